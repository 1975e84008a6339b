//! The meaning of an answer or a failure for the event.

use std::io::{Error, ErrorKind};

use postbox::Outcome;

/// Classifies the server's answer. An unknown one may come from a newer server, so the event is
/// retried.
pub(crate) fn answer(line: &str) -> Outcome {
    match line.trim_end() {
        "ok" => Outcome::DELIVERED,
        "duplicate" => Outcome::DUPLICATE,
        "refused" => Outcome::dead("lines_refused", "the server refuses this event"),
        "slower" => Outcome::Throttled {
            code: "lines_slower".into(),
            error: "the server asks for fewer events".to_owned(),
            after: None,
        },
        "failed" => Outcome::retry("lines_failed", "the server could not take it"),
        "" => Outcome::ambiguous("lines_connection_lost", "the server closed the connection before it answered"),
        other => Outcome::retry("lines_answer_unknown", format!("the server says {other:?}")),
    }
}

/// No connection: the server has nothing of this event, and other events would fail as well.
pub(crate) fn connecting(error: &Error) -> Outcome {
    Outcome::unavailable("lines_connect_failed", error.to_string())
}

/// The connection broke in the middle of a call: perhaps because of this event, perhaps because the
/// server stopped.
pub(crate) fn exchanging(error: &Error) -> Outcome {
    match error.kind() {
        ErrorKind::InvalidData => Outcome::retry("lines_answer_unknown", "the server's answer is no text"),
        _ => Outcome::ambiguous("lines_connection_lost", error.to_string()),
    }
}
