//! The schema comes, goes and is checked.

use postbox_core::{Disposition, ErrorKind, Selection};

use super::StoreFixture;
use super::harness::*;

/// A migrated store says so, and there is nothing to do.
pub async fn a_migrated_store_validates_and_up_does_nothing(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.validate().await.expect("the fixture is migrated");
    append(&store, [event("1")]).await;
    assert!(store.up().await.expect("idempotent").is_empty());
    assert_eq!(Lane::open(fixture).await.drain().await.len(), 1, "nothing was touched");
}

/// Everything goes, and comes back empty.
pub async fn down_removes_everything_and_up_makes_it_anew(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let lane = Lane::open(fixture).await;
    lane.past(vec![event("1"), event("2")], vec![(0, retry(HOUR))]).await;
    let mut removed = store.down(true).await.expect("removed");
    assert!(!removed.is_empty());
    refused(store.validate().await, ErrorKind::Mismatch, "schema_missing");
    assert!(store.down(true).await.expect("nothing left").is_empty());
    let applied = store.up().await.expect("applied");
    removed.reverse();
    assert_eq!(applied, removed, "the same migrations, newest removed first");
    store.validate().await.expect("migrated again");
    assert!(store.subscriptions().await.expect("asked").is_empty());
    assert!(Lane::open(fixture).await.drain().await.is_empty());
}

/// Events that somebody waits for are not thrown away by the way: not those that wait, not those that nobody has read, not those that nobody
/// reads at all. What is delivered, dead or discarded keeps nobody.
pub async fn down_refuses_where_events_are_undelivered(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    append(&store, [event("1")]).await;
    refused(store.down(false).await, ErrorKind::Conflict, "events_undelivered");
    let lane = Lane::open(fixture).await;
    refused(store.down(false).await, ErrorKind::Conflict, "events_undelivered");
    for exception in [retry(HOUR), Disposition::Schedule { at: jiff::Timestamp::MAX }] {
        let batch = lane.next(10).await;
        lane.settle(&batch, vec![(0, exception)]).await;
        refused(store.down(false).await, ErrorKind::Conflict, "events_undelivered");
        let ids = batch.deliveries.iter().map(|delivery| delivery.event.id).collect();
        let these = Selection { ids: Some(ids), ..Selection::default() };
        assert_eq!(store.discard(&named("reader"), &these).await.expect("taken out").count, 1);
        append(&store, [event("2")]).await;
    }
    let batch = lane.next(10).await;
    lane.settle(&batch, vec![(0, dead())]).await;
    append(&store, [event("3")]).await;
    refused(store.down(false).await, ErrorKind::Conflict, "events_undelivered");
    lane.drain().await;
    assert_eq!(stats(&store).await.total, 4, "nothing was touched");
    store.down(false).await.expect("nobody waits for anything");
    refused(store.validate().await, ErrorKind::Mismatch, "schema_missing");
}

/// A relay on a missing schema fails at its start, with the cure.
pub async fn subscribing_without_a_schema_names_the_cure(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.down(true).await.expect("removed");
    let error = store.subscribe(&reader()).await.expect_err("no schema");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "schema_missing"), "{error}");
    assert!(error.message().contains("migrate"), "the message names the cure: {error}");
    refused(store.validate().await, ErrorKind::Mismatch, "schema_missing");
}

/// Two programs start at once on an empty database.
pub async fn two_starters_at_once_apply_each_migration_once(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let mut expected = store.down(true).await.expect("removed");
    expected.reverse();
    let calls = (0..4).map(|_| {
        let store = store.clone();
        tokio::spawn(async move { store.up().await })
    });
    let mut applied = Vec::new();
    for call in futures::future::join_all(calls).await {
        applied.extend(call.expect("no panic").expect("each start succeeds"));
    }
    applied.sort();
    expected.sort();
    assert_eq!(applied, expected);
    store.validate().await.expect("migrated");
}

/// Other tools get every migration.
pub async fn the_script_names_every_migration(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let script = store.script();
    for name in store.down(true).await.expect("removed") {
        assert!(script.contains(&name), "{name} is missing");
    }
}

/// The cases of this suite.
#[doc(hidden)]
#[macro_export]
macro_rules! migrate_cases {
    ($fixture:expr) => {
        $crate::conformance_cases!(
            migrate,
            $fixture,
            [
                a_migrated_store_validates_and_up_does_nothing,
                down_removes_everything_and_up_makes_it_anew,
                down_refuses_where_events_are_undelivered,
                subscribing_without_a_schema_names_the_cure,
                two_starters_at_once_apply_each_migration_once,
                the_script_names_every_migration,
            ]
        );
    };
}
