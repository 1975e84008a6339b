//! Changes by an operator: retry, discard.

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{Change, Changed, Criteria, ErrorKind, NewEvent, Selection, State};

use super::StoreFixture;
use super::harness::*;

pub async fn a_replayed_event_is_due_now_with_no_attempts_and_a_fresh_dedupe_id(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past([(event("1"), dead())]).await[0];
    assert!(lane.due(10).await.deliveries.is_empty(), "dead events never go by themselves");
    assert_eq!(lane.replay(these(&[id])).await, 1);
    let waiting = record(&lane.store, id).await;
    assert_eq!((waiting.state, waiting.attempts, waiting.replays), (State::Retrying, 0, 1));
    let due = lane.due(10).await;
    assert_eq!((due.deliveries[0].attempt, due.deliveries[0].replay), (1, 1));
    assert_eq!(due.deliveries[0].dedupe_id(), format!("{id}-r1"));
    lane.settle_due(&due, vec![dead()]).await;
    lane.replay(these(&[id])).await;
    assert_eq!(lane.due(10).await.deliveries[0].replay, 2);
    lane.drain_due().await;
    assert_eq!(record(&lane.store, id).await.state, State::Dispatched);
}

pub async fn replaying_twice_replays_once(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past([(event("1"), dead())]).await[0];
    let clicks = (0..4).map(|_| {
        let store = lane.store.clone();
        async move { store.change(&named("reader"), &Change::Retry, &these(&[id])).await.expect("each answers") }
    });
    at_once(clicks).await;
    lane.replay(Selection::default()).await;
    assert_eq!(record(&lane.store, id).await.replays, 1);
    assert_eq!(lane.drain_due().await.len(), 1);
    assert_eq!(lane.replay(Selection::default()).await, 0, "nothing is left");
}

pub async fn a_retrying_event_can_be_sent_now(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past([(event("1"), retry(HOUR))]).await[0];
    assert_eq!(lane.replay(these(&[id])).await, 1);
    let due = lane.due(10).await;
    assert_eq!((due.deliveries[0].attempt, due.deliveries[0].replay), (2, 0));
}

pub async fn replay_never_touches_pending_dispatched_or_discarded_events(fixture: &dyn StoreFixture) {
    let (lane, mut ids) = Lane::settled(fixture, [(event("sent"), Delivered), (event("out"), dead())]).await;
    lane.discard(these(&[ids[1]])).await;
    ids.extend(append(&lane.store, [event("unread")]).await);
    assert_eq!(lane.replay(these(&ids)).await, 0);
    assert_eq!(lane.replay(Selection::default()).await, 0);
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(payloads(&lane.drain().await), ["unread"]);
}

pub async fn a_selection_narrows_a_replay(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let of = |topic: &str, payload: &str| NewEvent::json(topic, payload.to_owned());
    let ids = lane
        .past([
            (of("a_b", "0"), dead_of("x")),
            (of("aXb", "1"), dead_of("x")),
            (of("a.c", "2"), dead_of("x")),
            (of("a.c", "3"), dead_of("y")),
            (of("a.c", "4"), dead_of("y")),
            (of("a.c", "5"), dead_of("y")),
        ])
        .await;
    let topic = |topic: &str| Criteria { topic: Some(pattern(topic)), ..Criteria::default() };
    for (selection, expected) in [
        (Selection { which: topic("a_b"), ..Selection::default() }, vec!["0"]),
        (Selection { which: topic("a*"), code: Some("x".into()), ..Selection::default() }, vec!["1", "2"]),
        (these(&[ids[4], ids[0]]), vec!["4"]),
        (these(&[]), vec![]),
        (Selection { limit: Some(1), ..Selection::default() }, vec!["3"]),
        (Selection { code: Some("z".into()), ..Selection::default() }, vec![]),
        (Selection::default(), vec!["5"]),
    ] {
        assert_eq!(lane.replay(selection.clone()).await, expected.len() as u64, "{selection:?}");
        assert_eq!(payloads(&lane.drain_due().await), expected, "{selection:?}");
    }
}

pub async fn a_replayed_event_holds_its_key_again(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past([(keyed("a", "1"), dead())]).await[0];
    lane.replay(these(&[id])).await;
    append(&lane.store, [keyed("a", "2")]).await;
    let batch = lane.next(10).await;
    assert_eq!(batch.held.len(), 1);
    lane.settle(&batch, vec![(0, Block)]).await;
    assert_eq!(payloads(&lane.drain_due().await), ["1", "2"]);
}

pub async fn dead_events_of_one_key_are_retried_in_their_order(fixture: &dyn StoreFixture) {
    let events = ["1", "2", "3"].map(|payload| (keyed("a", payload), dead()));
    let (lane, _) = Lane::settled(fixture, events).await;
    assert_eq!(lane.replay(Selection::default()).await, 3);
    for payload in ["1", "2", "3"] {
        let due = lane.due(1).await;
        assert_eq!(payloads(&due.deliveries), [payload]);
        lane.settle_due(&due, vec![Delivered]).await;
    }
    assert!(lane.due(10).await.deliveries.is_empty(), "each once");
}

pub async fn a_discarded_event_is_never_delivered(fixture: &dyn StoreFixture) {
    let (lane, mut ids) = Lane::settled(
        fixture,
        [
            (keyed("a", "retrying"), retry_now()),
            (keyed("a", "blocked"), Block),
            (event("scheduled"), scheduled()),
            (event("dead"), dead()),
        ],
    )
    .await;
    ids.extend(append(&lane.store, [event("pending")]).await);
    for id in ids.clone() {
        assert_eq!(lane.discard(these(&[id])).await, 1);
        assert_eq!(lane.discard(these(&[id])).await, 0, "once is enough");
        let taken_out = record(&lane.store, id).await;
        assert_eq!((taken_out.state, taken_out.due_at), (State::Discarded, None));
    }
    assert!(lane.due(10).await.deliveries.is_empty());
    let batch = lane.next(10).await;
    assert!(batch.deliveries.iter().all(|delivery| batch.discarded.contains(&delivery.seq)));
    let stats = stats(&lane.store).await;
    assert_eq!((stats.discarded, stats.pending, stats.dispatched), (5, 0, 0));
    assert_eq!(lane.replay(these(&ids)).await, 0, "for good");
}

pub async fn pending_events_are_discarded_only_by_id(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("dead"), dead())]).await;
    append(&lane.store, [event("pending")]).await;
    let which = Criteria { topic: Some(pattern("*")), ..Criteria::default() };
    let everything = Selection { which, ..Selection::default() };
    assert_eq!(lane.discard(everything).await, 1);
    assert_eq!(lane.discard(Selection::default()).await, 0);
    assert_eq!(payloads(&lane.drain().await), ["pending"]);
}

pub async fn discarding_leaves_the_dispatched_and_other_subscriptions_alone(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let other = Lane::open_as(fixture, &reader_named("other")).await;
    let ids = lane.past([(event("sent"), Delivered)]).await;
    let late = append(&lane.store, [event("unread")]).await;
    assert_eq!(lane.discard(these(&[ids[0]])).await, 0);
    assert_eq!(lane.discard(these(&[late[0]])).await, 1);
    assert_eq!(payloads(&other.drain().await), ["sent", "unread"]);
}

pub async fn discarding_a_follower_keeps_the_others_waiting(fixture: &dyn StoreFixture) {
    let (lane, ids) =
        Lane::settled(fixture, [(keyed("a", "1"), retry(HOUR)), (keyed("a", "2"), Block), (keyed("a", "3"), Block)])
            .await;
    lane.discard(these(&[ids[1]])).await;
    assert!(lane.due(10).await.deliveries.is_empty(), "the head still waits");
    lane.replay(these(&[ids[0]])).await;
    assert_eq!(payloads(&lane.drain_due().await), ["1", "3"]);
}

pub async fn a_replay_is_found_by_the_next_read(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past([(event("1"), dead())]).await[0];
    assert!(lane.next(10).await.is_empty());
    lane.replay(these(&[id])).await;
    let batch = lane.next(10).await;
    assert!(batch.is_empty() && batch.due_in.is_none_or(|due_in| due_in.is_zero()));
    assert_eq!(lane.drain_due().await.len(), 1);
}

/// Events that die again behind the last step's position are not retried twice.
pub async fn a_large_replay_goes_in_bounded_steps(fixture: &dyn StoreFixture) {
    const EVENTS: usize = 2 * CHANGE_EVENTS_MAX + 500;
    let (lane, _) = Lane::settled(fixture, numbered(EVENTS).into_iter().map(|event| (event, dead()))).await;
    let mut selection = Selection::default();
    let mut counts = Vec::new();
    loop {
        let changed = lane.store.change(&named("reader"), &Change::Retry, &selection).await.expect("replayed");
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

pub async fn small_steps_discard_all_that_is_named(fixture: &dyn StoreFixture) {
    let (lane, mut ids) =
        Lane::settled(fixture, numbered(4).into_iter().zip([dead(), retry(HOUR), dead(), Delivered])).await;
    ids.extend(append(&lane.store, [event("5"), event("6"), event("7")]).await);
    let mut selection = Selection { limit: Some(0), ..these(&ids) };
    assert_eq!(
        lane.store.change(&named("reader"), &Change::Discard, &selection).await.expect("asked"),
        Changed::default()
    );
    selection.limit = Some(2);
    let mut counts = Vec::new();
    while counts.len() < 10 {
        let changed = lane.store.change(&named("reader"), &Change::Discard, &selection).await.expect("discarded");
        counts.push(changed.count);
        if changed.next.is_none() {
            break;
        }
        selection.after = changed.next;
    }
    assert!(counts.len() < 10 && counts.iter().all(|count| *count <= 2), "{counts:?}");
    assert_eq!((counts.iter().sum::<u64>(), stats(&lane.store).await.discarded), (6, 6), "{counts:?}");
}

pub async fn too_many_ids_at_once_are_refused(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past([(event("1"), dead())]).await[0];
    let mut selection = these(&[id; CHANGE_EVENTS_MAX + 1]);
    refused(lane.store.change(&named("reader"), &Change::Retry, &selection).await, ErrorKind::Invalid, "too_many_ids");
    refused(
        lane.store.change(&named("reader"), &Change::Discard, &selection).await,
        ErrorKind::Invalid,
        "too_many_ids",
    );
    selection.ids.as_mut().expect("set above").truncate(CHANGE_EVENTS_MAX);
    assert_eq!(lane.replay(selection).await, 1);
}

pub async fn key_tenant_and_time_narrow_a_change(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past([(keyed("a", "1"), dead()), (keyed("b", "2"), dead()), (event("3").tenant("acme"), dead())]).await;
    fixture.pass(SHORT).await;
    let late = lane.past([(keyed("a", "4"), dead())]).await[0];
    let at = Some(record(&lane.store, late).await.event.created_at);
    let key = Some("a".parse().expect("a key"));
    let by = |which| Selection { which, ..Selection::default() };
    let of_key = by(Criteria { key, ..Criteria::default() });
    assert_eq!(lane.replay(of_key.clone()).await, 2);
    assert_eq!(payloads(&lane.drain_due().await), ["1", "4"]);
    assert_eq!(lane.discard(of_key).await, 0, "they are delivered");
    assert_eq!(lane.discard(by(Criteria { since: at, ..Criteria::default() })).await, 0);
    let of_tenant = |tenant: &str| by(Criteria { tenant: tenant.parse().ok(), ..Criteria::default() });
    assert_eq!(lane.discard(of_tenant("acm")).await, 0);
    assert_eq!(lane.discard(of_tenant("acme")).await, 1);
    assert_eq!(lane.discard(by(Criteria { until: at, ..Criteria::default() })).await, 1);
    assert_eq!(listed(&lane.store, State::Discarded).await, ["2", "3"]);
}

/// A dry run reports what a run right after it does, and does nothing itself.
pub async fn a_dry_run_counts_and_changes_nothing(fixture: &dyn StoreFixture) {
    let (lane, mut ids) = Lane::settled(
        fixture,
        [(keyed("a", "1"), dead()), (keyed("a", "2"), retry(HOUR)), (keyed("a", "3"), Block), (event("4"), Delivered)],
    )
    .await;
    ids.extend(append(&lane.store, [event("5"), event("6")]).await);
    let states = async || {
        let mut states = Vec::new();
        for id in &ids {
            states.push(record(&lane.store, *id).await);
        }
        states
    };
    let reader = named("reader");
    let before = states().await;
    for (selection, retried, discarded, marked) in [
        (Selection::default(), 2, 3, 2),
        (these(&ids), 2, 5, 4),
        (these(&ids[4..]), 0, 2, 2),
        (Selection { limit: Some(1), ..Selection::default() }, 1, 1, 1),
        (Selection { limit: Some(3), ..these(&ids) }, 2, 3, 3),
        (Selection { code: Some("no_such_code".into()), ..these(&ids) }, 0, 0, 0),
    ] {
        let counted = Selection { dry_run: true, ..selection.clone() };
        for _ in 0..2 {
            let mark = Change::MarkDead { why: None };
            for (change, count) in [(Change::Retry, retried), (Change::Discard, discarded), (mark, marked)] {
                let changed = lane.store.change(&reader, &change, &counted).await.expect("counted");
                assert_eq!(changed.count, count, "{change:?} {selection:?}");
            }
        }
    }
    assert_eq!(states().await, before);
    assert_eq!(lane.replay(Selection::default()).await, 2);
    assert_eq!(lane.discard(these(&ids)).await, 5);
}

/// An event's age counts from its death. Events that only wait do not match, nor does an event that
/// holds its key, because the others of the key wait for a person.
pub async fn what_is_dead_for_long_is_given_up(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(
        fixture,
        [
            (keyed("a", "old"), dead()),
            (keyed("b", "halts"), halted()),
            (keyed("b", "waits"), Block),
            (event("retrying"), retry(HOUR)),
            (event("dies late"), retry_now()),
        ],
    )
    .await;
    fixture.pass(4 * SHORT).await;
    let old = |dead_for| Selection { dead_for: Some(dead_for), ..Selection::default() };
    assert_eq!(lane.discard(old(HOUR)).await, 0);
    let late = lane.due(10).await;
    lane.settle_due(&late, vec![dead()]).await;
    let counted = Selection { dry_run: true, ..old(4 * SHORT) };
    assert_eq!(lane.store.change(&named("reader"), &Change::Discard, &counted).await.expect("counted").count, 1);
    assert_eq!(lane.discard(old(4 * SHORT)).await, 1);
    let given_up = record(&lane.store, ids[0]).await;
    assert_eq!((given_up.state, given_up.code.as_deref()), (State::Discarded, Some("http_422")));
    let error = given_up.error.expect("it says why");
    assert!(error.starts_with("given up by retention") && error.ends_with("never"), "{error}");
    let unread = append(&lane.store, [event("unread")]).await;
    let named = Selection { dead_for: Some(4 * SHORT), ..these(&[ids[0], ids[1], ids[2], ids[3], unread[0]]) };
    assert_eq!(lane.discard(named).await, 0, "named or not");
    assert_eq!(listed(&lane.store, State::Dead).await, ["halts", "dies late"]);
    assert_eq!(listed(&lane.store, State::Blocked).await, ["waits"]);
}

pub async fn a_large_dry_run_goes_in_the_same_steps(fixture: &dyn StoreFixture) {
    const EVENTS: usize = CHANGE_EVENTS_MAX + 500;
    let (lane, _) = Lane::settled(fixture, numbered(EVENTS).into_iter().map(|event| (event, dead()))).await;
    let mut counted = Selection { dry_run: true, ..Selection::default() };
    for expected in [CHANGE_EVENTS_MAX as u64, 500] {
        let retried = lane.store.change(&named("reader"), &Change::Retry, &counted).await.expect("counted");
        let discarded = lane.store.change(&named("reader"), &Change::Discard, &counted).await.expect("counted");
        assert_eq!((retried.count, discarded), (expected, retried));
        counted.after = retried.next;
    }
    assert_eq!(counted.after, None);
    assert_eq!(stats(&lane.store).await.dead, EVENTS as u64);
}
