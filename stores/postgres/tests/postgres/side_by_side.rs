//! Reads, settlements and renewals of one lane run at the same time. Settlements and renewals both
//! move the lane's row, and an operator's changes lock it.

use std::time::Duration;

use postbox_core::{
    Admin as _, Append as _, BatchLimit, Change, Criteria, Diagnose as _, Disposition, Entry, Error, Filter, Headers,
    Hold, Inspect as _, Lease, ListQuery, Log as _, LogName, Maintain as _, Migrate as _, NewEvent, OwnerId, Routed,
    Selection, Settlement, State, Store as _, Subscription, SubscriptionName,
};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::servers::{Postgres, PrivatePostgres, Settings, Version};

use crate::support;

const EVENTS: usize = 3_000;
const TTL: Duration = Duration::from_secs(600);

/// A database with so many events, its store, and the lease of the only lane.
async fn leased(events: usize, ttl: Duration) -> (String, PostgresStore, Lease) {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let name = SubscriptionName::new("s").expect("a name");
    store
        .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");
    let events: Vec<NewEvent> = (0..events).map(|n| NewEvent::json("t", n.to_string())).collect();
    store.append(&LogName::outbox(), &events).await.expect("appended");
    let owner = OwnerId::new("me").expect("a name");
    let lease = store.acquire(&name, &owner, &[], ttl).await.expect("acquired").lease.expect("a free lane");
    (url, store, lease)
}

/// The lane's row is looked up at its last known place. Not to find it there does not mean a lost
/// lease, however often other calls moved it meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lease_is_lost_by_missing_the_row_at_its_place() {
    let (_, store, lease) = leased(EVENTS, TTL).await;
    let limit = BatchLimit { events: 5, ..BatchLimit::default() };
    let mut batch = store.next_batch(&lease, limit).await.expect("read");
    let mut delivered = 0;
    while !batch.is_empty() {
        delivered += batch.deliveries.len();
        let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
        let ahead = async {
            match batch.more {
                true => store.next_batch(&lease, limit).await.map(Some),
                false => Ok(None),
            }
        };
        let (next, settled, renewed, due) =
            tokio::join!(ahead, store.settle(&lease, settlement), store.renew(&lease, TTL), store.due(&lease, limit),);
        settled.expect("settled");
        renewed.expect("renewed");
        due.expect("looked");
        batch = match next.expect("read ahead") {
            Some(next) => next,
            None => store.next_batch(&lease, limit).await.expect("read"),
        };
    }
    assert_eq!(delivered, EVENTS);
}

/// A settlement may check its lease in time and commit after the lease ended. The filter that it
/// read with decides what it passes, so nothing is checked for routing before it commits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_called_unrouted_while_somebody_writes_to_a_lane_behind_its_filter() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let name = SubscriptionName::new("s").expect("a name");
    let wants = |topic: &str| {
        let topics = vec![topic.parse().expect("a pattern")];
        let filter = Filter { topics, ..Filter::default() };
        Subscription { lanes: Some(1), filter, ..Subscription::new(name.clone(), LogName::outbox()) }
    };
    store.subscribe(&wants("a")).await.expect("subscribed");
    store.subscribe(&wants("c")).await.expect("subscribed");
    // Events that are already unrouted are handed over under a lock on the lanes.
    while store.note_unrouted(&LogName::outbox()).await.expect("noted").more {}
    store.append(&LogName::outbox(), &[NewEvent::json("b", "1")]).await.expect("appended");
    let mut settling = support::client(&url).await;
    let transaction = settling.transaction().await.expect("begun");
    transaction.execute("UPDATE postbox.lane SET delivered = delivered", &[]).await.expect("locked");
    assert_eq!(store.note_unrouted(&LogName::outbox()).await.expect("noted"), Routed::default());
    transaction.commit().await.expect("committed");
    let found = async {
        while store.note_unrouted(&LogName::outbox()).await.expect("noted").unrouted == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TTL, found).await.expect("found once nobody writes");
}

/// Finding the rows of an operator's change takes no lock, so a lease is renewed meanwhile, however
/// long that takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_renewed_while_an_operators_change_looks_for_its_rows() {
    let (url, store, lease) = leased(1, TTL).await;
    let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    let disposition = Disposition::Dead { code: "http_422".into(), error: "no".into(), halt: false, took: None };
    let entries = vec![Entry { delivery: &batch.deliveries[0], disposition }];
    let settlement = Settlement { position: batch.end, entries, hold_keys: true, ..Settlement::default() };
    store.settle(&lease, settlement).await.expect("settled");

    // The lookup needs the log, which is locked here, so it waits.
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.outbox IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let (of_name, asking) = (lease.subscription.clone(), store.clone());
    let change = tokio::spawn(async move { asking.change(&of_name, &Change::Retry, &Selection::default()).await });
    support::until_waited_for(&holder).await;
    tokio::time::timeout(Duration::from_secs(5), store.renew(&lease, TTL)).await.expect("not locked").expect("renewed");
    assert!(!change.is_finished());
    holder.batch_execute("COMMIT").await.expect("released");
    assert_eq!(change.await.expect("no panic").expect("replayed").count, 1);
}

/// Whoever waits for the answer can end that session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operators_change_names_whoever_locks_its_rows() {
    let (url, store, lease) = leased(1, TTL).await;
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.delivery IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    for dry_run in [true, false] {
        let all = Selection { dry_run, ..Selection::default() };
        let error = store.change(&lease.subscription, &Change::Retry, &all).await.expect_err("locked");
        assert_eq!(error.code(), "table_locked", "{error}");
        assert!(error.message().contains("the table delivery is locked by session"), "{error}");
    }
}

/// A log that somebody has locked is not counted; the others are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_log_keeps_no_other_from_being_counted() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let names = ["in", "out"].map(|name| SubscriptionName::new(name).expect("a name"));
    for (name, log) in names.iter().zip([LogName::inbox(), LogName::outbox()]) {
        store.append(&log, &[NewEvent::json("t", "1")]).await.expect("appended");
        store.subscribe(&Subscription::new(name.clone(), log)).await.expect("subscribed");
    }
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.inbox IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let looked = tokio::time::timeout(Duration::from_secs(5), store.stats_of(&names)).await.expect("no long wait");
    let [inbox, outbox] = <[_; 2]>::try_from(looked).expect("one for each");
    assert_eq!(inbox.expect_err("locked").code(), "table_locked");
    assert_eq!(outbox.expect("counted").pending, 1);
}

/// A list may have to read the whole log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_takes_too_long_says_how_to_ask_for_less() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let name = SubscriptionName::new("s").expect("a name");
    let subscription = Subscription::new(name.clone(), LogName::outbox());
    support::migrated(PostgresConfig::new(&url)).await.subscribe(&subscription).await.expect("subscribed");
    let config = PostgresConfig { statement_timeout: Duration::from_millis(500), ..PostgresConfig::new(&url) };
    let store = PostgresStore::connect(config).await.expect("a store");
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.outbox IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let (which, code, headers, after) = (Criteria::default(), None, Headers::new(), None);
    let (state, limit, payloads) = (Some(State::Dispatched), 10, true);
    let query = ListQuery { subscription: name, state, which, code, headers, after, limit, payloads };
    let error = store.list(&query).await.expect_err("locked");
    assert_eq!(error.code(), "statement_timeout", "{error}");
    assert!(["--since", "--key", "`statement_timeout`"].iter().all(|cure| error.message().contains(cure)), "{error}");
}

/// Relays wait for a lock on every connection of their pool. An operator's query is answered all
/// the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_looks_waits_for_no_relay() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig { pool_size: 1, ..PostgresConfig::new(&url) }).await;
    let name = SubscriptionName::new("s").expect("a name");
    store
        .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.delivery IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let (of_name, waiting) = (name.clone(), store.clone());
    let owner = OwnerId::new("me").expect("a name");
    // It waits again and again, and never for long.
    let relay = tokio::spawn(async move {
        loop {
            match waiting.acquire(&of_name, &owner, &[], TTL).await {
                Err(error) if error.code() == "table_locked" => {}
                acquired => return acquired,
            }
        }
    });
    support::until_waited_for(&holder).await;
    let looked = tokio::time::timeout(Duration::from_secs(5), async {
        store.validate().await.expect("the database answers");
        store.stats(&name).await.expect_err("locked").code().to_owned()
    });
    assert_eq!(looked.await.expect("no wait for the relay"), "table_locked");
    assert!(!relay.is_finished());
    holder.batch_execute("COMMIT").await.expect("released");
    assert!(relay.await.expect("no panic").expect("asked").lease.is_some());
}

/// A relay that waited for a locked log for longer than its lease lasts would lose the lane, and
/// name no lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_waits_for_a_locked_log_no_longer_than_its_lease_lasts() {
    let lease_ttl = Duration::from_secs(10);
    let (url, store, lease) = leased(1, lease_ttl).await;
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.outbox IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let renew = async {
        support::until_waited_for(&holder).await;
        store.renew(&lease, lease_ttl).await
    };
    let log = LogName::outbox();
    let (read, _, renewed) =
        tokio::join!(store.next_batch(&lease, BatchLimit::default()), store.note_unrouted(&log), renew);
    renewed.expect("renewed");
    let error = read.expect_err("locked");
    assert_eq!(error.code(), "table_locked", "{error}");
    assert!(error.message().contains("the table outbox is locked by session"), "{error}");
    holder.batch_execute("COMMIT").await.expect("released");
    assert_eq!(store.next_batch(&lease, BatchLimit::default()).await.expect("read").deliveries.len(), 1);
}

/// CREATE INDEX locks out writers, but not whoever looks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_names_whoever_locks_out_only_writers() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let name = SubscriptionName::new("s").expect("a name");
    store.subscribe(&Subscription::new(name.clone(), LogName::outbox())).await.expect("subscribed");
    let (owner, holder) = (OwnerId::new("me").expect("a name"), support::client(&url).await);
    let is_named = |error: Error, table: &str| {
        assert_eq!(error.code(), "table_locked", "{error}");
        assert!(error.message().contains(&format!("the table {table} is locked by session")), "{error}");
    };
    holder.batch_execute("BEGIN; LOCK TABLE postbox.lane IN SHARE MODE").await.expect("locked");
    is_named(store.acquire(&name, &owner, &[], TTL).await.expect_err("locked"), "lane");
    holder.batch_execute("ROLLBACK; BEGIN; LOCK TABLE postbox.log IN EXCLUSIVE MODE").await.expect("locked");
    is_named(store.note_unrouted(&LogName::outbox()).await.expect_err("locked"), "log");
}

/// Whoever waits for a row holds a lock on it as well. To end that session would cure nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_waits_itself_is_not_blamed() {
    let (url, store, lease) = leased(1, TTL).await;
    let position = store.next_batch(&lease, BatchLimit::default()).await.expect("read").end;
    let holder = support::client(&url).await;
    let pid: i32 = holder.query_one("SELECT pg_backend_pid()", &[]).await.expect("asked").get(0);
    holder.batch_execute("BEGIN; SELECT FROM postbox.lane FOR UPDATE").await.expect("locked");
    let (waiting, of_lane) = (store.clone(), lease.clone());
    let renewed = tokio::spawn(async move { waiting.renew(&of_lane, TTL).await });
    support::until_waited_for(&holder).await;
    holder.batch_execute("SELECT 1;\n  SELECT 2").await.expect("its last statement");
    let error = store.settle(&lease, Settlement { position, ..Settlement::default() }).await.expect_err("locked");
    assert_eq!(error.code(), "table_locked", "{error}");
    let who =
        format!("a row of the table lane is locked by session {pid} (a program without a name: SELECT 1, SELECT 2)");
    assert!(error.message().starts_with(&who), "{error}");
    assert!(!renewed.is_finished());
    holder.batch_execute("COMMIT").await.expect("released");
    renewed.await.expect("no panic").expect("renewed");
}

/// A prepared transaction has no session to end. What a program says of itself must not become the
/// cure, which follows the first semicolon.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_locks_a_table_is_named_with_its_end() {
    for version in Version::ALL {
        let postgres = PrivatePostgres::launch(version, Settings::fast()).await;
        let url = postgres.fresh_database().await;
        let store = support::migrated(PostgresConfig::new(&url)).await;
        let holder = support::client(&url).await;
        let lock = "LOCK TABLE postbox.lane IN ACCESS EXCLUSIVE MODE";
        let said = async || {
            let error = store.subscriptions().await.expect_err("locked");
            assert_eq!(error.code(), "table_locked", "{error}");
            let (what, cure) = error.message().split_once("; ").expect("a cure");
            (what.to_owned(), cure.to_owned())
        };
        holder.batch_execute("SET application_name = 'app; run: x'").await.expect("named");
        let pid: i32 = holder.query_one("SELECT pg_backend_pid()", &[]).await.expect("asked").get(0);
        holder.batch_execute(&format!("BEGIN; {lock}; SELECT 'y'")).await.expect("locked");
        let (what, cure) = said().await;
        assert!(what.ends_with(&format!("session {pid} (app, run: x: BEGIN, {lock}, SELECT 'y')")), "{what}");
        let end = format!("SELECT pg_terminate_backend({pid}) -- as a superuser, or a member of pg_signal_backend");
        assert_eq!(cure, format!("wait for it, or end it: {end}"));
        holder.batch_execute("PREPARE TRANSACTION 'it''s; run: z'").await.expect("prepared");
        let (what, cure) = said().await;
        assert!(what.ends_with("the prepared transaction 'it''s, run: z' (role postgres)"), "{what}");
        let end = cure.strip_prefix("wait for it, or end it: ").expect("the end of it");
        assert_eq!(end, "ROLLBACK PREPARED 'it''s; run: z'");
        holder.batch_execute(end).await.expect("ended");
        assert!(store.subscriptions().await.expect("not locked any more").is_empty());
    }
}

/// Of several prepared transactions only those are named whose locks clash with what others wait
/// for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_prepared_transaction_that_blocks_others_is_named() {
    for version in Version::ALL {
        let postgres = PrivatePostgres::launch(version, Settings::fast()).await;
        let url = postgres.fresh_database().await;
        let store = support::migrated(PostgresConfig::new(&url)).await;
        let holder = support::client(&url).await;
        for mode in ["ROW SHARE", "SHARE"] {
            let lock = format!("BEGIN; LOCK TABLE postbox.outbox IN {mode} MODE; PREPARE TRANSACTION '{mode}'");
            holder.batch_execute(&lock).await.expect("prepared");
        }
        let (appending, event) = (store.clone(), [NewEvent::json("t", "1")]);
        let appended = tokio::spawn(async move { appending.append(&LogName::outbox(), &event).await });
        let named = async {
            loop {
                let found = store.blockers().await.expect("looked");
                if !found.is_empty() {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let found = tokio::time::timeout(TTL, named).await.expect("named");
        let [found] = <[_; 1]>::try_from(found).expect("only the one that blocks");
        assert_eq!((found.holder.as_str(), found.hold), ("the prepared transaction 'SHARE'", Hold::Lock));
        assert_eq!((found.waiting, found.tables.as_slice()), (1, &["outbox".to_owned()][..]));
        holder.batch_execute(&found.end).await.expect("ended");
        appended.await.expect("no panic").expect("appended");
    }
}

/// Of programs that create the same log at once, one does, and the others find it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_is_created_by_several_at_once() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; SELECT postbox.create_log('more')").await.expect("created");
    let log = LogName::new("more").expect("a name");
    let others: Vec<_> = (0..3)
        .map(|_| {
            let (store, log) = (store.clone(), log.clone());
            tokio::spawn(async move { store.create_log(&log).await })
        })
        .collect();
    support::until_waited_for(&holder).await;
    holder.batch_execute("COMMIT").await.expect("committed");
    for other in others {
        other.await.expect("no panic").expect("it is there");
    }
}

/// A migration may take longer than the transactions of its role.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_outlasts_the_timeout_of_transactions() {
    let url = Postgres::shared(Version::V18).await.fresh_database().await;
    let holder = support::client(&url).await;
    let lock = "BEGIN; SELECT pg_advisory_xact_lock(hashtextextended('postbox migrate', 0))";
    holder.batch_execute(lock).await.expect("locked");
    let url = format!("{url}?options=-c%20transaction_timeout%3D2s");
    let migrated = tokio::spawn(support::migrated(PostgresConfig::new(url)));
    support::until_waited_for(&holder).await;
    holder.batch_execute("SELECT pg_sleep(3); COMMIT").await.expect("released");
    migrated.await.expect("migrated");
}

/// A rebase waits for a transaction that wrote events only as long as `down` does, because whoever
/// appends waits behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rebase_does_not_wait_for_a_writer_without_end() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let writer = support::client(&url).await;
    writer.batch_execute("BEGIN; SELECT postbox.enqueue('t', '1')").await.expect("open");
    let refused = tokio::time::timeout(Duration::from_secs(60), store.rebase()).await.expect("no wait without end");
    let error = refused.expect_err("the log is in use");
    assert_eq!((error.operation(), error.code()), ("rebase", "schema_in_use"), "{error}");
    writer.batch_execute("COMMIT").await.expect("committed");
    store.rebase().await.expect("rebased");
}

/// Also the check of the schema names the session that keeps it waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_on_the_migrations_is_named() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.migration IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let error = store.validate().await.expect_err("locked");
    assert_eq!(error.code(), "table_locked", "{error}");
    assert!(error.message().contains("pg_terminate_backend"), "{error}");
}
