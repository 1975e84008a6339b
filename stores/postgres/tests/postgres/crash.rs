//! A crash of the database takes back transaction ids that were never flushed, and assigns them
//! again. What a lane remembers must not outlive them.

use std::time::Duration;

use postbox_core::{
    Append as _, Batch, BatchLimit, Disposition, Entry, Filter, Lease, Log as _, LogName, NewEvent, OwnerId,
    Settlement, Subscription, SubscriptionName, TopicPattern,
};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::proxy::{FaultProxy, Harm, Point};
use postbox_testkit::servers::{Postgres, PrivatePostgres, Settings, Version};

use crate::support;

/// Number of transactions that exist only in memory when the server dies.
const UNFLUSHED: usize = 50;

/// Reads as the engine does: a lane whose cursor was taken back is released and acquired again.
async fn read_on(store: &PostgresStore, lease: &mut Lease) -> Batch {
    loop {
        match store.next_batch(lease, BatchLimit::default()).await {
            Ok(batch) => return batch,
            Err(error) if error.code() == "window_undone" => {
                store.release(lease).await.expect("given back");
                let acquired = store.acquire(&lease.subscription, &lease.owner, &[], Duration::from_secs(300)).await;
                *lease = acquired.expect("asked").lease.expect("free again");
            }
            Err(error) => assert!(!error.is_permanent() && !error.is_stale(), "{error:?}"),
        }
    }
}

async fn read(store: &PostgresStore, lease: &Lease) -> Batch {
    loop {
        match store.next_batch(lease, BatchLimit::default()).await {
            Ok(batch) => return batch,
            // After the crash, each old connection is found broken when it is first used.
            Err(error) => assert!(!error.is_permanent() && !error.is_stale(), "{error:?}"),
        }
    }
}

#[tokio::test]
async fn ids_given_out_twice_around_a_crash_lose_no_event() {
    let settings = Settings::durable().with("autovacuum", "off");
    let mut server = PrivatePostgres::launch(Version::V15, settings).await;
    // No background flushes: only a commit flushes the write-ahead log.
    server.freeze_wal_writer().await;
    let url = server.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let name = SubscriptionName::new("s").expect("a name");
    let mut subscription = Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) };
    subscription.filter = Filter { topics: vec![TopicPattern::new("mine").expect("a pattern")], ..Filter::default() };
    store.subscribe(&subscription).await.expect("subscribed");
    let owner = OwnerId::new("me").expect("a name");
    let acquired = store.acquire(&name, &owner, &[], Duration::from_secs(300)).await.expect("acquired");
    let mut lease = acquired.lease.expect("a free lane");

    // A window without events for the lane. Its snapshot also sees ids that are not on disk yet.
    let producer = support::client(&url).await;
    producer.execute("SELECT postbox.enqueue('others', '{}')", &[]).await.expect("appended");
    assert!(read(&store, &lease).await.is_empty());
    // Begins a new page of the write-ahead log: a full page would be flushed in the background.
    producer.batch_execute("SELECT pg_switch_wal()").await.expect("a new segment");
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
        let batch = read_on(&store, &mut lease).await;
        if let Some(delivery) = batch.deliveries.first() {
            assert_eq!(delivery.event.id, appended[0]);
            return;
        }
    }
    panic!("the event is never read");
}

/// After a failover that lost a window, the positions in it mean nothing in the window before:
/// settling one would pass over events that nobody has read.
#[tokio::test]
async fn a_settlement_of_a_lost_window_moves_nothing() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let lease = support::leased(&store, "s").await;
    let one = [NewEvent::json("t", "{}")];
    store.append(&LogName::outbox(), &one).await.expect("appended");
    let first = read(&store, &lease).await;
    let settle = |position| Settlement { position, hold_keys: true, ..Settlement::default() };
    store.settle(&lease, settle(first.end)).await.expect("settled");
    let client = support::client(&url).await;
    client.batch_execute("CREATE TABLE before_failover AS SELECT * FROM postbox.lane").await.expect("remembered");
    store.append(&LogName::outbox(), &one).await.expect("appended");
    let second = read(&store, &lease).await;
    assert_eq!(second.deliveries.len(), 1);

    let back = "UPDATE postbox.lane AS l SET from_snap = b.from_snap, to_snap = b.to_snap, last_seq = b.last_seq FROM before_failover AS b
        RETURNING l.last_seq";
    let position: i64 = client.query_one(back, &[]).await.expect("taken back").get(0);
    let error = store.settle(&lease, settle(second.end)).await.expect_err("of a window that never was");
    assert_eq!((error.code(), error.is_stale()), ("window_undone", true), "{error:?}");
    let entries = vec![Entry { delivery: &second.deliveries[0], disposition: Disposition::Delivered }];
    let due = Settlement { entries, hold_keys: true, ..Settlement::default() };
    let error = store.settle(&lease, due).await.expect_err("its number may be another event's");
    assert_eq!(error.code(), "window_undone");
    let error = store.next_batch(&lease, BatchLimit::default()).await.expect_err("it was not settled");
    assert_eq!(error.code(), "window_undone");
    // That read forgot the window. Now the position belongs to a window that the store does not
    // know.
    let error = store.settle(&lease, settle(second.end)).await.expect_err("of a window that is not known");
    assert_eq!((error.code(), error.is_stale()), ("window_undone", true), "{error:?}");
    let kept: i64 = client.query_one("SELECT last_seq FROM postbox.lane", &[]).await.expect("read").get(0);
    assert_eq!(kept, position, "nothing was passed");

    store.release(&lease).await.expect("given back, as the engine does");
    let acquired = store.acquire(&lease.subscription, &lease.owner, &[], Duration::from_secs(300)).await;
    let acquired = acquired.expect("acquired");
    let again = read(&store, &acquired.lease.expect("free again")).await;
    assert_eq!(again.deliveries, second.deliveries, "it comes again");
}

/// A settlement that begins in time and ends after the lease ran out. Its rows without its position
/// would make the next owner send a dead event again.
#[tokio::test]
async fn a_settlement_that_outlasts_its_lease_is_whole() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let proxy = FaultProxy::in_front_of(&url).await;
    let store = support::migrated(PostgresConfig::new(proxy.url(&url))).await;
    let name = SubscriptionName::new("s").expect("a name");
    store
        .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");
    store.append(&LogName::outbox(), &[NewEvent::json("t", "{}")]).await.expect("appended");
    let owner = OwnerId::new("me").expect("a name");
    let acquired = store.acquire(&name, &owner, &[], Duration::from_secs(2)).await.expect("acquired");
    let lease = acquired.lease.expect("a free lane");
    let batch = read(&store, &lease).await;
    let dead = Disposition::Dead { code: "http_422".into(), error: "no".to_owned(), halt: false, took: None };
    let entries = vec![Entry { delivery: &batch.deliveries[0], disposition: dead }];
    let settlement = Settlement { position: batch.end, entries, hold_keys: true, ..Settlement::default() };

    let trap = proxy.trap(Point::Statement("INSERT INTO \"postbox\".delivery".to_owned()), Harm::Delay);
    store.settle(&lease, settlement).await.expect_err("its connection breaks");
    trap.sprung().await;
    let client = support::client(&url).await;
    client
        .execute("SELECT pg_sleep_until(lease_until + interval '50 ms') FROM postbox.lane", &[])
        .await
        .expect("waited");
    trap.release().await;
    let both =
        "SELECT (SELECT last_seq > 0 FROM postbox.lane), EXISTS (SELECT FROM postbox.delivery WHERE state = 'dead')";
    let row = client.query_one(both, &[]).await.expect("read");
    assert_eq!(row.get::<_, bool>(0), row.get::<_, bool>(1), "the position and the rows belong together");
}
