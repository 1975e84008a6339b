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
