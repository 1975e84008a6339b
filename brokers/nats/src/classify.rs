//! Classifies JetStream's answers, missing answers and failures of the client.

use async_nats::{ConnectError, ConnectErrorKind, Message, RequestError, RequestErrorKind};
use postbox_core::{Down, ErrorKind, Outcome};
use serde::Deserialize;

/// JetStream's answer to a publish or an API call, with the fields that matter here.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Answer {
    pub(crate) stream: Option<String>,
    pub(crate) seq: Option<u64>,
    /// The stream has a message with this id, under this number.
    #[serde(default)]
    pub(crate) duplicate: bool,
    pub(crate) error: Option<Refusal>,
}

/// Why JetStream refused.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Refusal {
    /// JetStream's own error number.
    #[serde(default)]
    pub(crate) err_code: u32,
    #[serde(default)]
    pub(crate) description: String,
}

/// Error numbers that say that this message is too large for the stream, with its headers or
/// without.
const TOO_LARGE: [u32; 2] = [10_054, 10_097];
/// The stream could not store the message: it is full, or its files failed. Only the text says
/// which.
const NOT_STORED: u32 = 10_077;
/// How the text begins if a limit is reached: of messages, of bytes, of a subject.
const FULL: &str = "maximum ";
/// The account has used up its share of the server.
const ACCOUNT_FULL: u32 = 10_002;
/// Another stream than the expected one took the subject.
const OTHER_STREAM: u32 = 10_060;
/// Error numbers while JetStream as a whole cannot work: no quorum, no resources, no memory.
const SYSTEM: [u32; 5] = [10_008, 10_009, 10_023, 10_028, 10_047];

/// Reads the server's answer to a publish.
pub(crate) fn read(message: &Message) -> Answer {
    serde_json::from_slice(&message.payload).unwrap_or_default()
}

/// Returns the outcome of one publish from the server's answer.
pub(crate) fn outcome(answer: Answer) -> Outcome {
    match answer {
        Answer { error: Some(refusal), .. } => refused(&refusal),
        Answer { stream: Some(_), seq: Some(seq), duplicate, .. } => Outcome::delivered_at(duplicate, seq),
        // Something answered that is no stream: nothing is stored.
        _ => Outcome::ambiguous("nats_answer_unknown", "the answer to the publish is not from JetStream"),
    }
}

fn refused(refusal: &Refusal) -> Outcome {
    let text = format!("JetStream refused it: {} ({})", refusal.description, refusal.err_code);
    match refusal.err_code {
        code if TOO_LARGE.contains(&code) => Outcome::dead("payload_too_large", text),
        OTHER_STREAM => Outcome::ambiguous(
            "nats_stream_other",
            format!("{text}; correct the sink's stream or subject, or the stream's subjects"),
        ),
        code if SYSTEM.contains(&code) => Outcome::unavailable("nats_system_unavailable", text),
        // Another subject or a smaller event may pass. The event waits for space, however long that
        // takes.
        code if code == ACCOUNT_FULL || (code == NOT_STORED && refusal.description.starts_with(FULL)) => {
            let text = format!("{text}; raise the limit, or delete what is no longer needed");
            Outcome::Throttled { code: "nats_stream_full".into(), error: text, after: None }
        }
        // An unknown error number: another event may pass.
        _ => Outcome::ambiguous("nats_refused", text),
    }
}

/// Returns the outcome of a publish without an answer. `unsent`: the client had written nothing
/// when the connection was lost.
pub(crate) fn failure(error: &RequestError, unsent: bool) -> Outcome {
    match error.kind() {
        RequestErrorKind::InvalidSubject => Outcome::dead("subject_invalid", error.to_string()),
        RequestErrorKind::MaxPayloadExceeded => {
            let text = format!("the server takes no message of this size, headers included: {error}");
            Outcome::dead("payload_too_large", text)
        }
        RequestErrorKind::NoResponders => {
            Outcome::ambiguous(NO_STREAM, "no stream takes this subject, or its leader is being elected")
        }
        RequestErrorKind::TimedOut => no_ack(),
        _ if unsent => Outcome::unavailable("nats_disconnected", "the connection was lost before anything was sent"),
        _ => Outcome::ambiguous("nats_disconnected", "the connection was lost before the stream acknowledged it"),
    }
}

/// The code of an event whose subject no stream takes, and of a missing stream.
pub(crate) const NO_STREAM: &str = "nats_no_stream";
/// The code of a missing consumer.
pub(crate) const NO_CONSUMER: &str = "nats_no_consumer";

/// The code if a server, or all of them, did not answer in time.
pub(crate) const CONNECT_TOO_SLOW: &str = "connect_timeout";

/// No stream takes subjects of this pattern.
pub(crate) fn no_stream(name: Option<&str>, pattern: &str) -> Down {
    let name = name.unwrap_or("NAME");
    let text = format!(
        "no stream takes the subject now; if that continues, create one with: nats stream add {name} --subjects '{pattern}' --dupe-window 4h --defaults"
    );
    Down::new(ErrorKind::Mismatch, NO_STREAM, text)
}

/// No server was connected to within the time of a call.
pub(crate) fn connect_too_slow() -> Down {
    let text =
        "no server answered within the subscription's timeout; is one of them behind a firewall that drops packets?";
    Down::new(ErrorKind::Unavailable, CONNECT_TOO_SLOW, text)
}

/// The server refused the publish, and reported it only on the connection.
pub(crate) fn no_right(subject: &str) -> Down {
    let text = format!("the server does not allow publishing to {subject}; grant the user publish on it");
    Down::new(ErrorKind::Unauthorized, "nats_publish_denied", text)
}

/// The deadline passed; the stream may have stored the event.
pub(crate) fn no_ack() -> Outcome {
    Outcome::ambiguous("nats_ack_timeout", "the stream did not acknowledge it in time")
}

/// The connection was lost.
pub(crate) fn lost() -> Down {
    Down::new(ErrorKind::Unavailable, "nats_disconnected", "the connection to the server was lost")
}

/// An API call was refused.
pub(crate) fn not_done(what: &str, refusal: &Refusal) -> Down {
    let text = format!("{what}: {} ({})", refusal.description, refusal.err_code);
    let kind = if SYSTEM.contains(&refusal.err_code) { ErrorKind::Unavailable } else { ErrorKind::Mismatch };
    Down::new(kind, "nats_refused", text)
}

/// Connecting to this server failed.
pub(crate) fn connecting(server: &str, error: &ConnectError) -> Down {
    let refused = std::error::Error::source(error).is_some_and(is_refused);
    let (kind, code) = match error.kind() {
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
            (ErrorKind::Unauthorized, "nats_unauthorized")
        }
        ConnectErrorKind::Dns => (ErrorKind::Unavailable, "dns_failed"),
        ConnectErrorKind::TimedOut => (ErrorKind::Unavailable, CONNECT_TOO_SLOW),
        ConnectErrorKind::Tls => (ErrorKind::Unavailable, "tls_failed"),
        _ if refused => (ErrorKind::Unavailable, "connect_refused"),
        _ => (ErrorKind::Unavailable, "connect_failed"),
    };
    Down::new(kind, code, format!("no connection to {server}: {error}"))
}

fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionRefused) || error.source().is_some_and(is_refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(payload: &str) -> Message {
        Message {
            subject: "x".into(),
            reply: None,
            payload: payload.to_owned().into(),
            headers: None,
            status: None,
            description: None,
            length: 0,
        }
    }

    #[test]
    fn every_answer_has_one_meaning() {
        let full = || Outcome::Throttled { code: "nats_stream_full".into(), error: String::new(), after: None };
        let error = |code| format!("{{\"error\":{{\"code\":503,\"err_code\":{code},\"description\":\"why\"}}}}");
        for (payload, expected) in [
            (r#"{"stream":"S","seq":1}"#.to_owned(), Outcome::DELIVERED),
            (r#"{"stream":"S","seq":1,"duplicate":true}"#.to_owned(), Outcome::DUPLICATE),
            (error(10_054), Outcome::dead("payload_too_large", "")),
            (error(10_097), Outcome::dead("payload_too_large", "")),
            (error(10_060), Outcome::ambiguous("nats_stream_other", "")),
            (error(10_077), Outcome::ambiguous("nats_refused", "")),
            (error(10_077).replace("why", "maximum bytes exceeded"), full()),
            (error(10_002), full()),
            (error(10_008), Outcome::unavailable("nats_system_unavailable", "")),
            (error(99_999), Outcome::ambiguous("nats_refused", "")),
            ("ok".to_owned(), Outcome::ambiguous("nats_answer_unknown", "")),
            (r#"{"stream":"S"}"#.to_owned(), Outcome::ambiguous("nats_answer_unknown", "")),
        ] {
            let outcome = outcome(read(&message(&payload)));
            let code = |outcome: &Outcome| match outcome {
                Outcome::Dead { code, .. }
                | Outcome::Ambiguous { code, .. }
                | Outcome::Throttled { code, .. }
                | Outcome::Unavailable { code, .. } => code.to_string(),
                other => format!("{other:?}"),
            };
            assert_eq!(std::mem::discriminant(&outcome), std::mem::discriminant(&expected), "{payload}: {outcome:?}");
            assert_eq!(code(&outcome), code(&expected), "{payload}");
        }
    }

    #[test]
    fn what_was_never_sent_is_no_attempt() {
        let of = |kind: RequestErrorKind, unsent| failure(&kind.into(), unsent);
        assert!(matches!(of(RequestErrorKind::Other, true), Outcome::Unavailable { .. }));
        assert!(matches!(of(RequestErrorKind::Other, false), Outcome::Ambiguous { .. }));
        assert!(matches!(of(RequestErrorKind::TimedOut, true), Outcome::Ambiguous { .. }));
        assert!(matches!(of(RequestErrorKind::MaxPayloadExceeded, false), Outcome::Dead { .. }));
    }
}
