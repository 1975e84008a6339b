//! A borrowed connection and the transactions that run on it.
//!
//! Everything is scoped to a transaction, so that a pooler in transaction mode works. Settings are
//! `SET LOCAL`. The statements of one transaction are sent together, without waiting for answers
//! that later statements do not need.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use deadpool_postgres::{Object, PoolError, TimeoutType, Timeouts};
use postbox_core::{Error, ErrorKind, LogName, Result, Tenant};
use postbox_postgres_sql::{Param, SchemaName};
use tokio_postgres::{Client, Row};

use crate::PostgresStore;
use crate::classify::classify;
use crate::driver::in_time;

/// How much longer than the server's statement timeout a call may take before its connection is
/// given up. It covers round trips, which take far less.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the server keeps a transaction open that sends no next statement: far longer than a
/// round trip, shorter than any lease. Otherwise a host that vanishes during a settlement would
/// hold the lane's lock and prevent a take-over.
const IDLE_IN_TRANSACTION: Duration = Duration::from_secs(3);

/// The longest that a relay's statement waits for a lock. While it waits for a table, it may hold
/// the row of a lane or of the replica, and a renewal waits for one after the other: together that
/// must be less than half of the default lease. Renewals are not limited: the engine gives them up
/// in time, and the doctor sees who keeps them waiting.
const RELAY_LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest that a read waits for a lock: an operator wants to be shown the lock, and soon.
const LOOK_LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest that a count may take. Each normally takes milliseconds.
const COUNT_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection, borrowed for one operation.
///
/// On drop it goes back to the pool, unless a transaction may be open on it or an answer is
/// outstanding. Otherwise a future dropped halfway would pass an open transaction, with its locks,
/// to the next borrower.
pub(crate) struct Session {
    object: Option<Object>,
    store: PostgresStore,
    operation: &'static str,
    /// The number of statements whose answer is outstanding.
    unanswered: AtomicUsize,
    in_transaction: AtomicBool,
}

impl Session {
    /// The client, for calls that have no method here.
    pub(crate) fn client(&self) -> &Client {
        self.object.as_ref().expect("only drop takes the connection")
    }

    /// The client, for a transaction that the driver begins. The connection goes back to the pool
    /// only if [`Self::ended`] is called.
    pub(crate) fn client_mut(&mut self) -> &mut Client {
        self.in_transaction.store(true, Ordering::Relaxed);
        self.object.as_mut().expect("only drop takes the connection")
    }

    /// Notes that no transaction is open any more.
    pub(crate) fn ended(&self) {
        self.in_transaction.store(false, Ordering::Relaxed);
    }

    /// Whether the store works for one tenant.
    pub(crate) fn is_of_one_tenant(&self) -> bool {
        self.store.inner.config.tenant.is_some()
    }

    /// The name of the operation that borrowed the connection.
    pub(crate) fn operation(&self) -> &'static str {
        self.operation
    }

    pub(crate) fn schema(&self) -> &SchemaName {
        self.store.schema()
    }

    /// Fills a template; see [`SchemaName::sql`].
    pub(crate) fn sql(&self, template: &str) -> String {
        self.schema().sql(template)
    }

    /// The same for a template that names a log.
    pub(crate) fn log_sql(&self, template: &str, log: &LogName) -> String {
        self.schema().log_sql(template, log)
    }

    /// Waits for the answer of a statement.
    pub(crate) async fn answer<T>(&self, answer: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T> {
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        let answer = answer.await;
        self.unanswered.fetch_sub(1, Ordering::Relaxed);
        answer.map_err(|error| {
            let error = classify(self.operation, &error);
            if error.code() == "store_read_only" {
                // As if never answered, so that a connection to a standby leaves the pool.
                self.unanswered.fetch_add(1, Ordering::Relaxed);
            }
            error
        })
    }

    /// Runs statements without parameters.
    pub(crate) async fn run(&self, sql: &str) -> Result<()> {
        self.answer(self.client().batch_execute(sql)).await
    }

    /// Runs a statement and returns its rows.
    pub(crate) async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.alone_or_within(self.client().query_typed(sql, params)).await
    }

    /// Runs a statement that returns one row.
    pub(crate) async fn row(&self, sql: &str, params: &[Param<'_>]) -> Result<Row> {
        self.alone_or_within(self.client().query_typed_one(sql, params)).await
    }

    /// Runs a statement and returns the number of rows it changed.
    pub(crate) async fn execute(&self, sql: &str, params: &[Param<'_>]) -> Result<u64> {
        self.alone_or_within(self.client().execute_typed(sql, params)).await
    }

    /// Waits for the answer of a statement. A statement outside of a transaction gets one that
    /// names the tenant first, if the store works for one.
    pub(crate) async fn alone_or_within<T>(
        &self,
        answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        match &self.store.inner.modes.alone {
            Some(begin) if !self.in_transaction.load(Ordering::Relaxed) => {
                let (begun, answered, committed) =
                    futures::join!(self.run(begin), self.answer(answer), self.run("COMMIT"));
                begun?;
                let answered = answered?;
                committed.map(|()| answered)
            }
            _ => self.answer(answer).await,
        }
    }

    /// Begins a transaction in one of the [`TransactionModes`].
    pub(crate) async fn begin(&self, mode: &str) -> Result<()> {
        self.in_transaction.store(true, Ordering::Relaxed);
        self.run(mode).await
    }

    /// Commits a transaction. After an error in it, Postgres rolls back instead.
    pub(crate) async fn commit(&self) -> Result<()> {
        self.run("COMMIT").await.map(|()| self.ended())
    }

    /// Runs a transaction that is sent as a whole. `work` sends statements that do not need each
    /// other's answers, and BEGIN and COMMIT are not waited for either. Returns the first error in
    /// the order sent.
    pub(crate) async fn at_once<T>(&self, mode: &str, work: impl AsyncFnOnce(&Self) -> Result<T>) -> Result<T> {
        let (begun, worked, committed) = futures::join!(self.begin(mode), work(self), self.commit());
        begun?;
        let worked = worked?;
        committed.map(|()| worked)
    }

    /// Runs a transaction step by step, and commits it if `work` succeeds.
    pub(crate) async fn step_by_step<T>(&self, mode: &str, work: impl AsyncFnOnce(&Self) -> Result<T>) -> Result<T> {
        self.begin(mode).await?;
        let worked = work(self).await;
        if worked.is_ok() {
            self.commit().await?;
        } else if self.run("ROLLBACK").await.is_ok() {
            self.ended();
        }
        worked
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if *self.in_transaction.get_mut() || *self.unanswered.get_mut() > 0 {
            // Taken out of the pool and closed, so that the server rolls back.
            drop(self.object.take().map(Object::take));
        }
    }
}

impl PostgresStore {
    /// Borrows a connection, within the pool's timeouts. A store for one tenant is refused on a
    /// role that policies do not limit.
    pub(crate) async fn session(&self, operation: &'static str) -> Result<Session> {
        self.limited(self.session_on_schema(operation).await?).await
    }

    /// The same for what concerns no rows of tenants. Whoever migrates or prints the policies is
    /// not limited by them.
    pub(crate) async fn session_on_schema(&self, operation: &'static str) -> Result<Session> {
        self.borrowed(operation, self.inner.pool.get().await)
    }

    /// The same for a transaction of handlers. The time that it takes counts against its events, so
    /// the wait is short, however long the caller's pool would wait.
    pub(crate) async fn session_for_handlers(&self) -> Result<Session> {
        let pool = &self.inner.pool;
        let got = in_time(pool.get()).await.unwrap_or_else(|| {
            let status = pool.status();
            let is_full = status.size >= status.max_size;
            Err(PoolError::Timeout(if is_full { TimeoutType::Wait } else { TimeoutType::Create }))
        });
        self.limited(self.borrowed("apply", got)?).await
    }

    /// The same for status queries.
    pub(crate) async fn look_session(&self, operation: &'static str) -> Result<Session> {
        self.limited(self.look_session_on_schema(operation).await?).await
    }

    async fn look_session_on_schema(&self, operation: &'static str) -> Result<Session> {
        self.borrowed(operation, self.inner.look_pool.get().await)
    }

    /// Borrows a connection to renew a lease, with the mode of its transaction. While handlers hold
    /// every connection of the pool, it is one of those for status queries: to wait for a handler
    /// could cost the lease.
    pub(crate) async fn renewal_session(&self, operation: &'static str) -> Result<(Session, &str)> {
        let (pool, modes) = (&self.inner.pool, &self.inner.modes);
        match pool.timeout_get(&Timeouts { wait: Some(Duration::ZERO), ..pool.timeouts() }).await {
            Err(PoolError::Timeout(TimeoutType::Wait)) => {
                Ok((self.look_session(operation).await?, modes.renew_beside.as_str()))
            }
            got => Ok((self.limited(self.borrowed(operation, got)?).await?, modes.write.as_str())),
        }
    }

    async fn limited(&self, session: Session) -> Result<Session> {
        self.require_limit(&session).await?;
        Ok(session)
    }

    fn borrowed(&self, operation: &'static str, got: Result<Object, PoolError>) -> Result<Session> {
        let unavailable = |code, message| Error::new(ErrorKind::Unavailable, operation, code, message);
        let object = got.map_err(|error| match error {
            PoolError::Backend(error) => self.not_connected(classify(operation, &error)),
            PoolError::Timeout(TimeoutType::Wait) => {
                let message = "no free database connection in time; raise the pool size or look for long calls";
                unavailable("pool_exhausted", message)
            }
            error => {
                let message = "the database did not answer in time; is it overloaded, or a firewall in between?";
                self.not_connected(unavailable("store_unreachable", message)).with_source(error)
            }
        })?;
        let (unanswered, in_transaction) = (AtomicUsize::new(0), AtomicBool::new(false));
        Ok(Session { object: Some(object), store: self.clone(), operation, unanswered, in_transaction })
    }

    /// Adds what each server said, and the address, to the error of a connection that could not be
    /// opened. Whatever follows the first semicolon is the cure.
    fn not_connected(&self, error: Error) -> Error {
        let Some(target) = &self.inner.target else { return error };
        let (said, address) = (target.servers.said(), target.address());
        let message = match error.message().split_once("; ") {
            Some((what, cure)) => format!("{what}{said}; {cure} ({address})"),
            None => format!("{}{said} ({address})", error.message()),
        };
        Error::new(error.kind(), error.operation(), error.code().to_owned(), message)
    }

    /// Runs a call on a connection, bounded in time.
    pub(crate) async fn call<T>(
        &self,
        operation: &'static str,
        work: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        self.bounded(operation, async { work(&self.session(operation).await?).await }).await
    }

    /// The same for status queries.
    pub(crate) async fn call_to_look<T>(
        &self,
        operation: &'static str,
        work: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        self.bounded(operation, async { work(&self.look_session(operation).await?).await }).await
    }

    /// Runs a call that concerns no rows of tenants.
    pub(crate) async fn call_on_schema<T>(
        &self,
        operation: &'static str,
        work: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        self.bounded(operation, async { work(&self.session_on_schema(operation).await?).await }).await
    }

    /// The same for status queries.
    pub(crate) async fn call_to_look_at_schema<T>(
        &self,
        operation: &'static str,
        work: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        self.bounded(operation, async { work(&self.look_session_on_schema(operation).await?).await }).await
    }

    /// Bounds a call in time, whatever the network does. The session is dropped with the call,
    /// which closes its connection.
    pub(crate) async fn bounded<T>(&self, operation: &'static str, call: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = self.inner.config.statement_timeout + self.inner.config.pool_timeout + PATIENCE;
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            let message = "the database did not answer in time; postbox doctor names the locks it may wait for";
            Err(Error::new(ErrorKind::Unavailable, operation, "store_timeout", message))
        })
    }
}

/// The plans that the planner must not choose; see [`TransactionModes::read`].
pub(crate) const PINNED: [&str; 7] = [
    "enable_seqscan",
    "enable_bitmapscan",
    "enable_hashjoin",
    "enable_mergejoin",
    "enable_sort",
    "enable_incremental_sort",
    "enable_material",
];

/// The statements that begin our transactions, built once per store. Each is sent as one message.
///
/// All of them set the search_path to Postgres's own schema. Otherwise an object planted in a
/// schema of the role's search_path would run with our rights. A statement outside of such a
/// transaction qualifies every name instead.
pub(crate) struct TransactionModes {
    /// For what a relay reads: the planner is pinned to nested loops over indexes.
    ///
    /// Without statistics the planner believes that a LIMIT is cheap to reach by a sequential scan,
    /// a hash join or a sort. Each of these reads the whole table (measured: 3 to 250 times
    /// slower). `enable_sort` makes rows come from the index in `seq` order.
    pub(crate) read: String,
    /// For writing: durable even if the role or database sets `synchronous_commit = off`, and never
    /// left open by a stopped process.
    pub(crate) write: String,
    /// For what a relay writes beside renewals: as `write`, with a limit to the wait for a lock.
    pub(crate) relay: String,
    /// For a renewal on a connection of the status queries: as `write`, but it never waits long for
    /// a lock, so that they are answered while relays wait for one.
    pub(crate) renew_beside: String,
    /// For a function of the relay that only reads and sets the planner options itself.
    pub(crate) look: String,
    /// For a function of the relay that writes and sets the planner options itself.
    pub(crate) call: String,
    /// For an operator's queries, which may scan a table. They never wait long for a lock.
    pub(crate) report: String,
    /// For a list of events by state: as a report, but pinned to nested loops over indexes. Without
    /// statistics, or far from the log's start, another plan reads the log up to the page.
    pub(crate) list: String,
    /// For a dry run, and a list that walks the log: as a report, but through indexes.
    pub(crate) dry_run: String,
    /// For counts, which are polled: never slow, whatever the reason.
    pub(crate) count: String,
    /// For an operator's changes: as durable as a relay's, without planner options.
    pub(crate) change: String,
    /// For a settlement that only moves the position: as `change`, with a relay's limit.
    pub(crate) settle: String,
    /// For a change that locks a table. Its lock timeout is short, because later sessions queue
    /// behind it.
    pub(crate) enable: String,
    /// For a step of retention. What it reads has indexes, and its lists fit into a hash table
    /// whatever the planner estimates.
    pub(crate) prune: String,
    /// Begins a transaction for a single statement, if it has to name a tenant.
    pub(crate) alone: Option<String>,
    /// Does not begin a transaction: what a transaction of handlers sets before it locks the lane.
    pub(crate) soon_over: String,
}

impl TransactionModes {
    pub(crate) fn new(statement_timeout: Duration, tenant: Option<&Tenant>) -> Self {
        let timeout_ms = statement_timeout.as_millis().clamp(1, i32::MAX as u128);
        let idle_ms = IDLE_IN_TRANSACTION.as_millis().min(timeout_ms);
        let soon_over = format!("SET LOCAL idle_in_transaction_session_timeout = {idle_ms}");
        let named = tenant.map(|tenant| {
            let escaped = tenant.as_str().replace('\\', "\\\\").replace('\'', "''");
            format!("; SET LOCAL postbox.tenant = E'{escaped}'")
        });
        let timeouts = |lock_ms: u128| {
            format!(
                "SET LOCAL statement_timeout = {timeout_ms}; {soon_over}; SET LOCAL lock_timeout = {lock_ms}; SET LOCAL search_path = pg_catalog{}",
                named.as_deref().unwrap_or_default()
            )
        };
        let (relay_ms, lock_ms) = (RELAY_LOCK_TIMEOUT.as_millis(), LOOK_LOCK_TIMEOUT.as_millis());
        let limited = timeouts(relay_ms);
        let common = |lock_ms: u128| format!("{}; SET LOCAL jit = off", timeouts(lock_ms));
        let (patient, of_relay, soon) = (common(0), common(relay_ms), common(lock_ms));
        let pins = PINNED.map(|name| format!("SET LOCAL {name} = off")).join("; ");
        let planner = format!("{pins}; SET LOCAL max_parallel_workers_per_gather = 0");
        // Raised only if it is `off`: a setting stricter than `on` is kept.
        let durable = "SELECT pg_catalog.set_config('synchronous_commit', 'on', true) WHERE pg_catalog.current_setting('synchronous_commit') = 'off'";
        // A step that a crash undoes is simply repeated, so it need not wait for the disk. Pages
        // that it evicts from the cache are flushed at once. Gigabytes of them, written by the
        // kernel all together, make other commits wait (measured at 10 million events: p99 99 ms,
        // 6.6 ms with this setting).
        let paced = "SET LOCAL synchronous_commit = off; SET LOCAL backend_flush_after = '256kB'";
        // Set explicitly, because the database's default may be another level, under which our
        // guarded updates would fail.
        let (reading, writing) =
            ("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY", "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE");
        let report = format!("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {soon}");
        let by_index = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL work_mem = '64MB'";
        let count_ms = COUNT_TIMEOUT.as_millis().min(timeout_ms);
        Self {
            read: format!("{reading}; {of_relay}; {planner}"),
            write: format!("{writing}; {patient}; {planner}; {durable}"),
            relay: format!("{writing}; {of_relay}; {planner}; {durable}"),
            renew_beside: format!("{writing}; {soon}; {planner}; {durable}"),
            look: format!("{reading}; {limited}"),
            call: format!("{writing}; {limited}"),
            dry_run: format!("{report}; {by_index}"),
            count: format!("{report}; SET LOCAL statement_timeout = {count_ms}"),
            list: format!("{report}; {planner}"),
            report,
            change: format!("{writing}; {patient}; {durable}"),
            settle: format!("{writing}; {of_relay}; {durable}"),
            enable: format!("{writing}; {soon}"),
            prune: format!("{writing}; {patient}; {paced}; {by_index}"),
            alone: named.map(|named| format!("BEGIN ISOLATION LEVEL READ COMMITTED{named}")),
            soon_over,
        }
    }
}
