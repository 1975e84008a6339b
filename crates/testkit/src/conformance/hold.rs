//! Held keys: nobody overtakes an unfinished event of its own key, and nobody else waits.

use std::collections::HashSet;
use std::time::Duration;

use postbox_core::{Disposition, Key, Selection, State, Subscription};

use super::StoreFixture;
use super::harness::*;

/// Later events of an unfinished key are marked; other keys are not.
pub async fn a_key_with_an_unfinished_event_is_held(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past(vec![keyed("a", "1"), keyed("b", "2")], vec![(0, retry(HOUR))]).await;
    append(&lane.store, [keyed("a", "3"), keyed("b", "4"), event("5")]).await;
    let batch = lane.next(10).await;
    assert_eq!(payloads(&batch.deliveries), ["3", "4", "5"], "held events are read, to be settled as blocked");
    assert_eq!(batch.held, HashSet::from([Key::new("a").expect("a key")]));
}

/// Head first, then what waits behind it, in order and in one go.
pub async fn blocked_events_follow_their_head_in_order(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past(
        vec![keyed("a", "1"), keyed("b", "2"), keyed("a", "3")],
        vec![(0, retry(Duration::ZERO)), (1, retry(HOUR)), (2, Disposition::Block)],
    )
    .await;
    lane.past(vec![keyed("a", "4"), keyed("b", "5")], vec![(0, Disposition::Block), (1, Disposition::Block)]).await;
    let due = lane.due(10).await;
    assert_eq!(payloads(&due.deliveries), ["1", "3", "4"], "nothing of b: its head is not due");
    assert_eq!(listed(&lane.store, State::Blocked).await, ["3", "4", "5"]);
    lane.settle_due(&due, vec![Disposition::Delivered; 3]).await;
    assert_eq!(listed(&lane.store, State::Blocked).await, ["5"]);
    assert_eq!(stats(&lane.store).await.dispatched, 3);
}

/// A limit cuts at the end of a key's queue, never at its head.
pub async fn a_limit_never_gives_a_follower_without_its_head(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let now = || retry(Duration::ZERO);
    lane.past(
        vec![keyed("a", "1"), keyed("b", "2"), keyed("a", "3"), keyed("b", "4"), keyed("a", "5")],
        vec![(0, now()), (1, now()), (2, Disposition::Block), (3, Disposition::Block), (4, Disposition::Block)],
    )
    .await;
    let mut seen = Vec::new();
    loop {
        let due = lane.due(2).await;
        assert!(due.deliveries.len() <= 2);
        if due.deliveries.is_empty() {
            break;
        }
        assert!(due.deliveries.windows(2).all(|pair| pair[0].seq < pair[1].seq), "seq order");
        lane.settle_due(&due, vec![Disposition::Delivered; due.deliveries.len()]).await;
        seen.extend(payloads(&due.deliveries));
    }
    for (key, expected) in [("a", ["1", "3", "5"].as_slice()), ("b", &["2", "4"])] {
        let of_key: Vec<&String> = seen.iter().filter(|payload| expected.contains(&payload.as_str())).collect();
        assert_eq!(of_key, expected, "key {key}");
    }
}

/// The head went, its followers were not in the batch: the next one is due.
pub async fn the_next_of_a_key_is_due_once_its_head_is_delivered(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    blocked_pair(&lane, retry(Duration::ZERO)).await;
    let head = lane.due(1).await;
    assert_eq!(payloads(&head.deliveries), ["1"]);
    lane.settle_due(&head, vec![Disposition::Delivered]).await;
    let next = lane.due(10).await;
    assert_eq!(payloads(&next.deliveries), ["2", "3"]);
    assert!(next.deliveries.iter().all(|delivery| delivery.attempt == 1), "waiting is no attempt");
}

/// Dead is out of the way, unless told otherwise.
pub async fn the_next_of_a_key_is_due_once_its_head_is_dead(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids = blocked_pair(&lane, retry(Duration::ZERO)).await;
    let head = lane.due(1).await;
    lane.settle_due(&head, vec![dead()]).await;
    assert_eq!(payloads(&lane.due(10).await.deliveries), ["2", "3"], "the dead one is never due");
    let buried = record(&lane.store, ids[0]).await;
    assert_eq!((buried.state, buried.attempts, buried.code.as_deref()), (State::Dead, 2, Some("http_422")));
    assert_eq!(buried.due_at, None);
}

/// An operator takes the head out: the key moves on.
pub async fn the_next_of_a_key_is_due_once_its_head_is_discarded(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids = blocked_pair(&lane, retry(HOUR)).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    let selection = Selection { ids: Some(vec![ids[0]]), ..Selection::default() };
    assert_eq!(lane.store.discard(&named("reader"), &selection).await.expect("discarded").count, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["2", "3"]);
}

/// The head failed again: nobody of its key overtakes.
pub async fn followers_stay_blocked_when_their_head_fails_again(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    blocked_pair(&lane, retry(Duration::ZERO)).await;
    let due = lane.due(10).await;
    lane.settle_due(&due, vec![retry(HOUR), Disposition::Block, Disposition::Block]).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(listed(&lane.store, State::Blocked).await, ["2", "3"]);
}

/// The head went through, the second failed: the third waits for the second.
pub async fn a_follower_that_fails_becomes_the_head(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    blocked_pair(&lane, retry(Duration::ZERO)).await;
    let due = lane.due(10).await;
    lane.settle_due(&due, vec![Disposition::Delivered, retry(SHORT), Disposition::Block]).await;
    fixture.pass(2 * SHORT).await;
    let again = lane.due(10).await;
    assert_eq!(payloads(&again.deliveries), ["2", "3"]);
    assert_eq!((again.deliveries[0].attempt, again.deliveries[1].attempt), (2, 1));
}

/// Dead in the stream without `halt`: later events of the key flow.
pub async fn a_dead_event_does_not_hold_its_key(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past(vec![keyed("a", "1")], vec![(0, dead())]).await;
    append(&lane.store, [keyed("a", "2")]).await;
    let batch = lane.next(10).await;
    assert!(batch.held.is_empty());
    lane.settle(&batch, vec![]).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(stats(&lane.store).await.dead, 1);
}

/// `on_dead = "halt"`: the key waits for a person, whose replay or discard releases it.
pub async fn a_halting_dead_event_holds_its_key_until_a_person_acts(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let first = lane.past(vec![keyed("a", "1"), keyed("a", "2")], vec![(0, halted()), (1, Disposition::Block)]).await;
    let second = lane.past(vec![keyed("b", "3"), keyed("b", "4")], vec![(0, halted()), (1, Disposition::Block)]).await;
    append(&lane.store, [keyed("a", "5")]).await;
    let batch = lane.next(10).await;
    assert_eq!(batch.held, HashSet::from([Key::new("a").expect("a key")]));
    lane.settle(&batch, vec![(0, Disposition::Block)]).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    let named_by = |id| Selection { ids: Some(vec![id]), ..Selection::default() };
    assert_eq!(lane.store.discard(&named("reader"), &named_by(second[0])).await.expect("discarded").count, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["4"]);
    assert_eq!(lane.store.retry(&named("reader"), &named_by(first[0])).await.expect("replayed").count, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["1", "2", "5"]);
}

/// The earlier event was finished meanwhile: a blocked event with nothing ahead must not wait for ever.
pub async fn a_block_with_nothing_ahead_is_due_at_once(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past(vec![keyed("a", "1")], vec![(0, retry(Duration::ZERO))]).await;
    append(&lane.store, [keyed("a", "2"), keyed("a", "3")]).await;
    let batch = lane.next(10).await;
    assert_eq!(batch.held.len(), 1);
    assert_eq!(payloads(&lane.drain_due().await), ["1"], "the head goes out before the batch is settled");
    lane.settle(&batch, vec![(0, Disposition::Block), (1, Disposition::Block)]).await;
    assert_eq!(payloads(&lane.drain_due().await), ["2", "3"]);
}

/// Scheduled events wait for their time and stand in nobody's way.
pub async fn a_scheduled_event_waits_and_holds_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = append(&lane.store, [event("stamp")]).await[0];
    lane.drain().await;
    let now = record(&lane.store, id).await.event.created_at;
    let at = |wait| Disposition::Schedule { at: now + wait };
    let soon = lane.past(vec![keyed("a", "soon"), keyed("b", "late")], vec![(0, at(SHORT)), (1, at(HOUR))]).await;
    append(&lane.store, [keyed("a", "1"), keyed("b", "2")]).await;
    let batch = lane.next(10).await;
    assert!(batch.held.is_empty(), "a scheduled event leaves its key's order");
    lane.settle(&batch, vec![]).await;
    let waiting = record(&lane.store, soon[1]).await;
    assert_eq!((waiting.state, waiting.due_at, waiting.attempts), (State::Scheduled, Some(now + HOUR), 0));
    fixture.pass(2 * SHORT).await;
    let due = lane.due(10).await;
    assert_eq!(payloads(&due.deliveries), ["soon"]);
    assert_eq!(due.deliveries[0].attempt, 1);
    lane.settle_due(&due, vec![Disposition::Delivered]).await;
    assert_eq!(listed(&lane.store, State::Scheduled).await, ["late"]);
}

/// The key's head waits for its retry; what was scheduled goes out at its time all the same.
pub async fn a_scheduled_event_does_not_wait_for_its_key(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let past = jiff::Timestamp::UNIX_EPOCH;
    lane.past(
        vec![keyed("a", "head"), keyed("a", "scheduled"), keyed("a", "behind")],
        vec![(0, retry(HOUR)), (1, Disposition::Schedule { at: past }), (2, Disposition::Block)],
    )
    .await;
    assert_eq!(payloads(&lane.due(10).await.deliveries), ["scheduled"]);
}

/// Ordering none: a failure holds nobody.
pub async fn without_order_a_retry_holds_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane { hold_keys: false, ..Lane::open(fixture).await };
    lane.past(vec![keyed("a", "1")], vec![(0, retry(HOUR))]).await;
    append(&lane.store, [keyed("a", "2")]).await;
    assert!(lane.next(10).await.held.is_empty());
}

/// Each subscription has its own failures.
pub async fn a_failure_in_one_subscription_holds_nobody_elses_key(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let other = Lane::open_as(fixture, &Subscription { name: named("other"), ..reader() }).await;
    lane.past(vec![keyed("a", "1")], vec![(0, retry(Duration::ZERO))]).await;
    append(&lane.store, [keyed("a", "2")]).await;
    let batch = other.next(10).await;
    assert!(batch.held.is_empty() && batch.due_in.is_none());
    assert_eq!(payloads(&batch.deliveries), ["1", "2"]);
    assert!(other.due(10).await.deliveries.is_empty());
}

/// `1` with the given disposition, `2` and `3` of the same key blocked behind it.
async fn blocked_pair(lane: &Lane, head: Disposition) -> Vec<postbox_core::EventId> {
    lane.past(
        vec![keyed("a", "1"), keyed("a", "2"), keyed("a", "3")],
        vec![(0, head), (1, Disposition::Block), (2, Disposition::Block)],
    )
    .await
}

/// The cases of this suite.
#[doc(hidden)]
#[macro_export]
macro_rules! hold_cases {
    ($fixture:expr) => {
        $crate::conformance_cases!(
            hold,
            $fixture,
            [
                a_key_with_an_unfinished_event_is_held,
                blocked_events_follow_their_head_in_order,
                a_limit_never_gives_a_follower_without_its_head,
                the_next_of_a_key_is_due_once_its_head_is_delivered,
                the_next_of_a_key_is_due_once_its_head_is_dead,
                the_next_of_a_key_is_due_once_its_head_is_discarded,
                followers_stay_blocked_when_their_head_fails_again,
                a_follower_that_fails_becomes_the_head,
                a_dead_event_does_not_hold_its_key,
                a_halting_dead_event_holds_its_key_until_a_person_acts,
                a_block_with_nothing_ahead_is_due_at_once,
                a_scheduled_event_waits_and_holds_nothing,
                a_scheduled_event_does_not_wait_for_its_key,
                without_order_a_retry_holds_nothing,
                a_failure_in_one_subscription_holds_nobody_elses_key,
            ]
        );
    };
}
