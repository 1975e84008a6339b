//! A restored dump: rows with transaction ids of another cluster are data, not forgeries.

use std::process::{Command, Stdio};

use postbox_core::{Append as _, BatchLimit, Log as _, LogName, Maintain as _, NewEvent, Settlement};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::servers::{Postgres, Version};

use crate::support;

async fn read(store: &PostgresStore, settle: bool) -> Vec<Vec<u8>> {
    let lease = support::leased(store, "reader").await;
    let limit = BatchLimit { events: 2, ..BatchLimit::default() };
    let batch = store.next_batch(&lease, limit).await.expect("read");
    if settle {
        let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
        store.settle(&lease, settlement).await.expect("settled");
    }
    store.release(&lease).await.expect("released");
    batch.deliveries.iter().map(|delivery| delivery.event.payload.to_vec()).collect()
}

#[tokio::test]
async fn a_dump_is_restored_and_read_on() {
    let server = Postgres::shared(Version::V15).await;
    let (url, restored) = (server.fresh_database().await, server.fresh_database().await);
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let events: Vec<NewEvent> = (1..=4).map(|n| NewEvent::json("t", n.to_string()).key("k")).collect();
    store.append(&LogName::outbox(), &events).await.expect("appended");
    assert_eq!(read(&store, true).await, [b"1", b"2"]);
    let dump = Command::new("/usr/lib/postgresql/15/bin/pg_dump").arg(&url).stdin(Stdio::null()).output().expect("run");
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    Postgres::psql(&restored, &String::from_utf8(dump.stdout).expect("UTF-8"));
    let store = PostgresStore::connect(PostgresConfig::new(&restored)).await.expect("connected");
    assert_eq!(read(&store, false).await, [b"3", b"4"]);
    // As in another cluster: rebase adjusts the ids, and the rules apply again.
    store.rebase().await.expect("rebased");
    let forged = "INSERT INTO postbox.outbox (topic, payload, xid) VALUES ('t', '', '3')";
    let refused = support::client(&restored).await.batch_execute(forged).await.expect_err("refused");
    assert_eq!(refused.as_db_error().and_then(|said| said.constraint()), Some("xid_forged"));
    store.append(&LogName::outbox(), &[NewEvent::json("t", "5").key("k")]).await.expect("appended");
    assert_eq!(read(&store, true).await, [b"3", b"4"]);
    assert_eq!(read(&store, true).await, [b"5"]);
}

/// Makes a database look like one restored from a cluster that had used far more transactions.
const FROM_AN_OLDER_CLUSTER: &str = "
ALTER TABLE postbox.outbox DROP CONSTRAINT event_invalid;
UPDATE postbox.outbox SET xid = (xid::text::bigint + 1000000000)::text::xid8;
UPDATE postbox.lane SET cluster = 1,
  from_snap = format('%1$s:%1$s:', pg_snapshot_xmax(from_snap)::text::bigint + 1000000000)::pg_snapshot,
  to_snap = format('%1$s:%1$s:', pg_snapshot_xmax(to_snap)::text::bigint + 1000000000)::pg_snapshot;
SELECT postbox.guard_log('outbox')";

#[tokio::test]
async fn what_is_appended_between_a_restore_and_its_rebase_is_sent() {
    let server = Postgres::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let events: Vec<NewEvent> = (1..=4).map(|n| NewEvent::json("t", n.to_string()).key("k")).collect();
    store.append(&LogName::outbox(), &events).await.expect("appended");
    assert_eq!(read(&store, true).await, [b"1", b"2"]);
    let mut client = support::client(&url).await;
    client.batch_execute(FROM_AN_OLDER_CLUSTER).await.expect("moved");
    store.append(&LogName::outbox(), &[NewEvent::json("t", "5").key("k")]).await.expect("appended");
    let transaction = client.transaction().await.expect("begun");
    transaction.batch_execute("SELECT pg_current_xact_id(); SAVEPOINT s").await.expect("begun");
    let enqueue = "SELECT postbox.enqueue('t', '6', key => 'k')";
    transaction.batch_execute(enqueue).await.expect("appended in a subtransaction");
    transaction.commit().await.expect("committed");
    store.rebase().await.expect("rebased");
    for expected in [[b"3", b"4"], [b"5", b"6"]] {
        assert_eq!(read(&store, true).await, expected);
    }
}
