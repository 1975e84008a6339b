//! Maps the driver's errors to ours: one function, one table test.

use postbox_core::{Error, ErrorKind};
use postbox_postgres_sql::Refusal;
use tokio_postgres::error::DbError;

/// Maps a driver's error.
///
/// The result never contains a secret: the driver's errors hold no credentials, and the server's
/// detail text about a row is left out.
pub(crate) fn classify(operation: &'static str, error: &tokio_postgres::Error) -> Error {
    let classified = match error.as_db_error() {
        Some(database) => fields(database).of(operation),
        // A value that cannot be encoded is our fault, and permanent. Every other error without an
        // answer of the server is a connection that was refused, reset, closed or timed out.
        None if is_conversion(error) => Error::new(
            ErrorKind::Internal,
            operation,
            "store_protocol",
            "a value could not be converted; this is a defect",
        ),
        None => not_connected(operation, &chain(error)),
    };
    classified.with_source(error.to_string())
}

/// The error of a connection that was not made, or broke. `cause` is what the client says: it has
/// no codes.
fn not_connected(operation: &'static str, cause: &str) -> Error {
    let (kind, code, message) = if cause.contains("password missing") {
        let message = "the server asks for a password, and the store's URL has none; write postgres://USER:PASSWORD@HOST/DATABASE";
        (ErrorKind::Unauthorized, "login_refused", message.to_owned())
    } else if cause.contains("server does not support TLS") {
        let message = "the server does not offer TLS, which the store's URL requires; enable it there, or write sslmode=disable \
                       where the network is trusted";
        (ErrorKind::Mismatch, "store_without_tls", message.to_owned())
    } else if cause.contains("invalid peer certificate") {
        let message = format!(
            "the certificate of the database is refused ({cause}); renew it there, or correct the store's URL: its host must be a name in \
             the certificate, and sslrootcert=FILE must name the authority if the system does not know it"
        );
        (ErrorKind::Unavailable, "store_certificate_invalid", message)
    } else if cause.contains("does not allow writes") {
        let message = "no server of the store's URL accepts writes now, which its target_session_attrs requires; the primary may be down \
                       or restarting: wait for it, or repair it, and only if it will never accept writes again, promote the standby; where \
                       transactions start read-only, set default_transaction_read_only = off by ALTER ROLE or ALTER DATABASE";
        (ErrorKind::Unavailable, "store_read_only", message.to_owned())
    } else {
        let message = format!("the database cannot be reached ({cause}); is it running, and is the store's URL right?");
        (ErrorKind::Unavailable, "store_unreachable", message)
    };
    Error::new(kind, operation, code, message)
}

fn fields(error: &DbError) -> Refusal<'_> {
    Refusal {
        state: error.code().code(),
        constraint: error.constraint(),
        column: error.column(),
        message: error.message(),
        hint: error.hint(),
    }
}

/// What a server said of a connection that was not made, as a part of a message: see [`plain`].
pub(crate) fn said(error: &tokio_postgres::Error) -> String {
    plain(&error.as_db_error().map_or_else(|| chain(error), |database| database.message().to_owned()))
}

/// A text of somebody else's as a part of a message: on one line, and without a semicolon, because
/// whatever follows the first one is the cure.
pub(crate) fn plain(text: &str) -> String {
    one_line(text).replace(';', ",")
}

/// The same text on one line.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether the server could not return a value as it is stored: the text is in no known encoding,
/// or the storage is damaged. Other errors say nothing about the row.
pub(crate) fn is_damage(error: &Error) -> bool {
    ["row_damaged", "text_invalid", "value_out_of_range", "store_error"].contains(&error.code())
}

fn is_conversion(error: &tokio_postgres::Error) -> bool {
    let text = error.to_string();
    text.starts_with("error serializing parameter") || text.starts_with("error deserializing column")
}

/// Returns the deepest cause, which says what happened. The driver's own text is only "error
/// connecting to server".
fn chain(error: &tokio_postgres::Error) -> String {
    let error: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(error), |&error| error.source()).last().unwrap_or(error).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_broken_connection_has_its_code_and_cure() {
        for (cause, kind, code, cure) in [
            ("password missing", ErrorKind::Unauthorized, "login_refused", "USER:PASSWORD"),
            ("server does not support TLS", ErrorKind::Mismatch, "store_without_tls", "sslmode=disable"),
            (
                "invalid peer certificate: certificate expired: verification time 1764227504 (UNIX)",
                ErrorKind::Unavailable,
                "store_certificate_invalid",
                "sslrootcert=FILE",
            ),
            ("database does not allow writes", ErrorKind::Unavailable, "store_read_only", "or restarting: wait"),
            ("Connection refused (os error 111)", ErrorKind::Unavailable, "store_unreachable", "is it running"),
        ] {
            let error = not_connected("test", cause);
            assert_eq!((error.kind(), error.code()), (kind, code), "{error}");
            assert!(error.message().contains(cure), "{error}");
        }
    }
}
