//! One borrowed connection and the transactions we run on it.
//!
//! Everything is transaction-scoped, so that a transaction-mode pooler may sit in between: settings
//! are `SET LOCAL`, statements are unnamed and typed, and the statements of one transaction are
//! sent together, without waiting for each other's answers.

use std::future::Future;
use std::time::Duration;

use deadpool_postgres::{Object, PoolError, TimeoutType};
use postbox_core::{Error, ErrorKind, Result};
use tokio_postgres::Client;

use crate::PostgresStore;
use crate::classify::classify;

/// Ends a transaction. After an error inside it, Postgres turns this into a rollback.
pub(crate) const COMMIT: &str = "COMMIT";

/// What a call may take on our side beyond the server's own statement timeout, before the
/// connection is given up.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the server keeps a transaction open whose next statement does not come: far longer than
/// a round trip, shorter than any lease. A host that vanishes in the middle of a settlement would
/// otherwise hold the lane's lock, and with it the take-over.
const IDLE_IN_TRANSACTION: Duration = Duration::from_secs(3);

/// A connection that goes back to the pool only if its owner says that no transaction is open on
/// it.
///
/// A future dropped half-way would otherwise hand an open transaction, and its locks, to the next
/// borrower.
pub(crate) struct Session {
    object: Option<Object>,
}

impl Session {
    /// The client.
    pub(crate) fn client(&self) -> &Client {
        self.object.as_ref().expect("only finish and drop take the connection, and both consume the session")
    }

    /// The client, for transactions of the driver's own.
    pub(crate) fn client_mut(&mut self) -> &mut Client {
        self.object.as_mut().expect("only finish and drop take the connection, and both consume the session")
    }

    /// Runs a transaction that is sent as a whole, and gives the connection back unless the
    /// transaction may still be open on it.
    ///
    /// `work` sends statements that need not know each other's answers; those of BEGIN and COMMIT
    /// are not waited for either. After an error in between, COMMIT rolls back. The first error, in
    /// the order sent, is told.
    pub(crate) async fn transact<T>(
        self,
        preamble: &str,
        work: impl AsyncFnOnce(&Client) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, tokio_postgres::Error> {
        let client = self.client();
        let (begun, worked, committed) =
            futures::join!(client.batch_execute(preamble), work(client), client.batch_execute(COMMIT));
        self.end_after(begun.is_ok() && committed.is_ok());
        begun?;
        let worked = worked?;
        committed.map(|()| worked)
    }

    /// Gives the connection back: no transaction is open.
    pub(crate) fn finish(mut self) {
        drop(self.object.take());
    }

    /// Gives the connection back after a success, and drops it after a failure that may have left a
    /// transaction open.
    pub(crate) fn end_after(self, success: bool) {
        if success {
            self.finish();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(object) = self.object.take() {
            // Taken out of the pool and closed: the server rolls back.
            drop(Object::take(object));
        }
    }
}

impl PostgresStore {
    /// Borrows a connection, within the pool's timeouts.
    pub(crate) async fn session(&self, operation: &'static str) -> Result<Session> {
        match self.inner.pool.get().await {
            Ok(object) => Ok(Session { object: Some(object) }),
            Err(PoolError::Backend(error)) => Err(classify(operation, &error)),
            Err(PoolError::Timeout(TimeoutType::Wait)) => Err(Error::new(
                ErrorKind::Unavailable,
                operation,
                "pool_exhausted",
                "no free database connection in time; raise the pool size or look for long calls",
            )),
            Err(error) => Err(Error::new(
                ErrorKind::Unavailable,
                operation,
                "store_unreachable",
                "the database did not answer in time",
            )
            .with_source(error)),
        }
    }

    /// Bounds a call in time, whatever the network does. The dropped session closes its connection.
    pub(crate) async fn bounded<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let limit = self.inner.config.statement_timeout + self.inner.config.pool_timeout + PATIENCE;
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Unavailable, operation, "store_timeout", "the database did not answer in time"))
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
    /// For an operator's queries, which may walk a table.
    pub(crate) report: String,
    /// For an operator's changes: as durable as a relay's, planned as the planner likes.
    pub(crate) change: String,
    /// Not a beginning: what a transaction of handlers says before it locks the lane.
    pub(crate) soon_over: String,
}

impl TransactionModes {
    pub(crate) fn new(statement_timeout: Duration) -> Self {
        let timeout_ms = statement_timeout.as_millis().clamp(1, i32::MAX as u128);
        // The isolation is named because the database's default may be another, under which our
        // guarded updates would fail.
        let idle_ms = IDLE_IN_TRANSACTION.as_millis().min(timeout_ms);
        let timeouts = format!(
            "SET LOCAL statement_timeout = {timeout_ms}; SET LOCAL idle_in_transaction_session_timeout = {idle_ms}; \
             SET LOCAL lock_timeout = 0; SET LOCAL search_path = pg_catalog"
        );
        let common = format!("{timeouts}; SET LOCAL jit = off");
        let planner = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_hashjoin = off; \
                       SET LOCAL enable_mergejoin = off; SET LOCAL enable_sort = off; SET LOCAL enable_incremental_sort = off; \
                       SET LOCAL enable_material = off; SET LOCAL max_parallel_workers_per_gather = 0";
        // Raised only where it is `off`: a stricter setting than `on` stays.
        let durable = "SELECT pg_catalog.set_config('synchronous_commit', 'on', true) WHERE pg_catalog.current_setting('synchronous_commit') = 'off'";
        Self {
            read: format!("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; {common}; {planner}"),
            write: format!("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {common}; {planner}; {durable}"),
            look: format!("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; {timeouts}"),
            call: format!("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {timeouts}"),
            report: format!("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {common}"),
            change: format!("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {common}; {durable}"),
            soon_over: format!("SET LOCAL idle_in_transaction_session_timeout = {idle_ms}"),
        }
    }
}
