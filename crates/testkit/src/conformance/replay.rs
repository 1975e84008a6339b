//! Sending events again, beside new ones.

use std::collections::BTreeSet;

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{Criteria, ErrorKind, EventId, NewEvent, Replay, Replayed, Seq, StartAt, State, Subscription};

use super::StoreFixture;
use super::harness::*;

async fn step(lane: &Lane, replay: &Replay) -> Replayed {
    lane.store.replay(&named("reader"), replay).await.expect("replayed")
}

/// Runs all steps of a replay. Returns the number of events.
async fn replay(lane: &Lane, mut replay: Replay) -> u64 {
    let mut count = 0;
    for _ in 0..1_000 {
        let done = step(lane, &replay).await;
        count += done.count;
        (replay.after, replay.through) = (done.next, Some(done.through));
        if done.next.is_none() {
            return count;
        }
    }
    panic!("a replay never ends");
}

fn of_ids(ids: &[EventId]) -> Replay {
    Replay { ids: Some(ids.to_vec()), ..Replay::default() }
}

fn by(which: Criteria) -> Replay {
    Replay { which, ..Replay::default() }
}

pub async fn what_was_delivered_goes_out_again(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, numbered(3).into_iter().map(|event| (event, Delivered))).await;
    assert_eq!(replay(&lane, Replay::default()).await, 3);
    assert_eq!(record(&lane.store, ids[0]).await.state, State::Retrying);
    let again = lane.drain_due().await;
    assert_eq!(payloads(&again), ["1", "2", "3"]);
    assert!(again.iter().all(|delivery| (delivery.attempt, delivery.replay > 0) == (1, true)));
    assert_eq!(record(&lane.store, ids[0]).await.state, State::Dispatched);
    assert!(lane.drain_due().await.is_empty(), "once");
    let none = step(&lane, &Replay { limit: Some(0), ..Replay::default() }).await;
    assert_eq!((none.count, none.next), (0, None));
    assert!(lane.drain_due().await.is_empty(), "none was asked for");
}

/// A destination remembers dedupe ids, so no two replays of an event may have the same number.
pub async fn each_replay_of_an_event_has_its_own_number(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), Delivered), (event("2"), dead())]).await;
    let mut seen = BTreeSet::from([0]);
    for round in 0..3 {
        assert_eq!(replay(&lane, of_ids(&ids[..1])).await, 1);
        let batch = lane.due(10).await;
        assert!(seen.insert(batch.deliveries[0].replay), "round {round}: {seen:?}");
        lane.settle_due(&batch, vec![dead()]).await;
        assert_eq!(lane.replay(these(&ids[..1])).await, 1, "a dead one is retried");
        let batch = lane.due(10).await;
        assert!(seen.insert(batch.deliveries[0].replay), "round {round}: {seen:?}");
        lane.settle_due(&batch, vec![Delivered]).await;
    }
}

pub async fn what_was_skipped_goes_out_if_it_is_wanted_now_or_named(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let topics = ["order.paid", "order.sent", "invoice.paid"];
    let ids = append(&store, topics.map(|topic| NewEvent::json(topic, topic.to_owned()))).await;
    let lane = Lane::open_as(fixture, &Subscription { start: StartAt::Now, ..reader_of("order.*") }).await;
    assert_eq!(replay(&lane, by(Criteria { topic: Some(pattern("*.paid")), ..Criteria::default() })).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["order.paid"]);
    assert_eq!(replay(&lane, of_ids(&ids[2..])).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["invoice.paid"]);
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["order.paid", "invoice.paid"]);
    assert_eq!(listed(&lane.store, State::Skipped).await, ["order.sent"]);
}

pub async fn pending_discarded_and_dead_events_are_passed_over(fixture: &dyn StoreFixture) {
    let (lane, mut ids) =
        Lane::settled(fixture, [(event("dead"), dead()), (event("gone"), Delivered), (event("waits"), retry(HOUR))])
            .await;
    ids.extend(append(&lane.store, [event("unread")]).await);
    assert_eq!(lane.discard(these(&ids[..1])).await, 1);
    assert_eq!(replay(&lane, of_ids(&ids)).await, 1);
    assert_eq!(replay(&lane, Replay::default()).await, 0, "what is on its way is not sent twice");
    assert_eq!(payloads(&lane.drain_due().await), ["gone"]);
    assert_eq!(payloads(&lane.drain().await), ["unread"]);
}

pub async fn a_range_narrows_a_replay(fixture: &dyn StoreFixture) {
    let events = [keyed("a", "1"), keyed("b", "2").tenant("acme"), keyed("a", "3"), keyed("b", "4")];
    let (lane, ids) = Lane::settled(fixture, events.into_iter().map(|event| (event, Delivered))).await;
    fixture.pass(SHORT).await;
    let later = lane.past([(keyed("a", "5"), Delivered)]).await[0];
    let at = record(&lane.store, later).await.event.created_at;
    let seq = async |id| record(&lane.store, id).await.seq;
    let (first, third) = (seq(ids[0]).await, seq(ids[2]).await);
    for (narrowed, expected) in [
        (by(Criteria { key: Some("a".parse().expect("a key")), ..Criteria::default() }), &["1", "3", "5"][..]),
        (by(Criteria { tenant: "acme".parse().ok(), ..Criteria::default() }), &["2"]),
        (by(Criteria { since: Some(at), ..Criteria::default() }), &["5"]),
        (by(Criteria { until: Some(at), ..Criteria::default() }), &["1", "2", "3", "4"]),
        (Replay { after: Some(first), through: Some(third), ..Replay::default() }, &["2", "3"]),
        (Replay { limit: Some(2), ..Replay::default() }, &["1", "2"]),
    ] {
        let limited = narrowed.limit.is_some();
        let counted = Replay { dry_run: true, ..narrowed.clone() };
        let counted = if limited { step(&lane, &counted).await.count } else { replay(&lane, counted).await };
        assert_eq!(counted, expected.len() as u64, "only counted: {narrowed:?}");
        assert!(lane.due(10).await.deliveries.is_empty(), "only counted: {narrowed:?}");
        let count = if limited { step(&lane, &narrowed).await.count } else { replay(&lane, narrowed.clone()).await };
        assert_eq!(count, expected.len() as u64, "{narrowed:?}");
        let mut again = payloads(&lane.drain_due().await);
        again.sort();
        assert_eq!(again, expected, "{narrowed:?}");
    }
}

pub async fn a_replay_keeps_the_order_of_each_key(fixture: &dyn StoreFixture) {
    let events = [keyed("a", "1"), keyed("a", "2"), keyed("a", "3")];
    let (lane, _) = Lane::settled(fixture, events.into_iter().map(|event| (event, Delivered))).await;
    assert_eq!(replay(&lane, Replay::default()).await, 3);
    append(&lane.store, [keyed("a", "4")]).await;
    let live = lane.next(10).await;
    assert_eq!(live.held.len(), 1, "what is new of the key comes after what is sent again");
    lane.settle(&live, vec![(0, Block)]).await;
    let due = lane.due(1).await;
    assert_eq!(payloads(&due.deliveries), ["1"]);
    lane.settle_due(&due, vec![retry(HOUR)]).await;
    assert!(lane.drain_due().await.is_empty(), "the first of the key has failed");
    assert_eq!(lane.replay(these(&[due.deliveries[0].event.id])).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["1", "2", "3", "4"]);
}

/// Events delivered again while it runs are beyond its end.
pub async fn a_large_replay_goes_in_steps_over_a_range_that_stands(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(CHANGE_EVENTS_MAX + 500)).await;
    lane.drain().await;
    let first = step(&lane, &Replay::default()).await;
    assert_eq!(first.count, CHANGE_EVENTS_MAX as u64);
    assert_eq!(lane.drain_due().await.len(), CHANGE_EVENTS_MAX);
    append(&lane.store, [event("new")]).await;
    lane.drain().await;
    let rest = Replay { after: first.next, through: Some(first.through), ..Replay::default() };
    assert_eq!(replay(&lane, rest).await, 500);
    assert_eq!(lane.drain_due().await.len(), 500);
}

pub async fn bad_replays_are_refused(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids: Vec<EventId> = (0..=CHANGE_EVENTS_MAX).map(|_| EventId::now_v7()).collect();
    refused(lane.store.replay(&named("reader"), &of_ids(&ids)).await, ErrorKind::Invalid, "too_many_ids");
    let nobody = lane.store.replay(&named("nobody"), &Replay::default()).await;
    refused(nobody, ErrorKind::NotFound, "subscription_unknown");
    let empty = step(&lane, &Replay::default()).await;
    assert_eq!((empty.count, empty.next), (0, None));
    let nowhere = Replay { after: Some(Seq(i64::MAX)), ..Replay::default() };
    assert_eq!(step(&lane, &nowhere).await.count, 0);
}
