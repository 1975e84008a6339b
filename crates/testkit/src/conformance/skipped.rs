//! The number of events a subscription passed without wanting them.

use std::sync::Arc;

use postbox_core::kit::LOOK_EVENTS_MAX;
use postbox_core::{EventId, NewEvent, Replay, StartAt, State, Stats, Store, Subscription};

use super::StoreFixture;
use super::harness::*;
use super::routing::find;

fn of(topics: &[&str]) -> Vec<NewEvent> {
    topics.iter().map(|topic| NewEvent::json(*topic, "1")).collect()
}

/// Appends events of these topics and reads all. The last one must be wanted: reading it passes
/// everything before it.
async fn past(lane: &Lane, topics: &[&str]) -> Vec<EventId> {
    let ids = append(&lane.store, of(topics)).await;
    lane.drain().await;
    ids
}

/// Returns the count, which must match the list.
async fn skipped(store: &Arc<dyn Store>) -> u64 {
    let Stats { skipped, skipped_is_estimate, is_estimate, .. } = stats(store).await;
    assert!(!skipped_is_estimate && !is_estimate, "few enough to count");
    assert_eq!(listed(store, State::Skipped).await.len() as u64, skipped);
    skipped
}

async fn wants(lane: &Lane, topic: &str) {
    lane.store.subscribe(&reader_of(topic)).await.expect("another filter");
}

pub async fn what_was_passed_and_not_wanted_is_counted(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    let all = Lane::open_as(fixture, &reader_named("all")).await;
    past(&lane, &["b", "a", "c", "b", "a"]).await;
    all.drain().await;
    assert_eq!(skipped(&lane.store).await, 3);
    let of_all = lane.store.stats(&named("all")).await.expect("counted");
    assert_eq!((of_all.skipped, of_all.dispatched), (0, 5));
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dispatched, stats.total), (2, 2), "no part of the total");
    append(&lane.store, of(&["b"])).await;
    assert_eq!(lane.store.stats(&named("reader")).await.expect("counted").skipped, 3, "not passed yet");
}

/// Events that nobody wants have a separate state and count.
pub async fn what_nobody_wants_is_not_skipped(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    past(&lane, &["b", "b", "a"]).await;
    assert_eq!(skipped(&lane.store).await, 2);
    find(&lane.store, 2).await;
    assert_eq!(skipped(&lane.store).await, 0);
}

pub async fn a_skipped_event_that_is_replayed_is_not_skipped_any_more(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    let ids = past(&lane, &["b", "b", "a"]).await;
    let replay = Replay { ids: Some(ids[..1].to_vec()), ..Replay::default() };
    assert_eq!(lane.store.replay(&named("reader"), &replay).await.expect("replayed").count, 1);
    assert_eq!(skipped(&lane.store).await, 1, "on its way");
    assert_eq!(lane.drain_due().await.len(), 1);
    assert_eq!(skipped(&lane.store).await, 1, "sent");
}

/// Each event was judged by the filter of its time.
pub async fn another_filter_changes_nothing_of_the_past(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    past(&lane, &["b", "a"]).await;
    wants(&lane, "*").await;
    past(&lane, &["b", "a"]).await;
    assert_eq!(skipped(&lane.store).await, 1, "wider");
    wants(&lane, "b").await;
    past(&lane, &["a", "a", "b"]).await;
    assert_eq!(skipped(&lane.store).await, 3, "narrower");
    lane.store.subscribe(&reader()).await.expect("without a filter");
    past(&lane, &["c"]).await;
    assert_eq!(skipped(&lane.store).await, 3, "none");
}

pub async fn what_lies_before_the_beginning_is_counted(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    append(&store, of(&["a", "b", "a"])).await;
    let lane = Lane::open_as(fixture, &Subscription { start: StartAt::Now, ..reader() }).await;
    assert_eq!(skipped(&store).await, 3);
    past(&lane, &["a"]).await;
    assert_eq!(skipped(&store).await, 3);
}

/// If there are too many to count, the number is estimated and marked so. Pending stays exact.
pub async fn many_are_near_the_truth(fixture: &dyn StoreFixture) {
    const DEPTH: u64 = LOOK_EVENTS_MAX + 5_000;
    let lane = Lane::open_as(fixture, &reader_of("rare")).await;
    let store = fixture.store();
    let event = |n: u64| NewEvent::json(if n % 4 == 3 { "rare" } else { "other" }, "1");
    for from in (0..DEPTH).step_by(1_000) {
        append(&store, (from..from + 1_000).map(event).collect::<Vec<_>>()).await;
    }
    let late = Subscription { start: StartAt::Now, ..reader_named("late") };
    store.subscribe(&late).await.expect("new");
    loop {
        let batch = lane.next(1_000).await;
        if batch.is_empty() {
            break;
        }
        lane.settle(&batch, vec![]).await;
    }
    for (name, truth) in [("reader", DEPTH / 4 * 3), ("late", DEPTH)] {
        let counted = store.stats(&named(name)).await.expect("counted");
        assert!(counted.skipped.abs_diff(truth) * 4 <= truth, "{counted:?}");
        assert!(counted.skipped_is_estimate || counted.skipped == truth, "{counted:?}");
        assert_eq!((counted.pending, counted.is_estimate), (0, false), "{counted:?}");
    }
}
