//! The life of a subscription: renaming and removal.

use std::time::Duration;

use postbox_core::{BatchLimit, ErrorKind, NewEvent, Pause, Prune, State, Subscription};

use super::StoreFixture;
use super::harness::*;

pub async fn a_renamed_subscription_keeps_everything_but_its_name(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    let of = |topic: &str, payload: &str| NewEvent::json(topic, payload.to_owned()).key("k");
    let ids = append(&lane.store, [of("a", "a1"), of("b", "b1")]).await;
    assert_eq!(payloads(&lane.drain().await), ["a1"]);
    append(&lane.store, [of("a", "a2")]).await;
    lane.drain().await;
    lane.store.subscribe(&reader_of("*")).await.expect("another filter");
    let rows =
        lane.past([(keyed("x", "dead"), dead()), (keyed("y", "3"), retry_now()), (keyed("y", "4"), Block)]).await;
    append(&lane.store, [event("unread")]).await;
    let pause = Pause { until: None, by: "me".into(), why: "why".into() };
    lane.store.pause(&named("reader"), Some(&pause)).await.expect("paused");
    let store = lane.release().await;
    let before = (stats(&store).await, info(&store, "reader").await);

    store.rename(&named("reader"), before.1.generation, &named("writer")).await.expect("renamed");
    let after = info(&store, "writer").await;
    assert_eq!((&after.filter, &after.paused, after.lanes.len()), (&before.1.filter, &Some(pause), 1));
    let counted = store.stats(&named("writer")).await.expect("counted");
    assert_eq!(
        (counted.dead, counted.pending, counted.dispatched),
        (before.0.dead, before.0.pending, before.0.dispatched)
    );
    refused(store.stats(&named("reader")).await, ErrorKind::NotFound, "subscription_unknown");
    assert_eq!(store.subscriptions().await.expect("listed").len(), 1);
    for (id, state) in [
        (ids[0], State::Dispatched),
        (ids[1], State::Skipped),
        (rows[0], State::Dead),
        (rows[1], State::Retrying),
        (rows[2], State::Blocked),
    ] {
        assert_eq!(store.get(&named("writer"), id).await.expect("asked").expect("there").state, state);
    }
    store.pause(&named("writer"), None).await.expect("resumed");
    let lane = Lane::take(&store, "writer", "one").await;
    assert_eq!(payloads(&lane.drain_due().await), ["3", "4"]);
    assert_eq!(payloads(&lane.drain().await), ["unread"]);
    let dead = super::dead_letters::texts(&lane).await;
    assert_eq!(dead, ["dead"]);
}

/// The holder does not know of it, so it may still send until its lease would have ended.
pub async fn a_renamed_one_is_fenced_and_its_holder_has_its_time(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    append(&store, [event("1")]).await;
    let lease = acquire(&store, "reader", "one", 8 * SHORT).await.lease.expect("free");
    let generation = info(&store, "reader").await.generation;
    store.rename(&named("reader"), generation, &named("writer")).await.expect("renamed");
    stale(store.renew(&lease, LONG).await);
    stale(store.next_batch(&lease, BatchLimit::default()).await);
    stale(store.due(&lease, BatchLimit::default()).await);
    store.release(&lease).await.expect("does nothing");
    let asked = store.acquire(&named("reader"), &owner("one"), &[], LONG).await;
    refused(asked, ErrorKind::NotFound, "subscription_unknown");
    assert_eq!(acquire(&store, "writer", "two", LONG).await.lease, None);
    fixture.pass(9 * SHORT).await;
    assert_eq!(payloads(&Lane::take(&store, "writer", "two").await.drain().await), ["1"]);
}

pub async fn a_name_that_is_taken_is_refused(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    store.subscribe(&reader_named("other")).await.expect("another");
    let generation = info(&store, "reader").await.generation;
    for name in ["other", "reader"] {
        let taken = store.rename(&named("reader"), generation, &named(name)).await;
        refused(taken, ErrorKind::Conflict, "subscription_exists");
    }
    let nobody = store.rename(&named("nobody"), generation, &named("another")).await;
    refused(nobody, ErrorKind::NotFound, "subscription_unknown");
}

/// An earlier lease is invalid, whoever holds it and under whichever name.
pub async fn the_former_name_begins_like_a_new_one(fixture: &dyn StoreFixture) {
    let old = Lane::open(fixture).await;
    old.past([(event("1"), Delivered), (event("2"), dead())]).await;
    let store = old.store.clone();
    store.rename(&named("reader"), info(&store, "reader").await.generation, &named("writer")).await.expect("renamed");
    store.subscribe(&reader()).await.expect("the name is free");
    assert_ne!(info(&store, "reader").await.generation, info(&store, "writer").await.generation);
    let new = Lane::take(&store, "reader", "one").await;
    assert_ne!(new.lease.epoch, old.lease.epoch);
    stale(store.renew(&old.lease, LONG).await);
    assert_eq!(payloads(&new.drain().await), ["1", "2"]);
    assert_eq!(stats(&store).await.dead, 0);
    assert_eq!(store.stats(&named("writer")).await.expect("counted").dead, 1);
}

pub async fn a_removed_subscription_is_gone_and_frees_retention(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_named("other")).await;
    let gone = Lane::open(fixture).await;
    gone.past([(event("1"), dead()), (event("2"), retry(HOUR))]).await;
    append(&lane.store, [event("3")]).await;
    lane.drain().await;
    fixture.pass(Duration::from_millis(1)).await;
    let store = lane.store.clone();
    assert_eq!(store.prune(&outbox(), &Prune::default()).await.expect("pruned").count, 0, "it waits for them");
    store.remove(&named("reader"), info(&store, "reader").await.generation).await.expect("removed");
    stale(store.renew(&gone.lease, LONG).await);
    refused(store.stats(&named("reader")).await, ErrorKind::NotFound, "subscription_unknown");
    let asked = store.acquire(&named("reader"), &owner("one"), &[], LONG).await;
    refused(asked, ErrorKind::NotFound, "subscription_unknown");
    assert_eq!(store.subscriptions().await.expect("listed").len(), 1);
    let pruned = async {
        let mut pruned = 0;
        while pruned < 3 {
            _ = store.note_unrouted(&outbox()).await.expect("noted");
            pruned += store.prune(&outbox(), &Prune::default()).await.expect("pruned").count;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, pruned).await.expect("nobody waits for them");
}

pub async fn a_name_made_again_begins_like_a_new_one(fixture: &dyn StoreFixture) {
    let old = Lane::open(fixture).await;
    old.past([(event("1"), Delivered), (event("2"), dead()), (keyed("a", "3"), retry(HOUR))]).await;
    let pause = Pause { until: None, by: "me".into(), why: "why".into() };
    let store = old.store.clone();
    store.pause(&named("reader"), Some(&pause)).await.expect("paused");
    let before = info(&store, "reader").await.generation;
    store.remove(&named("reader"), before).await.expect("removed");
    store.subscribe(&Subscription { lanes: Some(2), ..reader() }).await.expect("made anew");
    let again = info(&store, "reader").await;
    assert_eq!((again.lanes.len(), again.paused), (2, None));
    assert_ne!(again.generation, before);
    let stats = stats(&store).await;
    assert_eq!((stats.dispatched, stats.dead, stats.pending), (0, 0, 3));
    let lanes = Lane::take_all(&store, "reader").await;
    assert!(lanes.iter().all(|lane| lane.lease.epoch > old.lease.epoch));
    stale(store.renew(&old.lease, LONG).await);
    let mut all = payloads(&Lane::run_all(&lanes).await);
    all.sort();
    assert_eq!(all, ["1", "2", "3"]);
}

/// The event had a reader while the subscription existed.
pub async fn what_a_removed_one_took_is_not_unrouted(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let store = lane.store.clone();
    store.subscribe(&Subscription { name: named("other"), ..reader_of("b") }).await.expect("another");
    append(&store, [NewEvent::json("a", "1"), NewEvent::json("b", "2")]).await;
    lane.drain().await;
    store.remove(&named("reader"), info(&store, "reader").await.generation).await.expect("removed");
    append(&store, [NewEvent::json("a", "3")]).await;
    let found = async {
        while store.unrouted(&outbox()).await.expect("counted").count == 0 {
            _ = store.note_unrouted(&outbox()).await.expect("noted");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, found).await.expect("found in time");
    assert_eq!(store.unrouted(&outbox()).await.expect("counted").count, 1, "what came later");
}

pub async fn what_changed_since_it_was_looked_at_is_left_alone(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    let looked = info(&store, "reader").await.generation;
    store.remove(&named("reader"), looked).await.expect("removed");
    store.subscribe(&reader()).await.expect("made anew");
    let removed = store.remove(&named("reader"), looked).await;
    refused(removed, ErrorKind::Conflict, "subscription_changed");
    let renamed = store.rename(&named("reader"), looked, &named("writer")).await;
    refused(renamed, ErrorKind::Conflict, "subscription_changed");
    assert_eq!(info(&store, "reader").await.name, named("reader"));
}
