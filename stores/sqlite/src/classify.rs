//! Classifies SQLite errors.

use std::path::Path;

use postbox_core::{Error, ErrorKind, Result};
use rusqlite::ffi;

/// Why a job on a store thread failed: an error of our own, or one from SQLite.
#[derive(Debug)]
pub(crate) enum Fault {
    Classified(Error),
    Sqlite(rusqlite::Error),
}

/// The result of work on a connection, before its error has the name of the operation.
pub(crate) type Work<T> = Result<T, Fault>;

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Classified(error)
    }
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

impl Fault {
    pub(crate) fn into_error(self, operation: &'static str) -> Error {
        match self {
            Self::Classified(error) => error,
            Self::Sqlite(error) => classify(operation, error),
        }
    }

    /// As [`Self::into_error`], where the file is known: the error of a missing table names it.
    pub(crate) fn into_error_of_file(self, operation: &'static str, path: &Path) -> Error {
        match self {
            Self::Sqlite(error) if is_own_table_missing(&error.to_string()) => schema_missing(operation, Some(path)),
            fault => fault.into_error(operation),
        }
    }

    /// Whether SQLite says that a table is missing.
    pub(crate) fn is_table_missing(&self) -> bool {
        matches!(self, Self::Sqlite(error) if error.to_string().contains("no such table"))
    }
}

/// Maps errors of `rusqlite`.
pub(crate) fn classify(operation: &'static str, error: rusqlite::Error) -> Error {
    let code = error.sqlite_error().map_or(0, |error| error.extended_code);
    from_code(operation, code, &error.to_string()).with_source(error)
}

fn is_own_table_missing(text: &str) -> bool {
    text.contains("no such table: postbox_") || text.contains("no such table: main.postbox_")
}

/// Maps SQLite's extended result code and text to kind, code and cure; shared by the drivers.
///
/// Unknown codes become `Internal`, which callers retry with a limit, so nothing is lost.
pub(crate) fn from_code(operation: &'static str, extended: i32, text: &str) -> Error {
    if is_own_table_missing(text) {
        return schema_missing(operation, None);
    }
    // SQLite refuses for ON DELETE RESTRICT with a trigger of its own.
    let is_reference = extended == ffi::SQLITE_CONSTRAINT_FOREIGNKEY
        || (extended == ffi::SQLITE_CONSTRAINT_TRIGGER && text.contains("FOREIGN KEY constraint failed"));
    let (kind, code, message) = match (extended & 0xff, extended) {
        (_, ffi::SQLITE_BUSY_SNAPSHOT) => (
            ErrorKind::Unavailable,
            "store_busy",
            "the transaction read before another one wrote, so it cannot write any more; roll it back, and begin such \
             transactions with BEGIN IMMEDIATE"
                .into(),
        ),
        (ffi::SQLITE_BUSY | ffi::SQLITE_LOCKED, _) => (
            ErrorKind::Unavailable,
            "store_busy",
            "the database's write lock was not free in time: another process has a long transaction, or many one after \
             another without a pause; end it, or let it pause between them"
                .into(),
        ),
        (ffi::SQLITE_READONLY | ffi::SQLITE_PERM | ffi::SQLITE_AUTH, _) => return read_only(operation),
        (ffi::SQLITE_NOTADB, _) => (
            ErrorKind::Mismatch,
            "store_not_a_database",
            "the file is not a SQLite database (or it is encrypted); correct the store's path".into(),
        ),
        (ffi::SQLITE_CANTOPEN, _) => (
            ErrorKind::Mismatch,
            "store_cannot_open",
            "the database file cannot be opened; check the path and that the file and its folder are writable".into(),
        ),
        (ffi::SQLITE_CORRUPT, _) => {
            let message = format!("the database file is damaged ({text}); restore it from a backup");
            (ErrorKind::Mismatch, "store_corrupt", message)
        }
        (ffi::SQLITE_FULL, _) => (
            ErrorKind::Unavailable,
            "store_full",
            "the disk is full; free space, and delivery continues by itself".into(),
        ),
        (ffi::SQLITE_IOERR, _) => {
            let message = format!("the disk answered with an error ({text}); look for its cause in the system's log");
            (ErrorKind::Unavailable, "store_io", message)
        }
        (ffi::SQLITE_NOMEM, _) => (
            ErrorKind::Unavailable,
            "store_out_of_memory",
            "out of memory; give the program more, or make batches smaller".into(),
        ),
        (ffi::SQLITE_INTERRUPT, _) => {
            (ErrorKind::Unavailable, "store_interrupted", "the statement was interrupted; run it again".into())
        }
        (ffi::SQLITE_TOOBIG, _) => {
            (ErrorKind::Invalid, "payload_too_large", "the value is larger than SQLite can hold".into())
        }
        (_, ffi::SQLITE_CONSTRAINT_CHECK) => return broken_check(operation, text),
        (_, ffi::SQLITE_CONSTRAINT_UNIQUE) if text.contains(".id") => (
            ErrorKind::Conflict,
            "event_id_taken",
            "the log has another event under this id; nothing was written: give each an id of its own".into(),
        ),
        // A foreign key of the application refers to what would be deleted.
        _ if is_reference && ["prune", "forget"].contains(&operation) => (
            ErrorKind::Conflict,
            "reference_held",
            "a row refers to an event that would be deleted; drop the foreign key that refers to the log, or give it \
             ON DELETE CASCADE"
                .into(),
        ),
        // Internal, so that the relay finds the event whose handler left it.
        _ if is_reference => (
            ErrorKind::Internal,
            "foreign_key",
            "a foreign key points nowhere, so nothing was written; write the row it points to in the same transaction"
                .into(),
        ),
        (_, ffi::SQLITE_CONSTRAINT_NOTNULL) => {
            (ErrorKind::Invalid, "column_missing", format!("a column must not be null ({text}); give it a value"))
        }
        _ => (ErrorKind::Internal, "store_error", format!("SQLite answered: {text}")),
    };
    Error::new(kind, operation, code, message)
}

/// Constraints are named by the stable codes of `NewEvent::validate`.
fn broken_check(operation: &'static str, text: &str) -> Error {
    let code = text.rsplit("CHECK constraint failed: ").next().unwrap_or("event_invalid").trim().to_owned();
    Error::invalid(operation, code.clone(), format!("the event breaks the rule {code}; nothing was written"))
}

/// The file can be read but not written.
pub(crate) fn read_only(operation: &'static str) -> Error {
    let message = "the database is read-only; make the file and its folder writable for this user";
    Error::new(ErrorKind::Mismatch, operation, "store_readonly", message)
}

/// The error of a missing schema; `path` if we know the file.
pub(crate) fn schema_missing(operation: &'static str, path: Option<&Path>) -> Error {
    let store = path.map_or_else(|| "sqlite:FILE".into(), |path| format!("sqlite:{}", path.display()));
    let message = format!("{store} has no Postbox tables; run: postbox migrate up, with the same store");
    Error::new(ErrorKind::Mismatch, operation, "schema_missing", message)
}

/// The error of a file that is not there, which may be a wrong path as well as a new store.
pub(crate) fn file_missing(operation: &'static str, path: &Path) -> Error {
    let path = path.display();
    let message = format!(
        "there is no file {path}; correct the path or the working folder, or create it: postbox migrate up, with the \
         same store"
    );
    Error::new(ErrorKind::Mismatch, operation, "schema_missing", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sqlite_error_has_a_kind_and_a_code() {
        for (extended, text, kind, code) in [
            (ffi::SQLITE_BUSY, "database is locked", ErrorKind::Unavailable, "store_busy"),
            (ffi::SQLITE_BUSY_SNAPSHOT, "database is locked", ErrorKind::Unavailable, "store_busy"),
            (ffi::SQLITE_LOCKED, "table is locked", ErrorKind::Unavailable, "store_busy"),
            (ffi::SQLITE_READONLY, "attempt to write", ErrorKind::Mismatch, "store_readonly"),
            (ffi::SQLITE_READONLY_DIRECTORY, "attempt to write", ErrorKind::Mismatch, "store_readonly"),
            (ffi::SQLITE_NOTADB, "file is not a database", ErrorKind::Mismatch, "store_not_a_database"),
            (ffi::SQLITE_CANTOPEN, "unable to open", ErrorKind::Mismatch, "store_cannot_open"),
            (ffi::SQLITE_CORRUPT, "malformed", ErrorKind::Mismatch, "store_corrupt"),
            (ffi::SQLITE_FULL, "full", ErrorKind::Unavailable, "store_full"),
            (ffi::SQLITE_IOERR_FSYNC, "disk I/O error", ErrorKind::Unavailable, "store_io"),
            (ffi::SQLITE_CONSTRAINT_CHECK, "CHECK constraint failed: key_too_long", ErrorKind::Invalid, "key_too_long"),
            (
                ffi::SQLITE_CONSTRAINT_UNIQUE,
                "UNIQUE constraint failed: postbox_outbox.id",
                ErrorKind::Conflict,
                "event_id_taken",
            ),
            (ffi::SQLITE_CONSTRAINT_FOREIGNKEY, "FOREIGN KEY constraint failed", ErrorKind::Internal, "foreign_key"),
            (ffi::SQLITE_CONSTRAINT_TRIGGER, "FOREIGN KEY constraint failed", ErrorKind::Internal, "foreign_key"),
            (ffi::SQLITE_CONSTRAINT_TRIGGER, "not on a Sunday", ErrorKind::Internal, "store_error"),
            (ffi::SQLITE_ERROR, "no such table: postbox_outbox", ErrorKind::Mismatch, "schema_missing"),
            (ffi::SQLITE_ERROR, "near \"x\": syntax error", ErrorKind::Internal, "store_error"),
        ] {
            let error = from_code("test", extended, text);
            assert_eq!((error.kind(), error.code()), (kind, code), "{extended} {text}");
        }
        for extended in [ffi::SQLITE_CONSTRAINT_FOREIGNKEY, ffi::SQLITE_CONSTRAINT_TRIGGER] {
            let held = from_code("prune", extended, "FOREIGN KEY constraint failed");
            assert_eq!((held.kind(), held.code()), (ErrorKind::Conflict, "reference_held"));
        }
    }
}
