#![doc = include_str!("../README.md")]

mod apply;

pub use apply::DieselAsync;
use diesel_async::pooled_connection::deadpool::Object;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl as _, TransactionManager as _};
use postbox_core::{AppendFuture, Appended, LogName, NewEvent, Result, Transaction};
use postbox_postgres::Postgres;
use postbox_postgres_sql::{AppendStatement, no_transaction};

impl<'a> Transaction<'a, Postgres, DieselAsync> for AsyncPgConnection {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, to, log, events))
    }
}

/// What `transaction(…)` of a connection of the pool hands over.
impl<'a> Transaction<'a, Postgres, DieselAsync> for Object<AsyncPgConnection> {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, to, log, events))
    }
}

async fn append_in(
    connection: &mut AsyncPgConnection,
    to: &Postgres,
    log: &LogName,
    events: Result<Vec<NewEvent>>,
) -> Result<Appended> {
    type Transactions = <AsyncPgConnection as AsyncConnection>::TransactionManager;
    if !matches!(Transactions::transaction_manager_status_mut(connection).transaction_depth(), Ok(Some(_))) {
        return Err(no_transaction("append"));
    }
    let Some(statement) = AppendStatement::of(to, log, events)? else { return Ok(Appended::default()) };
    let executed = postbox_diesel::query(statement.sql, statement.texts).execute(connection).await;
    let known = executed.map_err(|error| postbox_diesel::classify("append", &error, Some(log)))?;
    Ok(Appended::new(statement.ids, known))
}
