//! What an answer of the server, or a failure of the client, means. What it costs is the engine's
//! to decide.

use postbox_core::{Error, ErrorKind, Outcome, excerpt};
use redis::RedisError;

/// Whom an error of the server concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Concerns {
    /// Every write: the destination is down.
    Everybody,
    /// Every write, until a person mends our credentials.
    Credentials,
    /// This stream. It looks the same if it is every stream, so what happens to other events
    /// decides.
    Perhaps,
}

/// What the server's error says: whom it concerns, our code for it, and what to do.
pub(crate) fn answer(code: &str) -> (Concerns, &'static str, &'static str) {
    use Concerns::{Credentials, Everybody, Perhaps};
    match code {
        "OOM" => (Everybody, "redis_out_of_memory", "raise maxmemory, or trim the streams (maxlen)"),
        "READONLY" => (Everybody, "redis_readonly", "this is a replica; the url must lead to the primary"),
        "LOADING" => (Everybody, "redis_loading", "it reads its data and will be back"),
        "MISCONF" => (Everybody, "redis_persistence_failed", "it cannot write to its disk"),
        "NOREPLICAS" => (Everybody, "redis_replicas_missing", "fewer replicas follow than min-replicas-to-write"),
        "CLUSTERDOWN" | "MASTERDOWN" => (Everybody, "redis_cluster_down", "it has lost its cluster or its primary"),
        "BUSY" => (Everybody, "redis_busy", "a script runs; SCRIPT KILL ends it"),
        "NOAUTH" | "WRONGPASS" => (Credentials, "redis_unauthorized", "set user and password"),
        "NOPERM" => (Perhaps, "redis_not_permitted", "allow the user the commands and keys that the guide names"),
        "WRONGTYPE" => (Perhaps, "redis_wrong_type", "the key is of another type; rename it, or name another"),
        "MOVED" | "ASK" | "TRYAGAIN" | "CROSSSLOT" => {
            (Perhaps, "redis_cluster_redirect", "this is a node of a cluster, which is not supported")
        }
        _ => (Perhaps, "redis_refused", "it refused the command"),
    }
}

/// What an error in answer to one entry means for its event.
pub(crate) fn refused(error: &RedisError) -> Outcome {
    let (concerns, code, cure) = answer(error.code().unwrap_or_default());
    let text = format!("{} ({cure})", excerpt(&error.to_string()));
    match concerns {
        Concerns::Everybody | Concerns::Credentials => Outcome::unavailable(code, text),
        Concerns::Perhaps => Outcome::ambiguous(code, text),
    }
}

pub(crate) const STREAM_MISSING: &str =
    "the stream does not exist, and make_stream = false; make it (XGROUP CREATE … MKSTREAM)";

/// No stream, and none may be made.
pub(crate) fn stream_missing() -> Outcome {
    Outcome::ambiguous("redis_stream_missing", STREAM_MISSING)
}

/// The connection broke after the entries were written to it: they may be in the stream.
pub(crate) fn unanswered(error: &RedisError) -> Outcome {
    let code = if error.is_io_error() { "redis_connection_lost" } else { "redis_answer_unknown" };
    Outcome::ambiguous(code, excerpt(&error.to_string()))
}

/// What is said of a server that keeps silent.
pub(crate) const SILENT: &str =
    "the server did not answer in time; is it overloaded, or the URL that of another program?";

/// No answer within the time of a call: they may be in the stream, or get there later.
pub(crate) fn timed_out() -> Outcome {
    Outcome::ambiguous("redis_timeout", SILENT)
}

/// What a failure of the client means for whoever asked for the connection, or for the source.
pub(crate) fn failure(operation: &'static str, error: RedisError) -> Error {
    let text = excerpt(&error.to_string());
    let (kind, code, text) = match error.code() {
        Some(code) => {
            let (concerns, code, cure) = answer(code);
            let kind = match (concerns, code) {
                (Concerns::Credentials, _) | (_, "redis_not_permitted") => ErrorKind::Unauthorized,
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
            // TLS that fails is one or the other; the text says so.
            redis::ErrorKind::Io | redis::ErrorKind::Client if operation == "connect" => {
                (ErrorKind::Unavailable, "redis_connect_failed", text)
            }
            redis::ErrorKind::Io => (ErrorKind::Unavailable, "redis_connection_lost", text),
            _ => (ErrorKind::Unavailable, "redis_answer_unknown", text),
        },
    };
    Error::new(kind, operation, code, text)
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
        let lost = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert_eq!(failure("connect", lost.into()).code(), "redis_connect_failed");
    }

    #[test]
    fn a_server_s_text_is_one_harmless_line() {
        let hostile = make_extension_error("ERR".into(), Some("a\r\nb\u{1b}[1m".repeat(1_000)));
        let Outcome::Ambiguous { error, .. } = refused(&hostile) else { panic!("ambiguous") };
        assert!(!error.contains(['\r', '\n', '\u{1b}']) && error.len() < 4_000, "{error}");
    }
}
