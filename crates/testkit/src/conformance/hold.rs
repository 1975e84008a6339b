//! Held keys: nothing overtakes an unfinished event of its own key, and no other key waits.

use postbox_core::{Change, Criteria, Disposition, Key, Ordering, Selection, State, Subscription};
use std::collections::HashSet;

use super::StoreFixture;
use super::harness::*;

pub async fn a_key_with_an_unfinished_event_is_held(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(keyed("a", "1"), retry(HOUR)), (keyed("b", "2"), Delivered)]).await;
    append(&lane.store, [keyed("a", "3"), keyed("b", "4"), event("5")]).await;
    let batch = lane.next(10).await;
    assert_eq!(payloads(&batch.deliveries), ["3", "4", "5"], "held events are read, to be settled as blocked");
    assert_eq!(batch.held, HashSet::from([Key::new("a").expect("a key")]));
}

pub async fn blocked_events_follow_their_head_in_order(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(
        fixture,
        [(keyed("a", "1"), retry_now()), (keyed("b", "2"), retry(HOUR)), (keyed("a", "3"), Block)],
    )
    .await;
    lane.past([(keyed("a", "4"), Block), (keyed("b", "5"), Block)]).await;
    let due = lane.due(10).await;
    assert_eq!(payloads(&due.deliveries), ["1", "3", "4"], "nothing of b: its head is not due");
    assert_eq!(listed(&lane.store, State::Blocked).await, ["3", "4", "5"]);
    lane.settle_due(&due, vec![Delivered; 3]).await;
    assert_eq!(listed(&lane.store, State::Blocked).await, ["5"]);
    assert_eq!(stats(&lane.store).await.dispatched, 3);
}

pub async fn a_deep_key_leaves_room_for_the_heads_of_others(fixture: &dyn StoreFixture) {
    let deep = (0..20).map(|n| (keyed("deep", &n.to_string()), if n == 0 { retry_now() } else { Block }));
    let others = ["b", "c", "d"].map(|key| (keyed(key, key), retry_now()));
    let (lane, _) = Lane::settled(fixture, deep.chain(others)).await;
    let due = lane.due(8).await;
    assert_eq!(payloads(&due.deliveries), ["0", "1", "b", "c", "d"], "each head, and its share of what is behind");
    let due = lane.due(3).await;
    assert_eq!(due.deliveries.len(), 3, "heads only");
    lane.settle_due(&due, vec![Delivered; 3]).await;
    assert_eq!(lane.drain_due().await.len(), 20, "nothing is left out for good");
}

pub async fn a_limit_never_gives_a_follower_without_its_head(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(
        fixture,
        [
            (keyed("a", "1"), retry_now()),
            (keyed("b", "2"), retry_now()),
            (keyed("a", "3"), Block),
            (keyed("b", "4"), Block),
            (keyed("a", "5"), Block),
        ],
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
        lane.settle_due(&due, vec![Delivered; due.deliveries.len()]).await;
        seen.extend(payloads(&due.deliveries));
    }
    for (key, expected) in [("a", ["1", "3", "5"].as_slice()), ("b", &["2", "4"])] {
        let of_key: Vec<&String> = seen.iter().filter(|payload| expected.contains(&payload.as_str())).collect();
        assert_eq!(of_key, expected, "key {key}");
    }
}

pub async fn the_next_of_a_key_is_due_once_its_head_is_delivered(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    blocked_pair(&lane, retry_now()).await;
    let head = lane.due(1).await;
    assert_eq!(payloads(&head.deliveries), ["1"]);
    lane.settle_due(&head, vec![Delivered]).await;
    let next = lane.due(10).await;
    assert_eq!(payloads(&next.deliveries), ["2", "3"]);
    assert!(next.deliveries.iter().all(|delivery| delivery.attempt == 1), "waiting is no attempt");
}

pub async fn the_next_of_a_key_is_due_once_its_head_is_dead(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids = blocked_pair(&lane, retry_now()).await;
    let head = lane.due(1).await;
    lane.settle_due(&head, vec![dead()]).await;
    assert_eq!(payloads(&lane.due(10).await.deliveries), ["2", "3"], "the dead one is never due");
    let dead_one = record(&lane.store, ids[0]).await;
    assert_eq!((dead_one.state, dead_one.attempts, dead_one.code.as_deref()), (State::Dead, 2, Some("http_422")));
    assert_eq!(dead_one.due_at, None);
}

pub async fn the_next_of_a_key_is_due_once_its_head_is_discarded(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids = blocked_pair(&lane, retry(HOUR)).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(lane.discard(these(&ids[..1])).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["2", "3"]);
}

pub async fn followers_stay_blocked_when_their_head_fails_again(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    blocked_pair(&lane, retry_now()).await;
    let due = lane.due(10).await;
    lane.settle_due(&due, vec![retry(HOUR), Block, Block]).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(listed(&lane.store, State::Blocked).await, ["2", "3"]);
}

pub async fn a_follower_that_fails_becomes_the_head(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    blocked_pair(&lane, retry_now()).await;
    let due = lane.due(10).await;
    lane.settle_due(&due, vec![Delivered, retry(SHORT), Block]).await;
    fixture.pass(2 * SHORT).await;
    let again = lane.due(10).await;
    assert_eq!(payloads(&again.deliveries), ["2", "3"]);
    assert_eq!((again.deliveries[0].attempt, again.deliveries[1].attempt), (2, 1));
}

pub async fn a_dead_event_does_not_hold_its_key(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(keyed("a", "1"), dead())]).await;
    append(&lane.store, [keyed("a", "2")]).await;
    let batch = lane.next(10).await;
    assert!(batch.held.is_empty());
    lane.settle(&batch, vec![]).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(stats(&lane.store).await.dead, 1);
}

/// `on_dead = "halt"`: the key waits for a person, whose replay or discard releases it.
pub async fn a_halting_dead_event_holds_its_key_until_a_person_acts(fixture: &dyn StoreFixture) {
    let (lane, first) = Lane::settled(fixture, [(keyed("a", "1"), halted()), (keyed("a", "2"), Block)]).await;
    let second = lane.past([(keyed("b", "3"), halted()), (keyed("b", "4"), Block)]).await;
    append(&lane.store, [keyed("a", "5")]).await;
    let batch = lane.next(10).await;
    assert_eq!(batch.held, HashSet::from([Key::new("a").expect("a key")]));
    lane.settle(&batch, vec![(0, Block)]).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(lane.discard(these(&second[..1])).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["4"]);
    assert_eq!(lane.replay(these(&first[..1])).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["1", "2", "5"]);
}

/// The earlier event was finished meanwhile, so nothing else would ever release the blocked one.
pub async fn a_block_with_nothing_ahead_is_due_at_once(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(keyed("a", "1"), retry_now())]).await;
    append(&lane.store, [keyed("a", "2"), keyed("a", "3")]).await;
    let batch = lane.next(10).await;
    assert_eq!(batch.held.len(), 1);
    assert_eq!(payloads(&lane.drain_due().await), ["1"], "the head goes out before the batch is settled");
    lane.settle(&batch, vec![(0, Block), (1, Block)]).await;
    assert_eq!(payloads(&lane.drain_due().await), ["2", "3"]);
}

pub async fn a_scheduled_event_waits_and_holds_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = append(&lane.store, [event("stamp")]).await[0];
    lane.drain().await;
    let now = record(&lane.store, id).await.event.created_at;
    let at = |wait| Schedule { at: now + wait };
    let soon = lane.past([(keyed("a", "soon"), at(SHORT)), (keyed("b", "late"), at(HOUR))]).await;
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
    lane.settle_due(&due, vec![Delivered]).await;
    assert_eq!(listed(&lane.store, State::Scheduled).await, ["late"]);
}

/// The key's head waits for its retry. The scheduled event still goes out at its time.
pub async fn a_scheduled_event_does_not_wait_for_its_key(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let past = jiff::Timestamp::UNIX_EPOCH;
    lane.past([
        (keyed("a", "head"), retry(HOUR)),
        (keyed("a", "scheduled"), Schedule { at: past }),
        (keyed("a", "behind"), Block),
    ])
    .await;
    assert_eq!(payloads(&lane.due(10).await.deliveries), ["scheduled"]);
}

pub async fn without_order_a_retry_holds_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane { hold_keys: false, ..Lane::open(fixture).await };
    lane.past([(keyed("a", "1"), retry(HOUR))]).await;
    append(&lane.store, [keyed("a", "2")]).await;
    assert!(lane.next(10).await.held.is_empty());
}

/// If an operator removes the order, events that waited behind another are released, even behind
/// one that halts its key, and those that are retried behind another.
pub async fn once_there_is_no_order_nobody_waits_for_a_turn(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    blocked_pair(&lane, retry(HOUR)).await;
    lane.past([(keyed("b", "4"), halted()), (keyed("b", "5"), Block)]).await;
    lane.past([(keyed("c", "6"), dead()), (keyed("c", "7"), dead())]).await;
    let of_c = Criteria { key: Some(Key::new("c").expect("a key")), ..Criteria::default() };
    let retried = Selection { which: of_c, ..Selection::default() };
    let changed = lane.store.change(&named("reader"), &Change::Retry, &retried).await.expect("retried");
    assert_eq!(changed.count, 2);
    lane.store.subscribe(&Subscription { ordering: Ordering::None, ..reader() }).await.expect("subscribed");
    let lane = Lane { hold_keys: false, ..lane };
    assert_eq!(listed(&lane.store, State::Blocked).await, [""; 0]);
    let due = lane.drain_due().await;
    let mut due = payloads(&due);
    due.sort_unstable();
    assert_eq!(due, ["2", "3", "5", "6", "7"]);
}

/// A replica that has not noticed the change still writes blocked rows.
pub async fn without_order_the_next_of_a_key_is_due_too(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    blocked_pair(&lane, retry_now()).await;
    let lane = Lane { hold_keys: false, ..lane };
    // Only the head: the others are behind it, and beyond the limit.
    let head = lane.due(1).await;
    assert_eq!(payloads(&head.deliveries), ["1"]);
    lane.settle_due(&head, vec![Delivered]).await;
    assert_eq!(payloads(&lane.drain_due().await), ["2", "3"]);
}

pub async fn a_failure_in_one_subscription_holds_nobody_elses_key(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let other = Lane::open_as(fixture, &reader_named("other")).await;
    lane.past([(keyed("a", "1"), retry_now())]).await;
    append(&lane.store, [keyed("a", "2")]).await;
    let batch = other.next(10).await;
    assert!(batch.held.is_empty() && batch.due_in.is_none());
    assert_eq!(payloads(&batch.deliveries), ["1", "2"]);
    assert!(other.due(10).await.deliveries.is_empty());
}

/// Settles `1` with the given disposition, and `2` and `3` of the same key as blocked behind it.
async fn blocked_pair(lane: &Lane, head: Disposition) -> Vec<postbox_core::EventId> {
    lane.past([(keyed("a", "1"), head), (keyed("a", "2"), Block), (keyed("a", "3"), Block)]).await
}
