//! Handlers in transactions of a `diesel-async` pool.

use std::sync::Arc;

use async_trait::async_trait;
use diesel::connection::{TransactionDepthChange, TransactionManagerStatus};
use diesel::deserialize::{self, FromSql, QueryableByName};
use diesel::pg::Pg;
use diesel::row::{Field as _, NamedRow, Row};
use diesel::sql_types::{Nullable, Text};
use diesel_async::pooled_connection::PoolError as NotConnected;
use diesel_async::pooled_connection::deadpool::{Object, Pool, PoolError};
use diesel_async::{
    AnsiTransactionManager, AsyncPgConnection, RunQueryDsl as _, SimpleAsyncConnection as _, TransactionManager as _,
};
use postbox_core::{
    Apply, Database, Decide, Delivery, Error, HandledFuture, Handlers, Lease, Outcome, Result, Settlement, Transact,
};
use postbox_postgres::PostgresStore;
use postbox_postgres::driver::{BEGIN, Borrowed, Rows, Settles, Statement, apply_in, in_time, no_connection};
use postbox_postgres_sql::unreachable;

/// `diesel-async`: lends handlers a transaction of your pool, in which their event is settled.
///
/// ```
/// use diesel::sql_types::Text;
/// use diesel_async::pooled_connection::AsyncDieselConnectionManager;
/// use diesel_async::pooled_connection::deadpool::Pool;
/// use diesel_async::{AsyncPgConnection, RunQueryDsl as _};
/// use postbox_core::{Delivery, Tx};
/// use postbox_diesel_async::DieselAsync;
/// use postbox_router::Router;
/// use postbox_postgres::PostgresStore;
///
/// async fn ledger(delivery: Delivery, Tx(tx): Tx<'_, DieselAsync>) -> Result<(), diesel::result::Error> {
///     let insert = diesel::sql_query("INSERT INTO ledger (event) VALUES ($1)");
///     insert.bind::<Text, _>(delivery.event.id.to_string()).execute(tx).await.map(drop)
/// }
///
/// # fn example(store: &PostgresStore, url: &str) -> Result<(), Box<dyn std::error::Error>> {
/// let pool: Pool<AsyncPgConnection> = Pool::builder(AsyncDieselConnectionManager::new(url)).build()?;
/// let router: Router<(), DieselAsync> = Router::in_transaction(&DieselAsync::new(store, pool)).fallback(ledger);
/// # Ok(())
/// # }
/// ```
///
/// The handler borrows a connection. It may begin transactions on it, which are savepoints.
#[derive(Clone)]
pub struct DieselAsync {
    store: PostgresStore,
    pool: Pool<AsyncPgConnection>,
}

impl DieselAsync {
    /// The pool must lead to the store's database, with a role that has the store's rights.
    ///
    /// The pool lends each lane up to two connections while handlers run, for new events and for
    /// retries. A connection whose transaction did not end, because a handler took too long or the
    /// store was lost, is closed.
    pub fn new(store: &PostgresStore, pool: Pool<AsyncPgConnection>) -> Self {
        Self { store: store.clone(), pool }
    }
}

impl Database for DieselAsync {
    type Lent<'t> = &'t mut AsyncPgConnection;
    type Handled<'t> = HandledFuture<'t>;

    fn handled<'t>(outcome: Outcome) -> HandledFuture<'t> {
        Box::pin(std::future::ready(outcome))
    }
}

impl Transact for DieselAsync {
    fn apply_handlers(&self, handlers: Arc<dyn Handlers<Self>>) -> Arc<dyn Apply> {
        Arc::new(DieselApply { diesel: self.clone(), handlers })
    }
}

impl Settles for DieselAsync {
    type Connection = AsyncPgConnection;

    async fn run(connection: &mut AsyncPgConnection, sql: String) -> Result<()> {
        connection.batch_execute(&sql).await.map_err(failed)?;
        // Exactly one transaction is open, ours. A handler that panicked or was dropped inside a
        // nested one would leave the driver counting another, or refusing all.
        let status = no_transaction_of(connection);
        let TransactionManagerStatus::Valid(status) = status else { unreachable!("it was just set") };
        status.change_transaction_depth(TransactionDepthChange::IncreaseDepth).map_err(failed)
    }

    /// A future that was dropped inside of `transaction` ends nothing.
    fn is_nested(connection: &mut AsyncPgConnection) -> bool {
        let status = AnsiTransactionManager::transaction_manager_status_mut(connection);
        status.transaction_depth().is_ok_and(|depth| depth.is_some_and(|depth| depth.get() > 1))
    }

    async fn rows(connection: &mut AsyncPgConnection, statement: Statement) -> Result<Rows> {
        let rows = postbox_diesel::query(statement.sql, statement.texts).load::<Texts>(connection).await;
        rows.map(|rows| rows.into_iter().map(|Texts(columns)| columns).collect()).map_err(failed)
    }
}

/// A row of any number of `text` columns.
struct Texts(Vec<Option<String>>);

impl QueryableByName<Pg> for Texts {
    fn build<'a>(row: &impl NamedRow<'a, Pg>) -> deserialize::Result<Self> {
        let text = |column| {
            let field = Row::get(row, column).ok_or("a column is missing")?;
            FromSql::<Nullable<Text>, Pg>::from_nullable_sql(field.value())
        };
        (0..row.field_count()).map(text).collect::<deserialize::Result<_>>().map(Self)
    }
}

struct DieselApply {
    diesel: DieselAsync,
    handlers: Arc<dyn Handlers<DieselAsync>>,
}

#[async_trait]
impl Apply for DieselApply {
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        let DieselAsync { store, pool } = &self.diesel;
        let mut borrowed = borrow(pool).await?;
        let connection: &mut AsyncPgConnection = borrowed.connection();
        DieselAsync::run(connection, BEGIN.to_owned()).await?;
        let applied = apply_in(store, connection, &*self.handlers, lease, deliveries, settlement, decide).await?;
        // Not the driver's commit, which fails if a handler dropped a nested transaction midway.
        connection.batch_execute("COMMIT").await.map_err(failed)?;
        no_transaction_of(connection);
        borrowed.give_back();
        Ok(applied.committed())
    }
}

/// Makes the driver count no open transaction.
fn no_transaction_of(connection: &mut AsyncPgConnection) -> &mut TransactionManagerStatus {
    let status = AnsiTransactionManager::transaction_manager_status_mut(connection);
    *status = TransactionManagerStatus::default();
    status
}

/// The pool's name for its size.
const SIZE: &str = "max_size";

/// Borrows a connection of the pool. If it is dropped with a transaction open, it is closed: the
/// pool would only notice when it lends the connection again.
async fn borrow(pool: &Pool<AsyncPgConnection>) -> Result<Borrowed<Object<AsyncPgConnection>>> {
    match in_time(pool.get()).await {
        Some(Ok(object)) => Ok(Borrowed::new(object, |object| drop(Object::take(object)))),
        None | Some(Err(PoolError::Timeout(_))) => {
            let status = pool.status();
            Err(no_connection(status.size >= status.max_size, SIZE))
        }
        Some(Err(PoolError::Backend(NotConnected::QueryError(error)))) => Err(failed(error)),
        Some(Err(error)) => Err(unreachable("apply", error)),
    }
}

fn failed(error: diesel::result::Error) -> Error {
    postbox_diesel::classify("apply", &error, None)
}
