//! What an operator steers: replay, discard.

use std::time::Duration;

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{Changed, Disposition, ErrorKind, EventId, NewEvent, Selection, State, TopicPattern};

use super::StoreFixture;
use super::harness::*;

/// A replay starts over: due now, no attempts, a dedupe id of its own.
pub async fn a_replayed_event_is_due_now_with_no_attempts_and_a_fresh_dedupe_id(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past(vec![event("1")], vec![(0, dead())]).await[0];
    assert!(lane.due(10).await.deliveries.is_empty(), "dead events never go by themselves");
    assert_eq!(replay(&lane, only(id)).await, 1);
    let waiting = record(&lane.store, id).await;
    assert_eq!((waiting.state, waiting.attempts, waiting.replays), (State::Retrying, 0, 1));
    let due = lane.due(10).await;
    assert_eq!((due.deliveries[0].attempt, due.deliveries[0].replay), (1, 1));
    assert_eq!(due.deliveries[0].dedupe_id(), format!("{id}-r1"));
    lane.settle_due(&due, vec![dead()]).await;
    replay(&lane, only(id)).await;
    assert_eq!(lane.due(10).await.deliveries[0].replay, 2);
    lane.drain_due().await;
    assert_eq!(record(&lane.store, id).await.state, State::Dispatched);
}

/// A double click sends once.
pub async fn replaying_twice_replays_once(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past(vec![event("1")], vec![(0, dead())]).await[0];
    let clicks = (0..4).map(|_| {
        let store = lane.store.clone();
        tokio::spawn(async move { store.retry(&named("reader"), &only(id)).await })
    });
    for click in futures::future::join_all(clicks).await {
        let _ = click.expect("no panic").expect("each answers");
    }
    replay(&lane, Selection::default()).await;
    assert_eq!(record(&lane.store, id).await.replays, 1);
    assert_eq!(lane.drain_due().await.len(), 1);
    assert_eq!(replay(&lane, Selection::default()).await, 0, "nothing is left");
}

/// An impatient operator need not wait for the backoff; it is no replay.
pub async fn a_retrying_event_can_be_sent_now(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past(vec![event("1")], vec![(0, retry(HOUR))]).await[0];
    assert_eq!(replay(&lane, only(id)).await, 1);
    let due = lane.due(10).await;
    assert_eq!((due.deliveries[0].attempt, due.deliveries[0].replay), (2, 0));
}

/// Replay is for the dead and the waiting; nothing else is sent again by it.
pub async fn replay_never_touches_pending_dispatched_or_discarded_events(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let mut ids = lane.past(vec![event("sent"), event("out")], vec![(1, dead())]).await;
    discard(&lane, only(ids[1])).await;
    ids.extend(append(&lane.store, [event("unread")]).await);
    let by_id = Selection { ids: Some(ids), ..Selection::default() };
    assert_eq!(replay(&lane, by_id).await, 0);
    assert_eq!(replay(&lane, Selection::default()).await, 0);
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(payloads(&lane.drain().await), ["unread"]);
}

/// All, some, by topic, by code, so many of the oldest.
pub async fn a_selection_narrows_a_replay(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let coded = |code: &'static str| Disposition::Dead { code: code.into(), error: String::new(), halt: false };
    let of = |topic: &str, payload: &str| NewEvent::json(topic, payload.to_owned());
    let ids = lane
        .past(
            vec![of("a_b", "0"), of("aXb", "1"), of("a.c", "2"), of("a.c", "3"), of("a.c", "4"), of("a.c", "5")],
            vec![(0, coded("x")), (1, coded("x")), (2, coded("x")), (3, coded("y")), (4, coded("y")), (5, coded("y"))],
        )
        .await;
    let topic = |pattern: &str| Some(TopicPattern::new(pattern).expect("a pattern"));
    for (selection, expected) in [
        (Selection { topic: topic("a_b"), ..Selection::default() }, vec!["0"]),
        (Selection { topic: topic("a*"), code: Some("x".into()), ..Selection::default() }, vec!["1", "2"]),
        (Selection { ids: Some(vec![ids[4], ids[0]]), ..Selection::default() }, vec!["4"]),
        (Selection { ids: Some(vec![]), ..Selection::default() }, vec![]),
        (Selection { limit: Some(1), ..Selection::default() }, vec!["3"]),
        (Selection { code: Some("z".into()), ..Selection::default() }, vec![]),
        (Selection::default(), vec!["5"]),
    ] {
        assert_eq!(replay(&lane, selection.clone()).await, expected.len() as u64, "{selection:?}");
        assert_eq!(payloads(&lane.drain_due().await), expected, "{selection:?}");
    }
}

/// A replayed event takes its key's order again: later ones wait behind it.
pub async fn a_replayed_event_holds_its_key_again(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past(vec![keyed("a", "1")], vec![(0, dead())]).await[0];
    replay(&lane, only(id)).await;
    append(&lane.store, [keyed("a", "2")]).await;
    let batch = lane.next(10).await;
    assert_eq!(batch.held.len(), 1);
    lane.settle(&batch, vec![(0, Disposition::Block)]).await;
    assert_eq!(payloads(&lane.drain_due().await), ["1", "2"]);
}

/// Whatever is not delivered yet can be taken out, and never comes.
pub async fn a_discarded_event_is_never_delivered(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let far = jiff::Timestamp::UNIX_EPOCH + 400 * 365 * 24 * HOUR;
    let mut ids = lane
        .past(
            vec![keyed("a", "retrying"), keyed("a", "blocked"), event("scheduled"), event("dead")],
            vec![
                (0, retry(Duration::ZERO)),
                (1, Disposition::Block),
                (2, Disposition::Schedule { at: far }),
                (3, dead()),
            ],
        )
        .await;
    ids.extend(append(&lane.store, [event("pending")]).await);
    for id in ids.clone() {
        assert_eq!(discard(&lane, only(id)).await, 1);
        assert_eq!(discard(&lane, only(id)).await, 0, "once is enough");
        let taken_out = record(&lane.store, id).await;
        assert_eq!((taken_out.state, taken_out.due_at), (State::Discarded, None));
    }
    assert!(lane.due(10).await.deliveries.is_empty());
    let batch = lane.next(10).await;
    assert!(batch.deliveries.iter().all(|delivery| batch.discarded.contains(&delivery.seq)));
    let stats = stats(&lane.store).await;
    assert_eq!((stats.discarded, stats.pending, stats.dispatched), (5, 0, 0));
    assert_eq!(replay(&lane, Selection { ids: Some(ids), ..Selection::default() }).await, 0, "for good");
}

/// "All" means all that failed or waits, never the unread stream.
pub async fn pending_events_are_discarded_only_by_id(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past(vec![event("dead")], vec![(0, dead())]).await;
    append(&lane.store, [event("pending")]).await;
    let everything = Selection { topic: Some(TopicPattern::new("*").expect("a pattern")), ..Selection::default() };
    assert_eq!(discard(&lane, everything).await, 1);
    assert_eq!(discard(&lane, Selection::default()).await, 0);
    assert_eq!(payloads(&lane.drain().await), ["pending"]);
}

/// What is delivered cannot be taken back; another subscription's work is not touched.
pub async fn discarding_leaves_the_dispatched_and_other_subscriptions_alone(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let other = Lane::open_as(fixture, &postbox_core::Subscription { name: named("other"), ..reader() }).await;
    let ids = lane.past(vec![event("sent")], vec![]).await;
    let late = append(&lane.store, [event("unread")]).await;
    assert_eq!(discard(&lane, only(ids[0])).await, 0);
    assert_eq!(discard(&lane, only(late[0])).await, 1);
    assert_eq!(payloads(&other.drain().await), ["sent", "unread"]);
}

/// Taking a blocked event out of the middle keeps the rest of its key in order.
pub async fn discarding_a_follower_keeps_the_others_waiting(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids = lane
        .past(
            vec![keyed("a", "1"), keyed("a", "2"), keyed("a", "3")],
            vec![(0, retry(HOUR)), (1, Disposition::Block), (2, Disposition::Block)],
        )
        .await;
    discard(&lane, only(ids[1])).await;
    assert!(lane.due(10).await.deliveries.is_empty(), "the head still waits");
    replay(&lane, only(ids[0])).await;
    assert_eq!(payloads(&lane.drain_due().await), ["1", "3"]);
}

/// An operator's click wakes a relay that sleeps, or the relay's own poll finds the row; either way it is there.
pub async fn a_replay_is_found_by_the_next_read(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past(vec![event("1")], vec![(0, dead())]).await[0];
    assert!(lane.next(10).await.is_empty());
    replay(&lane, only(id)).await;
    let batch = lane.next(10).await;
    assert!(batch.is_empty() && batch.due_in.is_none_or(|due_in| due_in.is_zero()));
    assert_eq!(lane.drain_due().await.len(), 1);
}

/// No step is large, however much is meant; what was sent and died once more behind the place of the last step is not sent again.
pub async fn a_large_replay_goes_in_bounded_steps(fixture: &dyn StoreFixture) {
    const EVENTS: usize = 2 * CHANGE_EVENTS_MAX + 500;
    let lane = Lane::open(fixture).await;
    lane.past(numbered(EVENTS), (0..EVENTS).map(|index| (index, dead())).collect()).await;
    let mut selection = Selection::default();
    let mut counts = Vec::new();
    loop {
        let changed = lane.store.retry(&named("reader"), &selection).await.expect("replayed");
        counts.push(changed.count);
        let due = lane.due(EVENTS).await;
        assert_eq!(due.deliveries.len() as u64, changed.count);
        lane.settle_due(&due, vec![dead(); due.deliveries.len()]).await;
        if changed.next.is_none() {
            break;
        }
        selection.after = changed.next;
        assert!(counts.len() < 10, "it never ends: {counts:?}");
    }
    assert!(counts.iter().all(|count| *count <= CHANGE_EVENTS_MAX as u64), "{counts:?}");
    assert_eq!(counts.iter().sum::<u64>(), EVENTS as u64, "{counts:?}");
    let records = lane.store.list(&query(State::Dead)).await.expect("listed");
    assert!(!records.is_empty() && records.iter().all(|record| record.replays == 1));
}

/// Steps of any size take all that is named: what failed, what waits, what was not read yet.
pub async fn small_steps_discard_all_that_is_named(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let exceptions = vec![(0, dead()), (1, retry(HOUR)), (2, dead())];
    let mut ids = lane.past(numbered(4), exceptions).await;
    ids.extend(append(&lane.store, [event("5"), event("6"), event("7")]).await);
    let mut selection = Selection { ids: Some(ids), limit: Some(0), ..Selection::default() };
    assert_eq!(lane.store.discard(&named("reader"), &selection).await.expect("asked"), Changed::default());
    selection.limit = Some(2);
    let mut counts = Vec::new();
    while counts.len() < 10 {
        let changed = lane.store.discard(&named("reader"), &selection).await.expect("discarded");
        counts.push(changed.count);
        if changed.next.is_none() {
            break;
        }
        selection.after = changed.next;
    }
    assert!(counts.len() < 10 && counts.iter().all(|count| *count <= 2), "{counts:?}");
    assert_eq!((counts.iter().sum::<u64>(), stats(&lane.store).await.discarded), (6, 6), "{counts:?}");
}

/// A list without a limit would make a statement without a limit.
pub async fn too_many_ids_at_once_are_refused(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past(vec![event("1")], vec![(0, dead())]).await[0];
    let mut selection = Selection { ids: Some(vec![id; CHANGE_EVENTS_MAX + 1]), ..Selection::default() };
    refused(lane.store.retry(&named("reader"), &selection).await, ErrorKind::Invalid, "too_many_ids");
    refused(lane.store.discard(&named("reader"), &selection).await, ErrorKind::Invalid, "too_many_ids");
    selection.ids.as_mut().expect("set above").truncate(CHANGE_EVENTS_MAX);
    assert_eq!(replay(&lane, selection).await, 1);
}

fn only(id: EventId) -> Selection {
    Selection { ids: Some(vec![id]), ..Selection::default() }
}

async fn replay(lane: &Lane, selection: Selection) -> u64 {
    lane.store.retry(&named("reader"), &selection).await.expect("replayed").count
}

async fn discard(lane: &Lane, selection: Selection) -> u64 {
    lane.store.discard(&named("reader"), &selection).await.expect("discarded").count
}

/// The cases of this suite.
#[doc(hidden)]
#[macro_export]
macro_rules! steer_cases {
    ($fixture:expr) => {
        $crate::conformance_cases!(
            steer,
            $fixture,
            [
                a_replayed_event_is_due_now_with_no_attempts_and_a_fresh_dedupe_id,
                replaying_twice_replays_once,
                a_retrying_event_can_be_sent_now,
                replay_never_touches_pending_dispatched_or_discarded_events,
                a_selection_narrows_a_replay,
                a_replayed_event_holds_its_key_again,
                a_discarded_event_is_never_delivered,
                pending_events_are_discarded_only_by_id,
                discarding_leaves_the_dispatched_and_other_subscriptions_alone,
                discarding_a_follower_keeps_the_others_waiting,
                a_replay_is_found_by_the_next_read,
                a_large_replay_goes_in_bounded_steps,
                small_steps_discard_all_that_is_named,
                too_many_ids_at_once_are_refused,
            ]
        );
    };
}
