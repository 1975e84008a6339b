//! Classifies errors of `diesel`.

use diesel::result::{DatabaseErrorKind, Error as Failure};
use postbox_core::{Error, ErrorKind, LogName};
use postbox_postgres_sql::{Refusal, unreachable};

/// Classifies a failure of `diesel`; also for drivers built on it. `appended_to` is the log of an
/// append, which may be missing.
pub fn classify(operation: &'static str, error: &Failure, appended_to: Option<&LogName>) -> Error {
    let unknown = || Error::new(ErrorKind::Internal, operation, "store_error", error.to_string());
    let Failure::DatabaseError(kind, information) = error else { return unknown() };
    let message = information.message();
    let classified = match state(kind, message, appended_to) {
        Some(state) => {
            let refusal = Refusal {
                state,
                constraint: information.constraint_name(),
                column: information.column_name(),
                message,
                hint: information.hint(),
            };
            appended_to.map_or_else(|| refusal.of(operation), |log| refusal.of_append(log))
        }
        None if matches!(kind, DatabaseErrorKind::ClosedConnection | DatabaseErrorKind::UnableToSendCommand) => {
            unreachable(operation, message)
        }
        None => unknown(),
    };
    classified.with_source(error.to_string())
}

/// Returns the SQLSTATE of an error, which `diesel` does not expose. Errors recognised by their
/// text have these words in every language.
fn state(kind: &DatabaseErrorKind, message: &str, appended_to: Option<&LogName>) -> Option<&'static str> {
    let names = |function: &str| appended_to.is_some_and(|log| message.contains(&format!(".{log}_{function}(")));
    match kind {
        DatabaseErrorKind::CheckViolation => Some("23514"),
        DatabaseErrorKind::ForeignKeyViolation => Some("23503"),
        DatabaseErrorKind::NotNullViolation => Some("23502"),
        DatabaseErrorKind::ReadOnlyTransaction => Some("25006"),
        DatabaseErrorKind::SerializationFailure => Some("40001"),
        DatabaseErrorKind::UniqueViolation => Some("23505"),
        // Only the message about a missing function names the function's arguments.
        _ if ["append", "append_many"].into_iter().any(names) => Some("42883"),
        // One of our savepoints is missing; or no transaction is open.
        _ if message.contains("postbox_handler") => Some("3B001"),
        _ if message.contains("SAVEPOINT") => Some("25P01"),
        _ => None,
    }
}
