//! Appending: in a transaction of the store's own, or in yours.

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::kit::in_context;
use postbox_core::{Append, Appended, Error, ErrorKind, EventId, LogName, NewEvent, Result, Transaction};
use rusqlite::{CachedStatement, Connection, params};

use crate::classify::{Fault, Work};
use crate::migrate::{checked_log, explain_missing};
use crate::schema::log_table;
use crate::store::SqliteStore;

/// The columns of an append, in the order of its parameters.
pub(crate) const APPEND_COLUMNS: &str = "id, topic, key, aggregate, version, kind, source, tenant, content_type, headers, occurred_at, deliver_at, expires_at, payload, created_at";

#[async_trait]
impl Append for SqliteStore {
    async fn append(&self, log: &LogName, events: &[NewEvent]) -> Result<Appended> {
        let log = checked_log("append", log)?;
        let events = in_context(events).into_owned();
        NewEvent::validate_all(&events)?;
        if events.is_empty() {
            return Ok(Appended::default());
        }
        let now = self.now();
        let appended =
            self.writer().call("append", move |session| session.transact(|tx| insert(tx, &log, &events, now))).await?;
        self.wake();
        Ok(appended)
    }
}

/// What a [`Postbox`](postbox_core::Postbox) for SQLite appends to: our tables in the file that the
/// transaction is in.
///
/// Takes a [`rusqlite::Transaction`], a savepoint of one, and a connection with an open
/// transaction; with the feature `sqlx`, transactions of `sqlx` 0.9 too. A connection without one
/// is refused (`Invalid`, code `no_transaction`). If an append fails, your transaction is as it was
/// before, unless SQLite has rolled back all of it, as after an error of the disk.
///
/// ```
/// # fn example() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut connection = rusqlite::Connection::open_in_memory()?;
/// use postbox_core::{NewEvent, Postbox};
/// use postbox_sqlite::Sqlite;
///
/// let postbox = Postbox::new(Sqlite);
/// let mut tx = connection.transaction()?;
/// tx.execute("INSERT INTO orders (id) VALUES (42)", [])?;
/// postbox.append(&mut tx, NewEvent::json("order.placed", "{}").key("42"))?;
/// tx.commit()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sqlite;

/// Marks transactions of `rusqlite`.
#[derive(Debug)]
pub enum Rusqlite {}

macro_rules! appends {
    ($($transaction:ty),*) => {
        $(impl<'a> Transaction<'a, Sqlite, Rusqlite> for $transaction {
            type Appended = Result<Appended>;

            fn append(&'a mut self, _: &'a Sqlite, log: &'a LogName, events: Result<Vec<NewEvent>>) -> Self::Appended {
                append_in(self, log, &events?)
            }
        })*
    };
}

appends!(rusqlite::Transaction<'_>, &rusqlite::Transaction<'_>, rusqlite::Savepoint<'_>, Connection);

fn append_in(tx: &Connection, log: &LogName, events: &[NewEvent]) -> Result<Appended> {
    let log = checked_log("append", log)?;
    NewEvent::validate_all(events)?;
    require_transaction("append", tx)?;
    if events.is_empty() {
        return Ok(Appended::default());
    }
    // By this machine's clock, which SQLite's functions read too, a tenth of a row's time cheaper.
    let now = Timestamp::now().as_microsecond();
    let append = || -> Work<Appended> {
        if events.len() == 1 {
            // A statement that fails takes back what it did.
            return insert(tx, &log, events, now);
        }
        tx.execute_batch("SAVEPOINT postbox_append")?;
        let inserted = insert(tx, &log, events, now);
        match inserted {
            Ok(_) => tx.execute_batch("RELEASE postbox_append")?,
            // The savepoint is gone too.
            Err(_) if tx.is_autocommit() => {}
            Err(_) => tx.execute_batch("ROLLBACK TO postbox_append; RELEASE postbox_append")?,
        }
        inserted
    };
    append().map_err(|fault| {
        let error = fault.into_error("append");
        if tx.is_autocommit() { rolled_back(error) } else { error }
    })
}

/// After some errors, as of the disk, SQLite rolls back the whole transaction by itself.
pub(crate) fn rolled_back(error: Error) -> Error {
    let message = format!("{}; SQLite has rolled back your whole transaction: begin it again", error.message());
    Error::new(error.kind(), error.operation(), error.code().to_owned(), message).with_source(error)
}

/// Refuses a connection in autocommit mode, where the promise of one transaction could not be kept.
pub(crate) fn require_transaction(operation: &'static str, tx: &Connection) -> Result<()> {
    if tx.is_autocommit() {
        let message = "there is no open transaction; begin one, and commit your change together with its events";
        return Err(Error::invalid(operation, "no_transaction", message));
    }
    Ok(())
}

/// How many rows one statement inserts, the largest number that fits first. A statement for many
/// rows costs each of them less, and SQLite copies each page it changes to the statement's journal
/// once, not once for each row (measured for 100 rows: 1 KiB instead of 12 KiB for each). 64 rows
/// have 960 parameters; a SQLite of before 2020 takes 999.
const ROWS: [usize; 3] = [64, 8, 1];

/// Inserts validated events with prepared statements: in-process, one costs no round trip. Takes
/// the primary key and the unique index on id; holds the database's one write lock.
fn insert(tx: &Connection, log: &LogName, events: &[NewEvent], now: i64) -> Work<Appended> {
    let ids: Vec<_> = events.iter().map(|event| event.id.unwrap_or_else(EventId::now_v7)).collect();
    let rows: Vec<_> = ids.iter().copied().zip(events).collect();
    let mut known = 0;
    for mut rows in rows.chunk_by(|(_, one), (_, next)| one.id.is_none() && next.id.is_none()) {
        if let [(id, event)] = rows
            && event.id.is_some()
        {
            known += usize::from(insert_or_know(tx, log, *id, event, now)?);
            continue;
        }
        for count in ROWS {
            let (full, rest) = rows.split_at(rows.len() - rows.len() % count);
            if !full.is_empty() {
                let mut insert = prepare(tx, log, count, "")?;
                for chunk in full.chunks(count) {
                    execute(&mut insert, chunk, now)?;
                }
            }
            rows = rest;
        }
    }
    Ok(Appended::new(ids, known))
}

/// Inserts one event under a new id, or under its own, which nobody else may have.
pub(crate) fn insert_one(tx: &Connection, log: &LogName, event: &NewEvent, now: i64) -> Work<EventId> {
    let id = event.id.unwrap_or_else(EventId::now_v7);
    execute(&mut prepare(tx, log, 1, "")?, &[(id, event)], now)?;
    Ok(id)
}

/// Inserts an event, unless the log has it; whether it has. Not asked for first: a transaction that
/// begins with a look cannot write once another has written.
fn insert_or_know(tx: &Connection, log: &LogName, id: EventId, event: &NewEvent, now: i64) -> Work<bool> {
    if execute(&mut prepare(tx, log, 1, OR_NOTHING)?, &[(id, event)], now)? == 1 {
        return Ok(false);
    }
    let content = params![id.to_string(), event.topic, event.key, event.tenant, event.payload.as_ref()];
    let known: bool = tx.prepare_cached(&log_has(log))?.query_row(content, |row| row.get(0))?;
    if !known {
        // SQLite says what is in its way.
        insert_one(tx, log, event, now)?;
    }
    Ok(known)
}

/// Ends an insert that leaves out what a unique index has already.
pub(crate) const OR_NOTHING: &str = " ON CONFLICT DO NOTHING";

/// Whether a log has an event, the same in what tells events apart. Index: the unique one on id.
/// Rows that were inserted by hand may have their payload as text.
pub(crate) fn log_has(log: &LogName) -> String {
    format!(
        "SELECT EXISTS (SELECT 1 FROM {} WHERE id = ?1 AND topic = ?2 AND key IS ?3 AND tenant IS ?4 AND CAST(payload AS BLOB) = ?5)",
        log_table(log)
    )
}

fn prepare<'tx>(tx: &'tx Connection, log: &LogName, rows: usize, end: &str) -> Work<CachedStatement<'tx>> {
    const ROW: &str = "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
    let rows = vec![ROW; rows].join(", ");
    let log_append = format!("INSERT INTO {} ({APPEND_COLUMNS}) VALUES {rows}{end}", log_table(log));
    tx.prepare_cached(&log_append).map_err(|error| explain_missing("append", tx, log, Fault::from(error)))
}

fn execute(insert: &mut CachedStatement<'_>, rows: &[(EventId, &NewEvent)], now: i64) -> Work<usize> {
    let mut place = 0;
    for (id, event) in rows {
        let values = params![
            id.to_string(),
            event.topic,
            event.key,
            event.aggregate,
            event.version,
            event.kind,
            event.source,
            event.tenant,
            event.content_type,
            headers_json(event)?,
            event.occurred_at.map(|at| at.as_microsecond()),
            event.deliver_at.map(|at| at.as_microsecond()),
            event.expires_at.map(|at| at.as_microsecond()),
            event.payload.as_ref(),
            now,
        ];
        for value in values {
            place += 1;
            insert.raw_bind_parameter(place, value)?;
        }
    }
    Ok(insert.raw_execute()?)
}

/// Headers as they are stored: a JSON object, or nothing.
pub(crate) fn headers_json(event: &NewEvent) -> Result<Option<String>> {
    if event.headers.is_empty() {
        return Ok(None);
    }
    let json = serde_json::to_string(&event.headers).map_err(|error| {
        Error::new(ErrorKind::Internal, "append", "headers_invalid", "the headers cannot be written").with_source(error)
    })?;
    Ok(Some(json))
}
