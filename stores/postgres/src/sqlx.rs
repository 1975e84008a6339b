//! For users of `sqlx`: append, and once, in a transaction of theirs.

use postbox_core::kit::check_message_id;
use postbox_core::{AppendFuture, Error, ErrorKind, EventId, LogName, NewEvent, Result, SourceName, Transaction};
use sqlx::Executor as _;
use sqlx::postgres::PgConnection;

use crate::append::{Columns, Postgres};
use crate::classify::{log_unknown, of_sqlstate};
use crate::once::ONCE;
use crate::schema::SchemaName;

/// Marks transactions of `sqlx`.
#[derive(Debug)]
pub enum Sqlx {}

impl<'a> Transaction<'a, Postgres, Sqlx> for sqlx::Transaction<'_, sqlx::Postgres> {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, to, log, events))
    }
}

/// For functions that are lent a transaction as a connection. `sqlx` cannot say whether one is
/// open: without one, each append commits for itself.
impl<'a> Transaction<'a, Postgres, Sqlx> for PgConnection {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, to, log, events))
    }
}

/// Statements are not kept by the connection, so that a transaction-mode pooler may sit in between.
async fn append_in(
    connection: &mut PgConnection,
    to: &Postgres,
    log: &LogName,
    events: Result<Vec<NewEvent>>,
) -> Result<Vec<EventId>> {
    let events = events?;
    let Some(columns) = Columns::of(log, &events)? else { return Ok(Vec::new()) };
    let ids: Vec<String> = columns.ids.iter().map(ToString::to_string).collect();
    let mut query = sqlx::query(sqlx::AssertSqlSafe(to.schema.log_sql(columns.statement(), log))).persistent(false);
    macro_rules! bind {
        ($($column:expr),*) => {
            match ids.len() {
                1 => query = query$(.bind($column[0].clone()))*,
                _ => query = query$(.bind($column.clone()))*,
            }
        };
    }
    bind!(
        ids,
        columns.topics,
        columns.keys,
        columns.aggregates,
        columns.versions,
        columns.kinds,
        columns.sources,
        columns.tenants,
        columns.texts,
        columns.bytes,
        columns.content_types,
        columns.headers,
        columns.occurred,
        columns.deliver
    );
    connection.execute(query).await.map_err(|error| classify("append", Some(log), &error))?;
    Ok(columns.event_ids())
}

/// Whether this is the first time that `message_id` of `source` is seen, decided in your
/// transaction; see [`crate::once_in`].
pub async fn once_in(
    connection: &mut PgConnection,
    schema: &SchemaName,
    source: &SourceName,
    message_id: &str,
) -> Result<bool> {
    check_message_id("once", message_id)?;
    let sql = schema.sql(ONCE);
    let query = sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).bind(source.as_str()).bind(message_id).persistent(false);
    query.fetch_one(connection).await.map_err(|error| classify("once", None, &error))
}

fn classify(operation: &'static str, log: Option<&LogName>, error: &sqlx::Error) -> Error {
    let classified = match (error.as_database_error(), log) {
        (Some(database), Some(log)) if database.code().as_deref() == Some("42883") => {
            log_unknown(operation, log.as_str())
        }
        (Some(database), _) => {
            let state = database.code().unwrap_or_default();
            let postgres = database.try_downcast_ref::<sqlx::postgres::PgDatabaseError>();
            let (column, hint) = (postgres.and_then(|error| error.column()), postgres.and_then(|error| error.hint()));
            of_sqlstate(operation, &state, database.constraint(), column, database.message(), hint)
        }
        (None, _) => {
            Error::new(ErrorKind::Unavailable, operation, "store_unreachable", "the database cannot be reached")
        }
    };
    classified.with_source(error.to_string())
}
