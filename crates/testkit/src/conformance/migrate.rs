//! Creating, removing and checking the schema.

use postbox_core::{ErrorKind, NewEvent, Prune, Selection};

use super::StoreFixture;
use super::harness::*;
use super::routing::find;

pub async fn a_migrated_store_validates_and_up_does_nothing(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let created_at = store.validate().await.expect("the fixture is migrated");
    append(&store, [event("1")]).await;
    assert!(fixture.owner().up().await.expect("idempotent").is_empty());
    assert_eq!(store.validate().await.expect("still migrated"), created_at, "it tells stores apart");
    assert_eq!(Lane::open(fixture).await.drain().await.len(), 1, "nothing was touched");
}

pub async fn down_removes_everything_and_up_makes_it_anew(fixture: &dyn StoreFixture) {
    let (store, by_owner) = (fixture.store(), fixture.owner());
    let _ = Lane::settled(fixture, [(event("1"), retry(HOUR)), (event("2"), Delivered)]).await;
    let mut removed = by_owner.down(true).await.expect("removed");
    assert!(!removed.is_empty());
    refused(store.validate().await, ErrorKind::Mismatch, "schema_missing");
    assert!(by_owner.down(true).await.expect("nothing left").is_empty());
    let applied = by_owner.up().await.expect("applied");
    removed.reverse();
    assert_eq!(applied, removed, "the same migrations, newest removed first");
    fixture.grant().await;
    store.validate().await.expect("migrated again");
    assert!(store.subscriptions().await.expect("asked").is_empty());
    assert!(Lane::open(fixture).await.drain().await.is_empty());
}

/// Waiting, dead, unread and unsubscribed events make it refuse; other events do not.
pub async fn down_refuses_where_events_are_undelivered(fixture: &dyn StoreFixture) {
    let (store, by_owner) = (fixture.store(), fixture.owner());
    append(&store, [event("1")]).await;
    refused(by_owner.down(false).await, ErrorKind::Conflict, "events_undelivered");
    let lane = Lane::open(fixture).await;
    refused(by_owner.down(false).await, ErrorKind::Conflict, "events_undelivered");
    for exception in [retry(HOUR), Schedule { at: jiff::Timestamp::MAX }] {
        let batch = lane.next(10).await;
        lane.settle(&batch, vec![(0, exception)]).await;
        refused(by_owner.down(false).await, ErrorKind::Conflict, "events_undelivered");
        let ids: Vec<_> = batch.deliveries.iter().map(|delivery| delivery.event.id).collect();
        assert_eq!(lane.discard(these(&ids)).await, 1);
        append(&store, [event("2")]).await;
    }
    let batch = lane.next(10).await;
    lane.settle(&batch, vec![(0, dead())]).await;
    append(&store, [event("3")]).await;
    refused(by_owner.down(false).await, ErrorKind::Conflict, "events_undelivered");
    lane.drain().await;
    refused(by_owner.down(false).await, ErrorKind::Conflict, "events_undelivered");
    assert_eq!(lane.discard(Selection::default()).await, 1);
    assert_eq!(stats(&store).await.total, 4, "nothing was touched");
    by_owner.down(false).await.expect("nobody waits for anything");
    refused(store.validate().await, ErrorKind::Mismatch, "schema_missing");
}

pub async fn down_refuses_where_events_are_unrouted(fixture: &dyn StoreFixture) {
    let (store, by_owner) = (fixture.store(), fixture.owner());
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&store, [NewEvent::json("b", "1"), NewEvent::json("a", "2")]).await;
    assert_eq!(payloads(&lane.drain().await), ["2"]);
    find(&store, 1).await;
    refused(by_owner.down(false).await, ErrorKind::Conflict, "events_undelivered");
    let unrouted = Prune { unrouted: true, ..Prune::default() };
    assert_eq!(store.prune(&outbox(), &unrouted).await.expect("pruned").count, 1);
    by_owner.down(false).await.expect("nobody waits for anything");
}

pub async fn subscribing_without_a_schema_names_the_cure(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    fixture.owner().down(true).await.expect("removed");
    let error = store.subscribe(&reader()).await.expect_err("no schema");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "schema_missing"), "{error}");
    assert!(error.message().contains("migrate"), "the message names the cure: {error}");
    refused(store.validate().await, ErrorKind::Mismatch, "schema_missing");
}

pub async fn two_starters_at_once_apply_each_migration_once(fixture: &dyn StoreFixture) {
    let store = fixture.owner();
    let mut expected = store.down(true).await.expect("removed");
    expected.reverse();
    let calls = (0..4).map(|_| {
        let store = store.clone();
        async move { store.up().await.expect("each start succeeds") }
    });
    let mut applied: Vec<_> = at_once(calls).await.into_iter().flatten().collect();
    applied.sort();
    expected.sort();
    assert_eq!(applied, expected);
    store.validate().await.expect("migrated");
}

pub async fn the_script_names_every_migration(fixture: &dyn StoreFixture) {
    let store = fixture.owner();
    let script = store.script();
    for name in store.down(true).await.expect("removed") {
        assert!(script.contains(&name), "{name} is missing");
    }
}
