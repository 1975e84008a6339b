//! Dead letters: every dead event is a letter until it is handed over.

use std::time::Duration;

use postbox_core::{BatchLimit, DeadLetter, Handover, Prune, State};

use super::StoreFixture;
use super::harness::*;

/// Returns the letters of a lane that can be handed over now.
pub(super) async fn letters(lane: &Lane) -> Vec<DeadLetter> {
    lane.store.dead_letters(&lane.lease, BatchLimit::default()).await.expect("the letters can be read")
}

pub(super) async fn texts(lane: &Lane) -> Vec<String> {
    payloads(&letters(lane).await.into_iter().map(|letter| letter.delivery).collect::<Vec<_>>())
}

/// Reports a letter as handed over, or as coming again after a wait.
pub(super) fn handover(letter: &DeadLetter, again: Option<Duration>) -> Handover {
    Handover { seq: letter.delivery.seq, replay: letter.delivery.replay, again }
}

async fn hand_over(lane: &Lane, letters: &[DeadLetter], again: Option<Duration>) {
    let handovers: Vec<_> = letters.iter().map(|letter| handover(letter, again)).collect();
    lane.store.hand_over(&lane.lease, &handovers).await.expect("written");
}

pub async fn a_dead_event_is_a_letter_until_it_is_handed_over(fixture: &dyn StoreFixture) {
    let (lane, ids) =
        Lane::settled(fixture, [(keyed("a", "1").header("h", "v"), dead()), (event("2"), dead_of("poison"))]).await;
    let read = letters(&lane).await;
    let [one, two] = &read[..] else { panic!("{read:?}") };
    assert_eq!((one.delivery.event.id, two.delivery.event.id), (ids[0], ids[1]));
    assert_eq!((one.code.as_str(), one.error.as_str(), one.delivery.attempt), ("http_422", "never", 1));
    assert_eq!((one.delivery.event.header("h"), one.delivery.replay, &one.unreadable), (Some("v"), 0, &None));
    assert_eq!(
        (two.code.as_str(), lane.store.dead_letters(&lane.lease, one_at_a_time()).await.expect("read").len()),
        ("poison", 1)
    );
    // Reading changes nothing.
    assert_eq!(texts(&lane).await, ["1", "2"]);
    hand_over(&lane, &read[..1], None).await;
    assert_eq!(texts(&lane).await, ["2"]);
    hand_over(&lane, &read, None).await;
    assert!(letters(&lane).await.is_empty());
    // The events are still dead.
    assert_eq!(listed(&lane.store, State::Dead).await, ["1", "2"]);
    assert!(lane.due(10).await.deliveries.is_empty());
}

fn one_at_a_time() -> BatchLimit {
    BatchLimit { events: 1, ..BatchLimit::default() }
}

pub async fn only_dead_events_are_letters(fixture: &dyn StoreFixture) {
    let events = [
        (keyed("a", "retrying"), retry(HOUR)),
        (keyed("a", "blocked"), Block),
        (event("scheduled"), scheduled()),
        (keyed("b", "halted"), halted()),
        (keyed("b", "behind"), Block),
        (event("delivered"), Delivered),
        (event("discarded"), dead()),
    ];
    let (lane, ids) = Lane::settled(fixture, events).await;
    lane.discard(these(&ids[6..])).await;
    assert_eq!(texts(&lane).await, ["halted"]);
}

pub async fn letters_wait_for_their_lane_and_subscription(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), dead())]).await;
    let other = Lane::open_as(fixture, &reader_named("other")).await;
    assert!(letters(&other).await.is_empty());
    // It was not handed over, so the next owner finds it.
    let next = lane.taken_over().await;
    assert_eq!(texts(&next).await, ["1"]);
}

pub async fn a_letter_that_is_put_off_comes_again(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), dead()), (event("2"), dead()), (event("3"), dead())]).await;
    let read = letters(&lane).await;
    hand_over(&lane, &read[..1], Some(HOUR)).await;
    hand_over(&lane, &read[1..2], Some(SHORT)).await;
    assert_eq!(texts(&lane).await, ["3"]);
    fixture.pass(SHORT).await;
    // Letters that waited longest come first.
    assert_eq!(texts(&lane).await, ["3", "2"]);
    hand_over(&lane, &read, None).await;
    assert!(letters(&lane).await.is_empty());
}

/// A store may read large payloads apart from their rows.
pub async fn large_letters_come_whole_in_any_order(fixture: &dyn StoreFixture) {
    let (one, two) = ("1".repeat(50_000), "2".repeat(50_000));
    let (lane, _) = Lane::settled(fixture, [(event(&one), dead()), (event(&two), dead())]).await;
    let read = letters(&lane).await;
    hand_over(&lane, &read[..1], Some(SHORT)).await;
    fixture.pass(SHORT).await;
    assert!(texts(&lane).await == [two, one]);
}

pub async fn a_replay_or_a_discard_takes_the_letter_back(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), dead()), (event("2"), dead())]).await;
    let read = letters(&lane).await;
    assert_eq!(lane.replay(these(&ids[..1])).await, 1);
    assert_eq!(lane.discard(these(&ids[1..])).await, 1);
    assert!(letters(&lane).await.is_empty());
    // A handover that was in flight at that moment changes neither.
    hand_over(&lane, &read, None).await;
    assert_eq!(payloads(&lane.drain_due().await), ["1"]);
    assert_eq!(listed(&lane.store, State::Discarded).await, ["2"]);
}

pub async fn an_event_that_dies_again_is_a_letter_again(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), dead())]).await;
    let first = letters(&lane).await;
    hand_over(&lane, &first, None).await;
    for replay in 1..3 {
        lane.replay(these(&ids)).await;
        let batch = lane.due(1).await;
        lane.settle_due(&batch, vec![dead()]).await;
        let again = letters(&lane).await;
        assert_eq!((again.len(), again[0].delivery.replay), (1, replay));
        // A report on the first death does not apply to this one.
        hand_over(&lane, &first, None).await;
        hand_over(&lane, &first, Some(HOUR)).await;
        assert_eq!(letters(&lane).await, again);
        hand_over(&lane, &again, None).await;
        assert!(letters(&lane).await.is_empty());
    }
}

pub async fn a_lost_lease_hands_nothing_over(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), dead())]).await;
    let read = letters(&lane).await;
    let next = lane.taken_over().await;
    stale(lane.store.dead_letters(&lane.lease, BatchLimit::default()).await);
    stale(lane.store.hand_over(&lane.lease, &[handover(&read[0], None)]).await);
    assert_eq!(texts(&next).await, ["1"]);
}

pub async fn letters_are_not_pruned(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), dead()), (event("2"), Delivered)]).await;
    fixture.pass(SHORT).await;
    assert_eq!(lane.store.prune(&outbox(), &Prune::default()).await.expect("pruned").count, 1);
    assert_eq!(texts(&lane).await, ["1"]);
}
