//! What a refusal of the server means, whichever driver reports it.

use std::fmt::Display;

use postbox_core::{Error, ErrorKind, LogName};

use crate::append::no_transaction;

/// The code for a row that refers to a missing row.
pub const REFERENCE_MISSING: &str = "reference_missing";

/// The cure where a wait was too long.
const LOCKS_NAMED: &str = "postbox doctor names the locks it may wait for";

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
        append_refused(log, self.of("append"))
    }
}

/// The code if the server did not answer.
pub const UNREACHABLE: &str = "store_unreachable";

/// The error if the server did not answer.
pub fn unreachable(operation: &'static str, cause: impl Display) -> Error {
    let message = format!("the database cannot be reached ({cause}); is it running, and did the connection end?");
    Error::new(ErrorKind::Unavailable, operation, UNREACHABLE, message)
}

/// What is wrong with a standby. A primary that only restarts must not be replaced: two would
/// accept writes.
pub const STANDBY: &str = "the database is a standby; name the primary in the store's URL; it may be down or restarting: \
    wait for it, or repair it, and only if it will never accept writes again, promote the standby";

/// The cure of a missing or old schema. Without the same store, the command would create another.
pub const MIGRATE: &str = "run: postbox migrate up, with the same store";

/// The cure of cursors of another cluster. The role of a relay may not rewrite the tables.
pub const REBASE: &str =
    "stop all relays and run, as the owner of the schema (--store postgres://OWNER@…): postbox migrate rebase";

/// The error of a log that does not exist.
pub fn log_unknown(operation: &'static str, log: &str) -> Error {
    let message = format!("there is no log {log}; create it: postbox migrate up --log {log}");
    Error::new(ErrorKind::NotFound, operation, "log_unknown", message)
}

/// The code if a table, an index or a rule of the schema was dropped or moved.
pub const SCHEMA_DAMAGED: &str = "schema_damaged";

/// The error of a cursor that was made in another cluster.
pub fn cursor_foreign(operation: &'static str) -> Error {
    let message = format!(
        "a cursor was made in another database cluster (a restored dump?), whose transaction ids mean nothing in this \
         one; {REBASE}"
    );
    Error::new(ErrorKind::Mismatch, operation, "cursor_foreign", message)
}

/// Maps the server's answer; every driver's errors come through here.
fn of_database(operation: &'static str, fields: &Refusal<'_>) -> Error {
    use ErrorKind::*;
    let make = |kind: ErrorKind, code: &str, message: String| Error::new(kind, operation, code.to_owned(), message);
    let text = || fields.message.to_owned();
    let cured = |cure: &str| format!("{}; {cure}", fields.message);
    let hint = fields.hint.unwrap_or_default();
    match fields.state {
        // The constraint is of the application: its handler wrote the row. An internal error counts
        // as a failure of the event.
        "23514" | "23502" | "23505" if operation == "apply" => make(Internal, "store_error", text()),
        // Raised by `pause`.
        "23514" if operation == "pause" => make(Invalid, fields.constraint.unwrap_or("refused"), cured(hint)),
        // check_violation: our constraints carry the stable codes of `postbox_core::limits`.
        "23514" => {
            let code = fields.constraint.unwrap_or("refused");
            let hint = fields.hint.map(|hint| format!(": {hint}")).unwrap_or_default();
            make(Invalid, code, format!("the event breaks the rule {code}{hint}"))
        }
        "23502" => {
            let column = fields.column.unwrap_or("column");
            make(Invalid, &format!("{column}_missing"), format!("the event has no {column}"))
        }
        "23505" if fields.constraint.is_some_and(|name| name.ends_with("_id_key")) => make(
            Conflict,
            "event_id_taken",
            "the log has another event under this id; nothing was appended: give each an id of its own".to_owned(),
        ),
        "23505" => make(Conflict, "unique_violation", text()),
        // A foreign key of the application refers to what would be deleted; since Postgres 18 with
        // a state of its own for ON DELETE RESTRICT.
        "23503" | "23001" if ["prune", "forget"].contains(&operation) => make(
            Conflict,
            "reference_held",
            cured("drop the foreign key that refers to the log, or give it ON DELETE CASCADE"),
        ),
        "23503" => make(NotFound, REFERENCE_MISSING, text()),
        // character_not_in_repertoire, untranslatable_character, invalid text or binary
        // representation, stack depth.
        "22021" | "22P05" | "22P02" | "22P03" | "22P04" | "22032" | "54001" => make(Invalid, "text_invalid", text()),
        "54000" | "22001" | "22003" | "22007" | "22008" => make(Invalid, "value_out_of_range", text()),
        // undefined table, schema; undefined function, column, type.
        "42P01" | "3F000" => make(Mismatch, "schema_missing", cured(MIGRATE)),
        "42883" | "42703" | "42704" => make(Mismatch, "schema_old", cured(MIGRATE)),
        "42501" if fields.message.contains("row-level security") => make(
            Unauthorized,
            "tenant_denied",
            format!(
                "{}: the transaction works for another tenant, or names none; name it with \
                 set_config('postbox.tenant', NAME, true) or `tenant` in [store], and give the event the same tenant \
                 (postbox send: --tenant NAME)",
                fields.message
            ),
        ),
        "42501" => {
            let cure = match operation {
                "migrate" | "rebase" | "create_log" => {
                    "use the role that owns the database, or Postbox's schema: only it may change tables \
                     (to let a role create the schema: GRANT CREATE ON DATABASE NAME TO ROLE)"
                }
                _ => {
                    "`postbox migrate grants --relay ROLE` (or --writer, --reader) prints the rights that the role needs"
                }
            };
            make(Unauthorized, "permission_denied", cured(cure))
        }
        "3D000" => make(Mismatch, "database_missing", cured("create it first")),
        // ALLOW_CONNECTIONS is false.
        "55000" if fields.message.contains("not currently accepting connections") => make(
            Unavailable,
            "store_unavailable",
            cured("delivery continues once it does: ALTER DATABASE NAME ALLOW_CONNECTIONS true"),
        ),
        "57014" => {
            // These may have to pass a large log, 200,000 rows, or many subscriptions. The
            // statements of other changes are short, so that a lock is the cause.
            let cure = match operation {
                "remove" | "reset" | "set_lanes" | "subscribe" | "note_unrouted" => {
                    "raise `statement_timeout` in [store] and try again, or "
                }
                _ => "",
            };
            let text = format!("a statement took longer than the statement timeout; {cure}{LOCKS_NAMED}");
            make(Unavailable, "statement_timeout", text)
        }
        // A standby refuses BEGIN READ WRITE as an unsupported feature.
        "0A000" if fields.message.contains("recovery") => make(Unavailable, "store_read_only", STANDBY.to_owned()),
        "25006" => make(
            Unavailable,
            "store_read_only",
            "the database is read-only: a standby, or default_transaction_read_only is on; name the primary in the \
             store's URL"
                .to_owned(),
        ),
        // Raised by `subscription_unknown`.
        "PB002" => make(NotFound, "subscription_unknown", cured(hint)),
        // Raised by `<log>_window`.
        "PB001" => cursor_foreign(operation),
        // Raised by `create_log`.
        "PB003" => make(Mismatch, SCHEMA_DAMAGED, cured(hint)),
        "53300" => make(
            Unavailable,
            "store_unavailable",
            cured("lower `pool` in [store], or raise the limit of the role or the server"),
        ),
        state if state == "53100" || is_disk_full(fields) => make(
            Unavailable,
            "store_full",
            cured("free space on the database's disk, and delivery continues by itself"),
        ),
        // No transaction is open, or our savepoint is not part of it. Between our statements, only
        // a handler can have ended the transaction.
        "25P01" | "3B001" if operation == "apply" => Error::transaction_ended(operation),
        // The answer to a driver that has to ask.
        "25P01" if operation == "append" => no_transaction(operation),
        "25P02" => make(Internal, "transaction_aborted", "an earlier statement of the transaction failed".to_owned()),
        "40001" | "40P01" => make(Unavailable, "store_contention", text()),
        "55P03" => make(Unavailable, "store_contention", cured(LOCKS_NAMED)),
        // A row, or its out-of-line (TOAST) storage, is damaged.
        "XX001" | "XX002" => make(Internal, "row_damaged", text()),
        state => match state.get(..2).unwrap_or_default() {
            "28" if fields.message.contains("pg_hba.conf") => make(
                Unauthorized,
                "login_refused",
                cured(
                    "allow this user, database and address in the server's pg_hba.conf, or write sslmode=require in \
                     the store's URL if it allows them only with TLS",
                ),
            ),
            "28" => make(Unauthorized, "login_refused", cured("correct the user or the password in the store's URL")),
            // connection exceptions, insufficient resources (memory, too many connections),
            // operator intervention (shutdown, starting up), system errors, idle transaction ended.
            "08" | "53" | "57" | "58" | "25" => make(Unavailable, "store_unavailable", text()),
            _ => make(Internal, "store_error", format!("{} ({state})", fields.message)),
        },
    }
}

/// Whether an internal error of the server comes from a full disk. Postgres does not give all of
/// these the state of a full disk.
fn is_disk_full(fields: &Refusal<'_>) -> bool {
    fields.state.starts_with("XX")
        && ["No space left on device", "could not extend", "could not write init file"]
            .iter()
            .any(|text| fields.message.contains(text))
}

/// Whether the error says that a table or function is missing: a log's, or the whole schema.
pub fn is_undefined(error: &Error) -> bool {
    ["schema_missing", "schema_old"].contains(&error.code())
}

/// An error of an append. A missing function means that the log is missing.
pub fn append_refused(log: &LogName, error: Error) -> Error {
    if is_undefined(&error) { log_unknown("append", log.as_str()) } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(state: &'static str) -> Refusal<'static> {
        Refusal { state, message: "text", ..Refusal::default() }
    }

    #[test]
    fn every_sqlstate_has_its_kind_and_code() {
        use ErrorKind::*;
        for (state, kind, code) in [
            ("22021", Invalid, "text_invalid"),
            ("22P05", Invalid, "text_invalid"),
            ("42P01", Mismatch, "schema_missing"),
            ("3F000", Mismatch, "schema_missing"),
            ("42703", Mismatch, "schema_old"),
            ("42501", Unauthorized, "permission_denied"),
            ("28P01", Unauthorized, "login_refused"),
            ("28000", Unauthorized, "login_refused"),
            ("3D000", Mismatch, "database_missing"),
            ("57014", Unavailable, "statement_timeout"),
            ("57P01", Unavailable, "store_unavailable"),
            ("57P02", Unavailable, "store_unavailable"),
            ("57P03", Unavailable, "store_unavailable"),
            ("53300", Unavailable, "store_unavailable"),
            ("53100", Unavailable, "store_full"),
            ("08006", Unavailable, "store_unavailable"),
            ("25P03", Unavailable, "store_unavailable"),
            ("25006", Unavailable, "store_read_only"),
            ("40001", Unavailable, "store_contention"),
            ("40P01", Unavailable, "store_contention"),
            ("55P03", Unavailable, "store_contention"),
            ("23505", Conflict, "unique_violation"),
            ("PB001", Mismatch, "cursor_foreign"),
            ("PB002", NotFound, "subscription_unknown"),
            ("PB003", Mismatch, "schema_damaged"),
            ("XX001", Internal, "row_damaged"),
            ("XX000", Internal, "store_error"),
        ] {
            let error = of_database("test", &fields(state));
            assert_eq!((error.kind(), error.code()), (kind, code), "{state}");
        }
    }

    #[test]
    fn a_reference_is_missing_to_a_writer_and_held_against_retention() {
        let of = |operation| of_database(operation, &fields("23503"));
        let held = of("prune");
        assert_eq!((held.kind(), held.code()), (ErrorKind::Conflict, "reference_held"));
        assert!(held.message().contains("; drop the foreign key"), "{held}");
        assert_eq!((of("append").kind(), of("append").code()), (ErrorKind::NotFound, REFERENCE_MISSING));
    }

    #[test]
    fn a_timeout_of_a_long_change_names_its_setting() {
        let names_it = |operation| of_database(operation, &fields("57014")).message().contains("`statement_timeout`");
        assert!(names_it("remove") && names_it("reset") && names_it("set_lanes"));
        assert!(names_it("subscribe") && names_it("note_unrouted"));
        assert!(!names_it("rename"), "a larger one would only wait longer for a lock");
    }

    #[test]
    fn a_wait_that_ended_says_who_names_the_lock() {
        for state in ["55P03", "57014"] {
            let error = of_database("settle", &fields(state));
            assert!(error.message().ends_with("; postbox doctor names the locks it may wait for"), "{error}");
        }
    }

    #[test]
    fn who_may_not_create_a_log_needs_its_owner() {
        let cure = |operation| of_database(operation, &fields("42501")).message().contains("the role that owns");
        assert!(cure("migrate") && cure("rebase") && cure("create_log"));
        assert!(!cure("append"), "a right is enough");
    }

    #[test]
    fn a_denied_tenant_is_named_in_sql_or_by_the_command() {
        let message = "new row violates row-level security policy";
        let error = of_database("append", &Refusal { message, ..fields("42501") });
        assert_eq!(error.code(), "tenant_denied");
        assert!(error.message().contains("set_config(") && error.message().contains("--tenant NAME"), "{error}");
    }

    #[test]
    fn the_text_tells_a_full_disk_and_a_closed_server() {
        let said = |state, message| of_database("test", &Refusal { state, message, ..Refusal::default() });
        for message in [
            "could not write init file",
            "could not extend file \"base/5/1259\": wrote only 4096 of 8192 bytes",
            "could not write to file \"pg_wal/xlogtemp.9\": No space left on device",
        ] {
            let error = said("XX000", message);
            assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "store_full"), "{message}");
            assert_ne!(said("22023", message).code(), "store_full");
        }
        let entry = r#"no pg_hba.conf entry for host "10.0.0.9", user "app", database "shop", no encryption"#;
        let error = said("28000", entry);
        assert_eq!((error.kind(), error.code()), (ErrorKind::Unauthorized, "login_refused"));
        assert!(error.message().contains("sslmode=require") && !error.message().contains("password"), "{error}");
        assert!(said("28P01", "password authentication failed").message().contains("the password"));
        let error = said("55000", "database \"shop\" is not currently accepting connections");
        assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "store_unavailable"));
        assert!(error.message().contains("ALLOW_CONNECTIONS true"), "{error}");
        assert_eq!(said("55000", "text").code(), "store_error");
    }

    #[test]
    fn constraints_are_codes() {
        let check = Refusal { constraint: Some("topic_too_long"), ..fields("23514") };
        assert_eq!(of_database("append", &check).code(), "topic_too_long");
        let over = Refusal { constraint: Some("until_past"), hint: Some("use resume"), ..fields("23514") };
        let over = of_database("pause", &over);
        assert_eq!((over.code(), over.message()), ("until_past", "text; use resume"), "it is no event");
        let missing = Refusal { column: Some("topic"), ..fields("23502") };
        assert_eq!(of_database("append", &missing).code(), "topic_missing");
        let taken = Refusal { constraint: Some("outbox_id_key"), ..fields("23505") };
        assert_eq!(of_database("append", &taken).code(), "event_id_taken");
        for state in ["23514", "23502", "23505"] {
            let theirs = Refusal { constraint: Some("account_user_id_key"), column: Some("id"), ..fields(state) };
            let error = of_database("apply", &theirs);
            assert_eq!((error.kind(), error.message()), (ErrorKind::Internal, "text"), "a handler's own: {state}");
        }
    }
}
