//! For crates that support other drivers: what to execute to append and to settle, and what a
//! refusal means.
//!
//! Such a crate implements [`Transaction`](postbox_core::Transaction) for a driver's transaction
//! and [`Postgres`]. Where handlers work in its transactions, it also implements [`Settles`]. It
//! binds and executes. Statements, parameters and errors are made here, so that all drivers behave
//! alike.

use std::fmt::Display;

use postbox_core::{Error, ErrorKind, EventId, LogName, NewEvent, Result};

use crate::append::{Columns, Postgres, refused};
use crate::classify::of_database;
pub use crate::lent::{Applied, BEGIN, Borrowed, Rows, Settles, Statement, apply_in, commit_failed, pool_exhausted};
use crate::once::ONCE;
use crate::schema::SchemaName;

/// A statement that appends events. Do not prepare it under a name: nothing may stay in the
/// session, so that a pooler in transaction mode works.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AppendStatement {
    /// What to execute. It returns an empty row for each event that the log already had. The number
    /// of rows is what [`Appended::new`](postbox_core::Appended::new) takes beside `ids`.
    pub sql: String,
    /// Its parameters `$1`, `$2`, …. Bind each as `text`, the only type that every driver treats
    /// alike; the statement casts.
    pub texts: Vec<Option<String>>,
    /// The ids of all events, once the statement has been executed.
    pub ids: Vec<EventId>,
}

impl AppendStatement {
    /// Checks every limit and makes the statement. `None` if there are no events.
    pub fn of(to: &Postgres, log: &LogName, events: Result<Vec<NewEvent>>) -> Result<Option<Self>> {
        let events = events?;
        let Some(columns) = Columns::of(log, &events)? else { return Ok(None) };
        let sql = columns.statement(&to.schema, log);
        Ok(Some(Self { sql, texts: columns.texts(), ids: columns.event_ids() }))
    }
}

/// The statement of [`once_in`](crate::once_in): `$1` is the source, `$2` the message's id, both as
/// `text`. Returns one row with one column, which is `true` the first time.
pub fn once_statement(schema: &SchemaName) -> String {
    schema.sql(ONCE)
}

/// What a driver reports of a statement that the server refused.
#[derive(Debug, Clone, Copy, Default)]
pub struct Refusal<'a> {
    /// The SQLSTATE.
    pub state: &'a str,
    /// The violated constraint.
    pub constraint: Option<&'a str>,
    /// The column that must not be null.
    pub column: Option<&'a str>,
    /// The server's text.
    pub message: &'a str,
    /// The server's hint.
    pub hint: Option<&'a str>,
}

impl Refusal<'_> {
    /// The error of the given operation.
    pub fn of(&self, operation: &'static str) -> Error {
        of_database(operation, self)
    }

    /// The error of an append to this log, which may be missing.
    pub fn of_append(&self, log: &LogName) -> Error {
        refused(log, self.of("append"))
    }
}

/// The code if the server did not answer.
pub(crate) const UNREACHABLE: &str = "store_unreachable";

/// The error if the server did not answer.
pub fn unreachable(operation: &'static str, cause: impl Display) -> Error {
    let message = format!("the database cannot be reached ({cause}); is it running, and did the connection end?");
    Error::new(ErrorKind::Unavailable, operation, UNREACHABLE, message)
}

/// The error of an append in autocommit mode, where one transaction for change and events cannot be
/// guaranteed.
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
