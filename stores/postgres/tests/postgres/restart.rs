//! Lost flushes, restarts, dumps: what a cursor made of snapshots must survive.

use std::time::Duration;

use postbox_core::{
    Append as _, Batch, BatchLimit, ErrorKind, Filter, Lease, Log as _, LogName, Maintain as _, Migrate as _, NewEvent,
    OwnerId, Receive as _, Seq, Settlement, Store as _, Subscription, SubscriptionName, Tenant, TopicPattern,
};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::proxy::{Direction, FaultProxy};
use postbox_testkit::servers::{Postgres, PrivatePostgres, Settings, Version};

use crate::support;

fn name() -> SubscriptionName {
    SubscriptionName::new("reader").expect("a name")
}

async fn take(store: &PostgresStore) -> Lease {
    support::leased(store, name().as_str()).await
}

async fn next(store: &PostgresStore, lease: &Lease) -> Batch {
    store.next_batch(lease, BatchLimit::default()).await.expect("read")
}

async fn settle(store: &PostgresStore, lease: &Lease, position: Option<Seq>) {
    let settlement = Settlement { position, hold_keys: true, ..Settlement::default() };
    store.settle(lease, settlement).await.expect("settled");
}

fn payloads(batch: &Batch) -> Vec<String> {
    batch.deliveries.iter().map(|one| String::from_utf8_lossy(&one.event.payload).into_owned()).collect()
}

/// An event of a producer with `synchronous_commit = off` is readable before it is on disk. Events
/// that we handed out must still exist after a crash.
#[tokio::test]
async fn what_was_given_out_survives_an_immediate_stop() {
    let settings = Settings::durable().with("synchronous_commit", "off");
    let mut server = PrivatePostgres::launch(Version::V15, settings).await;
    // Nothing is flushed in the background: only our own commit can have saved the event.
    server.freeze_wal_writer().await;
    let url = server.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let client = support::client(&url).await;
    client.batch_execute("SELECT postbox.enqueue('t', 'before', content_type => 'text/plain')").await.expect("written");
    let lease = take(&store).await;
    let batch = next(&store, &lease).await;
    settle(&store, &lease, batch.end).await;
    client
        .batch_execute("SELECT postbox.enqueue('t', 'published', content_type => 'text/plain')")
        .await
        .expect("written, not durably");
    assert_eq!(payloads(&next(&store, &lease).await), ["published"]);
    client
        .batch_execute("SELECT postbox.enqueue('t', 'never read', content_type => 'text/plain')")
        .await
        .expect("written, not durably");
    server.stop_immediate();
    server.start().await;
    let client = support::client(&url).await;
    let rows = client.query("SELECT payload FROM postbox.outbox ORDER BY seq", &[]).await.expect("read");
    let kept: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(kept[..2], ["before", "published"], "what was given out is there");
    // Not a promise, but proof that the test can fail: no commit of ours flushed the last event.
    assert_eq!(kept.len(), 2, "the event nobody read was lost in the crash, as its producer accepted");
}

/// As during a failover: the server that is left refuses writes, so no connection is made.
#[tokio::test]
async fn a_url_that_requires_writes_says_that_no_server_accepts_them() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let url = format!("{url}?target_session_attrs=read-write&options=-c%20default_transaction_read_only%3Don");
    let error = PostgresStore::connect(PostgresConfig::new(&url)).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "store_read_only"), "{error}");
}

/// A restart of the database causes one `Unavailable`. The first call after it succeeds on a new
/// connection.
#[tokio::test]
async fn a_restart_of_the_database_is_unavailable_and_then_over() {
    let mut server = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let url = server.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let lease = take(&store).await;
    store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect("appended");
    let batch = next(&store, &lease).await;
    server.stop_fast();
    for _ in 0..10 {
        let error = store.next_batch(&lease, BatchLimit::default()).await.expect_err("the database is down");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
    let error = store.append(&LogName::outbox(), &[NewEvent::json("t", "x")]).await.expect_err("down");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    server.start().await;
    settle(&store, &lease, batch.end).await;
    store.append(&LogName::outbox(), &[NewEvent::json("t", "2")]).await.expect("appended");
    assert_eq!(payloads(&next(&store, &lease).await), ["2"]);
}

/// A dump restored into a younger cluster is refused. The error says how to fix it, and after the
/// fix nothing is lost or sent twice.
#[tokio::test]
async fn a_cursor_from_the_future_is_refused_and_rebased() {
    let server = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let url = server.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let lease = take(&store).await;
    for payload in ["1", "2", "3"] {
        store.append(&LogName::outbox(), &[NewEvent::json("t", payload).key("k")]).await.expect("appended");
    }
    let early = support::client(&url).await;
    early
        .batch_execute("BEGIN; SELECT postbox.enqueue('t', 'late', key => 'l', content_type => 'text/plain')")
        .await
        .expect("open");
    store.append(&LogName::outbox(), &[NewEvent::json("t", "4").key("k")]).await.expect("appended");
    let batch = next(&store, &lease).await;
    assert_eq!(payloads(&batch), ["1", "2", "3", "4"]);
    settle(&store, &lease, batch.end).await;
    early.batch_execute("COMMIT").await.expect("committed behind the cursor's place");
    store.append(&LogName::outbox(), &[NewEvent::json("t", "5").key("k")]).await.expect("appended");
    store.release(&lease).await.expect("released");
    // As if all of it came from a cluster that is a million transactions ahead.
    let client = support::client(&url).await;
    client
        .batch_execute(
            "ALTER TABLE postbox.outbox DROP CONSTRAINT event_invalid;
             UPDATE postbox.outbox SET xid = (xid::text::bigint + 1000000)::text::xid8;
             UPDATE postbox.lane SET
               from_snap = regexp_replace(from_snap::text, '^1:1:$', '1:1:')::pg_snapshot,
               to_snap = (SELECT (1000000 + pg_snapshot_xmin(to_snap)::text::bigint) || ':' || (1000000 + pg_snapshot_xmax(to_snap)::text::bigint)
                 || ':' || coalesce((SELECT string_agg((1000000 + x::text::bigint)::text, ',') FROM pg_snapshot_xip(to_snap) AS x), ''))::pg_snapshot;
             SELECT postbox.guard_log('outbox')",
        )
        .await
        .expect("moved");
    for error in [
        store.check_integrity().await.expect_err("no fit"),
        store
            .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(name(), LogName::outbox()) })
            .await
            .expect_err("refused"),
    ] {
        assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "cursor_from_future"));
        assert!(error.message().contains("postbox migrate rebase"), "{error}");
    }
    store.rebase().await.expect("rebased");
    let lease = take(&store).await;
    let stats = store.stats(&name()).await.expect("counted");
    assert_eq!((stats.pending, stats.dispatched), (2, 4));
    // The straggler left the stream; events that were read in order stay in the stream.
    let due = store.due(&lease, BatchLimit::default()).await.expect("read");
    let stream = next(&store, &lease).await;
    assert_eq!((payloads(&due), payloads(&stream)), (vec!["late".to_owned()], vec!["5".to_owned()]));
    settle(&store, &lease, stream.end).await;
    store.append(&LogName::outbox(), &[NewEvent::json("t", "6").key("k")]).await.expect("appended");
    assert_eq!(payloads(&next(&store, &lease).await), ["6"]);
}

/// A straggler is judged like any other event: if it is not wanted, it gets no row; if its time is
/// later, it waits for that time.
#[tokio::test]
async fn a_rebase_keeps_the_filter_and_the_times_of_stragglers() {
    let server = Postgres::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let topics = vec![TopicPattern::new("a_b.*").expect("a pattern")];
    let filter = Filter { topics, tenant: Some(Tenant::new("acme").expect("a tenant")), ..Filter::default() };
    store
        .subscribe(&Subscription { lanes: Some(1), filter, ..Subscription::new(name(), LogName::outbox()) })
        .await
        .expect("new");
    let owner = OwnerId::new("one").expect("an owner");
    let acquired = store.acquire(&name(), &owner, &[], Duration::from_secs(600)).await.expect("asked");
    let lease = acquired.lease.expect("free");
    let early = support::client(&url).await;
    early
        .batch_execute(
            "BEGIN;
             SELECT postbox.enqueue('a_b.c', 'wanted', content_type => 'text/plain', key => 'k', tenant => 'acme');
             SELECT postbox.enqueue('a_b.c', 'later', content_type => 'text/plain', key => 'k', tenant => 'acme', deliver_at => now() + interval '1 hour');
             SELECT postbox.enqueue('axb.c', 'other topic', content_type => 'text/plain', key => 'k', tenant => 'acme');
             SELECT postbox.enqueue('a_b.c', 'other tenant', content_type => 'text/plain', key => 'k', tenant => 'evil')",
        )
        .await
        .expect("open");
    store.append(&LogName::outbox(), &[NewEvent::json("a_b.c", "first").tenant("acme")]).await.expect("appended");
    let batch = next(&store, &lease).await;
    assert_eq!(payloads(&batch), ["first"]);
    settle(&store, &lease, batch.end).await;
    early.batch_execute("COMMIT").await.expect("committed behind the cursor's place");
    store.release(&lease).await.expect("released");
    store.rebase().await.expect("rebased");
    let stats = store.stats(&name()).await.expect("counted");
    assert_eq!((stats.retrying, stats.scheduled, stats.pending), (1, 1, 2));
    let lease =
        store.acquire(&name(), &owner, &[], Duration::from_secs(600)).await.expect("asked").lease.expect("free");
    let due = store.due(&lease, BatchLimit::default()).await.expect("read");
    assert_eq!(payloads(&due), ["wanted"]);
    assert_eq!(payloads(&next(&store, &lease).await), Vec::<String>::new());
}

/// A wrong address, database or password gives one line, the right error kind, and no secret.
#[tokio::test]
async fn unreachable_stores_say_so() {
    let server = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let missing = server.postgres().url_of("nowhere");
    let error = PostgresStore::connect(PostgresConfig::new(missing)).await.expect_err("no such database");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "database_missing"));
    let refused = PostgresConfig::new("postgres://u:hunter2@127.0.0.1:1/d");
    let error = PostgresStore::connect(refused).await.expect_err("nobody listens");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "store_unreachable"));
    assert!(!format!("{error} {error:?}").contains("hunter2"));
    let url = server.fresh_database().await;
    let store = PostgresStore::connect(PostgresConfig::new(url)).await.expect("a store");
    assert_eq!(store.validate().await.expect_err("empty").code(), "schema_missing");
    let error = store.append(&LogName::outbox(), &[NewEvent::json("t", "{}")]).await.expect_err("empty");
    assert_eq!(error.code(), "schema_missing");
    let error = store
        .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(name(), LogName::outbox()) })
        .await
        .expect_err("empty");
    assert_eq!(error.code(), "schema_missing");
}

/// A server that stops answering blocks no caller for ever: retention, creating a log and the check
/// of the schema time out like every other call.
#[tokio::test]
async fn a_silent_server_holds_up_no_call() {
    let server = Postgres::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let proxy = FaultProxy::in_front_of(&url).await;
    support::migrated(PostgresConfig::new(&url)).await;
    let mut config = PostgresConfig::new(proxy.url(&url));
    (config.statement_timeout, config.pool_timeout) = (Duration::from_millis(500), Duration::from_millis(500));
    let store = PostgresStore::connect(config).await.expect("a store");
    let log = LogName::new("more").expect("a name");
    // Retries until the pool has a working connection: on a busy machine a call may take half a
    // second.
    while store.create_log(&log).await.is_err() || store.validate().await.is_err() {}
    proxy.swallow(&Direction::BOTH);
    // Far longer than the 6 s that a call may take: its own timeout, the pool's, and 5 s for the
    // network.
    let patience = Duration::from_secs(60);
    let calls = futures::join!(
        tokio::time::timeout(patience, store.forget(Duration::ZERO)),
        tokio::time::timeout(patience, store.create_log(&log)),
        tokio::time::timeout(patience, store.validate()),
    );
    let errors = [
        calls.0.expect("forget gives up").expect_err("no answer"),
        calls.1.expect("create_log gives up").expect_err("no answer"),
        calls.2.expect("validate gives up").expect_err("no answer"),
    ];
    assert_eq!(errors[2].code(), "store_timeout");
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
}

/// A machine that lost its power refuses nothing: it is silent, at whatever step.
#[tokio::test]
async fn a_server_that_is_silent_does_not_keep_the_next_from_being_asked() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    // The system answers for it, and nobody reads what is sent.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let (before, server) = url.split_once('@').expect("a user");
    let address = silent.local_addr().expect("an address");
    for servers in [format!("{address},{server}"), format!("{address},{address},{server}")] {
        let store = PostgresStore::connect(PostgresConfig::new(format!("{before}@{servers}"))).await;
        store.expect("the next server is asked").up().await.expect("made");
    }
}
