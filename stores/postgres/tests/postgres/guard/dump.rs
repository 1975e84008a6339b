//! A restored dump: rows with transaction ids of another cluster are data, not forgeries.

use std::process::{Command, Stdio};
use std::time::Duration;

use postbox_core::{
    Admin as _, Append as _, BatchLimit, Filter, Inspect as _, Lease, Log as _, LogName, Maintain as _, NewEvent,
    OwnerId, ResetTo, Settlement, Subscription, SubscriptionName,
};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::servers::{Postgres, PrivatePostgres, Settings, Version};

use crate::support;

async fn read(store: &PostgresStore, name: &str, settle: bool) -> Vec<Vec<u8>> {
    read_under(store, &support::leased(store, name).await, settle).await
}

async fn read_under(store: &PostgresStore, lease: &Lease, settle: bool) -> Vec<Vec<u8>> {
    let limit = BatchLimit { events: 2, ..BatchLimit::default() };
    let batch = store.next_batch(lease, limit).await.expect("read");
    if settle {
        let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
        store.settle(lease, settlement).await.expect("settled");
    }
    store.release(lease).await.expect("released");
    batch.deliveries.iter().map(|delivery| delivery.event.payload.to_vec()).collect()
}

#[tokio::test]
async fn a_dump_is_restored_and_read_on() {
    let server = Postgres::shared(Version::V15).await;
    let (url, restored) = (server.fresh_database().await, server.fresh_database().await);
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let events: Vec<NewEvent> = (1..=4).map(|n| NewEvent::json("t", n.to_string()).key("k")).collect();
    store.append(&LogName::outbox(), &events).await.expect("appended");
    assert_eq!(read(&store, "reader", true).await, [b"1", b"2"]);
    let dump = Command::new("/usr/lib/postgresql/15/bin/pg_dump").arg(&url).stdin(Stdio::null()).output().expect("run");
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    Postgres::psql(&restored, &String::from_utf8(dump.stdout).expect("UTF-8"));
    let store = PostgresStore::connect(PostgresConfig::new(&restored)).await.expect("connected");
    assert_eq!(read(&store, "reader", false).await, [b"3", b"4"]);
    // As in another cluster: rebase adjusts the ids, and the rules apply again.
    store.rebase().await.expect("rebased");
    let forged = "INSERT INTO postbox.outbox (topic, payload, xid) VALUES ('t', '', '3')";
    let refused = support::client(&restored).await.batch_execute(forged).await.expect_err("refused");
    assert_eq!(refused.as_db_error().and_then(|said| said.constraint()), Some("xid_forged"));
    store.append(&LogName::outbox(), &[NewEvent::json("t", "5").key("k")]).await.expect("appended");
    assert_eq!(read(&store, "reader", true).await, [b"3", b"4"]);
    assert_eq!(read(&store, "reader", true).await, [b"5"]);
}

/// Uses up transaction ids until this one.
const COUNT_TO: &str = "DO $$ BEGIN WHILE pg_current_xact_id()::text::bigint < {end} LOOP COMMIT; END LOOP; END $$";

#[tokio::test]
async fn what_is_appended_between_a_restore_and_its_rebase_is_sent_and_nothing_twice() {
    let new = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let client = support::client(&new.url()).await;
    let id: i64 = client.query_one("SELECT pg_current_xact_id()::text::bigint", &[]).await.expect("asked").get(0);
    let client = support::client(&url).await;
    client.batch_execute(&COUNT_TO.replace("{end}", &(id + 5_000).to_string())).await.expect("counted");
    // A former filter has a cursor of its own.
    let narrow = Filter { topics: vec!["x".parse().expect("a pattern")], ..Filter::default() };
    let (name, owner): (SubscriptionName, _) = ("reader".parse().expect("a name"), OwnerId::new("me").expect("a name"));
    let reader = Subscription { lanes: Some(1), filter: narrow, ..Subscription::new(name.clone(), LogName::outbox()) };
    store.subscribe(&reader).await.expect("subscribed");
    let former = ["t", "x"].map(|topic| NewEvent::json(topic, topic));
    for _ in 0..2 {
        store.append(&LogName::outbox(), &former).await.expect("appended");
        let lease = store.acquire(&name, &owner, &[], Duration::from_secs(60)).await.expect("acquired").lease;
        assert_eq!(read_under(&store, &lease.expect("a free lane"), true).await, [b"x"]);
    }
    // Each in a transaction of its own, and so in a restore by INSERTs. Several windows, so that
    // the last snapshots include what has lower ids.
    for n in (1..40).step_by(2) {
        for n in [n, n + 1] {
            store.append(&LogName::outbox(), &[NewEvent::json("t", n.to_string()).key("k")]).await.expect("appended");
        }
        if n < 39 {
            assert_eq!(read(&store, "reader", true).await, [n, n + 1].map(|n| n.to_string().into_bytes()));
        }
    }
    for how in ["--format=plain", "--inserts"] {
        let pg_dump = "/usr/lib/postgresql/15/bin/pg_dump";
        let dump = Command::new(pg_dump).args([how, &url]).stdin(Stdio::null()).output().expect("run");
        assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
        let url = new.fresh_database().await;
        Postgres::psql(&url, &String::from_utf8(dump.stdout).expect("UTF-8"));
        let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("connected");
        store.append(&LogName::outbox(), &[NewEvent::json("t", "41").key("k")]).await.expect("appended");
        let mut client = support::client(&url).await;
        let transaction = client.transaction().await.expect("begun");
        transaction.batch_execute("SELECT pg_current_xact_id(); SAVEPOINT s").await.expect("begun");
        let enqueue = "SELECT postbox.enqueue('t', '42', key => 'k')";
        transaction.batch_execute(enqueue).await.expect("appended in a subtransaction");
        transaction.commit().await.expect("committed");
        // As the guide's recipe for an erasure does; that is often due after a restore.
        let anew = "ALTER TABLE postbox.outbox DROP CONSTRAINT event_invalid; SELECT postbox.guard_log('outbox')";
        client.batch_execute(anew).await.expect("written anew");
        let known = store.subscriptions().await.expect("listed").remove(0);
        let plan = store.reset(&known.name, ResetTo::Now, None).await.expect("planned");
        let refused = store.reset(&known.name, ResetTo::Now, Some(&plan.stamp)).await.expect_err("another cluster's");
        assert_eq!(refused.code(), "cursor_foreign");
        store.rename(&known.name, known.generation, &"renamed".parse().expect("a name")).await.expect("renamed");
        // It has looked at the log, so rebase waits for it, and then appends under a later id.
        client.batch_execute("BEGIN; SELECT count(*) FROM postbox.outbox").await.expect("begun");
        let append = async {
            support::until_waited_for(&client).await;
            let enqueue = "SELECT postbox.enqueue('t', '43', key => 'k'); COMMIT";
            client.batch_execute(enqueue).await.expect("appended while rebase waits");
        };
        let (rebased, ()) = tokio::join!(store.rebase(), append);
        rebased.expect("rebased");
        for expected in [&[b"39", b"40"][..], &[b"41", b"42"], &[b"43"], &[]] {
            assert_eq!(read(&store, "renamed", true).await, expected, "{how}");
        }
    }
}
