//! Shared by this crate's tests: a migrated store in its own database, and a producer's
//! transaction.

#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses its part")]

mod faults;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Appended, Apply, Delivery, Lease, Log as _, LogName, Migrate as _, NewEvent, Outcome, OwnerId, Postbox, Result,
    SourceName, Store, Subscription, SubscriptionName,
};
use postbox_engine::RelayBuilder;
use postbox_postgres::{PostgresConfig, PostgresStore, Roles, TxHandler};
use postbox_router::{Event, Router, State, Tx};
use postbox_testkit::conformance::faults::CallFaults;
use postbox_testkit::conformance::transact::{Entry, Fault, Healed, NotBroken, RouterFixture, WRITTEN, sql_of};
use postbox_testkit::conformance::{
    ApplyFixture, OpenTransaction, StoreCapabilities, StoreFixture, forbidden_transitions,
};
use postbox_testkit::servers::{PgBouncer, Postgres, Version};
use tokio::sync::OnceCell;
use tokio_postgres::{Client, Transaction};

use self::faults::PostgresFaults;

/// Far longer than any call takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The role of the store under test. It has the rights that are printed for a writer and a relay.
/// It may set the role `pg_checkpoint`, which has no rights on the store.
pub const WORKER: &str = "suite_worker";

/// Makes the worker. All databases of a server share it, and several processes may make it at once.
const MAKE_WORKER: &str = "
DO $$ BEGIN
  CREATE ROLE suite_worker LOGIN IN ROLE pg_checkpoint;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$";

/// Whether a role may do more than it was granted.
const IS_UNBOUND: &str = "
SELECT r.rolsuper OR r.rolbypassrls OR pg_has_role(r.oid, n.nspowner, 'MEMBER')
FROM pg_roles AS r, pg_namespace AS n WHERE r.rolname = current_user AND n.nspname = 'postbox'";

/// A fresh database with a migrated store in it.
pub struct Fixture {
    /// It works as [`WORKER`].
    pub store: PostgresStore,
    /// The server itself as a superuser, who is the owner, for producers and checks.
    pub url: String,
    pub server: Postgres,
    /// What the store connects to: the server or the pooler.
    pub front: String,
    /// The same for the owner.
    owner_front: String,
    owner: OnceLock<PostgresStore>,
    faults: OnceCell<Arc<PostgresFaults>>,
    _pooler: Option<PgBouncer>,
}

/// A fixture on a server of that version.
pub async fn on(version: Version) -> Fixture {
    let server = Postgres::shared(version).await;
    let url = server.prepared_database(prepare).await;
    Fixture::new(server, url.clone(), url, None).await
}

/// A fixture whose store reaches Postgres 15 through pgbouncer in transaction mode.
pub async fn pooled() -> Fixture {
    let server = Postgres::shared(Version::V15).await;
    let url = server.prepared_database(prepare).await;
    let pooler = PgBouncer::start_for(&server, &[WORKER]).await;
    let fixture = Fixture::new(server, url.clone(), pooler.url(&url), Some(pooler)).await;
    assert_bound(&fixture.front).await;
    fixture
}

/// With long timeouts: on a busy machine a connection may take long, and these tests do not measure
/// that.
fn patient(config: PostgresConfig) -> PostgresConfig {
    PostgresConfig { connect_timeout: PATIENCE, pool_timeout: PATIENCE, ..config }
}

async fn connected(config: PostgresConfig) -> PostgresStore {
    PostgresStore::connect(patient(config)).await.expect("a store")
}

/// The same database as another role.
pub fn url_as(url: &str, role: &str) -> String {
    let (scheme, rest) = url.split_once("://").expect("a url");
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    format!("{scheme}://{role}@{host}")
}

/// Gives the worker its rights on every log, as the guide tells the owner to.
async fn grant(owner: &PostgresStore, client: &Client) {
    let roles = Roles { writers: vec![WORKER.into()], relays: vec![WORKER.into()], ..Roles::default() };
    let grants = owner.grants(&roles).await.expect("printed");
    client.batch_execute(&grants).await.expect(&grants);
}

/// Checks that the role of this URL is limited by rights.
async fn assert_bound(url: &str) {
    let role = client(url).await.query_typed(IS_UNBOUND, &[]).await.expect("asked");
    assert!(!role[0].get::<_, bool>(0), "the worker may do more than it was granted");
}

/// Returns the SQL of the block of `docs/guide/roles.md` that contains this text.
pub fn sql_of_roles(text: &str) -> &'static str {
    let guide = include_str!("../../../../docs/guide/roles.md");
    let block = guide.split("```").find(|block| block.contains(text));
    block.and_then(|block| block.strip_prefix("sql\n")).expect("a block of SQL")
}

/// Connects and migrates.
pub async fn migrated(config: PostgresConfig) -> PostgresStore {
    let store = connected(config).await;
    store.up().await.expect("migrated");
    store
}

/// Creates the store's schema, a table for effects, the worker with its rights, and a trigger that
/// fails every write that the state machine forbids. A row may be deleted together with its
/// subscription, or where a reset lets its lane read the event again.
async fn prepare(url: String) {
    let (owner, client) = (migrated(PostgresConfig::new(&url)).await, client(&url).await);
    client.batch_execute(MAKE_WORKER).await.expect("a role");
    grant(&owner, &client).await;
    assert_bound(&url_as(&url, WORKER)).await;
    let forbidden = forbidden_transitions();
    let sql = format!(
        "CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, payload text NOT NULL);
         GRANT SELECT, INSERT ON effect TO {WORKER};
         CREATE FUNCTION check_transition() RETURNS trigger LANGUAGE plpgsql AS $$
         DECLARE next text := CASE WHEN TG_OP = 'DELETE' THEN 'dispatched' ELSE NEW.state END;
         BEGIN
           IF (OLD.state, next) IN ({forbidden}) AND NOT (TG_OP = 'DELETE' AND (
             NOT EXISTS (SELECT FROM postbox.subscription AS s WHERE s.id = OLD.subscription)
             OR EXISTS (SELECT FROM postbox.lane AS n JOIN postbox.outbox AS l ON l.seq = OLD.seq
               WHERE n.subscription = OLD.subscription AND n.lane = OLD.lane AND NOT pg_visible_in_snapshot(l.xid, n.from_snap)
                 AND (NOT pg_visible_in_snapshot(l.xid, n.to_snap) OR l.seq > n.last_seq)))) THEN
             RAISE EXCEPTION 'forbidden transition of % from % to %', OLD.seq, OLD.state, next;
           END IF;
           RETURN NULL;
         END $$;
         CREATE TRIGGER check_transition AFTER UPDATE OR DELETE ON postbox.delivery
           FOR EACH ROW EXECUTE FUNCTION check_transition()"
    );
    client.batch_execute(&sql).await.expect("prepared");
}

/// A connection for producers and checks.
pub async fn client(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("a connection");
    tokio::spawn(connection);
    client
}

/// Subscribes to the outbox with one lane. Returns its lease, which outlasts every test.
pub async fn leased(store: &PostgresStore, name: &str) -> Lease {
    let name = SubscriptionName::new(name).expect("a name");
    let subscription = Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) };
    store.subscribe(&subscription).await.expect("subscribed");
    let owner = OwnerId::new("me").expect("a name");
    let acquired = store.acquire(&name, &owner, &[], Duration::from_secs(3_600)).await.expect("acquired");
    acquired.lease.expect("a free lane")
}

/// Waits until a store listens for notifications in the database of this connection.
pub async fn until_listening(client: &Client) {
    let listening = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND state = 'idle' AND query LIKE 'LISTEN %'";
    let wait = async {
        while client.query_one(listening, &[]).await.expect("asked").get::<_, i64>(0) == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("never listened");
}

/// Waits until a session waits for a lock that this connection holds.
pub async fn until_waited_for(holder: &Client) {
    let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))";
    let wait = async {
        while holder.query_one(waiting, &[]).await.expect("asked").get::<_, i64>(0) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("nobody came to the lock");
}

/// A pooler gives a connection to another client a moment later, so no test may leave anything
/// behind in one.
impl Drop for Fixture {
    fn drop(&mut self) {
        if self._pooler.is_none() || std::thread::panicking() {
            return;
        }
        let fronts = [Some(&self.front), self.owner.get().map(|_| &self.owner_front)];
        let fronts: Vec<String> = fronts.into_iter().flatten().cloned().collect();
        let probe = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let mut left = Vec::new();
                for front in &fronts {
                    left.extend(left_in_sessions(front).await);
                }
                left
            })
        });
        let left = probe.join().expect("probed");
        assert!(left.is_empty(), "state of a session stays behind the pooler: {left:?}");
    }
}

/// Returns what was left in the sessions of the pooler's connections.
async fn left_in_sessions(front: &str) -> Vec<String> {
    // The settings that the pooler sets for each client.
    const PROBE: &str = "
        SELECT 'lock ' || objid FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'
        UNION ALL SELECT 'statement ' || statement FROM pg_prepared_statements
        UNION ALL SELECT 'channel ' || name FROM pg_listening_channels() AS name
        UNION ALL SELECT 'temporary schema' WHERE pg_my_temp_schema() <> 0
        UNION ALL SELECT 'setting ' || name || ' = ' || setting FROM pg_settings WHERE source = 'session' AND name NOT IN
          ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'standard_conforming_strings')";
    let (mut open, mut left) = (Vec::new(), Vec::new());
    // Opens as many transactions as the pooler has connections, so that each uses another one.
    for _ in 0..PgBouncer::CONNECTIONS {
        let client = client(front).await;
        let begin = tokio::time::timeout(Duration::from_secs(2), client.batch_execute("BEGIN")).await;
        // A connection that a test left hanging cannot be had.
        if matches!(begin, Ok(Ok(()))) {
            let rows = client.simple_query(PROBE).await.expect("probed");
            left.extend(rows.iter().filter_map(|row| match row {
                tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
                _ => None,
            }));
        }
        open.push(client);
    }
    left
}

impl Fixture {
    async fn new(server: Postgres, url: String, owner_front: String, pooler: Option<PgBouncer>) -> Self {
        let front = url_as(&owner_front, WORKER);
        let store = connected(PostgresConfig::new(&front)).await;
        let (owner, faults) = (OnceLock::new(), OnceCell::new());
        Self { store, url, server, front, owner_front, owner, faults, _pooler: pooler }
    }

    pub async fn client(&self) -> Client {
        client(&self.url).await
    }

    /// The same store as the owner of the schema, for what only the owner may do.
    pub fn by_owner(&self) -> &PostgresStore {
        let connect = || PostgresStore::new(patient(PostgresConfig::new(&self.owner_front))).expect("a store");
        self.owner.get_or_init(connect)
    }

    pub async fn harm(&self) -> Arc<PostgresFaults> {
        let make = async || Arc::new(PostgresFaults::new(&self.front, &self.owner_front, &self.url).await);
        self.faults.get_or_init(make).await.clone()
    }
}

#[async_trait]
impl StoreFixture for Fixture {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn owner(&self) -> Arc<dyn Store> {
        Arc::new(self.by_owner().clone())
    }

    async fn grant(&self) {
        grant(self.by_owner(), &self.client().await).await;
    }

    fn capabilities(&self) -> StoreCapabilities {
        StoreCapabilities { concurrent_transactions: true }
    }

    async fn faults(&self) -> Arc<dyn CallFaults> {
        self.harm().await
    }

    async fn begin(&self) -> Box<dyn OpenTransaction> {
        let client = client(&url_as(&self.url, WORKER)).await;
        // Takes an id at once, so that the transaction's place among the others is fixed before it
        // writes.
        client.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.expect("begun");
        Box::new(Open { client, postbox: self.store.postbox() })
    }

    async fn conflicts(&self) -> u64 {
        let client = self.client().await;
        let row = client.query_one("SELECT count(*) FROM postbox.conflict", &[]).await.expect("counted");
        row.get::<_, i64>(0).unsigned_abs()
    }
}

struct Open {
    client: Client,
    postbox: Postbox<postbox_postgres::Postgres>,
}

impl Open {
    async fn run(&self, sql: &str) {
        self.client.batch_execute(sql).await.expect(sql);
    }
}

#[async_trait]
impl OpenTransaction for Open {
    async fn append(&mut self, log: &LogName, events: &[NewEvent]) -> Result<Appended> {
        // The driver's transaction type borrows its client. This one only stands for the
        // transaction that is already open (the server warns about the second BEGIN and goes on),
        // and must not roll it back.
        let mut tx = self.client.transaction().await.expect("the open transaction");
        let appended = self.postbox.clone().log(log.clone()).append(&mut tx, events).await;
        std::mem::forget(tx);
        appended
    }

    async fn once(&mut self, source: &SourceName, message_id: &str) -> Result<bool> {
        // A stand-in, as in `append`.
        let tx = self.client.transaction().await.expect("the open transaction");
        let asked = postbox_postgres::once_in(&tx, &Default::default(), source, message_id).await;
        std::mem::forget(tx);
        asked
    }

    async fn savepoint(&mut self) {
        self.run("SAVEPOINT here").await;
    }

    async fn rollback_to_savepoint(&mut self) {
        self.run("ROLLBACK TO SAVEPOINT here; RELEASE SAVEPOINT here").await;
    }

    async fn commit(self: Box<Self>) {
        self.run("COMMIT").await;
    }

    async fn rollback(self: Box<Self>) {
        self.run("ROLLBACK").await;
    }
}

#[async_trait]
impl ApplyFixture for Fixture {
    fn apply(&self) -> Arc<dyn Apply> {
        self.store.apply(Effects)
    }

    async fn harmed(&self) -> [Arc<dyn Apply>; 2] {
        let harm = self.harm().await;
        [harm.postgres().apply(Effects), harm.postgres().apply(Effects)]
    }

    async fn effects(&self) -> Vec<String> {
        let rows = self.client().await.query("SELECT payload FROM effect ORDER BY n", &[]).await.expect("read");
        rows.iter().map(|row| row.get(0)).collect()
    }
}

impl RouterFixture for Fixture {
    fn route(&self, relay: RelayBuilder, healed: Healed) -> Result<RelayBuilder> {
        let never = |fault: &Fault| matches!(fault, Fault::Never);
        let router = Router::in_transaction(&self.store).on(first).on(second).dead_on(never);
        relay.router(router.schemas(Arc::new(NotBroken)).with_state(healed))
    }
}

async fn first(
    Event(Entry { entry }): Event<Entry>,
    State(healed): State<Healed>,
    Tx(mut tx): Tx<'_, PostgresStore>,
) -> std::result::Result<(), Fault> {
    write(tx, &entry).await;
    let postbox = Postbox::new(postbox_postgres::Postgres::default());
    postbox.append(&mut tx, NewEvent::json(WRITTEN, entry.clone())).await.expect("appended");
    healed.end("first", &entry)
}

async fn second(
    State(healed): State<Healed>,
    Event(Entry { entry }): Event<Entry>,
    Tx(tx): Tx<'_, PostgresStore>,
) -> std::result::Result<(), Fault> {
    write(tx, &format!("{entry}+")).await;
    if let Some(sql) = sql_of(&entry) {
        tx.batch_execute(sql).await.expect("ended");
    }
    healed.end("second", &entry)
}

async fn write(tx: &Transaction<'_>, effect: &str) {
    let sql = "INSERT INTO effect (payload) VALUES ($1)";
    tx.execute_typed(sql, &[(&effect, tokio_postgres::types::Type::TEXT)]).await.expect("the effect is written");
}

/// Records the payload, then does what the payload says.
struct Effects;

#[async_trait]
impl TxHandler for Effects {
    async fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery) -> Outcome {
        let payload = String::from_utf8_lossy(&delivery.event.payload).into_owned();
        write(tx, &payload).await;
        match payload.as_str() {
            "retry" => Outcome::retry("later", "not now"),
            "dead" => Outcome::dead("never", "not ever"),
            "panic" => panic!("as asked"),
            _ => Outcome::DELIVERED,
        }
    }
}
