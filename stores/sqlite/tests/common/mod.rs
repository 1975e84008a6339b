//! A migrated store in its own file.

#![allow(dead_code, reason = "each test binary uses its own part")]

mod faults;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Appended, Apply, Batch, BatchLimit, Delivery, Filter, Lease, Log, LogName, Migrate, NewEvent, Outcome, OwnerId,
    Postbox, Settlement, SourceName, Store, Subscription, SubscriptionName,
};
use postbox_engine::RelayBuilder;
use postbox_router::{Event, Router, State, Tx};
use postbox_sqlite::{Sqlite, SqliteConfig, SqliteStore, once_in};
use postbox_testkit::conformance::faults::CallFaults;
use postbox_testkit::conformance::transact::{Entry, Fault, Healed, NotBroken, RouterFixture, WRITTEN, sql_of};
use postbox_testkit::conformance::{
    ApplyFixture, OpenTransaction, StoreCapabilities, StoreFixture, forbidden_transitions,
};
use rusqlite::Connection;
use tempfile::TempDir;
use tokio::sync::OnceCell;

use self::faults::SqliteFaults;

/// Longer than any test runs; nothing is expected to end within it.
pub(crate) const LONG: Duration = Duration::from_secs(600);

/// How long a call waits for a lock: on a busy disk a flush may take long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The default settings, except for the busy timeout.
pub(crate) fn config(path: impl Into<PathBuf>) -> SqliteConfig {
    SqliteConfig { busy_timeout: PATIENCE, ..SqliteConfig::new(path) }
}

pub(crate) struct Fixture {
    folder: TempDir,
    pub(crate) store: SqliteStore,
    faults: OnceCell<Arc<SqliteFaults>>,
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = SqliteStore::open(config(folder.path().join("shop.db"))).await.expect("opened");
        store.up().await.expect("migrated");
        let fixture = Self { folder, store, faults: OnceCell::new() };
        fixture.guard_transitions();
        fixture
    }

    /// Adds triggers that fail every write that the state machine forbids. `INSERT OR REPLACE`
    /// deletes without firing one. A row may be deleted together with its subscription, or where a
    /// reset lets its lane read the event again.
    fn guard_transitions(&self) {
        let forbidden = forbidden_transitions();
        let refuse = "SELECT RAISE(ABORT, 'forbidden transition')";
        let sql = format!(
            "CREATE TRIGGER check_update AFTER UPDATE ON postbox_delivery
               WHEN (OLD.state, NEW.state) IN (VALUES {forbidden}) BEGIN {refuse}; END;
             CREATE TRIGGER check_delete AFTER DELETE ON postbox_delivery
               WHEN (OLD.state, 'dispatched') IN (VALUES {forbidden})
                 AND EXISTS (SELECT 1 FROM postbox_subscription AS s WHERE s.name = OLD.subscription)
                 AND NOT EXISTS (SELECT 1 FROM postbox_lane AS n
                   WHERE n.subscription = OLD.subscription AND n.lane = OLD.lane AND OLD.seq > n.position) BEGIN {refuse}; END;
             CREATE TRIGGER check_insert BEFORE INSERT ON postbox_delivery
               WHEN EXISTS (SELECT 1 FROM postbox_delivery AS d WHERE d.subscription = NEW.subscription
                 AND d.seq = NEW.seq AND (d.state, NEW.state) IN (VALUES {forbidden})) BEGIN {refuse}; END;"
        );
        self.connect().execute_batch(&sql).expect("triggers");
    }

    async fn harm(&self) -> Arc<SqliteFaults> {
        let make = async || Arc::new(SqliteFaults::new(config(self.path()), self.store.clone()).await);
        self.faults.get_or_init(make).await.clone()
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("shop.db")
    }

    /// A connection of a program that does not use this crate.
    pub(crate) fn connect(&self) -> Connection {
        let connection = Connection::open(self.path()).expect("opened");
        connection.busy_timeout(PATIENCE).expect("set");
        connection
    }

    /// Subscribes `reader` to the outbox and takes its lane.
    pub(crate) async fn lane(&self) -> Lease {
        self.lane_for(Filter::default()).await
    }

    /// [`Self::lane`] of a subscription with a filter.
    pub(crate) async fn lane_for(&self, filter: Filter) -> Lease {
        let name = SubscriptionName::new("reader").expect("valid");
        let subscription =
            Subscription { filter, lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) };
        self.store.subscribe(&subscription).await.expect("subscribed");
        let owner = OwnerId::new("test").expect("valid");
        self.store.acquire(&name, &owner, &[], LONG).await.expect("asked").lease.expect("free")
    }

    pub(crate) async fn next(&self, lease: &Lease) -> Batch {
        self.store.next_batch(lease, BatchLimit::default()).await.expect("read")
    }

    pub(crate) async fn settle(&self, lease: &Lease, batch: &Batch) {
        let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
        self.store.settle(lease, settlement).await.expect("settled");
    }
}

pub(crate) async fn fixture() -> Fixture {
    Fixture::new().await
}

#[async_trait]
impl StoreFixture for Fixture {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn capabilities(&self) -> StoreCapabilities {
        StoreCapabilities { concurrent_transactions: false }
    }

    async fn faults(&self) -> Arc<dyn CallFaults> {
        self.harm().await
    }

    async fn begin(&self) -> Box<dyn OpenTransaction> {
        let connection = self.connect();
        tokio::task::block_in_place(|| connection.execute_batch("BEGIN IMMEDIATE")).expect("the lock is free in time");
        Box::new(Open(connection))
    }

    async fn conflicts(&self) -> u64 {
        let count: i64 =
            self.connect().query_row("SELECT count(*) FROM postbox_conflict", [], |row| row.get(0)).expect("counted");
        count.unsigned_abs()
    }
}

#[async_trait]
impl ApplyFixture for Fixture {
    fn apply(&self) -> Arc<dyn Apply> {
        self.connect().execute_batch("CREATE TABLE IF NOT EXISTS effects (payload TEXT NOT NULL)").expect("made");
        self.store.apply(effect)
    }

    async fn harmed(&self) -> [Arc<dyn Apply>; 2] {
        let again = ApplyFixture::apply(self);
        [self.harm().await.sqlite().apply(effect), again]
    }

    async fn effects(&self) -> Vec<String> {
        let connection = self.connect();
        let mut statement = connection.prepare("SELECT payload FROM effects ORDER BY rowid").expect("prepared");
        statement.query_map([], |row| row.get(0)).expect("read").collect::<Result<_, _>>().expect("text")
    }
}

impl RouterFixture for Fixture {
    fn route(&self, relay: RelayBuilder, healed: Healed) -> postbox_core::Result<RelayBuilder> {
        ApplyFixture::apply(self); // Creates the table.
        let never = |fault: &Fault| matches!(fault, Fault::Never);
        let router = Router::in_transaction(&self.store).on(first).on(second).dead_on(never);
        relay.router(router.schemas(Arc::new(NotBroken)).with_state(healed))
    }

    fn refuses_commit(&self) -> bool {
        true
    }
}

const EFFECT: &str = "INSERT INTO effects (payload) VALUES (?1)";

fn first(
    Event(Entry { entry }): Event<Entry>,
    State(healed): State<Healed>,
    Tx(mut tx): Tx<'_, SqliteStore>,
) -> Result<(), Fault> {
    tx.execute(EFFECT, [&entry]).expect("written");
    Postbox::new(Sqlite).append(&mut tx, NewEvent::json(WRITTEN, entry.clone())).expect("appended");
    healed.end("first", &entry)
}

fn second(State(healed): State<Healed>, event: Event<Entry>, Tx(tx): Tx<'_, SqliteStore>) -> Result<(), Fault> {
    let Event(Entry { entry }) = event;
    tx.execute(EFFECT, [format!("{entry}+")]).expect("written");
    if let Some(sql) = sql_of(&entry) {
        tx.execute_batch(sql).expect("ended");
    }
    healed.end("second", &entry)
}

/// Records the payload, and only then returns its outcome.
fn effect(tx: &rusqlite::Transaction<'_>, delivery: &Delivery) -> Outcome {
    let payload = String::from_utf8_lossy(&delivery.event.payload).into_owned();
    tx.execute("INSERT INTO effects (payload) VALUES (?1)", [&payload]).expect("written");
    match payload.as_str() {
        "retry" => Outcome::retry("not_now", "later"),
        "dead" => Outcome::dead("never", "no"),
        "panic" => panic!("as asked"),
        _ => Outcome::DELIVERED,
    }
}

/// A transaction on its own connection. Closing it rolls back.
struct Open(Connection);

#[async_trait]
impl OpenTransaction for Open {
    async fn append(&mut self, log: &LogName, events: &[NewEvent]) -> postbox_core::Result<Appended> {
        Postbox::new(Sqlite).log(log.clone()).append(&mut self.0, events)
    }

    async fn once(&mut self, source: &SourceName, message_id: &str) -> postbox_core::Result<bool> {
        once_in(&self.0, source, message_id)
    }

    async fn savepoint(&mut self) {
        self.0.execute_batch("SAVEPOINT mine").expect("set");
    }

    async fn rollback_to_savepoint(&mut self) {
        self.0.execute_batch("ROLLBACK TO mine; RELEASE mine").expect("rolled back");
    }

    async fn commit(self: Box<Self>) {
        self.0.execute_batch("COMMIT").expect("committed");
    }

    async fn rollback(self: Box<Self>) {
        self.0.execute_batch("ROLLBACK").expect("rolled back");
    }
}
