//! Subscribing, leases, fencing.

use std::collections::BTreeSet;
use std::time::Duration;

use postbox_core::{
    BatchLimit, Disposition, Entry, ErrorKind, Filter, LogName, Pause, Settlement, State, Subscription, TopicPattern,
};

use super::StoreFixture;
use super::harness::*;

/// Subscribing again changes nothing; another filter is taken over.
pub async fn subscribing_again_is_fine_and_updates_the_filter(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past(vec![event("1")], vec![]).await;
    lane.store.subscribe(&reader()).await.expect("the same again");
    assert!(lane.drain().await.is_empty(), "the position is kept");
    let topics = vec![TopicPattern::new("invoice.*").expect("a pattern")];
    let narrower = Subscription { filter: Filter { topics, tenant: None }, ..reader() };
    lane.store.subscribe(&narrower).await.expect("another filter");
    append(&lane.store, [event("2")]).await;
    assert!(lane.drain().await.is_empty(), "no longer wanted");
    let known = lane.store.subscriptions().await.expect("the subscriptions");
    assert_eq!(known[0].filter, narrower.filter);
}

/// A log must exist before it is read.
pub async fn subscribing_to_an_unknown_log_is_not_found(fixture: &dyn StoreFixture) {
    let unknown = Subscription { log: LogName::new("nowhere").expect("a name"), ..reader() };
    refused(fixture.store().subscribe(&unknown).await, ErrorKind::NotFound, "log_unknown");
}

/// Lanes are fixed once created: keys would change lanes.
pub async fn another_number_of_lanes_is_a_conflict(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&reader()).await.expect("new");
    refused(store.subscribe(&Subscription { lanes: 2, ..reader() }).await, ErrorKind::Conflict, "lanes_differ");
}

/// A subscription reads one log for ever.
pub async fn another_log_is_a_conflict(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&reader()).await.expect("new");
    refused(
        store.subscribe(&Subscription { log: LogName::inbox(), ..reader() }).await,
        ErrorKind::Conflict,
        "log_differs",
    );
}

/// 1 to 256 lanes.
pub async fn lanes_out_of_bounds_are_refused(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    for lanes in [0, 257] {
        refused(store.subscribe(&Subscription { lanes, ..reader() }).await, ErrorKind::Invalid, "lanes_invalid");
    }
    store.subscribe(&Subscription { lanes: 256, ..reader() }).await.expect("the most");
}

/// Several relays start at once.
pub async fn concurrent_subscribing_is_fine(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let calls = (0..8).map(|_| {
        let store = store.clone();
        tokio::spawn(async move { store.subscribe(&Subscription { lanes: 3, ..reader() }).await })
    });
    for call in futures::future::join_all(calls).await {
        call.expect("no panic").expect("each succeeds");
    }
    assert_eq!(store.subscriptions().await.expect("the subscriptions").len(), 1);
}

/// Nobody can drive what was not declared.
pub async fn acquiring_needs_a_subscription(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let result = store.acquire(&named("nobody"), &owner("one"), &[], LONG).await;
    refused(result, ErrorKind::NotFound, "subscription_unknown");
}

/// One lane, one owner; giving it back frees it at once.
pub async fn a_held_lane_is_given_to_nobody_else_until_released(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let refused = acquire(&lane.store, "reader", "two", LONG).await;
    assert_eq!((refused.lease, refused.lanes, refused.paused), (None, 1, None));
    lane.store.release(&lane.lease).await.expect("given back");
    let taken = acquire(&lane.store, "reader", "two", LONG).await.lease.expect("free at once");
    assert!(taken.epoch > lane.lease.epoch, "the epoch rises with every grant");
}

/// A crashed owner loses its lane by the clock.
pub async fn an_expired_lease_is_taken_over_with_a_higher_epoch(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&reader()).await.expect("new");
    let first = acquire(&store, "reader", "one", SHORT).await.lease.expect("free");
    fixture.pass(2 * SHORT).await;
    let second = acquire(&store, "reader", "two", LONG).await.lease.expect("free again");
    assert!(second.epoch > first.epoch);
    assert_eq!(second.lane, first.lane);
}

/// Renewing moves the deadline.
pub async fn a_renewed_lease_outlives_its_first_deadline(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&reader()).await.expect("new");
    let lease = acquire(&store, "reader", "one", 4 * SHORT).await.lease.expect("free");
    store.renew(&lease, LONG).await.expect("still ours");
    fixture.pass(5 * SHORT).await;
    store.next_batch(&lease, BatchLimit::default()).await.expect("still ours");
    assert_eq!(acquire(&store, "reader", "two", LONG).await.lease, None);
}

/// Expired is expired, even while nobody else wants the lane.
pub async fn an_expired_lease_is_stale_even_if_nobody_took_it(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.store.renew(&lane.lease, SHORT).await.expect("still ours");
    fixture.pass(2 * SHORT).await;
    assert_stale_and_harmless(&lane).await;
}

/// The former owner cannot write, read or renew once another has the lane.
pub async fn after_a_takeover_every_call_of_the_old_owner_is_stale(fixture: &dyn StoreFixture) {
    let old = Lane::open(fixture).await;
    let new = Lane { lease: old.lease.clone(), store: old.store.clone(), hold_keys: true }.taken_over().await;
    assert_stale_and_harmless(&old).await;
    new.store.renew(&new.lease, LONG).await.expect("the new owner's lease is untouched, by release too");
    assert_eq!(acquire(&new.store, "reader", "three", LONG).await.lease, None);
}

/// Releasing is final for the epoch.
pub async fn a_released_lease_is_stale(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.store.release(&lane.lease).await.expect("given back");
    assert_stale_and_harmless(&lane).await;
    lane.store.release(&lane.lease).await.expect("twice does nothing");
}

/// A call of the former holder is over: its event waits for nobody. Others keep their times.
pub async fn a_takeover_makes_calls_in_flight_due_at_once(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let events = vec![keyed("a", "1"), keyed("a", "2"), keyed("b", "3"), event("4"), keyed("c", "5")];
    let exceptions = vec![(0, in_flight()), (1, Disposition::Block), (2, retry(HOUR)), (3, in_flight())];
    let ids = lane.past(events, exceptions).await;
    lane.store.renew(&lane.lease, LONG).await.expect("still ours");
    assert_eq!(acquire(&lane.store, "reader", "two", LONG).await.lease, None);
    assert!(lane.due(10).await.deliveries.is_empty(), "whoever holds the lane waits for its own calls");
    let new = lane.taken_over().await;
    let due = new.due(10).await;
    assert_eq!(payloads(&due.deliveries), ["1", "2", "4"]);
    assert!(due.deliveries.iter().all(|delivery| delivery.attempt == 1), "a crash costs no attempt");
    assert_eq!(record(&new.store, ids[2]).await.state, State::Retrying, "not its time yet");
    new.settle_due(&due, vec![Disposition::Delivered; 3]).await;
    assert!(new.due(10).await.deliveries.is_empty());
}

/// A lane that changes hands says nothing about calls of the other lanes.
pub async fn a_takeover_leaves_calls_of_other_lanes_alone(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&Subscription { lanes: 2, ..reader() }).await.expect("new");
    let (one, two) = (Lane::take(&store, "reader", "one").await, Lane::take(&store, "reader", "one").await);
    append(&store, numbered(20)).await;
    for lane in [&one, &two] {
        let batch = lane.next(100).await;
        assert!(!batch.deliveries.is_empty(), "20 keys spread over two lanes");
        lane.settle(&batch, (0..batch.deliveries.len()).map(|index| (index, in_flight())).collect()).await;
    }
    // By the same relay, which still has calls of its other lane.
    store.release(&two.lease).await.expect("given back");
    let two = Lane::take(&store, "reader", "one").await;
    assert!(!two.due(100).await.deliveries.is_empty());
    assert!(one.due(100).await.deliveries.is_empty());
}

fn in_flight() -> Disposition {
    Disposition::InFlight { after: HOUR }
}

/// A settlement under a lost lease changes neither position nor rows.
pub async fn a_stale_settlement_changes_nothing(fixture: &dyn StoreFixture) {
    let old = Lane::open(fixture).await;
    append(&old.store, [keyed("a", "1"), keyed("a", "2"), keyed("b", "3")]).await;
    let batch = old.next(10).await;
    let new = Lane { lease: old.lease.clone(), store: old.store.clone(), hold_keys: true }.taken_over().await;
    let before = stats(&old.store).await;
    let entries = vec![
        Entry { delivery: &batch.deliveries[0], disposition: retry(HOUR) },
        Entry { delivery: &batch.deliveries[1], disposition: Disposition::Block },
    ];
    let settlement = Settlement { position: batch.end, entries, rewind: false, hold_keys: true };
    stale(old.store.settle(&old.lease, settlement).await);
    let after = stats(&old.store).await;
    assert_eq!((after.pending, after.retrying, after.blocked), (before.pending, 0, 0));
    assert_eq!(payloads(&new.drain().await), ["1", "2", "3"], "the new owner gets everything");
}

/// Each lane goes out once; one more relay gets none.
pub async fn lanes_are_given_one_by_one(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&Subscription { lanes: 3, ..reader() }).await.expect("new");
    let mut given = BTreeSet::new();
    for by in ["one", "one", "two"] {
        given.insert(acquire(&store, "reader", by, LONG).await.lease.expect("a lane is free").lane);
    }
    assert_eq!(given, BTreeSet::from([0, 1, 2]));
    let none = acquire(&store, "reader", "two", LONG).await;
    assert_eq!((none.lease, none.lanes, none.replicas), (None, 3, 2));
}

/// Two relays never get one lane, however they race.
pub async fn concurrent_acquires_never_share_a_lane(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&Subscription { lanes: 3, ..reader() }).await.expect("new");
    let calls = (0..8).map(|n| {
        let store = store.clone();
        tokio::spawn(async move { acquire(&store, "reader", &format!("owner-{n}"), LONG).await.lease })
    });
    let answers = futures::future::join_all(calls).await;
    let lanes: Vec<u16> = answers.into_iter().filter_map(|answer| Some(answer.expect("no panic")?.lane)).collect();
    assert!(lanes.len() <= 3, "given twice: {lanes:?}");
    assert_eq!(lanes.iter().collect::<BTreeSet<_>>().len(), lanes.len(), "given twice: {lanes:?}");
    // A racing call may come away with nothing, but no lane is lost by it.
    for _ in lanes.len()..3 {
        acquire(&store, "reader", "late", LONG).await.lease.expect("the rest is free");
    }
}

/// Whoever asked or renewed within the last lease time counts, lane or not.
pub async fn replicas_counts_who_asked_lately(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&reader()).await.expect("new");
    assert_eq!(acquire(&store, "reader", "one", LONG).await.replicas, 1);
    assert_eq!(acquire(&store, "reader", "one", LONG).await.replicas, 1, "asking twice is still one relay");
    assert_eq!(acquire(&store, "reader", "two", LONG).await.replicas, 2, "a standby counts");
    store.subscribe(&Subscription { name: named("other"), ..reader() }).await.expect("new");
    assert_eq!(acquire(&store, "other", "three", LONG).await.replicas, 1, "subscriptions count on their own");
}

/// A relay that died stops counting.
pub async fn replicas_forgets_who_fell_silent(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&reader()).await.expect("new");
    acquire(&store, "reader", "one", SHORT).await;
    fixture.pass(2 * SHORT).await;
    assert_eq!(acquire(&store, "reader", "two", SHORT).await.replicas, 1);
}

/// A pause stops new leases, and running ones at their renewal; resuming lifts it.
pub async fn a_pause_gives_no_lease_and_ends_the_running_one(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let pause = Pause { until: None, by: "ada".into(), why: "maintenance".into() };
    lane.store.pause(&named("reader"), Some(&pause)).await.expect("paused");
    stale(lane.store.renew(&lane.lease, LONG).await);
    lane.store.release(&lane.lease).await.expect("does no harm");
    let refused = acquire(&lane.store, "reader", "one", LONG).await;
    assert_eq!((refused.lease, refused.paused), (None, Some(pause)));
    lane.store.pause(&named("reader"), None).await.expect("resumed");
    let again = acquire(&lane.store, "reader", "one", LONG).await;
    assert!(again.lease.is_some() && again.paused.is_none());
}

/// Nobody has to remember to lift a pause with an end.
pub async fn a_pause_with_an_end_ends_by_itself(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = append(&lane.store, [event("1")]).await[0];
    lane.store.release(&lane.lease).await.expect("given back");
    // The store's own clock, as it stamped the event.
    let now = record(&lane.store, id).await.event.created_at;
    let until = Some(now + Duration::from_secs(3_600));
    let pause = Pause { until, by: "ada".into(), why: "lunch".into() };
    lane.store.pause(&named("reader"), Some(&pause)).await.expect("paused");
    assert_eq!(acquire(&lane.store, "reader", "one", LONG).await.lease, None);
    let over = Pause { until: Some(now + SHORT), ..pause };
    lane.store.pause(&named("reader"), Some(&over)).await.expect("paused for less long");
    fixture.pass(2 * SHORT).await;
    let again = acquire(&lane.store, "reader", "one", LONG).await;
    assert!(again.lease.is_some() && again.paused.is_none());
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

/// The cases of this suite.
#[doc(hidden)]
#[macro_export]
macro_rules! lease_cases {
    ($fixture:expr) => {
        $crate::conformance_cases!(
            lease,
            $fixture,
            [
                subscribing_again_is_fine_and_updates_the_filter,
                subscribing_to_an_unknown_log_is_not_found,
                another_number_of_lanes_is_a_conflict,
                another_log_is_a_conflict,
                lanes_out_of_bounds_are_refused,
                concurrent_subscribing_is_fine,
                acquiring_needs_a_subscription,
                a_held_lane_is_given_to_nobody_else_until_released,
                an_expired_lease_is_taken_over_with_a_higher_epoch,
                a_renewed_lease_outlives_its_first_deadline,
                an_expired_lease_is_stale_even_if_nobody_took_it,
                after_a_takeover_every_call_of_the_old_owner_is_stale,
                a_released_lease_is_stale,
                a_takeover_makes_calls_in_flight_due_at_once,
                a_takeover_leaves_calls_of_other_lanes_alone,
                a_stale_settlement_changes_nothing,
                lanes_are_given_one_by_one,
                concurrent_acquires_never_share_a_lane,
                replicas_counts_who_asked_lately,
                replicas_forgets_who_fell_silent,
                a_pause_gives_no_lease_and_ends_the_running_one,
                a_pause_with_an_end_ends_by_itself,
            ]
        );
    };
}
