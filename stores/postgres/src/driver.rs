//! For the crates of drivers other than ours: what they execute to append and to settle, and what a
//! refusal means.
//!
//! Such a crate implements [`Transaction`](postbox_core::Transaction) for a driver's transaction
//! and [`Postgres`], and where handlers work in its transactions [`Settles`]. It binds and
//! executes; the statements, their parameters and the errors are made here, so that all drivers do
//! the same.

use std::fmt::Display;

use postbox_core::{Error, ErrorKind, EventId, LogName, NewEvent, Result};

use crate::append::{Columns, Postgres, refused};
use crate::classify::of_database;
pub use crate::lent::{Applied, BEGIN, Borrowed, Rows, Settles, Statement, apply_in, pool_exhausted};
use crate::once::ONCE;
use crate::schema::SchemaName;

/// A statement that appends events. Do not prepare it under a name: nothing may stay in the
/// session, so that a transaction-mode pooler may sit in between.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AppendStatement {
    /// What to execute. It gives an empty row for each event that the log had already: their number
    /// is what [`Appended::new`](postbox_core::Appended::new) takes beside `ids`.
    pub sql: String,
    /// Its parameters `$1`, `$2`, …. Bind each as `text`, the only type that every driver agrees
    /// about; the statement casts.
    pub texts: Vec<Option<String>>,
    /// The ids of all events, when the statement was executed.
    pub ids: Vec<EventId>,
}

impl AppendStatement {
    /// Checks every limit and makes the statement. `None`: there are no events.
    pub fn of(to: &Postgres, log: &LogName, events: Result<Vec<NewEvent>>) -> Result<Option<Self>> {
        let events = events?;
        let Some(columns) = Columns::of(log, &events)? else { return Ok(None) };
        let sql = columns.statement(&to.schema, log);
        Ok(Some(Self { sql, texts: columns.texts(), ids: columns.event_ids() }))
    }
}

/// The statement behind [`once_in`](crate::once_in), which see: `$1` is the source, `$2` the
/// message's id, both as `text`. Its one row and column is `true` the first time.
pub fn once_statement(schema: &SchemaName) -> String {
    schema.sql(ONCE)
}

/// What a driver says of a statement that the server refused.
#[derive(Debug, Clone, Copy, Default)]
pub struct Refusal<'a> {
    /// The SQLSTATE.
    pub state: &'a str,
    /// The constraint that was broken.
    pub constraint: Option<&'a str>,
    /// The column that must not be null.
    pub column: Option<&'a str>,
    /// The server's text.
    pub message: &'a str,
    /// Its hint.
    pub hint: Option<&'a str>,
}

impl Refusal<'_> {
    /// The error of any operation.
    pub fn of(&self, operation: &'static str) -> Error {
        of_database(operation, self)
    }

    /// The error of an append to this log, which may be missing.
    pub fn of_append(&self, log: &LogName) -> Error {
        refused(log, self.of("append"))
    }
}

/// The code where the server gave no answer.
pub(crate) const UNREACHABLE: &str = "store_unreachable";

/// The error where the server gave no answer.
pub fn unreachable(operation: &'static str, cause: impl Display) -> Error {
    let message = format!("the database cannot be reached ({cause}); is it running, and did the connection end?");
    Error::new(ErrorKind::Unavailable, operation, UNREACHABLE, message)
}

/// The error of a connection in autocommit, where the promise of one transaction could not be kept.
pub fn no_transaction(operation: &'static str) -> Error {
    let message = "the driver has no transaction open; begin one with it (not with the SQL command), \
                   and commit your change together with its events";
    Error::invalid(operation, "no_transaction", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_and_several_have_the_same_number_of_parameters() {
        let of = |count| {
            let events = vec![NewEvent::json("t", "{}"); count];
            AppendStatement::of(&Postgres::default(), &LogName::outbox(), Ok(events)).expect("fine")
        };
        assert_eq!(of(0), None);
        let (one, two) = (of(1).expect("one"), of(2).expect("two"));
        assert_eq!((one.ids.len(), two.ids.len()), (1, 2));
        let parameters = |statement: &AppendStatement| statement.sql.matches('$').count();
        assert_eq!(parameters(&one), one.texts.len());
        assert_eq!(parameters(&two), two.texts.len());
    }
}
