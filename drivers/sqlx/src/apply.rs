//! Handlers in transactions of a `sqlx` pool.

use std::sync::Arc;

use async_trait::async_trait;
use postbox_core::{
    Apply, Database, Decide, Delivery, Error, HandledFuture, Handlers, Lease, Outcome, Result, Settlement, Transact,
};
use postbox_postgres::PostgresStore;
use postbox_postgres::driver::{
    BEGIN, Borrowed, Rows, Settles, Statement, apply_in, commit_failed, in_time, no_connection,
};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgPool, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, Postgres, Row as _};

use crate::classify;

/// `sqlx` 0.9: lends handlers a transaction of your pool, in which their event is settled.
///
/// ```
/// use postbox_core::{Delivery, Tx};
/// use postbox_router::Router;
/// use postbox_postgres::PostgresStore;
/// use postbox_sqlx::Sqlx;
///
/// async fn ledger(delivery: Delivery, Tx(tx): Tx<'_, Sqlx>) -> Result<(), sqlx::Error> {
///     let id = delivery.event.id.to_string();
///     sqlx::query("INSERT INTO ledger (event) VALUES ($1)").bind(id).execute(tx).await.map(drop)
/// }
///
/// # fn example(store: &PostgresStore, pool: sqlx::PgPool) {
/// let router: Router<(), Sqlx> = Router::in_transaction(&Sqlx::new(store, pool)).fallback(ledger);
/// # }
/// ```
///
/// The handler borrows a connection. It may begin transactions on it, which are savepoints.
#[derive(Debug, Clone)]
pub struct Sqlx {
    store: PostgresStore,
    pool: PgPool,
}

impl Sqlx {
    /// The pool must lead to the store's database, with a role that has the store's rights.
    ///
    /// The pool lends each lane up to two connections while handlers run, for new events and for
    /// retries. A connection whose transaction did not end, because a handler took too long or the
    /// store was lost, is closed.
    pub fn new(store: &PostgresStore, pool: PgPool) -> Self {
        Self { store: store.clone(), pool }
    }
}

impl Database for Sqlx {
    type Lent<'t> = &'t mut PgConnection;
    type Handled<'t> = HandledFuture<'t>;

    fn handled<'t>(outcome: Outcome) -> HandledFuture<'t> {
        Box::pin(std::future::ready(outcome))
    }
}

impl Transact for Sqlx {
    fn apply_handlers(&self, handlers: Arc<dyn Handlers<Self>>) -> Arc<dyn Apply> {
        Arc::new(SqlxApply { sqlx: self.clone(), handlers })
    }
}

impl Settles for Sqlx {
    type Connection = PgConnection;

    async fn run(connection: &mut PgConnection, sql: String) -> Result<()> {
        let executed = connection.execute(AssertSqlSafe(sql)).await.map(drop).map_err(failed);
        match executed {
            // The driver did that. After a ROLLBACK by SQL it still counts a transaction.
            Err(_) if !connection.is_in_transaction() => Err(Error::transaction_lost("apply", ROLLED_BACK)),
            executed => executed,
        }
    }

    async fn rows(connection: &mut PgConnection, statement: Statement) -> Result<Rows> {
        let query = sqlx::query(AssertSqlSafe(statement.sql)).persistent(false);
        let query = statement.texts.into_iter().fold(query, |query, text| query.bind(text));
        let rows = connection.fetch_all(query).await.map_err(failed)?;
        let columns = |row: &PgRow| (0..row.len()).map(|column| row.try_get(column)).collect();
        rows.iter().map(columns).collect::<Result<_, _>>().map_err(failed)
    }
}

/// Why `sqlx` counts no transaction any more.
const ROLLED_BACK: &str =
    "sqlx rolled it back, because a nested begin() failed or was dropped; let the handler fail then";

struct SqlxApply {
    sqlx: Sqlx,
    handlers: Arc<dyn Handlers<Sqlx>>,
}

#[async_trait]
impl Apply for SqlxApply {
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        let Sqlx { store, pool } = &self.sqlx;
        let mut borrowed = borrow(pool).await?;
        let mut tx = borrowed.connection().begin_with(BEGIN).await.map_err(failed)?;
        let applied = apply_in(store, &mut *tx, &*self.handlers, lease, deliveries, settlement, decide).await?;
        tx.commit().await.map_err(|error| commit_failed(failed(error)))?;
        borrowed.give_back();
        Ok(applied.committed())
    }
}

/// The pool's name for its size.
const SIZE: &str = "max_connections";

/// Borrows a connection of the pool. If it is dropped before its end, it is closed: `sqlx` would
/// lend a connection whose BEGIN is still in flight to the next caller.
async fn borrow(pool: &PgPool) -> Result<Borrowed<PoolConnection<Postgres>>> {
    match in_time(pool.acquire()).await {
        Some(Ok(connection)) => Ok(Borrowed::new(connection, |connection| drop(connection.detach()))),
        // Also if the database is down: `sqlx` tries to connect again until it is out of time. It
        // counts what it is opening as part of the pool.
        None | Some(Err(sqlx::Error::PoolTimedOut)) => {
            Err(no_connection(pool.size() >= pool.options().get_max_connections(), SIZE))
        }
        Some(Err(error)) => Err(failed(error)),
    }
}

fn failed(error: sqlx::Error) -> Error {
    classify("apply", &error, None)
}
