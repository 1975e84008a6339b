//! Creates, removes and checks the schema.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Error, ErrorKind, LogName, Migrate, Result, events_undelivered, kit};
use rusqlite::{Connection, ErrorCode, OptionalExtension, Transaction};

use crate::classify::{Fault, Work, schema_missing};
use crate::clock::timestamp;
use crate::inspect::undelivered;
use crate::schema::{self, MIGRATION_TABLE, MIGRATIONS, TABLES, VERSION, log_ddl, log_table};
use crate::store::SqliteStore;
use crate::thread::Session;

/// How often to try to switch to WAL mode while other processes start too: half a second in all.
const WAL_ATTEMPTS_MAX: u32 = 50;
/// The wait between two attempts.
const WAL_ATTEMPT_WAIT: Duration = Duration::from_millis(10);

/// The highest applied migration. Primary key of a tiny table; no lock.
const MIGRATION_LAST: &str = "SELECT coalesce(max(number), 0) FROM postbox_migration";
/// When the first migration was applied. Primary key of a tiny table; no lock.
const MIGRATION_FIRST: &str = "SELECT applied_at FROM postbox_migration ORDER BY number LIMIT 1";
/// The names of all logs, by primary key; no lock.
const LOG_NAMES: &str = "SELECT name FROM postbox_log ORDER BY name";
/// Whether a log exists, by primary key; no lock.
const LOG_EXISTS: &str = "SELECT 1 FROM postbox_log WHERE name = ?1";
/// Whether a table or an index has the name that a log's table or its index would have. Reads the
/// whole (small) table; no lock.
const NAME_TAKEN: &str = "SELECT 1 FROM sqlite_master WHERE name IN ('postbox_' || ?1, 'postbox_' || ?1 || '_id')";

#[async_trait]
impl Migrate for SqliteStore {
    async fn up(&self) -> Result<Vec<String>> {
        let applied = self.writer().call("migrate", up).await?;
        for name in &applied {
            tracing::info!(migration = name, "migration applied");
        }
        Ok(applied)
    }

    async fn down(&self, discard_events: bool) -> Result<Vec<String>> {
        // Dropped with this future, which tells the job that its caller has gone.
        let caller = Arc::new(());
        let waiting = Arc::downgrade(&caller);
        let removed = self.writer().call("migrate", move |session| down(session, discard_events, &waiting)).await?;
        drop(caller);
        self.forget_cursors();
        Ok(removed)
    }

    async fn validate(&self) -> Result<Timestamp> {
        self.inspector().call("validate", |session| created_at(session.connection()?)).await
    }

    fn script(&self) -> String {
        let steps: String =
            MIGRATIONS.iter().map(|step| format!("{}{}\n", (step.sql)(), schema::migration_insert(step))).collect();
        format!("PRAGMA journal_mode = WAL;\nBEGIN IMMEDIATE;\n{MIGRATION_TABLE}\n{steps}COMMIT;\n")
    }
}

/// Creates a log, the table `postbox_NAME`. Idempotent.
pub(crate) fn create_log(session: &mut Session, log: &LogName) -> Work<()> {
    validate(session.connection()?)?;
    session.transact(|tx| {
        if log_exists(tx, log)? {
            return Ok(());
        }
        if tx.prepare_cached(NAME_TAKEN)?.exists([log.as_str()])? {
            return Err(name_taken("create_log", log).into());
        }
        Ok(tx.execute_batch(&log_ddl(log))?)
    })
}

/// Takes the write lock before it reads, so that of two concurrent starts the second finds nothing
/// to do.
fn up(session: &mut Session) -> Work<Vec<String>> {
    let connection = session.create()?;
    refuse_newer(applied(connection)?)?;
    let encoding: String = connection.query_row("PRAGMA encoding", [], |row| row.get(0))?;
    if encoding != "UTF-8" {
        // Text is measured in bytes, and searched for NUL.
        let message = format!("the database keeps text in {encoding}, Postbox needs UTF-8; make a new file for it");
        return Err(Error::new(ErrorKind::Mismatch, "migrate", "encoding_unsupported", message).into());
    }
    let mode = enter_wal(connection)?;
    if mode != "wal" {
        let message = format!(
            "the database stays in journal mode {mode}; Postbox needs WAL, which needs a local file system (no network share)"
        );
        return Err(Error::new(ErrorKind::Mismatch, "migrate", "wal_unavailable", message).into());
    }
    session.transact(|tx| {
        tx.execute_batch(MIGRATION_TABLE)?;
        let last = applied(tx)?.unwrap_or(0);
        refuse_newer(Some(last))?;
        let mut names = Vec::new();
        for step in MIGRATIONS.iter().filter(|step| step.number > last) {
            tx.execute_batch(&(step.sql)())?;
            tx.execute_batch(&schema::migration_insert(step))?;
            names.push(step.name.to_owned());
        }
        Ok(names)
    })
}

/// Switches to WAL mode. SQLite does not wait for locks here, because that could be a deadlock, so
/// two processes that start on a new file have to retry.
pub(crate) fn enter_wal(connection: &Connection) -> Work<String> {
    let mut attempts = 0;
    loop {
        match connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)) {
            Err(error) if attempts < WAL_ATTEMPTS_MAX && error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {
                attempts += 1;
                std::thread::sleep(WAL_ATTEMPT_WAIT);
            }
            done => return Ok(done?),
        }
    }
}

/// Removes the schema. If the command was interrupted while it waited for the lock, nothing is
/// removed when the lock becomes free: the end checks that `caller` is alive.
fn down(session: &mut Session, discard_events: bool, caller: &Weak<()>) -> Work<Vec<String>> {
    if !session.settings.path.exists() {
        return Ok(Vec::new());
    }
    let found = applied(session.connection()?)?;
    if found.is_none() {
        return Ok(Vec::new());
    }
    refuse_newer(found)?;
    // First without the write lock: to refuse needs none.
    if !discard_events {
        refuse_undelivered(&session.read()?)?;
    }
    session.transact(|tx| {
        let Some(last) = applied(tx)? else { return Ok(Vec::new()) };
        refuse_newer(Some(last))?;
        // Under the write lock nothing is appended between this check and the end.
        if !discard_events {
            refuse_undelivered(tx)?;
        }
        for log in log_names(tx)? {
            tx.execute_batch(&format!("DROP TABLE {}", log_table(&LogName::new(log)?)))?;
        }
        for table in TABLES {
            tx.execute_batch(&format!("DROP TABLE IF EXISTS postbox_{table}"))?;
        }
        if caller.strong_count() == 0 {
            let message = "the caller went away; nothing was removed";
            return Err(Error::new(ErrorKind::Unavailable, "migrate", "migrate_abandoned", message).into());
        }
        Ok(MIGRATIONS.iter().rev().filter(|step| step.number <= last).map(|step| step.name.to_owned()).collect())
    })
}

fn refuse_undelivered(tx: &Transaction<'_>) -> Work<()> {
    undelivered(tx)?.map_or(Ok(()), |log| Err(events_undelivered(&log).into()))
}

/// Checks that the schema has exactly the version of this program.
pub(crate) fn validate(connection: &Connection) -> Work<()> {
    match applied(connection)? {
        None | Some(0) => Err(schema_missing("validate", connection.path().map(std::path::Path::new)).into()),
        Some(VERSION) => Ok(()),
        Some(older) if older < VERSION => {
            let message = format!(
                "the schema is at {older}, this program needs {VERSION}; run: postbox migrate up, with the same store"
            );
            Err(Error::new(ErrorKind::Mismatch, "validate", "schema_old", message).into())
        }
        newer => refuse_newer(newer),
    }
}

/// When the first migration was applied to a valid schema.
fn created_at(connection: &Connection) -> Work<Timestamp> {
    validate(connection)?;
    let micros: i64 = connection.query_row(MIGRATION_FIRST, [], |row| row.get(0))?;
    Ok(timestamp(micros))
}

fn refuse_newer(applied: Option<i64>) -> Work<()> {
    match applied {
        Some(newer) if newer > VERSION => {
            let message = format!("the schema is at {newer}, this program needs {VERSION}; use a newer postbox");
            Err(Error::new(ErrorKind::Mismatch, "validate", "schema_newer", message).into())
        }
        _ => Ok(()),
    }
}

/// The highest applied migration; `None` if there is no schema at all.
pub(crate) fn applied(connection: &Connection) -> Work<Option<i64>> {
    match connection.query_row(MIGRATION_LAST, [], |row| row.get(0)).map_err(Fault::from) {
        Ok(number) => Ok(Some(number)),
        Err(fault) if fault.is_table_missing() => Ok(None),
        Err(fault) => Err(fault),
    }
}

/// Refuses a log name that another table of ours has.
pub(crate) fn checked_log(operation: &'static str, log: &LogName) -> Result<LogName> {
    let log = LogName::new(log.as_str())?;
    if TABLES.contains(&log.as_str()) {
        return Err(name_taken(operation, &log));
    }
    Ok(log)
}

fn name_taken(operation: &'static str, log: &LogName) -> Error {
    let message = format!("{log} cannot be a log: Postbox has a table or index of that name, or of {log}_id");
    Error::new(ErrorKind::NotFound, operation, "log_unknown", message)
}

fn log_exists(tx: &Transaction<'_>, log: &LogName) -> Work<bool> {
    Ok(tx.prepare_cached(LOG_EXISTS)?.query_row([log.as_str()], |_| Ok(())).optional()?.is_some())
}

pub(crate) fn log_names(connection: &Connection) -> Work<Vec<String>> {
    Ok(connection.prepare_cached(LOG_NAMES)?.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?)
}

/// Refuses a log that does not exist, and names those that do.
pub(crate) fn require_log(operation: &'static str, tx: &Transaction<'_>, log: &LogName) -> Work<LogName> {
    let log = checked_log(operation, log)?;
    if log_exists(tx, &log)? { Ok(log) } else { Err(log_unknown(operation, tx, &log)?.into()) }
}

fn log_unknown(operation: &'static str, connection: &Connection, log: &LogName) -> Work<Error> {
    Ok(kit::log_unknown(operation, log, &log_names(connection)?))
}

/// Explains a missing log table: the log is unknown if there is a schema; otherwise the schema is
/// missing.
pub(crate) fn explain_missing(operation: &'static str, connection: &Connection, log: &LogName, fault: Fault) -> Fault {
    if fault.is_table_missing()
        && let Ok(error) = log_unknown(operation, connection, log)
    {
        return error.into();
    }
    fault
}
