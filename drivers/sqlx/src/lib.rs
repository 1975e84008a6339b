#![doc = include_str!("../README.md")]

mod apply;

pub use apply::Sqlx;
use postbox_core::kit::check_message_id;
use postbox_core::{AppendFuture, Appended, Error, LogName, NewEvent, Result, SourceName, Transaction};
use postbox_postgres::{Postgres, SchemaName};
use postbox_postgres_sql::{AppendStatement, Refusal, no_transaction, once_statement, unreachable};
use sqlx::postgres::{PgConnection, PgDatabaseError};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};

impl<'a> Transaction<'a, Postgres, Sqlx> for sqlx::Transaction<'_, sqlx::Postgres> {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, to, log, events))
    }
}

impl<'a> Transaction<'a, Postgres, Sqlx> for PgConnection {
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
    let query = sqlx::query(AssertSqlSafe(statement.sql)).persistent(to.prepared);
    let query = statement.texts.into_iter().fold(query, |query, text| query.bind(text));
    let done = connection.execute(query).await.map_err(|error| classify("append", &error, Some(log)))?;
    Ok(Appended::new(statement.ids, done.rows_affected() as usize))
}

/// Returns whether `message_id` of `source` is seen for the first time, decided in your
/// transaction; see [`postbox_postgres::once_in`]. Pass `&mut *tx`.
pub async fn once_in(
    connection: &mut PgConnection,
    schema: &SchemaName,
    source: &SourceName,
    message_id: &str,
) -> Result<bool> {
    if !connection.is_in_transaction() {
        return Err(no_transaction("once"));
    }
    check_message_id("once", message_id)?;
    let query = sqlx::query_scalar(AssertSqlSafe(once_statement(schema))).persistent(false);
    let claimed = query.bind(source.as_str()).bind(message_id).fetch_one(connection).await;
    claimed.map_err(|error| classify("once", &error, None))
}

/// Classifies a failure of `sqlx`; also for drivers built on it. `appended_to` is the log of an
/// append, which may be missing.
pub fn classify(operation: &'static str, error: &sqlx::Error, appended_to: Option<&LogName>) -> Error {
    match error.as_database_error().and_then(|it| it.try_downcast_ref::<PgDatabaseError>()) {
        Some(error) => {
            let refusal = Refusal {
                state: error.code(),
                constraint: error.constraint(),
                column: error.column(),
                message: error.message(),
                hint: error.hint(),
            };
            let classified = appended_to.map_or_else(|| refusal.of(operation), |log| refusal.of_append(log));
            // The driver's own text has a line number of the server's code.
            classified.with_source(error.message().to_owned())
        }
        None => unreachable(operation, error).with_source(error.to_string()),
    }
}
