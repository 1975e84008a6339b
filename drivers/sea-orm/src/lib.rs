#![doc = include_str!("../README.md")]

use postbox_core::{AppendFuture, Appended, Error, ErrorKind, LogName, NewEvent, Result, Transaction};
use postbox_postgres_sql::{AppendStatement, Postgres};
use sea_orm::{ConnectionTrait as _, DatabaseTransaction, DbBackend, DbErr, RuntimeErr, Statement};

/// Marks transactions of `sea-orm`.
#[derive(Debug)]
pub enum SeaOrm {}

impl<'a> Transaction<'a, Postgres, SeaOrm> for DatabaseTransaction {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, to, log, events))
    }
}

impl<'a> Transaction<'a, Postgres, SeaOrm> for &DatabaseTransaction {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, to, log, events))
    }
}

/// The server refuses this (25P01) unless a transaction is open, which `sea-orm` does not tell. A
/// nested `begin` that failed or was dropped has rolled the transaction back, and the append would
/// commit by itself.
const OPEN_CHECK: &str = "SAVEPOINT postbox_append; RELEASE SAVEPOINT postbox_append";

async fn append_in(
    tx: &DatabaseTransaction,
    to: &Postgres,
    log: &LogName,
    events: Result<Vec<NewEvent>>,
) -> Result<Appended> {
    let Some(statement) = AppendStatement::of(to, log, events)? else { return Ok(Appended::default()) };
    let database = tx.get_database_backend();
    check_database(database)?;
    tx.execute_unprepared(OPEN_CHECK).await.map_err(|error| classify(log, &error))?;
    let texts = statement.texts.into_iter().map(Into::into);
    let sql = Statement::from_sql_and_values(database, statement.sql, texts);
    let done = tx.execute_raw(sql).await.map_err(|error| classify(log, &error))?;
    Ok(Appended::new(statement.ids, done.rows_affected() as usize))
}

/// The compiler cannot tell: sea-orm has one transaction type for all databases.
fn check_database(database: DbBackend) -> Result<()> {
    if database == DbBackend::Postgres {
        return Ok(());
    }
    let message = format!(
        "the transaction is one of {database:?}, and its events go into Postgres; begin it on a connection to the store's \
         database"
    );
    Err(Error::invalid("append", "database_differs", message))
}

fn classify(log: &LogName, error: &DbErr) -> Error {
    match error {
        DbErr::Conn(RuntimeErr::SqlxError(error))
        | DbErr::Exec(RuntimeErr::SqlxError(error))
        | DbErr::Query(RuntimeErr::SqlxError(error)) => postbox_sqlx::classify("append", error, Some(log)),
        _ => Error::new(ErrorKind::Internal, "append", "store_error", error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_of_another_database_is_refused() {
        assert!(check_database(DbBackend::Postgres).is_ok());
        for other in [DbBackend::Sqlite, DbBackend::MySql] {
            assert_eq!(check_database(other).expect_err("refused").code(), "database_differs");
        }
    }
}
