//! From errors of `diesel` to ours.

use diesel::result::{DatabaseErrorKind, Error as Failure};
use postbox_core::{Error, ErrorKind, LogName};
use postbox_postgres::driver::{Refusal, unreachable};

/// What the failure of an append means; for drivers on top of `diesel`, too.
pub fn classify(log: &LogName, error: &Failure) -> Error {
    let unknown = || Error::new(ErrorKind::Internal, "append", "store_error", error.to_string());
    let Failure::DatabaseError(kind, information) = error else { return unknown() };
    let message = information.message();
    let classified = match state(kind, message, log) {
        Some(state) => Refusal {
            state,
            constraint: information.constraint_name(),
            column: information.column_name(),
            message,
            hint: information.hint(),
        }
        .of_append(log),
        None if matches!(kind, DatabaseErrorKind::ClosedConnection | DatabaseErrorKind::UnableToSendCommand) => {
            unreachable("append", message)
        }
        None => unknown(),
    };
    classified.with_source(error.to_string())
}

/// The SQLSTATE behind an error: `diesel` keeps it to itself.
fn state(kind: &DatabaseErrorKind, message: &str, log: &LogName) -> Option<&'static str> {
    match kind {
        DatabaseErrorKind::CheckViolation => Some("23514"),
        DatabaseErrorKind::ForeignKeyViolation => Some("23503"),
        DatabaseErrorKind::NotNullViolation => Some("23502"),
        DatabaseErrorKind::ReadOnlyTransaction => Some("25006"),
        DatabaseErrorKind::SerializationFailure => Some("40001"),
        DatabaseErrorKind::UniqueViolation => Some("23505"),
        // In every language, only the text about a function that is not there names its arguments.
        _ if ["append", "append_many"].iter().any(|function| message.contains(&format!(".{log}_{function}("))) => {
            Some("42883")
        }
        _ => None,
    }
}
