//! One borrowed connection and the transactions we run on it.
//!
//! Everything is transaction-scoped, so that a transaction-mode pooler may sit in between: settings
//! are `SET LOCAL`, and the statements of one transaction are sent together, without waiting for
//! each other's answers, where they need not know them.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use deadpool_postgres::{Object, Pool, PoolError, TimeoutType};
use postbox_core::{Error, ErrorKind, LogName, Result, Tenant};
use tokio_postgres::{Client, Row};

use crate::PostgresStore;
use crate::classify::classify;
use crate::params::Param;
use crate::schema::SchemaName;

/// What a call may take on our side beyond the server's own statement timeout, before the
/// connection is given up.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the server keeps a transaction open whose next statement does not come: far longer than
/// a round trip, shorter than any lease. A host that vanishes in the middle of a settlement would
/// otherwise hold the lane's lock, and with it the take-over.
const IDLE_IN_TRANSACTION: Duration = Duration::from_secs(3);

/// The longest wait of a look for a lock: whoever looks wants to hear of the lock, and soon.
const LOOK_LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest statement of a count. Each takes milliseconds.
const COUNT_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection, lent for one operation.
///
/// It goes back to the pool when it is dropped, unless a transaction may be open on it or an answer
/// is still to come: a future dropped half-way would otherwise hand an open transaction, and its
/// locks, to the next borrower.
pub(crate) struct Session {
    object: Option<Object>,
    store: PostgresStore,
    operation: &'static str,
    /// Statements whose answer is still to come.
    unanswered: AtomicUsize,
    in_transaction: AtomicBool,
}

impl Session {
    /// The client, for what has no method here.
    pub(crate) fn client(&self) -> &Client {
        self.object.as_ref().expect("only drop takes the connection")
    }

    /// The client, for a transaction of the driver's own: the connection goes back to the pool only
    /// if [`Self::ended`] is called.
    pub(crate) fn client_mut(&mut self) -> &mut Client {
        self.in_transaction.store(true, Ordering::Relaxed);
        self.object.as_mut().expect("only drop takes the connection")
    }

    /// No transaction is open any more.
    pub(crate) fn ended(&self) {
        self.in_transaction.store(false, Ordering::Relaxed);
    }

    /// What is being done.
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

    /// The same for a template of a log's.
    pub(crate) fn log_sql(&self, template: &str, log: &LogName) -> String {
        self.schema().log_sql(template, log)
    }

    /// Waits for the answer to a statement.
    pub(crate) async fn answer<T>(&self, answer: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T> {
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        let answer = answer.await;
        self.unanswered.fetch_sub(1, Ordering::Relaxed);
        answer.map_err(|error| classify(self.operation, &error))
    }

    /// Runs statements without parameters.
    pub(crate) async fn run(&self, sql: &str) -> Result<()> {
        self.answer(self.client().batch_execute(sql)).await
    }

    /// Runs a statement and gives its rows.
    pub(crate) async fn rows(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.alone_or_within(self.client().query_typed(sql, params)).await
    }

    /// Runs a statement that gives one row.
    pub(crate) async fn row(&self, sql: &str, params: &[Param<'_>]) -> Result<Row> {
        self.alone_or_within(self.client().query_typed_one(sql, params)).await
    }

    /// Runs a statement and gives the number of rows it changed.
    pub(crate) async fn execute(&self, sql: &str, params: &[Param<'_>]) -> Result<u64> {
        self.alone_or_within(self.client().execute_typed(sql, params)).await
    }

    /// Waits for the answer to a statement, which names the tenant first if it is a transaction of
    /// its own.
    async fn alone_or_within<T>(&self, answer: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T> {
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

    /// Begins a transaction, as one of [`TransactionModes`].
    pub(crate) async fn begin(&self, mode: &str) -> Result<()> {
        self.in_transaction.store(true, Ordering::Relaxed);
        self.run(mode).await
    }

    /// Ends a transaction. After an error in it, Postgres turns this into a rollback.
    pub(crate) async fn commit(&self) -> Result<()> {
        self.run("COMMIT").await.map(|()| self.ended())
    }

    /// Runs a transaction that is sent as a whole: `work` sends statements that need not know each
    /// other's answers, and those of BEGIN and COMMIT are not waited for either. Gives the first
    /// error in the order sent.
    pub(crate) async fn at_once<T>(&self, mode: &str, work: impl AsyncFnOnce(&Self) -> Result<T>) -> Result<T> {
        let (begun, worked, committed) = futures::join!(self.begin(mode), work(self), self.commit());
        begun?;
        let worked = worked?;
        committed.map(|()| worked)
    }

    /// Runs a transaction step by step, committed if `work` succeeds.
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
            // Taken out of the pool and closed: the server rolls back.
            drop(self.object.take().map(Object::take));
        }
    }
}

impl PostgresStore {
    /// Borrows a connection, within the pool's timeouts.
    pub(crate) async fn session(&self, operation: &'static str) -> Result<Session> {
        self.borrow(&self.inner.pool, operation).await
    }

    /// The same for a look.
    pub(crate) async fn look_session(&self, operation: &'static str) -> Result<Session> {
        self.borrow(&self.inner.look_pool, operation).await
    }

    async fn borrow(&self, pool: &Pool, operation: &'static str) -> Result<Session> {
        let unavailable = |code, message| Error::new(ErrorKind::Unavailable, operation, code, message);
        let object = pool.get().await.map_err(|error| match error {
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

    /// The error of a connection that could not be made, with what was to be connected to.
    fn not_connected(&self, error: Error) -> Error {
        let Some(address) = &self.inner.address else { return error };
        let message = format!("{} ({address})", error.message());
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

    /// The same for a look.
    pub(crate) async fn call_to_look<T>(
        &self,
        operation: &'static str,
        work: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        self.bounded(operation, async { work(&self.look_session(operation).await?).await }).await
    }

    /// Bounds a call in time, whatever the network does. The dropped session closes its connection.
    pub(crate) async fn bounded<T>(&self, operation: &'static str, call: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = self.inner.config.statement_timeout + self.inner.config.pool_timeout + PATIENCE;
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            let message = "the database did not answer in time; postbox doctor names the locks it may wait for";
            Err(Error::new(ErrorKind::Unavailable, operation, "store_timeout", message))
        })
    }
}

/// The statements that begin our transactions, made once per store. Each is one message.
///
/// Names mean Postgres's own in all of them: an object that somebody planted in a schema of the
/// role's search_path would run with our rights. A statement outside of such a transaction names
/// everything in full instead.
pub(crate) struct TransactionModes {
    /// For reading: the planner is pinned to nested loops over indexes.
    ///
    /// The planner believes that a LIMIT without statistics is cheap to reach by a sequential scan,
    /// a hash join or a sort; each of these walks the whole table (3 to 250 times slower,
    /// measured). `enable_sort` keeps the rows coming from the index in `seq` order.
    pub(crate) read: String,
    /// For writing: durable even where the role or database says `synchronous_commit = off`, and
    /// never left open by a stopped process.
    pub(crate) write: String,
    /// For a function of ours that only reads, and sets the planner itself.
    pub(crate) look: String,
    /// For a function of ours that writes, and sets the planner itself.
    pub(crate) call: String,
    /// For an operator's queries, which may walk a table. They wait for no lock for long.
    pub(crate) report: String,
    /// For what of a change only looks: as a report, by the indexes that the change itself takes.
    pub(crate) dry_run: String,
    /// For counts, which are asked for again and again: never slow, whatever the reason.
    pub(crate) count: String,
    /// For an operator's changes: as durable as a relay's, planned as the planner likes.
    pub(crate) change: String,
    /// For a change that locks a table: whoever comes later waits behind it.
    pub(crate) enable: String,
    /// For a step of retention. What it reads has indexes, and its lists fit into a hash whatever
    /// the planner thinks of their length.
    pub(crate) prune: String,
    /// Begins a transaction of one statement, where a tenant has to be named for it.
    pub(crate) alone: Option<String>,
    /// Not a beginning: what a transaction of handlers says before it locks the lane.
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
        let timeouts = format!(
            "SET LOCAL statement_timeout = {timeout_ms}; {soon_over}; SET LOCAL lock_timeout = 0; SET LOCAL search_path = pg_catalog"
        ) + named.as_deref().unwrap_or_default();
        let common = format!("{timeouts}; SET LOCAL jit = off");
        let planner = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_hashjoin = off; \
                       SET LOCAL enable_mergejoin = off; SET LOCAL enable_sort = off; SET LOCAL enable_incremental_sort = off; \
                       SET LOCAL enable_material = off; SET LOCAL max_parallel_workers_per_gather = 0";
        // Raised only where it is `off`: a stricter setting than `on` stays.
        let durable = "SELECT pg_catalog.set_config('synchronous_commit', 'on', true) WHERE pg_catalog.current_setting('synchronous_commit') = 'off'";
        // A step that a crash undoes is done again. What it makes other pages leave the cache for
        // goes to disk at once: gigabytes of it, written all together by the kernel, make the
        // commits of others wait (p99 99 ms at 10 million events, 6.6 so; measured).
        let paced = "SET LOCAL synchronous_commit = off; SET LOCAL backend_flush_after = '256kB'";
        // Named because the database's default may be another, under which our guarded updates
        // would fail.
        let (reading, writing) =
            ("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY", "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE");
        let lock_ms = LOOK_LOCK_TIMEOUT.as_millis();
        let report =
            format!("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {common}; SET LOCAL lock_timeout = {lock_ms}");
        let by_index = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL work_mem = '64MB'";
        let count_ms = COUNT_TIMEOUT.as_millis().min(timeout_ms);
        Self {
            read: format!("{reading}; {common}; {planner}"),
            write: format!("{writing}; {common}; {planner}; {durable}"),
            look: format!("{reading}; {timeouts}"),
            call: format!("{writing}; {timeouts}"),
            dry_run: format!("{report}; {by_index}"),
            count: format!("{report}; SET LOCAL statement_timeout = {count_ms}"),
            report,
            change: format!("{writing}; {common}; {durable}"),
            enable: format!("{writing}; {common}; SET LOCAL lock_timeout = {lock_ms}"),
            prune: format!("{writing}; {common}; {paced}; {by_index}"),
            alone: named.map(|named| format!("BEGIN ISOLATION LEVEL READ COMMITTED{named}")),
            soon_over,
        }
    }
}
