//! Subscribing, leases, fencing.

use std::collections::BTreeSet;
use std::time::Duration;

use postbox_core::{BatchLimit, Disposition, Entry, ErrorKind, LogName, Pause, Settlement, State, Subscription};

use super::StoreFixture;
use super::harness::*;

pub async fn subscribing_again_is_fine_and_updates_the_filter(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), Delivered)]).await;
    lane.store.subscribe(&reader()).await.expect("the same again");
    assert!(lane.drain().await.is_empty(), "the position is kept");
    let narrower = reader_of("invoice.*");
    lane.store.subscribe(&narrower).await.expect("another filter");
    append(&lane.store, [event("2")]).await;
    assert!(lane.drain().await.is_empty(), "no longer wanted");
    let known = lane.store.subscriptions().await.expect("the subscriptions");
    assert_eq!(known[0].filter, narrower.filter);
}

pub async fn subscribing_to_an_unknown_log_is_not_found(fixture: &dyn StoreFixture) {
    let unknown = Subscription { log: nowhere(), ..reader() };
    refused(fixture.store().subscribe(&unknown).await, ErrorKind::NotFound, "log_unknown");
}

/// Replicas with different configurations would undo each other's changes, so only a person changes
/// lanes.
pub async fn another_number_of_lanes_changes_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    for lanes in [Some(2), None] {
        lane.store.subscribe(&Subscription { lanes, ..reader() }).await.expect("it is there");
    }
    lane.store.renew(&lane.lease, LONG).await.expect("still ours");
    assert_eq!(acquire(&lane.store, "reader", "two", LONG).await.lanes, 1);
}

pub async fn another_log_is_a_conflict(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    let of_inbox = Subscription { log: LogName::inbox(), ..reader() };
    refused(store.subscribe(&of_inbox).await, ErrorKind::Conflict, "log_differs");
}

pub async fn lanes_out_of_bounds_are_refused(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    for lanes in [0, 257] {
        refused(
            store.subscribe(&Subscription { lanes: Some(lanes), ..reader() }).await,
            ErrorKind::Invalid,
            "lanes_invalid",
        );
    }
    store.subscribe(&Subscription { lanes: Some(256), ..reader() }).await.expect("the most");
    store.subscribe(&Subscription { lanes: None, ..reader_named("usual") }).await.expect("as many as suit the store");
    let lanes: Vec<_> = store.subscriptions().await.expect("listed").iter().map(|known| known.lanes.len()).collect();
    assert!(matches!(lanes[..], [256, 1 | 2]), "{lanes:?}");
}

pub async fn concurrent_subscribing_is_fine(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let calls = (0..8).map(|_| {
        let store = store.clone();
        async move { store.subscribe(&Subscription { lanes: Some(3), ..reader() }).await }
    });
    at_once(calls).await.into_iter().for_each(|subscribed| subscribed.expect("each succeeds"));
    assert_eq!(store.subscriptions().await.expect("the subscriptions").len(), 1);
}

pub async fn acquiring_needs_a_subscription(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let result = store.acquire(&named("nobody"), &owner("one"), &[], LONG).await;
    refused(result, ErrorKind::NotFound, "subscription_unknown");
}

pub async fn a_held_lane_is_given_to_nobody_else_until_released(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let refused = acquire(&lane.store, "reader", "two", LONG).await;
    assert_eq!((refused.lease, refused.lanes, refused.paused), (None, 1, None));
    lane.store.release(&lane.lease).await.expect("given back");
    let taken = acquire(&lane.store, "reader", "two", LONG).await.lease.expect("free at once");
    assert!(taken.epoch > lane.lease.epoch, "the epoch rises with every grant");
}

pub async fn an_expired_lease_is_taken_over_with_a_higher_epoch(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    let first = acquire(&store, "reader", "one", SHORT).await.lease.expect("free");
    fixture.pass(2 * SHORT).await;
    let second = acquire(&store, "reader", "two", LONG).await.lease.expect("free again");
    assert!(second.epoch > first.epoch);
    assert_eq!(second.lane, first.lane);
}

pub async fn a_renewed_lease_outlives_its_first_deadline(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    let lease = acquire(&store, "reader", "one", 4 * SHORT).await.lease.expect("free");
    store.renew(&lease, LONG).await.expect("still ours");
    fixture.pass(5 * SHORT).await;
    store.next_batch(&lease, BatchLimit::default()).await.expect("still ours");
    assert_eq!(acquire(&store, "reader", "two", LONG).await.lease, None);
}

pub async fn an_expired_lease_is_stale_even_if_nobody_took_it(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.store.renew(&lane.lease, SHORT).await.expect("still ours");
    fixture.pass(2 * SHORT).await;
    assert_stale_and_harmless(&lane).await;
}

pub async fn after_a_takeover_every_call_of_the_old_owner_is_stale(fixture: &dyn StoreFixture) {
    let old = Lane::open(fixture).await;
    let new = old.taken_over().await;
    assert_stale_and_harmless(&old).await;
    new.store.renew(&new.lease, LONG).await.expect("the new owner's lease is untouched, by release too");
    assert_eq!(acquire(&new.store, "reader", "three", LONG).await.lease, None);
}

pub async fn a_released_lease_is_stale(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.store.release(&lane.lease).await.expect("given back");
    assert_stale_and_harmless(&lane).await;
    lane.store.release(&lane.lease).await.expect("twice does nothing");
}

pub async fn a_takeover_makes_calls_in_flight_due_at_once(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let events = [keyed("a", "1"), keyed("a", "2"), keyed("b", "3"), event("4"), keyed("c", "5")];
    let settled = [in_flight(), Block, retry(HOUR), in_flight(), Delivered];
    let ids = lane.past(events.into_iter().zip(settled)).await;
    lane.store.renew(&lane.lease, LONG).await.expect("still ours");
    assert_eq!(acquire(&lane.store, "reader", "two", LONG).await.lease, None);
    assert!(lane.due(10).await.deliveries.is_empty(), "whoever holds the lane waits for its own calls");
    let new = lane.taken_over().await;
    let due = new.due(10).await;
    assert_eq!(payloads(&due.deliveries), ["1", "2", "4"]);
    assert!(due.deliveries.iter().all(|delivery| delivery.attempt == 1), "a crash costs no attempt");
    assert_eq!(record(&new.store, ids[2]).await.state, State::Retrying, "not its time yet");
    new.settle_due(&due, vec![Delivered; 3]).await;
    assert!(new.due(10).await.deliveries.is_empty());
}

pub async fn a_takeover_leaves_calls_of_other_lanes_alone(fixture: &dyn StoreFixture) {
    let [one, two] = Lane::two_settled(fixture, in_flight()).await;
    // Taken by the same relay, which still has calls of its other lane.
    two.store.release(&two.lease).await.expect("given back");
    let two = Lane::take(&one.store, "reader", "one").await;
    assert!(!two.due(100).await.deliveries.is_empty());
    assert!(one.due(100).await.deliveries.is_empty());
}

fn in_flight() -> Disposition {
    Disposition::InFlight { after: HOUR }
}

pub async fn a_stale_settlement_changes_nothing(fixture: &dyn StoreFixture) {
    let old = Lane::open(fixture).await;
    append(&old.store, [keyed("a", "1"), keyed("a", "2"), keyed("b", "3")]).await;
    let batch = old.next(10).await;
    let new = old.taken_over().await;
    let before = stats(&old.store).await;
    let entries = vec![
        Entry { delivery: &batch.deliveries[0], disposition: retry(HOUR) },
        Entry { delivery: &batch.deliveries[1], disposition: Block },
    ];
    let settlement = Settlement { position: batch.end, entries, rewind: false, hold_keys: true };
    stale(old.store.settle(&old.lease, settlement).await);
    let after = stats(&old.store).await;
    assert_eq!((after.pending, after.retrying, after.blocked), (before.pending, 0, 0));
    assert_eq!(payloads(&new.drain().await), ["1", "2", "3"], "the new owner gets everything");
}

pub async fn lanes_are_given_one_by_one(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &Subscription { lanes: Some(3), ..reader() }).await;
    let mut given = BTreeSet::new();
    for by in ["one", "one", "two"] {
        given.insert(acquire(&store, "reader", by, LONG).await.lease.expect("a lane is free").lane);
    }
    assert_eq!(given, BTreeSet::from([0, 1, 2]));
    let none = acquire(&store, "reader", "two", LONG).await;
    assert_eq!((none.lease, none.lanes, none.replicas), (None, 3, 2));
}

/// If the answer to a grant was lost, the same owner gets the lane again at once. A lane that the
/// owner knows it holds is left alone.
pub async fn a_lost_grant_is_granted_again_and_a_known_one_is_left_alone(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    let ask = async |by: &str, held: &[u16]| {
        store.acquire(&named("reader"), &owner(by), held, LONG).await.expect("asked").lease
    };
    let lost = ask("one", &[]).await.expect("free");
    assert_eq!(ask("one", &[lost.lane]).await, None);
    assert_eq!(ask("two", &[]).await, None);
    let lease = ask("one", &[]).await.expect("ours already");
    assert!(lease.lane == lost.lane && lease.epoch > lost.epoch);
    assert!(store.renew(&lost, LONG).await.expect_err("fenced").is_stale());
}

pub async fn concurrent_acquires_never_share_a_lane(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &Subscription { lanes: Some(3), ..reader() }).await;
    let calls = (0..8).map(|n| {
        let store = store.clone();
        async move { acquire(&store, "reader", &format!("owner-{n}"), LONG).await.lease }
    });
    let lanes: Vec<u16> = at_once(calls).await.into_iter().filter_map(|lease| Some(lease?.lane)).collect();
    assert!(lanes.len() <= 3, "given twice: {lanes:?}");
    assert_eq!(lanes.iter().collect::<BTreeSet<_>>().len(), lanes.len(), "given twice: {lanes:?}");
    // A racing call may get nothing, but no lane is lost by that.
    for _ in lanes.len()..3 {
        acquire(&store, "reader", "late", LONG).await.lease.expect("the rest is free");
    }
}

pub async fn replicas_counts_who_asked_lately(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    assert_eq!(acquire(&store, "reader", "one", LONG).await.replicas, 1);
    assert_eq!(acquire(&store, "reader", "one", LONG).await.replicas, 1, "asking twice is still one relay");
    assert_eq!(acquire(&store, "reader", "two", LONG).await.replicas, 2, "a standby counts");
    store.subscribe(&reader_named("other")).await.expect("new");
    assert_eq!(acquire(&store, "other", "three", LONG).await.replicas, 1, "subscriptions count on their own");
}

pub async fn replicas_forgets_who_fell_silent(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    acquire(&store, "reader", "one", SHORT).await;
    fixture.pass(2 * SHORT).await;
    assert_eq!(acquire(&store, "reader", "two", SHORT).await.replicas, 1);
}

pub async fn a_pause_gives_no_lease_and_ends_the_running_one(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    append(&lane.store, [event("1")]).await;
    let in_flight = lane.next(10).await;
    let pause = Pause { until: None, by: "ada".into(), why: "maintenance".into() };
    lane.store.pause(&named("reader"), Some(&pause)).await.expect("paused");
    stale(lane.store.renew(&lane.lease, LONG).await);
    lane.settle(&in_flight, Vec::new()).await;
    assert_eq!(stats(&lane.store).await.dispatched, 1, "what was in flight is settled");
    lane.store.release(&lane.lease).await.expect("does no harm");
    let refused = acquire(&lane.store, "reader", "one", LONG).await;
    assert_eq!((refused.lease, refused.paused), (None, Some(pause)));
    lane.store.pause(&named("reader"), None).await.expect("resumed");
    let again = acquire(&lane.store, "reader", "one", LONG).await;
    assert!(again.lease.is_some() && again.paused.is_none());
}

pub async fn a_pause_with_an_end_ends_by_itself(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    append(&lane.store, [event("1")]).await;
    lane.store.release(&lane.lease).await.expect("given back");
    let now = async || lane.store.time().await.expect("the time of the store");
    let until = Some(now().await + Duration::from_secs(3_600));
    let pause = Pause { until, by: "ada".into(), why: "lunch".into() };
    lane.store.pause(&named("reader"), Some(&pause)).await.expect("paused");
    assert_eq!(acquire(&lane.store, "reader", "one", LONG).await.lease, None);
    let over = Pause { until: Some(now().await + SHORT), ..pause };
    lane.store.pause(&named("reader"), Some(&over)).await.expect("paused for less long");
    fixture.pass(2 * SHORT).await;
    let again = acquire(&lane.store, "reader", "one", LONG).await;
    assert!(again.lease.is_some() && again.paused.is_none());
}

pub async fn a_pause_that_would_end_in_the_past_is_refused(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let pause = Pause { until: None, by: "ada".into(), why: "maintenance".into() };
    lane.store.pause(&named("reader"), Some(&pause)).await.expect("paused");
    let now = lane.store.time().await.expect("the time of the store");
    for until in [now, now - Duration::from_secs(3_600)] {
        let over = Pause { until: Some(until), why: "a typo".into(), ..pause.clone() };
        refused(lane.store.pause(&named("reader"), Some(&over)).await, ErrorKind::Invalid, "until_past");
    }
    assert_eq!(info(&lane.store, "reader").await.paused, Some(pause), "the former pause goes on");
}

async fn assert_stale_and_harmless(lane: &Lane) {
    append(&lane.store, [event("unread")]).await;
    stale(lane.store.renew(&lane.lease, LONG).await);
    stale(lane.store.next_batch(&lane.lease, BatchLimit::default()).await);
    stale(lane.store.due(&lane.lease, BatchLimit::default()).await);
    stale(lane.store.settle(&lane.lease, Settlement::default()).await);
    lane.store.release(&lane.lease).await.expect("releasing what is lost succeeds");
    assert_eq!(listed(&lane.store, State::Pending).await, ["unread"]);
}
