//! Cursors that are refused or kept safe: another cluster, a clock that went back, an outdated
//! filter, deleted rows.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use postbox_core::{
    Admin as _, Append as _, Batch, BatchLimit, Delivery, Disposition, Entry, Error, ErrorKind, Filter, Inspect as _,
    Lease, Log as _, LogName, Maintain as _, NewEvent, Outcome, OwnerId, Replay, Settlement, Subscription,
    SubscriptionName, TopicPattern,
};
use postbox_engine::Relay;
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_router::handler_sink;
use postbox_testkit::proxy::{FaultProxy, Harm, Point};
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
    let mut subscription = Subscription { lanes: Some(1), ..Subscription::new(name(), LogName::outbox()) };
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

/// Each write of a lane that wants nothing would make the next window of another lane wait for the
/// disk.
#[tokio::test]
async fn a_few_events_for_others_cost_no_write_and_are_passed_soon() {
    let fixture = support::on(Version::V15).await;
    let (store, client) = (&fixture.store, fixture.client().await);
    store.subscribe(&subscription(&["wanted"])).await.expect("subscribed");
    let lease = store.acquire(&name(), &owner("one"), &[], TTL).await.expect("acquired").lease.expect("a free lane");
    let window = async || -> String {
        client.query_one("SELECT to_snap::text FROM postbox.lane", &[]).await.expect("the lane").get(0)
    };
    // Until an attempt takes less than the second for which a lane stays.
    let first = loop {
        append(store, "wanted", "1").await;
        let started = Instant::now();
        assert_eq!(deliver(store, &lease).await.expect("delivered"), ["1"]);
        let first = window().await;
        append(store, "other", "2").await;
        assert!(deliver(store, &lease).await.expect("read").is_empty());
        let stays = window().await == first;
        if started.elapsed() < Duration::from_secs(1) {
            assert!(stays, "one event for others");
            break first;
        }
    };
    append(store, "wanted", "3").await;
    append(store, "other", "4").await;
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["3"]);
    let second = window().await;
    assert_ne!(second, first, "the second event was passed with the third");
    let many = vec![NewEvent::json("other", "{}"); 101];
    store.append(&LogName::outbox(), &many).await.expect("appended");
    assert!(deliver(store, &lease).await.expect("read").is_empty());
    let third = window().await;
    assert_ne!(third, second, "many events for others");
    append(store, "other", "5").await;
    let passed = async {
        while window().await == third {
            assert!(deliver(store, &lease).await.expect("read").is_empty());
        }
    };
    tokio::time::timeout(TTL, passed).await.expect("it does not stay for long");
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
        store.check_integrity().await.expect_err("no fit"),
        deliver(store, &lease).await.expect_err("no window"),
        store.acquire(&name(), &owner("two"), &[], TTL).await.expect_err("no grant"),
    ] {
        assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "cursor_foreign"));
    }
    // The refused calls changed nothing.
    client.batch_execute("UPDATE postbox.lane SET cluster = cluster + 1").await.expect("ours again");
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["2"]);
}

/// What a cursor of another cluster has still to read is not known: often its snapshots seem to
/// have seen everything. Other subscriptions are counted.
#[tokio::test]
async fn a_subscription_of_another_cluster_is_not_counted() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let other = Subscription { name: SubscriptionName::new("other").expect("a name"), ..subscription(&[]) };
    for subscription in [&subscription(&[]), &other] {
        store.subscribe(subscription).await.expect("subscribed");
    }
    append(store, "t", "1").await;
    let foreign = "UPDATE postbox.lane SET cluster = cluster - 1
                   WHERE subscription = (SELECT id FROM postbox.subscription WHERE name = 'reader')";
    fixture.client().await.batch_execute(foreign).await.expect("another cluster's");
    let mut counted = store.stats_of(&[name(), other.name]).await;
    assert_eq!(counted.pop().expect("two").expect("counted").pending, 1);
    let error = counted.pop().expect("two").expect_err("unknown");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "cursor_foreign"));
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
    let new = PostgresStore::connect(PostgresConfig::new(&fixture.front)).await.expect("a store");
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

/// A pooler may refuse BEGIN alone. What follows it then runs outside of any transaction.
#[tokio::test]
async fn a_settlement_without_its_transaction_moves_nothing() {
    let fixture = support::on(Version::V15).await;
    let proxy = FaultProxy::in_front_of(&fixture.front).await;
    let store = PostgresStore::connect(PostgresConfig::new(proxy.url(&fixture.front))).await.expect("a store");
    let lease = take(&store, "one").await.expect("taken");
    append(&store, "t", "1").await;
    let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    let settle = async || {
        let later = Disposition::Retry {
            after: Duration::ZERO,
            counted: true,
            code: "c".into(),
            error: String::new(),
            took: None,
        };
        let entries = vec![Entry { delivery: &batch.deliveries[0], disposition: later }];
        store.settle(&lease, Settlement { position: batch.end, entries, hold_keys: true, rewind: false }).await
    };
    let trap = proxy.trap(Point::Statement("BEGIN".into()), Harm::Refuse);
    settle().await.expect_err("refused");
    assert!(trap.is_sprung());
    settle().await.expect("settled");
    let due = store.due(&lease, BatchLimit::default()).await.expect("read");
    assert_eq!(due.deliveries.len(), 1, "it is not lost");
}

/// Retention holds the log while it deletes what nobody needs. What a replay chooses then could be
/// among it.
#[tokio::test]
async fn a_replay_waits_for_retention() {
    let fixture = support::on(Version::V15).await;
    let store = fixture.store.clone();
    let lease = take(&store, "one").await.expect("taken");
    append(&store, "t", "1").await;
    assert_eq!(deliver(&store, &lease).await.expect("delivered"), ["1"]);
    let holder = fixture.client().await;
    let hold = "BEGIN; SELECT FROM postbox.log WHERE name = 'outbox' FOR NO KEY UPDATE";
    holder.batch_execute(hold).await.expect("held");
    let replaying = tokio::spawn(async move { store.replay(&name(), &Replay::default()).await });
    support::until_waited_for(&holder).await;
    holder.batch_execute("DELETE FROM postbox.outbox; COMMIT").await.expect("deleted");
    assert_eq!(replaying.await.expect("no panic").expect("replayed").count, 0);
}

/// Far above the time, so that the next epochs are one more each.
const FAR: i64 = 9_000_000_000_000_000;

async fn set_epoch(fixture: &support::Fixture, to: &str) {
    let set = format!("UPDATE postbox.lane SET epoch = {to}, owner = NULL, lease_until = NULL");
    fixture.client().await.batch_execute(&set).await.expect("set");
}

/// After a failover the epoch may be lower than one that this process knew.
#[tokio::test]
async fn a_lower_epoch_after_a_failover_is_read_under() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    store.subscribe(&subscription(&[])).await.expect("subscribed");
    for (epoch, payload) in [(FAR, "1"), (0, "2")] {
        set_epoch(&fixture, &epoch.to_string()).await;
        let lease = take(store, "one").await.expect("taken");
        assert_eq!(lease.epoch > FAR, epoch == FAR);
        append(store, "t", payload).await;
        assert_eq!(deliver(store, &lease).await.expect("delivered"), [payload]);
    }
}

/// Should a grant carry an epoch under which this process has read before, the events that it
/// handed out then are handed out again.
#[tokio::test]
async fn an_epoch_that_is_granted_again_is_read_from_the_cursor() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    store.subscribe(&subscription(&[])).await.expect("subscribed");
    set_epoch(&fixture, &FAR.to_string()).await;
    let lease = take(store, "one").await.expect("taken");
    let events = [NewEvent::json("t", "1"), NewEvent::json("t", "2")];
    store.append(&LogName::outbox(), &events).await.expect("appended");
    let one = BatchLimit { events: 1, ..BatchLimit::default() };
    assert_eq!(store.next_batch(&lease, one).await.expect("read").deliveries.len(), 1);
    set_epoch(&fixture, "epoch - 1").await;
    let again = take(store, "one").await.expect("taken");
    assert_eq!(again.epoch, lease.epoch);
    assert_eq!(deliver(store, &again).await.expect("delivered"), ["1", "2"]);
}

/// A failover loses a grant, and the lane is granted to another owner. The first must not write
/// under the second's lease.
#[tokio::test]
async fn two_grants_of_a_lane_never_have_one_epoch() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lost = take(store, "one").await.expect("taken");
    set_epoch(&fixture, "0").await;
    let elsewhere = PostgresStore::connect(PostgresConfig::new(&fixture.front)).await.expect("a store");
    let lease = take(&elsewhere, "two").await.expect("taken");
    assert_ne!(lease.epoch, lost.epoch);
    assert!(store.renew(&lost, TTL).await.expect_err("refused").is_stale());
    store.release(&lost).await.expect("nothing to release");
    append(store, "t", "1").await;
    assert!(deliver(store, &lost).await.expect_err("refused").is_stale());
    assert_eq!(deliver(&elsewhere, &lease).await.expect("delivered"), ["1"]);
}

/// One call looks at a bounded number of places. What a rare topic has is found all the same, and
/// an empty stretch costs no walk.
#[tokio::test]
async fn a_filter_that_few_events_pass_is_looked_on_for() {
    let fixture = support::on(Version::V15).await;
    let (store, client) = (&fixture.store, fixture.client().await);
    let to = async |place: i64| {
        let set = format!("SELECT setval('postbox.outbox_seq_seq', {place})");
        client.batch_execute(&set).await.expect("set");
    };
    for place in [1, 150_000, 300_000, 450_000, 60_000_000_000] {
        to(place).await;
        append(store, "often", "{}").await;
    }
    append(store, "rare", "1").await;
    store.subscribe(&subscription(&["rare"])).await.expect("subscribed");
    let lease = store.acquire(&name(), &owner("one"), &[], TTL).await.expect("acquired").lease.expect("a free lane");
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["1"], "in one call");
    // In a window with known bounds, longer than one call looks at.
    for n in 0..20 {
        to(60_000_100_000 + n * 150_000).await;
        append(store, "often", "{}").await;
    }
    append(store, "rare", "2").await;
    let found = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    assert!(found.deliveries.is_empty() && found.end.is_some(), "{found:?}");
    // Nothing of it is settled, so the next holder begins there again.
    store.release(&lease).await.expect("released");
    let lease = store.acquire(&name(), &owner("two"), &[], TTL).await.expect("acquired").lease.expect("a free lane");
    let found = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    assert!(found.deliveries.is_empty() && found.end.is_some(), "{found:?}");
    let settlement = Settlement { position: found.end, hold_keys: true, ..Settlement::default() };
    store.settle(&lease, settlement).await.expect("settled");
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["2"]);
    // A transaction that ran when the last window began, far behind and far ahead of its rows.
    let mut other = fixture.client().await;
    let open = other.transaction().await.expect("begun");
    let late = "INSERT INTO postbox.outbox (topic, payload) VALUES ('often', '{}'), ('rare', '3')";
    open.batch_execute(late).await.expect("inserted");
    to(60_050_000_000).await;
    append(store, "rare", "4").await;
    assert_eq!(deliver(store, &lease).await.expect("delivered"), ["4"]);
    to(60_060_000_000).await;
    open.batch_execute(&late.replace('3', "5")).await.expect("inserted");
    open.commit().await.expect("committed");
    to(60_070_000_000).await;
    append(store, "rare", "6").await;
    let mut found = Vec::new();
    while found.len() < 3 {
        found.extend(deliver(store, &lease).await.expect("delivered"));
    }
    assert_eq!(found, ["3", "5", "6"]);
    assert!(deliver(store, &lease).await.expect("read").is_empty());
    // A relay passes the stretches in between, and a drain does not end in them.
    let (sent, mut arrived) = tokio::sync::mpsc::unbounded_channel();
    let sink = handler_sink(move |delivery: Delivery| {
        drop(sent.send(String::from_utf8_lossy(&delivery.event.payload).into_owned()));
        async { Outcome::DELIVERED }
    });
    let all = Subscription { name: SubscriptionName::new("all").expect("a name"), ..subscription(&["rare"]) };
    let relay = Relay::builder(Arc::new(store.clone()), all).sink(Arc::new(sink)).build().expect("built");
    relay.drain(None).await.expect("drained");
    let mut found = Vec::new();
    arrived.recv_many(&mut found, 10).await;
    found.sort();
    assert_eq!(found, ["1", "2", "3", "4", "5", "6"]);
}
