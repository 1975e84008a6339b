//! Reads, settlements and renewals of one lane run at the same time. Settlements and renewals both
//! move the lane's row, and an operator's changes lock it.

use std::time::Duration;

use postbox_core::{
    Admin as _, Append as _, BatchLimit, Change, Disposition, Entry, Filter, Inspect as _, Log as _, LogName,
    Maintain as _, Migrate as _, NewEvent, OwnerId, Routed, Selection, Settlement, Store as _, Subscription,
    SubscriptionName,
};
use postbox_postgres::PostgresConfig;
use postbox_testkit::servers::{Postgres, Version};

use crate::support;

const EVENTS: usize = 3_000;
const TTL: Duration = Duration::from_secs(600);

/// The lane's row is looked up at its last known place. Not to find it there does not mean a lost
/// lease, however often other calls moved it meanwhile.
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
        Subscription { lanes: 1, filter, ..Subscription::new(name.clone(), LogName::outbox()) }
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

    // The lookup needs the log, which is locked here, so it waits.
    let holder = support::client(&url).await;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.outbox IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let (of_name, asking) = (name.clone(), store.clone());
    let change = tokio::spawn(async move { asking.change(&of_name, &Change::Retry, &Selection::default()).await });
    support::until_waited_for(&holder).await;
    tokio::time::timeout(Duration::from_secs(5), store.renew(&lease, TTL)).await.expect("not locked").expect("renewed");
    assert!(!change.is_finished());
    holder.batch_execute("COMMIT").await.expect("released");
    assert_eq!(change.await.expect("no panic").expect("replayed").count, 1);
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

/// Relays wait for a lock on every connection of their pool. An operator's query is answered all
/// the same.
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
