//! Classifies the server's answers, missing answers and failures of the client. The engine decides
//! what they cost.

use postbox_core::{Error, ErrorKind, Outcome, excerpt};
use redis::{ConnectionAddr, RedisError};

/// What an error of the server is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The server: it accepts no writes at all, so the destination is down.
    Server,
    /// Our credentials: it accepts no writes until an operator corrects them.
    Credentials,
    /// This stream, or every stream: the error is the same. So the outcomes of other events decide.
    Stream,
}

/// Returns what a server's error is about, our code for it, and what to do.
pub(crate) fn answer(code: &str) -> (Scope, &'static str, &'static str) {
    use Scope::{Credentials, Server, Stream};
    match code {
        "OOM" => (Server, "redis_out_of_memory", "raise maxmemory, or trim the streams (maxlen)"),
        "READONLY" => (Server, "redis_readonly", "this is a replica; the url must lead to the primary"),
        "LOADING" => (Server, "redis_loading", "it reads its data and will be back"),
        "MISCONF" => (Server, "redis_persistence_failed", "it cannot write to its disk"),
        "NOREPLICAS" => (Server, "redis_replicas_missing", "fewer replicas follow than min-replicas-to-write"),
        "CLUSTERDOWN" | "MASTERDOWN" => (Server, "redis_cluster_down", "it has lost its cluster or its primary"),
        "BUSY" => (Server, "redis_busy", "a script runs; SCRIPT KILL ends it"),
        "NOAUTH" | "WRONGPASS" => (Credentials, "redis_unauthorized", "set user and password"),
        "NOPERM" => (Stream, "redis_not_permitted", "allow the user the commands and keys that the guide names"),
        "WRONGTYPE" => (Stream, "redis_wrong_type", "the key is of another type; rename it, or name another"),
        "MOVED" | "ASK" | "TRYAGAIN" | "CROSSSLOT" => {
            (Stream, "redis_cluster_redirect", "this is a node of a cluster, which is not supported")
        }
        _ => (Stream, "redis_refused", "it refused the command"),
    }
}

/// Returns the outcome of an event whose entry was refused with this error.
pub(crate) fn refused(error: &RedisError) -> Outcome {
    let (scope, code, cure) = answer(error.code().unwrap_or_default());
    let text = format!("{} ({cure})", excerpt(&error.to_string()));
    match scope {
        Scope::Server | Scope::Credentials => Outcome::unavailable(code, text),
        Scope::Stream => Outcome::ambiguous(code, text),
    }
}

pub(crate) const STREAM_MISSING: &str =
    "the stream does not exist, and make_stream = false; make it (XGROUP CREATE … MKSTREAM)";

/// The stream does not exist, and the sink must not create it.
pub(crate) fn stream_missing() -> Outcome {
    Outcome::ambiguous("redis_stream_missing", STREAM_MISSING)
}

/// The connection was lost after the entries were written to it, or an answer is not understood.
/// The entries may be in the stream.
pub(crate) fn unanswered(error: &RedisError) -> Outcome {
    let code = if error.is_io_error() { "redis_connection_lost" } else { "redis_answer_unknown" };
    Outcome::ambiguous(code, excerpt(&error.to_string()))
}

/// The error text for a server that does not answer.
pub(crate) const SILENT: &str =
    "the server did not answer in time; is it overloaded, or the URL that of another program?";

/// There was no answer within the time of a call. The entries may be in the stream, or arrive there
/// later.
pub(crate) fn timed_out() -> Outcome {
    Outcome::ambiguous("redis_timeout", SILENT)
}

/// Classifies a failure of the client in any operation but the delivery of events.
pub(crate) fn failure(operation: &'static str, error: RedisError) -> Error {
    let text = excerpt(&error.to_string());
    let code = match error.code() {
        // The client replaces the code with which a server refuses SELECT.
        Some(_) if text.contains("no permissions to run") => Some("NOPERM"),
        code => code,
    };
    let (kind, code, text) = match code {
        Some(code) => {
            let (scope, code, cure) = answer(code);
            let kind = match (scope, code) {
                (Scope::Credentials, _) | (_, "redis_not_permitted") => ErrorKind::Unauthorized,
                (_, "redis_wrong_type" | "redis_cluster_redirect") => ErrorKind::Mismatch,
                _ => ErrorKind::Unavailable,
            };
            (kind, code, format!("{text} ({cure})"))
        }
        None => match error.kind() {
            redis::ErrorKind::AuthenticationFailed => (ErrorKind::Unauthorized, "redis_unauthorized", text),
            redis::ErrorKind::InvalidClientConfig | redis::ErrorKind::RESP3NotSupported => {
                (ErrorKind::Mismatch, "redis_mismatch", text)
            }
            // A failure of TLS has either of these kinds; the text says what failed.
            redis::ErrorKind::Io | redis::ErrorKind::Client if operation == "connect" => {
                (ErrorKind::Unavailable, "redis_connect_failed", text)
            }
            redis::ErrorKind::Io => (ErrorKind::Unavailable, "redis_connection_lost", text),
            _ => (ErrorKind::Unavailable, "redis_answer_unknown", text),
        },
    };
    Error::new(kind, operation, code, text)
}

/// Connecting to the server at this address failed. A URL holds no user and no password.
pub(crate) fn connecting(address: &ConnectionAddr, error: RedisError) -> Error {
    let error = failure("connect", error);
    let text = format!("no connection to {address}: {}", error.message());
    Error::new(error.kind(), "connect", error.code().to_owned(), text)
}

#[cfg(test)]
mod tests {
    use redis::make_extension_error;

    use super::*;

    fn outcome(code: &str) -> (&'static str, String) {
        match refused(&make_extension_error(code.into(), Some("why".into()))) {
            Outcome::Unavailable { code, .. } => ("unavailable", code.into_owned()),
            Outcome::Ambiguous { code, .. } => ("ambiguous", code.into_owned()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_answer_has_one_meaning() {
        for (answer, expected, code) in [
            ("OOM", "unavailable", "redis_out_of_memory"),
            ("READONLY", "unavailable", "redis_readonly"),
            ("LOADING", "unavailable", "redis_loading"),
            ("MISCONF", "unavailable", "redis_persistence_failed"),
            ("NOREPLICAS", "unavailable", "redis_replicas_missing"),
            ("CLUSTERDOWN", "unavailable", "redis_cluster_down"),
            ("MASTERDOWN", "unavailable", "redis_cluster_down"),
            ("BUSY", "unavailable", "redis_busy"),
            ("NOAUTH", "unavailable", "redis_unauthorized"),
            ("WRONGPASS", "unavailable", "redis_unauthorized"),
            ("NOPERM", "ambiguous", "redis_not_permitted"),
            ("WRONGTYPE", "ambiguous", "redis_wrong_type"),
            ("MOVED", "ambiguous", "redis_cluster_redirect"),
            ("ERR", "ambiguous", "redis_refused"),
            ("NEVERHEARDOF", "ambiguous", "redis_refused"),
        ] {
            assert_eq!(outcome(answer), (expected, code.to_owned()), "{answer}");
        }
    }

    #[test]
    fn what_a_person_must_mend_is_said_so() {
        let kind = |code: &str| failure("receive", make_extension_error(code.into(), None)).kind();
        assert_eq!(kind("WRONGPASS"), ErrorKind::Unauthorized);
        assert_eq!(kind("NOPERM"), ErrorKind::Unauthorized);
        assert_eq!(kind("WRONGTYPE"), ErrorKind::Mismatch);
        assert_eq!(kind("LOADING"), ErrorKind::Unavailable);
        let select = "User u has no permissions to run the 'select' command".to_owned();
        let refused = failure("connect", make_extension_error("ERR".into(), Some(select)));
        assert_eq!((refused.kind(), refused.code()), (ErrorKind::Unauthorized, "redis_not_permitted"));
        let lost = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let failed = connecting(&ConnectionAddr::Tcp("redis.example".into(), 6379), lost.into());
        assert_eq!((failed.kind(), failed.code()), (ErrorKind::Unavailable, "redis_connect_failed"));
        assert!(failed.message().starts_with("no connection to redis.example:6379: "), "{failed}");
    }

    #[test]
    fn a_server_s_text_is_one_harmless_line() {
        let hostile = make_extension_error("ERR".into(), Some("a\r\nb\u{1b}[1m".repeat(1_000)));
        let Outcome::Ambiguous { error, .. } = refused(&hostile) else { panic!("ambiguous") };
        assert!(!error.contains(['\r', '\n', '\u{1b}']) && error.len() < 4_000, "{error}");
        let refusal = make_extension_error("WRONGPASS".into(), Some("invalid user-password pair of 'x'".into()));
        let failed = connecting(&ConnectionAddr::Tcp("h".into(), 6379), refusal);
        assert!(failed.message().contains("pair of 'x'") && !failed.message().contains('\\'), "{failed}");
    }
}
