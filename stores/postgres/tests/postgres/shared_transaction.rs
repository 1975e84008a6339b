//! What a handler leaves behind in the transaction that it shares with others.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::{Manager, Pool};
use postbox_core::{
    Append as _, Apply, BatchLimit, Delivery, Disposition, Lease, Log as _, LogName, NewEvent, Outcome, Result,
    Settlement,
};
use postbox_engine::RelaySettings;
use postbox_postgres::{PostgresConfig, PostgresStore, SchemaName, TxHandler};
use postbox_testkit::conformance::ApplyFixture as _;
use postbox_testkit::servers::Version;
use tokio::time::timeout;
use tokio_postgres::NoTls;

use crate::support::{self, Fixture};

/// Applies an event for each payload, in one transaction.
async fn apply_all(
    fixture: &Fixture,
    apply: Arc<dyn Apply>,
    payloads: [&'static str; 3],
) -> Result<Vec<Option<Outcome>>> {
    let store = &fixture.store;
    let lease = support::leased(store, "s").await;
    let events = payloads.map(|payload| NewEvent::new("t", payload, "text/plain"));
    store.append(&LogName::outbox(), &events).await.expect("appended");
    let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    let deliveries: Vec<&Delivery> = batch.deliveries.iter().collect();
    let decide = |_: &Delivery, outcome: &Outcome| match outcome {
        Outcome::Delivered { .. } => Disposition::Delivered,
        _ => Disposition::Dead { code: "handler".into(), error: String::new(), halt: false, took: None },
    };
    let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
    apply.apply(&lease, &deliveries, settlement, &decide).await
}

/// The same. Returns whether each was delivered.
async fn applied(fixture: &Fixture, apply: Arc<dyn Apply>, payloads: [&'static str; 3]) -> Vec<bool> {
    let outcomes = apply_all(fixture, apply, payloads).await.expect("committed");
    outcomes.iter().map(|it| it.as_ref().is_some_and(Outcome::is_delivered)).collect()
}

#[tokio::test]
async fn a_deferred_constraint_fails_its_own_handler_only() {
    let fixture = support::on(Version::V15).await;
    let unique = "ALTER TABLE effect ADD UNIQUE (payload) DEFERRABLE INITIALLY DEFERRED";
    fixture.client().await.batch_execute(unique).await.expect("a deferred constraint");
    assert_eq!(applied(&fixture, fixture.apply(), ["a", "a", "b"]).await, [true, false, true]);
    assert_eq!(fixture.effects().await, ["a", "b"]);
}

/// Its lane is not there, which would look like a lost lease.
#[tokio::test]
async fn handlers_of_another_store_are_named() {
    let (fixture, other) = (support::on(Version::V15).await, support::on(Version::V15).await);
    let lease = support::leased(&fixture.store, "s").await;
    let decide = |_: &Delivery, _: &Outcome| Disposition::Delivered;
    let error = other.apply().apply(&lease, &[], Settlement::default(), &decide).await.expect_err("it is elsewhere");
    assert_eq!(error.code(), "handlers_of_another_store");
}

/// It finds the lane, but does not know the window that was read, for ever.
#[tokio::test]
async fn handlers_of_a_second_handle_are_named() {
    let fixture = support::on(Version::V15).await;
    let other = PostgresStore::connect(PostgresConfig::new(&fixture.front)).await.expect("a store");
    let error = apply_all(&fixture, other.apply(Sets), ["a", "b", "c"]).await.expect_err("it read nothing");
    assert_eq!(error.code(), "handlers_of_another_store");
}

/// Sets a role without any rights here, and a path without its table.
struct Sets;

#[async_trait]
impl TxHandler for Sets {
    async fn handle(&self, tx: &tokio_postgres::Transaction<'_>, delivery: &Delivery) -> Outcome {
        let payload = String::from_utf8_lossy(&delivery.event.payload);
        let written = tx.execute("INSERT INTO effect (payload) VALUES ($1)", &[&payload]).await;
        let set = tx.batch_execute("SET LOCAL ROLE pg_checkpoint; SET LOCAL search_path = pg_catalog").await;
        if written.is_ok() && set.is_ok() {
            Outcome::DELIVERED
        } else {
            Outcome::retry("refused", "a statement failed")
        }
    }
}

/// A setting outlives the handler's savepoint, so it would apply to others and to the settlement.
#[tokio::test]
async fn the_role_and_path_that_a_handler_sets_end_with_it() {
    let fixture = support::on(Version::V15).await;
    let apply = fixture.store.apply(Sets);
    assert_eq!(applied(&fixture, apply, ["a", "b", "c"]).await, [true; 3]);
    assert_eq!(fixture.effects().await, ["a", "b", "c"]);
}

/// Does the same for the whole session.
struct SetsForGood;

#[async_trait]
impl TxHandler for SetsForGood {
    async fn handle(&self, tx: &tokio_postgres::Transaction<'_>, delivery: &Delivery) -> Outcome {
        let payload = String::from_utf8_lossy(&delivery.event.payload);
        tx.execute("INSERT INTO effect (payload) VALUES ($1)", &[&payload]).await.expect("written");
        tx.batch_execute("SET ROLE pg_checkpoint; SET search_path = pg_catalog").await.expect("set");
        Outcome::DELIVERED
    }
}

/// The pool's only connection would give the role to the next call.
#[tokio::test]
async fn what_a_handler_sets_for_the_session_reaches_no_later_call() {
    let mut fixture = support::on(Version::V15).await;
    let config = PostgresConfig { pool_size: 1, ..PostgresConfig::new(&fixture.front) };
    fixture.store = PostgresStore::connect(config).await.expect("a store");
    for _ in 0..2 {
        let apply = fixture.store.apply(SetsForGood);
        assert_eq!(applied(&fixture, apply, ["a", "b", "c"]).await, [true; 3]);
    }
    assert_eq!(fixture.effects().await, ["a", "b", "c", "a", "b", "c"]);
}

struct Commits;

#[async_trait]
impl TxHandler for Commits {
    async fn handle(&self, tx: &tokio_postgres::Transaction<'_>, _: &Delivery) -> Outcome {
        tx.batch_execute("COMMIT").await.expect("committed");
        Outcome::DELIVERED
    }
}

/// The handler has the store's only connection.
#[tokio::test]
async fn a_commit_that_the_store_cannot_ask_about_is_not_known() {
    let mut fixture = support::on(Version::V15).await;
    let mut config = PostgresConfig::new(&fixture.front);
    (config.pool_size, config.pool_timeout) = (1, Duration::from_millis(50));
    fixture.store = PostgresStore::connect(config).await.expect("a store");
    let apply = fixture.store.apply(Commits);
    let error = apply_all(&fixture, apply, ["a", "b", "c"]).await.expect_err("nothing is settled");
    assert_eq!(error.code(), "handler_ended_transaction");
    assert!(error.message().contains("not known whether it was committed"), "{error}");
}

/// A store on a pool of one connection, which waits for it for ever.
fn on_one_connection(fixture: &Fixture) -> (PostgresStore, Pool) {
    let manager = Manager::new(fixture.front.parse().expect("a URL"), NoTls);
    let pool = Pool::builder(manager).max_size(1).build().expect("a pool");
    (PostgresStore::from_pool(pool.clone(), SchemaName::default()), pool)
}

#[tokio::test]
async fn a_pool_of_yours_without_a_free_connection_says_so() {
    let fixture = support::on(Version::V15).await;
    let lease = support::leased(&fixture.store, "s").await;
    let (store, pool) = on_one_connection(&fixture);
    let (apply, decide) = (store.apply(Sets), |_: &Delivery, _: &Outcome| Disposition::Delivered);
    let taken = pool.get().await.expect("connected");
    let applied = apply.apply(&lease, &[], Settlement::default(), &decide);
    let applied = timeout(RelaySettings::default().deliver_timeout, applied).await;
    let error = applied.expect("the event would have to answer for it").expect_err("no connection");
    assert_eq!(error.code(), "pool_exhausted");
    drop(taken);
    apply.apply(&lease, &[], Settlement::default(), &decide).await.expect("applied");
}

/// Later, the event would be retried for its time, and do again what it committed.
#[tokio::test]
async fn a_commit_that_a_full_pool_of_yours_cannot_ask_about_is_noticed_in_time() {
    let mut fixture = support::on(Version::V15).await;
    (fixture.store, _) = on_one_connection(&fixture);
    let applied = apply_all(&fixture, fixture.store.apply(Commits), ["a", "b", "c"]);
    let applied = timeout(RelaySettings::default().deliver_timeout, applied).await;
    assert_eq!(applied.expect("in time").expect_err("nothing is settled").code(), "handler_ended_transaction");
}

/// Renews a lease while it holds its connection.
struct Renews(PostgresStore, Lease);

#[async_trait]
impl TxHandler for Renews {
    async fn handle(&self, _: &tokio_postgres::Transaction<'_>, _: &Delivery) -> Outcome {
        self.0.renew(&self.1, Duration::from_secs(60)).await.expect("renewed");
        Outcome::DELIVERED
    }
}

#[tokio::test]
async fn handlers_that_hold_every_connection_cost_no_lease() {
    let mut fixture = support::on(Version::V15).await;
    let mut config = PostgresConfig::new(&fixture.front);
    (config.pool_size, config.pool_timeout) = (1, Duration::from_millis(50));
    fixture.store = PostgresStore::connect(config).await.expect("a store");
    let lease = support::leased(&fixture.store, "other").await;
    let renews = fixture.store.apply(Renews(fixture.store.clone(), lease));
    assert_eq!(applied(&fixture, renews, ["a", "b", "c"]).await, [true; 3]);
}
