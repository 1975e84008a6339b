//! Appends in an `sqlx` transaction.

use ::sqlx::sqlite::SqliteArguments;
use ::sqlx::{Arguments, AssertSqlSafe, Connection as _, Database, SqliteConnection};
use postbox_core::kit::{check_message_id, log_unknown};
use postbox_core::{
    AppendFuture, Appended, Error, ErrorKind, EventId, LogName, NewEvent, Result, SourceName, Transaction,
};
use sqlx_core::transaction::TransactionManager as _;

use crate::append::{APPEND_COLUMNS, OR_NOTHING, Sqlite, headers_json, log_has, rolled_back};
use crate::classify::from_code;
use crate::migrate::checked_log;
use crate::once::once_insert;
use crate::schema::{NOW_MICROS, log_table};

/// The most events in one statement. With 14 parameters each they stay far below SQLite's limit of
/// 32,766, and a statement is one message to the connection's thread.
const EVENTS_PER_STATEMENT: usize = 500;

/// What counts the transactions of a connection.
type Manager = <::sqlx::Sqlite as Database>::TransactionManager;

/// Marks transactions of `sqlx`.
#[derive(Debug)]
pub enum Sqlx {}

impl<'a> Transaction<'a, Sqlite, Sqlx> for ::sqlx::Transaction<'_, ::sqlx::Sqlite> {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, _: &'a Sqlite, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, log, events))
    }
}

/// For functions that receive a transaction as a connection. `sqlx` counts the transactions that it
/// began itself; without one of them, an append is refused.
impl<'a> Transaction<'a, Sqlite, Sqlx> for SqliteConnection {
    type Appended = AppendFuture<'a>;

    fn append(&'a mut self, _: &'a Sqlite, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
        Box::pin(append_in(self, log, events))
    }
}

async fn append_in(
    connection: &mut SqliteConnection,
    log: &LogName,
    events: Result<Vec<NewEvent>>,
) -> Result<Appended> {
    let events = events?;
    let log = checked_log("append", log)?;
    NewEvent::validate_all(&events)?;
    let events: Vec<(EventId, NewEvent)> =
        events.into_iter().map(|event| (event.id.unwrap_or_else(EventId::now_v7), event)).collect();
    if events.is_empty() {
        return Ok(Appended::default());
    }
    require_transaction("append", connection).await?;
    let may_be_known = events.iter().any(|(_, event)| event.id.is_some());
    let known = if events.len() <= EVENTS_PER_STATEMENT && !may_be_known {
        match insert(connection, &log, &events, "").await {
            Ok(_) => 0,
            Err(error) => return Err(explain_rollback(connection, error).await),
        }
    } else {
        // Several statements must all take effect, or none.
        let mut savepoint = connection.begin().await.map_err(|error| classify("append", error))?;
        let known = match insert_chunks(&mut savepoint, &log, &events).await {
            Ok(known) => known,
            Err(error) => return Err(explain_rollback(&mut savepoint, error).await),
        };
        savepoint.commit().await.map_err(|error| classify("append", error))?;
        known
    };
    Ok(Appended::new(events.into_iter().map(|(id, _)| id).collect(), known))
}

/// Refuses a connection without a transaction, because change and events could not commit together.
async fn require_transaction(operation: &'static str, connection: &mut SqliteConnection) -> Result<()> {
    if !connection.is_in_transaction() {
        let message = "sqlx has no transaction open; begin one with it (not with the SQL command), \
                       and commit your change together with its events";
        return Err(Error::invalid(operation, "no_transaction", message));
    }
    if is_ended(operation, connection).await? {
        let message = "sqlx counts a transaction, but none is open: SQLite has rolled it back after an error, or an \
                       SQL command has ended it; begin another one";
        return Err(Error::invalid(operation, "no_transaction", message));
    }
    Ok(())
}

/// Returns whether the transaction that `sqlx` counts is there no more. If so, it is no longer
/// counted either: `sqlx` cannot end it, and would lend the connection again as it is.
async fn is_ended(operation: &'static str, connection: &mut SqliteConnection) -> Result<bool> {
    // Inside a transaction, BEGIN fails with SQLITE_ERROR and changes nothing.
    match ::sqlx::query("BEGIN").persistent(false).execute(&mut *connection).await {
        Err(error) if error.as_database_error().and_then(|error| error.code()).as_deref() == Some("1") => {
            return Ok(false);
        }
        Err(error) => return Err(classify(operation, error)),
        Ok(_) => {}
    }
    let depth = Manager::get_transaction_depth(connection);
    // `sqlx` rolls back to savepoints of these names.
    for nested in 1..depth {
        let savepoint = ::sqlx::query(AssertSqlSafe(format!("SAVEPOINT _sqlx_savepoint_{nested}"))).persistent(false);
        savepoint.execute(&mut *connection).await.map_err(|error| classify(operation, error))?;
    }
    for _ in 0..depth {
        Manager::rollback(connection).await.map_err(|error| classify(operation, error))?;
    }
    Ok(true)
}

/// Says of an append's error that SQLite has rolled back everything, if it has.
async fn explain_rollback(connection: &mut SqliteConnection, error: Error) -> Error {
    match is_ended("append", connection).await {
        Ok(true) => rolled_back(error),
        _ => error,
    }
}

/// Inserts events. Returns how many of them the log already has.
async fn insert_chunks(
    connection: &mut SqliteConnection,
    log: &LogName,
    events: &[(EventId, NewEvent)],
) -> Result<usize> {
    let mut known = 0;
    for chunk in events.chunks(EVENTS_PER_STATEMENT) {
        let inserted = insert(connection, log, chunk, OR_NOTHING).await?;
        known += chunk.len() - inserted;
        if inserted < chunk.len() {
            known -= insert_unknown(connection, log, chunk).await?;
        }
    }
    Ok(known)
}

/// Inserts rows. Returns how many.
async fn insert(
    connection: &mut SqliteConnection,
    log: &LogName,
    events: &[(EventId, NewEvent)],
    end: &str,
) -> Result<usize> {
    let mut arguments = SqliteArguments::default();
    events.iter().try_for_each(|(id, event)| bind(&mut arguments, *id, event))?;
    let row = format!("(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {NOW_MICROS})");
    let rows = vec![row; events.len()].join(", ");
    // The only text that is not a constant of ours is the log's name, which has only letters,
    // digits and underscores.
    let log_append = format!("INSERT INTO {} ({APPEND_COLUMNS}) VALUES {rows}{end}", log_table(log));
    // Each number of rows is a statement of its own. Kept, they would take up to 65 MiB in each
    // connection, and displace the caller's.
    let query = ::sqlx::query_with(AssertSqlSafe(log_append), arguments).persistent(events.len() == 1);
    match query.execute(&mut *connection).await {
        Ok(inserted) => Ok(inserted.rows_affected() as usize),
        Err(error) => Err(explain(connection, log, classify("append", error)).await),
    }
}

/// Inserts those events of a chunk that the log does not have, after some rows were left out.
/// SQLite then reports why a row was left out, if not because the event is known.
async fn insert_unknown(
    connection: &mut SqliteConnection,
    log: &LogName,
    events: &[(EventId, NewEvent)],
) -> Result<usize> {
    let mut inserted = 0;
    for (id, event) in events {
        let has = ::sqlx::query_scalar(AssertSqlSafe(log_has(log)))
            .bind(id.to_string())
            .bind(&event.topic)
            .bind(&event.key)
            .bind(&event.tenant)
            .bind(event.payload.as_ref());
        let is_known: bool = has.fetch_one(&mut *connection).await.map_err(|error| classify("append", error))?;
        if !is_known {
            inserted += insert(connection, log, &[(*id, event.clone())], "").await?;
        }
    }
    Ok(inserted)
}

/// Records a message id in *your* transaction: returns `true` the first time. Like
/// [`crate::once_in`]; pass `&mut *tx`.
pub async fn once_in(connection: &mut SqliteConnection, source: &SourceName, message_id: &str) -> Result<bool> {
    check_message_id("once", message_id)?;
    require_transaction("once", connection).await?;
    let noted = ::sqlx::query(AssertSqlSafe(once_insert()))
        .bind(source.as_str())
        .bind(message_id)
        .execute(connection)
        .await
        .map_err(|error| classify("once", error))?;
    Ok(noted.rows_affected() == 1)
}

fn bind(arguments: &mut SqliteArguments, id: EventId, event: &NewEvent) -> Result<()> {
    let micros = |at: Option<jiff::Timestamp>| at.map(|at| at.as_microsecond());
    let headers = headers_json(event)?;
    let added = (|| {
        arguments.add(id.to_string())?;
        arguments.add(event.topic.clone())?;
        arguments.add(event.key.clone())?;
        arguments.add(event.aggregate.clone())?;
        arguments.add(event.version)?;
        arguments.add(event.kind.clone())?;
        arguments.add(event.source.clone())?;
        arguments.add(event.tenant.clone())?;
        arguments.add(event.content_type.clone())?;
        arguments.add(headers)?;
        arguments.add(micros(event.occurred_at))?;
        arguments.add(micros(event.deliver_at))?;
        arguments.add(micros(event.expires_at))?;
        arguments.add(event.payload.to_vec())
    })();
    added.map_err(|error| {
        Error::new(ErrorKind::Internal, "append", "bind_failed", "a value could not be bound").with_source(error)
    })
}

/// Maps errors of `sqlx`. The codes are SQLite's own.
fn classify(operation: &'static str, error: ::sqlx::Error) -> Error {
    let (code, text) = match error.as_database_error() {
        Some(database) => {
            let code = database.code().and_then(|code| code.parse().ok()).unwrap_or(0);
            (code, database.message().to_owned())
        }
        None => (0, error.to_string()),
    };
    from_code(operation, code, &text).with_source(error)
}

/// If there is a schema, a missing log table means an unknown log.
async fn explain(connection: &mut SqliteConnection, log: &LogName, error: Error) -> Error {
    if error.code() != "schema_missing" {
        return error;
    }
    let known: Result<Vec<(String,)>, _> =
        ::sqlx::query_as("SELECT name FROM postbox_log ORDER BY name").fetch_all(connection).await;
    match known {
        Ok(known) => log_unknown("append", log, &known.into_iter().map(|(name,)| name).collect::<Vec<_>>()),
        Err(_) => error,
    }
}
