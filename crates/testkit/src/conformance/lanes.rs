//! Changing the number of lanes.

use std::collections::BTreeMap;
use std::sync::Arc;

use postbox_core::limits::LANES_APART_MAX;
use postbox_core::{BatchLimit, Delivery, ErrorKind, NewEvent, OwnerId, State, Store, Subscription};

use super::StoreFixture;
use super::harness::*;

fn reader_with(lanes: u16) -> Subscription {
    Subscription { lanes: Some(lanes), ..reader() }
}

async fn set(store: &Arc<dyn Store>, lanes: u16) {
    store.set_lanes(&named("reader"), lanes).await.expect("changed");
}

/// Returns events `1..=count`, round robin over some keys.
fn in_turns(count: usize, keys: usize) -> Vec<NewEvent> {
    (1..=count).map(|n| keyed(&format!("key-{}", n % keys), &format!("{n:03}"))).collect()
}

/// Asserts that each event came once, and those of each key in order.
#[track_caller]
fn assert_whole(all: &[Delivery], count: usize) {
    let mut sorted = payloads(all);
    sorted.sort();
    assert_eq!(sorted, (1..=count).map(|n| format!("{n:03}")).collect::<Vec<_>>(), "each once");
    let mut keys: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for delivery in all {
        let key = delivery.event.key.as_ref().expect("all have one").as_str();
        keys.entry(key).or_default().push(delivery.seq.0);
    }
    assert!(keys.values().all(|seqs| seqs.is_sorted()), "out of order: {keys:?}");
}

async fn run_as(store: &Arc<dyn Store>, lanes: usize) -> Vec<Delivery> {
    let taken = Lane::take_all(store, "reader").await;
    assert_eq!(taken.len(), lanes);
    let all = Lane::run_all(&taken).await;
    for lane in taken {
        lane.release().await;
    }
    all
}

pub async fn more_lanes_lose_nothing_and_repeat_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    append(&lane.store, in_turns(60, 20)).await;
    let batch = lane.next(25).await;
    lane.settle(&batch, Vec::new()).await;
    let mut all = batch.deliveries;
    let unsettled = lane.next(5).await;
    assert!(!unsettled.is_empty(), "read, and not settled");
    let store = lane.release().await;
    set(&store, 4).await;
    assert_eq!(info(&store, "reader").await.lanes.len(), 4);
    assert_eq!(stats(&store).await.dispatched, 25);
    all.extend(run_as(&store, 4).await);
    assert_whole(&all, 60);
    assert_eq!(stats(&store).await.dispatched, 60);
}

pub async fn fewer_lanes_lose_nothing_and_repeat_nothing(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader_with(4)).await;
    append(&store, in_turns(30, 10)).await;
    let mut all = run_as(&store, 4).await;
    append(&store, in_turns(60, 10).split_off(30)).await;
    for lanes in [3, 1] {
        set(&store, lanes).await;
    }
    all.extend(run_as(&store, 1).await);
    assert_whole(&all, 60);
}

/// One lane is far ahead, another has rows, a third has read nothing at all.
pub async fn lanes_that_stand_apart_keep_the_order_of_each_key(fixture: &dyn StoreFixture) {
    for (from, to) in [(3, 2), (3, 1), (2, 4), (3, 7)] {
        let name = format!("reader-{from}-{to}");
        let store = fixture.store();
        let begins = postbox_core::StartAt::Now;
        let of = Subscription { name: named(&name), start: begins, ..reader_with(from) };
        store.subscribe(&of).await.expect("new");
        append(&store, in_turns(40, 12)).await;
        let lanes = Lane::take_all(&store, &name).await;
        let mut all = lanes[0].drain().await;
        let batch = lanes[1].next(4).await;
        lanes[1].settle(&batch, vec![(0, retry_now())]).await;
        all.extend(batch.deliveries.into_iter().skip(1));
        append(&store, in_turns(80, 12).split_off(40)).await;
        all.extend(lanes[0].drain().await);
        for lane in lanes {
            lane.release().await;
        }
        store.set_lanes(&named(&name), to).await.expect("changed");
        append(&store, in_turns(90, 12).split_off(80)).await;
        let lanes = Lane::take_all(&store, &name).await;
        assert_eq!(lanes.len(), usize::from(to));
        all.extend(Lane::run_all(&lanes).await);
        assert_whole(&all, 90);
        store.remove(&named(&name), info(&store, &name).await.generation).await.expect("removed");
    }
}

/// A replica that stops leaves its share to the others at once. One that vanishes keeps it until
/// its lease would be over.
pub async fn who_leaves_counts_no_longer_as_a_replica(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader_with(2)).await;
    let (one, two) = (owner("one"), owner("two"));
    let replicas = async |of: &OwnerId| store.acquire(&named("reader"), of, &[], LONG).await.expect("answered");
    let first = replicas(&one).await;
    assert_eq!((first.replicas, replicas(&two).await.replicas), (1, 2));
    store.release(&first.lease.expect("free")).await.expect("given back");
    assert_eq!(replicas(&two).await.replicas, 2, "it may ask again");
    for _ in 0..2 {
        store.leave(&named("reader"), &one).await.expect("left");
        assert_eq!(replicas(&two).await.replicas, 1);
    }
    assert_eq!(replicas(&one).await.replicas, 2, "it is back");
    store.leave(&named("nobody"), &one).await.expect("nothing to leave");
    assert_eq!(replicas(&two).await.replicas, 2, "of another subscription");
}

pub async fn the_former_holders_are_fenced_and_have_their_time(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    append(&store, [event("1")]).await;
    let lease = acquire(&store, "reader", "one", 8 * SHORT).await.lease.expect("free");
    let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    set(&store, 2).await;
    stale(store.renew(&lease, LONG).await);
    stale(store.next_batch(&lease, BatchLimit::default()).await);
    let old = Lane::of(store.clone(), lease);
    let settlement =
        postbox_core::Settlement { position: batch.end, entries: Vec::new(), rewind: false, hold_keys: true };
    stale(store.settle(&old.lease, settlement).await);
    let asked = acquire(&store, "reader", "two", LONG).await;
    assert_eq!((asked.lease, asked.lanes), (None, 2), "its holder may still send");
    fixture.pass(9 * SHORT).await;
    let lanes = Lane::take_all(&store, "reader").await;
    assert!(lanes.len() == 2 && lanes.iter().all(|lane| lane.lease.epoch > old.lease.epoch));
    assert_eq!(payloads(&Lane::run_all(&lanes).await), ["1"]);
}

pub async fn the_same_number_of_lanes_changes_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    set(&lane.store, 1).await;
    lane.store.renew(&lane.lease, LONG).await.expect("still ours");
}

pub async fn bad_numbers_of_lanes_are_refused(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    for lanes in [0, 257] {
        refused(store.set_lanes(&named("reader"), lanes).await, ErrorKind::Invalid, "lanes_invalid");
    }
    refused(store.set_lanes(&named("nobody"), 2).await, ErrorKind::NotFound, "subscription_unknown");
    set(&store, 256).await;
    assert_eq!(info(&store, "reader").await.lanes.len(), 256);
}

pub async fn lanes_too_far_apart_are_refused(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader_with(2)).await;
    let key = |lane: &str| format!("of-{lane}");
    // Two keys of different lanes, found by trying.
    append(&store, (0..16).map(|n| keyed(&key(&n.to_string()), "probe")).collect::<Vec<_>>()).await;
    let lanes = Lane::take_all(&store, "reader").await;
    let first = lanes[0].drain().await[0].event.key.clone().expect("a key");
    let second = lanes[1].drain().await[0].event.key.clone().expect("a key");
    let many: Vec<NewEvent> = (0..=LANES_APART_MAX).map(|_| keyed(second.as_str(), "x")).collect();
    for chunk in many.chunks(2_000) {
        append(&store, chunk).await;
    }
    append(&store, [keyed(first.as_str(), "last")]).await;
    assert_eq!(payloads(&lanes[0].drain().await), ["last"]);
    let refusal = store.set_lanes(&named("reader"), 1).await;
    refused(refusal, ErrorKind::Conflict, "lanes_apart");
    lanes[1].store.renew(&lanes[1].lease, LONG).await.expect("nothing has changed");
    let batch = lanes[1].next(100).await;
    lanes[1].settle(&batch, Vec::new()).await;
    set(&store, 1).await;
    assert_eq!(stats(&store).await.pending, LANES_APART_MAX as u64 + 1 - batch.deliveries.len() as u64);
}

fn names(topic: &str, numbers: std::ops::Range<usize>) -> Vec<String> {
    numbers.map(|n| format!("{topic}{n}")).collect()
}

/// Which filter an event was passed by stays a fact, whichever lane reads it.
pub async fn other_lanes_judge_by_the_filters_of_before(fixture: &dyn StoreFixture) {
    let of = |topic: &str, n: usize| NewEvent::json(topic, format!("{topic}{n}")).key(format!("key-{n}"));
    let store = fixture.store();
    store.subscribe(&Subscription { lanes: Some(3), ..reader_of("a") }).await.expect("new");
    append(&store, (10..22).flat_map(|n| [of("a", n), of("b", n)]).collect::<Vec<_>>()).await;
    assert_eq!(run_as(&store, 3).await.len(), 12);
    append(&store, (22..34).map(|n| of("a", n)).collect::<Vec<_>>()).await;
    assert_eq!(run_as(&store, 3).await.len(), 12, "and with them the others are passed");
    // Only one lane takes the next filter before the number of lanes changes.
    store.subscribe(&Subscription { lanes: Some(3), ..reader_of("b") }).await.expect("another filter");
    let lane = Lane::take(&store, "reader", "one").await;
    lane.drain().await;
    lane.release().await;
    set(&store, 2).await;
    append(&store, (34..46).flat_map(|n| [of("a", n), of("b", n)]).collect::<Vec<_>>()).await;
    assert_eq!(run_as(&store, 2).await.len(), 12);
    append(&store, (46..58).map(|n| of("b", n)).collect::<Vec<_>>()).await;
    assert_eq!(run_as(&store, 2).await.len(), 12);
    let mut dispatched = listed(&store, State::Dispatched).await;
    dispatched.sort();
    let expected: Vec<String> = [names("a", 10..34), names("b", 34..58)].concat();
    assert_eq!(dispatched, expected);
    let mut skipped = listed(&store, State::Skipped).await;
    skipped.sort();
    let expected: Vec<String> = [names("a", 34..46), names("b", 10..22)].concat();
    assert_eq!(skipped, expected);
}

/// This includes dead rows: their letters are handed over by the holder of their new lane.
pub async fn rows_go_with_their_key(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let dispositions = (0..20).map(|n| match n % 3 {
        0 => dead(),
        1 => retry_now(),
        _ => scheduled(),
    });
    lane.past(numbered(20).into_iter().zip(dispositions)).await;
    let store = lane.release().await;
    set(&store, 3).await;
    let lanes = Lane::take_all(&store, "reader").await;
    let (mut letters, mut due) = (Vec::new(), Vec::new());
    for lane in &lanes {
        letters.push(super::dead_letters::texts(lane).await.len());
        due.push(lane.drain_due().await.len());
    }
    for of_lanes in [letters, due] {
        assert_eq!(of_lanes.iter().sum::<usize>(), 7);
        assert!(of_lanes.iter().filter(|count| **count > 0).count() > 1, "{of_lanes:?}");
    }
    append(&store, numbered(20)).await;
    let again = Lane::run_all(&lanes).await;
    assert_eq!(again.len(), 20, "each in the lane of its row");
}

pub async fn what_commits_late_is_read_by_the_new_lanes(fixture: &dyn StoreFixture) {
    let Some(mut open) = begin_beside_others(fixture).await else { return };
    open.append(&outbox(), &[keyed("a", "late"), keyed("b", "later")]).await.expect("appended");
    let store = subscribed(fixture, &reader_with(2)).await;
    append(&store, numbered(10)).await;
    assert_eq!(run_as(&store, 2).await.len(), 10);
    set(&store, 3).await;
    open.commit().await;
    let mut late = payloads(&run_as(&store, 3).await);
    late.sort();
    assert_eq!(late, ["late", "later"]);
}
