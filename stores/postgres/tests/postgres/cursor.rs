//! Cursors that are refused or kept safe: another cluster, a clock that went back, an outdated
//! filter, deleted rows.

use std::process::Command;
use std::time::Duration;

use postbox_core::{
    Append as _, Batch, BatchLimit, Disposition, Entry, Error, ErrorKind, Filter, Lease, Log as _, LogName,
    Maintain as _, NewEvent, OwnerId, Settlement, Subscription, SubscriptionName, TopicPattern,
};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::servers::{PrivatePostgres, Settings, Version};

use crate::support;

const TTL: Duration = Duration::from_secs(10);

fn name() -> SubscriptionName {
    SubscriptionName::new("reader").expect("a name")
}

fn owner(name: &str) -> OwnerId {
    OwnerId::new(name).expect("a name")
}

fn subscription(topics: &[&str]) -> Subscription {
    let topics = topics.iter().map(|topic| TopicPattern::new(*topic).expect("a pattern")).collect();
    let mut subscription = Subscription { lanes: 1, ..Subscription::new(name(), LogName::outbox()) };
    subscription.filter = Filter { topics, ..Filter::default() };
    subscription
}

async fn take(store: &PostgresStore, by: &str) -> Result<Lease, Error> {
    store.subscribe(&subscription(&[])).await?;
    Ok(store.acquire(&name(), &owner(by), &[], TTL).await?.lease.expect("a free lane"))
}

async fn append(store: &PostgresStore, topic: &str, payload: &str) {
    store.append(&LogName::outbox(), &[NewEvent::json(topic, payload.to_owned())]).await.expect("appended");
}

async fn deliver(store: &PostgresStore, lease: &Lease) -> Result<Vec<String>, Error> {
    let batch: Batch = store.next_batch(lease, BatchLimit::default()).await?;
    let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
    store.settle(lease, settlement).await?;
    Ok(batch.deliveries.iter().map(|one| String::from_utf8_lossy(&one.event.payload).into_owned()).collect())
}

/// A dump is restored into a younger cluster, whose counter then passes the cursor. The numbers
/// look right, but every new event would lie in what the cursor has already seen.
#[tokio::test]
async fn a_dump_in_another_cluster_is_refused_until_it_is_rebased() {
    let (old, new) = futures::join!(
        PrivatePostgres::launch(Version::V15, Settings::fast()),
        PrivatePostgres::launch(Version::V15, Settings::fast())
    );
    let (from, to) = (old.fresh_database().await, new.fresh_database().await);
    let store = support::migrated(PostgresConfig::new(&from)).await;
    let lease = take(&store, "before").await.expect("taken");
    append(&store, "t", "1").await;
    assert_eq!(deliver(&store, &lease).await.expect("delivered"), ["1"]);
    append(&store, "t", "2").await;
    store.release(&lease).await.expect("released");
    let dump = Command::new("/usr/lib/postgresql/15/bin/pg_dump").arg(&from).output().expect("pg_dump runs");
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    let script = String::from_utf8(dump.stdout).expect("text");
    postbox_testkit::servers::Postgres::psql(&to, &script);
    let client = support::client(&to).await;
    for _ in 0..2_000 {
        client.batch_execute("SELECT pg_current_xact_id()").await.expect("the counter moves on");
    }
    let store = PostgresStore::connect(PostgresConfig::new(&to)).await.expect("a store");
    let error = take(&store, "after").await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "cursor_foreign"));
    assert!(error.message().contains("postbox migrate rebase"), "{error}");
    store.rebase().await.expect("rebased");
    append(&store, "t", "3").await;
    let lease = take(&store, "after").await.expect("taken");
    // Events from before the rebase form a window of their own.
    assert_eq!(deliver(&store, &lease).await.expect("delivered"), ["2"]);
    assert_eq!(deliver(&store, &lease).await.expect("delivered"), ["3"]);
}

/// The database behind the address is replaced while a relay runs: it gets neither a lease nor a
/// window.
#[tokio::test]
async fn a_running_relay_notices_another_cluster() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lease = take(store, "one").await.expect("taken");
    append(store, "t", "1").await;
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["1"]);
    let client = fixture.client().await;
    client.batch_execute("UPDATE postbox.lane SET cluster = cluster - 1").await.expect("another cluster's");
    append(store, "t", "2").await;
    for error in [
        store.check_cursors().await.expect_err("no fit"),
        deliver(store, &lease).await.expect_err("no window"),
        store.acquire(&name(), &owner("two"), &[], TTL).await.expect_err("no grant"),
    ] {
        assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "cursor_foreign"));
    }
    // The refused calls changed nothing.
    client.batch_execute("UPDATE postbox.lane SET cluster = cluster + 1").await.expect("ours again");
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["2"]);
}

/// The database's clock went back by a day after a grant. Neither the lease of a dead relay nor its
/// heartbeat lasts that day.
#[tokio::test]
async fn a_lease_never_outlasts_its_own_length() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lease = take(store, "dead").await.expect("taken");
    let client = fixture.client().await;
    let day = "UPDATE postbox.lane SET lease_until = lease_until + interval '1 day';
               UPDATE postbox.replica SET alive_until = alive_until + interval '1 day'";
    client.batch_execute(day).await.expect("granted tomorrow");
    let acquired = store.acquire(&name(), &owner("alive"), &[], TTL).await.expect("asked");
    assert_eq!(acquired.replicas, 1, "a heartbeat from tomorrow counts for nobody");
    assert!(acquired.lease.expect("a free lane").epoch > lease.epoch);
}

/// A replica with an older filter reads by the newer one, so events that only the newer filter
/// wants are not passed over.
#[tokio::test]
async fn an_older_replica_reads_by_the_newer_filter() {
    let fixture = support::on(Version::V15).await;
    let old = &fixture.store;
    let new = PostgresStore::connect(PostgresConfig::new(&fixture.url)).await.expect("a store");
    old.subscribe(&subscription(&["a"])).await.expect("subscribed");
    let lease = old.acquire(&name(), &owner("old"), &[], TTL).await.expect("asked").lease.expect("a free lane");
    append(old, "a", "1").await;
    assert_eq!(deliver(old, &lease).await.expect("delivered"), ["1"]);
    new.subscribe(&subscription(&["a", "b"])).await.expect("widened");
    append(old, "b", "2").await;
    append(old, "a", "3").await;
    assert_eq!(deliver(old, &lease).await.expect("delivered"), ["2", "3"]);
    // The filter also changes in the middle of a window.
    for n in 0..6 {
        append(old, if n % 2 == 0 { "a" } else { "c" }, &n.to_string()).await;
    }
    let one = BatchLimit { events: 1, ..BatchLimit::default() };
    let batch = old.next_batch(&lease, one).await.expect("read");
    assert_eq!(batch.deliveries.len(), 1);
    new.subscribe(&subscription(&["a", "b", "c"])).await.expect("widened");
    let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
    old.settle(&lease, settlement).await.expect("settled");
    assert_eq!(deliver(old, &lease).await.expect("delivered").last().map(String::as_str), Some("5"));
}

/// Rows of Postbox that somebody deleted cause an error that says how to fix it, never silence.
#[tokio::test]
async fn deleted_lanes_and_subscriptions_are_named() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lease = take(store, "one").await.expect("taken");
    append(store, "t", "1").await;
    let client = fixture.client().await;
    client.batch_execute("DELETE FROM postbox.lane").await.expect("deleted");
    assert!(store.renew(&lease, TTL).await.expect_err("lost").is_stale());
    let error = store.acquire(&name(), &owner("one"), &[], TTL).await.expect_err("no lanes");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "lanes_missing"));
    let lease = take(store, "one").await.expect("made anew");
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["1"]);
    client.batch_execute("DELETE FROM postbox.subscription").await.expect("deleted");
    let error = store.acquire(&name(), &owner("one"), &[], TTL).await.expect_err("no subscription");
    assert_eq!((error.kind(), error.code()), (ErrorKind::NotFound, "subscription_unknown"));
}

/// If the answer to a grant was lost, the same owner gets the lane again at once. A lane that the
/// owner knows it holds is left alone.
#[tokio::test]
async fn a_lost_grant_is_granted_again() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lost = take(store, "one").await.expect("taken");
    let known = [lost.lane];
    assert!(store.acquire(&name(), &owner("one"), &known, TTL).await.expect("asked").lease.is_none());
    assert!(store.acquire(&name(), &owner("two"), &[], TTL).await.expect("asked").lease.is_none());
    let lease = store.acquire(&name(), &owner("one"), &[], TTL).await.expect("asked").lease.expect("ours already");
    assert_eq!((lease.lane, lease.epoch), (lost.lane, lost.epoch + 1));
    assert!(store.renew(&lost, TTL).await.expect_err("fenced").is_stale());
}

/// A failover to a standby that lacked the last settlement, but had its window: the position must
/// not pass over the rows that were lost with the settlement.
#[tokio::test]
async fn a_settlement_that_was_taken_back_is_not_passed_over() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lease = take(store, "one").await.expect("taken");
    let events = [NewEvent::json("t", "1"), NewEvent::json("t", "2")];
    store.append(&LogName::outbox(), &events).await.expect("appended");
    let one = BatchLimit { events: 1, ..BatchLimit::default() };
    let first = store.next_batch(&lease, one).await.expect("read");
    let later =
        Disposition::Retry { after: Duration::ZERO, counted: true, code: "c".into(), error: String::new(), took: None };
    let entries = vec![Entry { delivery: &first.deliveries[0], disposition: later }];
    let settlement = Settlement { position: first.end, entries, hold_keys: true, rewind: false };
    store.settle(&lease, settlement).await.expect("settled");
    let second = store.next_batch(&lease, one).await.expect("read");
    let client = fixture.client().await;
    client
        .batch_execute("UPDATE postbox.lane SET last_seq = 0; DELETE FROM postbox.delivery")
        .await
        .expect("taken back");
    let settlement = Settlement { position: second.end, hold_keys: true, ..Settlement::default() };
    let error = store.settle(&lease, settlement).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Stale, "window_undone"));
    let error = store.next_batch(&lease, one).await.expect_err("what held keys is gone");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Stale, "window_undone"));
    store.release(&lease).await.expect("released");
    let lease = take(store, "one").await.expect("taken");
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["1", "2"]);
}

/// A failover to a standby that lacked the last filter: a position that was read with that filter
/// must not pass over events that the filter before it wants.
#[tokio::test]
async fn a_filter_that_was_taken_back_passes_nothing_over() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lease = take(store, "one").await.expect("taken");
    for (topic, payload) in [("a", "1"), ("b", "2"), ("a", "3"), ("b", "4")] {
        append(store, topic, payload).await;
    }
    let one = BatchLimit { events: 1, ..BatchLimit::default() };
    let settle = |position| store.settle(&lease, Settlement { position, hold_keys: true, ..Settlement::default() });
    let first = store.next_batch(&lease, one).await.expect("read");
    settle(first.end).await.expect("settled");
    store.subscribe(&subscription(&["b"])).await.expect("another filter");
    let mut read = Vec::new();
    for _ in 0..2 {
        read.push(store.next_batch(&lease, one).await.expect("read"));
    }
    assert_eq!(read.iter().map(|batch| &batch.deliveries[0].event.payload[..]).collect::<Vec<_>>(), [b"2", b"4"]);
    let back = "UPDATE postbox.lane SET revision = 1; UPDATE postbox.subscription SET revision = 1, topics = '{}';
        DELETE FROM postbox.filter WHERE revision = 2; DELETE FROM postbox.passage WHERE revision = 1";
    fixture.client().await.batch_execute(back).await.expect("taken back");
    let error = settle(read[1].end).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Stale, "window_undone"));
    store.release(&lease).await.expect("released");
    let lease = take(store, "one").await.expect("taken");
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["2", "3", "4"]);
}

/// After a failover the epoch may be lower than one that this process knew.
#[tokio::test]
async fn a_lower_epoch_after_a_failover_is_read_under() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    for n in 1..=3 {
        let lease = take(store, "one").await.expect("taken");
        append(store, "t", &n.to_string()).await;
        assert_eq!(deliver(store, &lease).await.expect("delivered"), [n.to_string()]);
        store.release(&lease).await.expect("released");
    }
    fixture.client().await.batch_execute("UPDATE postbox.lane SET epoch = 0").await.expect("taken back");
    let lease = take(store, "one").await.expect("taken");
    assert_eq!(lease.epoch, 1);
    append(store, "t", "4").await;
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["4"]);
}

/// After a failover, a grant may carry an epoch under which this process has read before. The
/// events that it handed out then are handed out again.
#[tokio::test]
async fn an_epoch_that_is_granted_again_is_read_from_the_cursor() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lease = take(store, "one").await.expect("taken");
    let events = [NewEvent::json("t", "1"), NewEvent::json("t", "2")];
    store.append(&LogName::outbox(), &events).await.expect("appended");
    let one = BatchLimit { events: 1, ..BatchLimit::default() };
    assert_eq!(store.next_batch(&lease, one).await.expect("read").deliveries.len(), 1);
    let back = "UPDATE postbox.lane SET epoch = epoch - 1, lease_until = NULL";
    fixture.client().await.batch_execute(back).await.expect("taken back");
    let again = take(store, "one").await.expect("taken");
    assert_eq!(again.epoch, lease.epoch);
    assert_eq!(deliver(store, &again).await.expect("delivered"), ["1", "2"]);
}
