#![doc = include_str!("../README.md")]

use postbox_core::{AppendFuture, Appended, Error, LogName, NewEvent, Result, Transaction};
use postbox_postgres_sql::{AppendStatement, Postgres, Refusal, no_transaction, unreachable};
use sqlx08::postgres::{PgConnection, PgDatabaseError};
use sqlx08::{Connection as _, Executor as _};

/// Marks transactions of `sqlx` 0.8.
#[derive(Debug)]
pub enum Sqlx08 {}

impl<'a> Transaction<'a, Postgres, Sqlx08> for sqlx08::Transaction<'_, sqlx08::Postgres> {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, to, log, events))
    }
}

impl<'a> Transaction<'a, Postgres, Sqlx08> for PgConnection {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, to, log, events))
    }
}

async fn append_in(
    connection: &mut PgConnection,
    to: &Postgres,
    log: &LogName,
    events: Result<Vec<NewEvent>>,
) -> Result<Appended> {
    if !connection.is_in_transaction() {
        return Err(no_transaction("append"));
    }
    let Some(statement) = AppendStatement::of(to, log, events)? else { return Ok(Appended::default()) };
    let query = sqlx08::query(&statement.sql).persistent(to.prepared);
    let query = statement.texts.into_iter().fold(query, |query, text| query.bind(text));
    let done = connection.execute(query).await.map_err(|error| classify(&error, log))?;
    Ok(Appended::new(statement.ids, done.rows_affected() as usize))
}

/// Classifies the failure of a statement.
fn classify(error: &sqlx08::Error, log: &LogName) -> Error {
    let classified = match error.as_database_error().and_then(|it| it.try_downcast_ref::<PgDatabaseError>()) {
        Some(error) => Refusal {
            state: error.code(),
            constraint: error.constraint(),
            column: error.column(),
            message: error.message(),
            hint: error.hint(),
        }
        .of_append(log),
        None => unreachable("append", error),
    };
    classified.with_source(error.to_string())
}
