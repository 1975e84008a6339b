//! A crash of the database takes back ids that were never flushed, and gives them out again. What a lane remembers must not outlive them.

mod support;

use std::time::Duration;

use postbox_core::{
    Append as _, Batch, BatchLimit, Filter, Lease, Log as _, LogName, NewEvent, OwnerId, Subscription,
    SubscriptionName, TopicPattern,
};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::servers::{PrivatePostgres, Settings, Version};

/// Transactions whose traces are only in memory when the server dies.
const UNFLUSHED: usize = 50;

async fn read(store: &PostgresStore, lease: &Lease) -> Batch {
    loop {
        match store.next_batch(lease, BatchLimit::default()).await {
            Ok(batch) => return batch,
            // Connections from before the crash are found broken one by one.
            Err(error) => assert!(!error.is_permanent() && !error.is_stale(), "{error:?}"),
        }
    }
}

#[tokio::test]
async fn ids_given_out_twice_around_a_crash_lose_no_event() {
    // Nobody flushes but those who commit.
    let settings = Settings::durable().with("wal_writer_delay", "10s").with("autovacuum", "off");
    let mut server = PrivatePostgres::launch(Version::V15, settings).await;
    let url = server.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let name = SubscriptionName::new("s").expect("a name");
    let mut subscription = Subscription::new(name.clone(), LogName::outbox());
    subscription.filter = Filter { topics: vec![TopicPattern::new("mine").expect("a pattern")], tenant: None };
    store.subscribe(&subscription).await.expect("subscribed");
    let owner = OwnerId::new("me").expect("a name");
    let acquired = store.acquire(&name, &owner, Duration::from_secs(300)).await.expect("acquired");
    let lease = acquired.lease.expect("a free lane");

    // A window without anything for the lane, seen together with ids above it that are not on disk yet.
    let producer = support::client(&url).await;
    producer.execute("SELECT postbox.enqueue('others', '{}')", &[]).await.expect("appended");
    assert!(read(&store, &lease).await.is_empty());
    producer.execute("SELECT postbox.enqueue('others', '{}')", &[]).await.expect("appended");
    for _ in 0..UNFLUSHED {
        producer.batch_execute("BEGIN; SELECT pg_current_xact_id(); ROLLBACK").await.expect("an id used up");
    }
    let used = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
    let before: i64 = producer.query_one(used, &[]).await.expect("a snapshot").get(0);
    assert!(read(&store, &lease).await.is_empty());

    server.stop_immediate();
    server.start().await;
    let producer = support::client(&url).await;
    let after: i64 = producer.query_one(used, &[]).await.expect("a snapshot").get(0);
    assert!(after < before, "the ids {after} to {before} are given out again");

    let event = NewEvent::json("mine", "{}");
    let appended = loop {
        match store.append(&LogName::outbox(), std::slice::from_ref(&event)).await {
            Ok(ids) => break ids,
            Err(error) => assert!(!error.is_permanent(), "{error:?}"),
        }
    };
    for _ in 0..3 {
        let batch = read(&store, &lease).await;
        if let Some(delivery) = batch.deliveries.first() {
            assert_eq!(delivery.event.id, appended[0]);
            return;
        }
    }
    panic!("the event is never read");
}
