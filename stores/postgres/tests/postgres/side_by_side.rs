//! One lane's reads, settlements and renewals run at the same time, and each of the latter two
//! moves the lane's row. An operator's changes lock it.

use std::time::Duration;

use postbox_core::{
    Admin as _, Append as _, BatchLimit, Disposition, Entry, Inspect as _, Log as _, LogName, Migrate as _, NewEvent,
    OwnerId, Selection, Settlement, Subscription, SubscriptionName,
};
use postbox_postgres::PostgresConfig;
use postbox_testkit::servers::{Postgres, Version};

use crate::support;

const EVENTS: usize = 3_000;
const TTL: Duration = Duration::from_secs(600);

/// The row is looked for where it was last seen. To miss it there is no lost lease, however often
/// the others moved it meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lease_is_lost_by_missing_the_row_at_its_place() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let name = SubscriptionName::new("s").expect("a name");
    store
        .subscribe(&Subscription { lanes: 1, ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");
    let events: Vec<NewEvent> = (0..EVENTS).map(|n| NewEvent::json("t", n.to_string())).collect();
    store.append(&LogName::outbox(), &events).await.expect("appended");
    let owner = OwnerId::new("me").expect("a name");
    let lease = store.acquire(&name, &owner, &[], TTL).await.expect("acquired").lease.expect("a free lane");
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

/// What a person means is looked for without a lock: a lease is renewed meanwhile, however long
/// that takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_renewed_while_an_operators_change_looks_for_its_rows() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let name = SubscriptionName::new("s").expect("a name");
    store
        .subscribe(&Subscription { lanes: 1, ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");
    store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect("appended");
    let owner = OwnerId::new("me").expect("a name");
    let lease = store.acquire(&name, &owner, &[], TTL).await.expect("acquired").lease.expect("a free lane");
    let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    let disposition = Disposition::Dead { code: "http_422".into(), error: "no".into(), halt: false, took: None };
    let entries = vec![Entry { delivery: &batch.deliveries[0], disposition }];
    let settlement = Settlement { position: batch.end, entries, hold_keys: true, ..Settlement::default() };
    store.settle(&lease, settlement).await.expect("settled");

    // The look needs the log, which is held here: it takes as long as it takes.
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.outbox IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let (of_name, asking) = (name.clone(), store.clone());
    let change = tokio::spawn(async move { asking.retry(&of_name, &Selection::default()).await });
    support::until_waited_for(&holder).await;
    tokio::time::timeout(Duration::from_secs(5), store.renew(&lease, TTL)).await.expect("not locked").expect("renewed");
    assert!(!change.is_finished());
    holder.batch_execute("COMMIT").await.expect("released");
    assert_eq!(change.await.expect("no panic").expect("replayed").count, 1);
}

/// Relays wait for a lock on every connection of theirs; whoever looks hears of it all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_looks_waits_for_no_relay() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig { pool_size: 1, ..PostgresConfig::new(&url) }).await;
    let name = SubscriptionName::new("s").expect("a name");
    store
        .subscribe(&Subscription { lanes: 1, ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.delivery IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let (of_name, waiting) = (name.clone(), store.clone());
    let owner = OwnerId::new("me").expect("a name");
    let relay = tokio::spawn(async move { waiting.acquire(&of_name, &owner, &[], TTL).await });
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
