//! Classifies the server's answers, missing answers and failures of the client.

use lapin::protocol::AMQPErrorKind;
use lapin::{Error as ClientError, ErrorKind as Client};
use postbox_core::{Down, ErrorKind, Outcome, excerpt};

/// AMQP's own error numbers.
const ACCESS_REFUSED: u16 = 403;
const NOT_FOUND: u16 = 404;
const RESOURCE_LOCKED: u16 = 405;
const PRECONDITION_FAILED: u16 = 406;
const FRAME_ERROR: u16 = 501;
const NOT_ALLOWED: u16 = 530;

/// The connection was lost.
pub(crate) fn lost(why: &str) -> Down {
    Down::new(ErrorKind::Unavailable, "rabbitmq_connection_lost", format!("the connection was lost: {why}"))
}

/// The code of a message that the client cannot read.
pub(crate) const UNREADABLE: &str = "rabbitmq_message_unreadable";

/// Classifies the error that ended the consumer.
pub(crate) fn ended(queue: &str, error: &ClientError) -> Down {
    let why = match error.kind() {
        Client::ParsingError(why) => why.to_string(),
        // A server with larger frames sends a header as it is.
        Client::ProtocolError(_) if number(error) == Some(FRAME_ERROR) => safe(error),
        _ => return lost(&error.to_string()),
    };
    let text = format!(
        "a message of the queue {queue} cannot be read, and ends the connection each time it comes: {}; its id, \
         content type or another property is no UTF-8, or its headers are too large. Those behind it wait. Look first \
         whether it is at the head: rabbitmqadmin get queue={queue} ackmode=ack_requeue_true (or Get messages in the \
         management UI); then remove it with ackmode=ack_requeue_false. A quorum queue with a dead-letter exchange \
         and a finite x-delivery-limit does so by itself",
        excerpt(&why)
    );
    Down::new(ErrorKind::Invalid, UNREADABLE, text)
}

/// The code of a missing queue or exchange.
pub(crate) const MISSING: &str = "rabbitmq_not_found";

/// Classifies a request on a channel that was refused or not answered.
pub(crate) fn refused(what: &str, error: &ClientError) -> Down {
    let text = safe(error);
    let (kind, code, cure) = match number(error) {
        Some(NOT_FOUND) => (ErrorKind::Mismatch, MISSING, "; declare it first"),
        Some(ACCESS_REFUSED) => {
            (ErrorKind::Unauthorized, "rabbitmq_access_refused", "; grant the user the permissions of the guide")
        }
        Some(RESOURCE_LOCKED | PRECONDITION_FAILED) => (
            ErrorKind::Mismatch,
            "rabbitmq_refused",
            "; it exists with other settings, or is exclusive to another connection",
        ),
        _ => return lost(&format!("{what}: {text}")),
    };
    Down::new(kind, code, format!("{what}: {text}{cure}"))
}

/// Connecting to this server failed.
pub(crate) fn connecting(server: &str, error: &ClientError) -> Down {
    let text = format!("no connection to {server}: {}", safe(error));
    let (kind, code) = match (error.kind(), number(error)) {
        (_, Some(ACCESS_REFUSED)) => (ErrorKind::Unauthorized, "rabbitmq_unauthorized"),
        // There is no such virtual host, or we may not use it.
        (_, Some(NOT_ALLOWED)) => (ErrorKind::Unauthorized, "rabbitmq_vhost_refused"),
        (Client::IOError(io), _) if io.kind() == std::io::ErrorKind::ConnectionRefused => {
            (ErrorKind::Unavailable, "connect_refused")
        }
        (Client::IOError(io), _) if io.kind() == std::io::ErrorKind::InvalidData => {
            (ErrorKind::Unavailable, "tls_failed")
        }
        _ => (ErrorKind::Unavailable, "connect_failed"),
    };
    Down::new(kind, code, text)
}

/// Classifies a refused publish, which ended its channel. `body_bytes` is the size of this event's
/// body.
pub(crate) fn unpublished(error: &ClientError, body_bytes: usize, written: bool) -> Outcome {
    let text = safe(error);
    match number(error) {
        Some(NOT_FOUND) => Outcome::ambiguous(
            "rabbitmq_no_exchange",
            format!("{text}; declare it: rabbitmqadmin declare exchange name=NAME type=topic durable=true"),
        ),
        Some(ACCESS_REFUSED) => {
            Outcome::ambiguous("rabbitmq_access_refused", format!("{text}; grant the user `write` on the exchange"))
        }
        // One message ended the channel, and failed the others of the call with it. Only the one
        // that is too large is dead.
        Some(PRECONDITION_FAILED) if size_limit(&text).is_some_and(|most| body_bytes > most) => {
            Outcome::dead("payload_too_large", text)
        }
        Some(PRECONDITION_FAILED) => Outcome::ambiguous("rabbitmq_refused", text),
        _ if written => {
            let text = format!("the connection was lost before the server confirmed it: {text}");
            Outcome::ambiguous("rabbitmq_connection_lost", text)
        }
        _ => Outcome::unavailable("rabbitmq_connection_lost", format!("lost before anything was sent: {text}")),
    }
}

/// Parses the limit from `… larger than configured max size N`.
fn size_limit(text: &str) -> Option<usize> {
    let (_, most) = text.split_once("max size ")?;
    most.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// No queue took the message.
pub(crate) fn returned(number: u16, text: &str) -> Outcome {
    let text = format!(
        "no queue takes its routing key ({number} {}); bind one, or give the exchange an alternate exchange",
        excerpt(text)
    );
    Outcome::ambiguous("rabbitmq_unroutable", text)
}

/// A queue refused the message: it is full (`overflow = reject-publish`), or lost its replicas.
pub(crate) fn rejected() -> Outcome {
    Outcome::ambiguous("rabbitmq_rejected", "a queue refused it: it is full, or not available")
}

/// The deadline passed; the queues may have stored the message.
pub(crate) fn no_confirm() -> Outcome {
    Outcome::ambiguous("rabbitmq_confirm_timeout", "the server did not confirm it in time")
}

/// The server accepts nothing from this connection: it is short of a resource.
pub(crate) fn blocked(reason: &str) -> Outcome {
    let text = format!("blocked: {}; the server takes no messages until that has passed", excerpt(reason));
    Outcome::unavailable("rabbitmq_blocked", text)
}

fn number(error: &ClientError) -> Option<u16> {
    let Client::ProtocolError(error) = error.kind() else { return None };
    Some(match error.kind() {
        AMQPErrorKind::Soft(soft) => soft.get_id(),
        AMQPErrorKind::Hard(hard) => hard.get_id(),
    })
}

/// Turns text from outside into one harmless line.
fn safe(error: &ClientError) -> String {
    excerpt(&match error.kind() {
        Client::ProtocolError(error) => error.get_message().to_string(),
        _ => error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use lapin::protocol::AMQPError;

    use super::*;

    fn error(number: u16, text: &str) -> ClientError {
        Client::ProtocolError(AMQPError::from_id(number, text.into()).expect("an error")).into()
    }

    #[test]
    fn every_refusal_has_one_meaning() {
        let large = "PRECONDITION_FAILED - message size 11 is larger than configured max size 10";
        for (refusal, written, kind, code) in [
            (error(404, "no exchange 'x'"), false, "ambiguous", "rabbitmq_no_exchange"),
            (error(403, "refused"), true, "ambiguous", "rabbitmq_access_refused"),
            (error(406, large), true, "dead", "payload_too_large"),
            (error(406, "user_id"), true, "ambiguous", "rabbitmq_refused"),
            (error(320, "shutdown"), true, "ambiguous", "rabbitmq_connection_lost"),
            (error(320, "shutdown"), false, "unavailable", "rabbitmq_connection_lost"),
            (Client::MissingHeartbeatError.into(), true, "ambiguous", "rabbitmq_connection_lost"),
        ] {
            let said = match unpublished(&refusal, 11, written) {
                Outcome::Ambiguous { code, .. } => ("ambiguous", code),
                Outcome::Unavailable { code, .. } => ("unavailable", code),
                Outcome::Dead { code, .. } => ("dead", code),
                other => panic!("{other:?}"),
            };
            assert_eq!(said, (kind, code.into()), "{refusal}");
        }
        let neighbour = unpublished(&error(406, large), 10, true);
        assert!(matches!(neighbour, Outcome::Ambiguous { .. }), "only the one that is too large dies: {neighbour:?}");
    }

    #[test]
    fn a_server_s_text_is_one_harmless_line() {
        let Outcome::Ambiguous { error, .. } = returned(312, &"a\r\nb\u{1b}[1m".repeat(1_000)) else { panic!("what?") };
        assert!(!error.contains(['\r', '\n', '\u{1b}']) && error.len() < 4_000, "{error}");
    }
}
