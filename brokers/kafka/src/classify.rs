//! Classifies brokers' answers, missing answers and failures of a client.
//!
//! Each client turns its own errors into a [`Failure`]; what one means is decided here alone, so
//! that all clients report the same codes.

use krafka::error::ErrorCode;
use postbox_core::{Error, ErrorKind, Outcome, excerpt};

/// A failure of a client, in words that all clients share.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) cause: Cause,
    pub(crate) text: String,
    /// Whether the client cannot continue and must be replaced.
    pub(crate) is_final: bool,
}

/// What failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The delivery timeout has passed. The record may be written; the client does not send it
    /// again.
    NoAnswer,
    /// No broker could be reached, so nothing was sent.
    Unreachable,
    /// The credentials were refused.
    Unauthorized,
    /// The topic does not exist, or its partition has no leader yet.
    TopicMissing,
    /// A broker answered with this code.
    Refused(ErrorCode),
    /// An earlier batch of the partition was lost, or another producer uses our id. The record was
    /// not written.
    SequenceLost,
    /// The client was closed.
    Closed,
    /// The client does not accept its configuration.
    Config,
    /// The brokers do not support what the client needs.
    Unsupported,
    /// Any other failure of the client.
    Client,
}

impl Failure {
    /// Returns a failure after which the client can continue. Of the text, one harmless line is
    /// kept.
    pub(crate) fn new(cause: Cause, text: impl ToString) -> Self {
        Self { cause, text: excerpt(&text.to_string()), is_final: false }
    }

    /// Returns whether nothing was sent because no broker could be reached.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.cause == Cause::Unreachable
    }

    /// Returns whether we are no longer a member of the group, or a rebalance is in progress. Our
    /// partitions may then belong to another member, and messages that are not committed are
    /// delivered again.
    pub(crate) fn is_membership_lost(&self) -> bool {
        let Cause::Refused(code) = self.cause else { return false };
        matches!(
            code,
            ErrorCode::UnknownMemberId
                | ErrorCode::IllegalGeneration
                | ErrorCode::RebalanceInProgress
                | ErrorCode::FencedInstanceId
        )
    }
}

/// Returns the outcome of a record that was not confirmed.
pub(crate) fn failure(failure: &Failure, topic: &str) -> Outcome {
    let text = failure.text.clone();
    match failure.cause {
        Cause::NoAnswer => Outcome::ambiguous("kafka_ack_timeout", text),
        Cause::Unreachable => Outcome::unavailable("kafka_unreachable", text),
        Cause::Unauthorized => Outcome::unavailable("kafka_unauthorized", text),
        Cause::TopicMissing => topic_missing(topic),
        Cause::Refused(code) => match code {
            ErrorCode::UnknownTopicOrPartition | ErrorCode::UnknownTopicId => topic_missing(topic),
            ErrorCode::TopicAuthorizationFailed => {
                Outcome::ambiguous("kafka_not_permitted", format!("{text} (allow the user WRITE on the topic)"))
            }
            ErrorCode::ClusterAuthorizationFailed | ErrorCode::SaslAuthenticationFailed => {
                Outcome::unavailable("kafka_unauthorized", text)
            }
            // A batch of several records is refused as a whole, so this record need not be the
            // cause.
            ErrorCode::MessageTooLarge | ErrorCode::RecordListTooLarge => Outcome::ambiguous(
                "kafka_message_too_large",
                format!("{text} (the topic's max.message.bytes is less than the sink's message_max)"),
            ),
            _ => Outcome::ambiguous("kafka_refused", text),
        },
        Cause::SequenceLost => Outcome::ambiguous("kafka_sequence_lost", text),
        Cause::Closed => {
            Outcome::ambiguous("kafka_producer_closed", "the producer was given up before the record was confirmed")
        }
        Cause::Config | Cause::Unsupported | Cause::Client => Outcome::ambiguous("kafka_client_failed", text),
    }
}

/// The call's deadline passed before the client reported a result.
pub(crate) fn no_ack() -> Outcome {
    Outcome::ambiguous("kafka_ack_timeout", "the brokers did not acknowledge it in time")
}

/// The topic does not exist, or its partition has no leader yet.
fn topic_missing(topic: &str) -> Outcome {
    Outcome::ambiguous(TOPIC_MISSING, missing_text(topic))
}

/// The code of a missing topic.
pub(crate) const TOPIC_MISSING: &str = "kafka_topic_missing";

/// Returns the error of `operation` for a missing topic.
pub(crate) fn missing(operation: &'static str, topic: &str) -> Error {
    Error::new(ErrorKind::Mismatch, operation, TOPIC_MISSING, missing_text(topic))
}

/// Returns the error text for a missing topic, with the command that creates it.
fn missing_text(topic: &str) -> String {
    format!("there is no topic {topic}; make it: kafka-topics.sh --bootstrap-server HOST:PORT --create --topic {topic}")
}

/// Classifies a failure of the client while connecting, receiving or settling.
pub(crate) fn error(operation: &'static str, failure: &Failure) -> Error {
    let (kind, code) = match failure.cause {
        Cause::Unauthorized => (ErrorKind::Unauthorized, "kafka_unauthorized"),
        Cause::Config => (ErrorKind::Mismatch, "kafka_config_invalid"),
        Cause::Unsupported => (ErrorKind::Mismatch, "kafka_unsupported"),
        Cause::TopicMissing => (ErrorKind::Mismatch, TOPIC_MISSING),
        Cause::Refused(code) => match code {
            ErrorCode::TopicAuthorizationFailed | ErrorCode::GroupAuthorizationFailed => {
                (ErrorKind::Unauthorized, "kafka_not_permitted")
            }
            ErrorCode::ClusterAuthorizationFailed | ErrorCode::SaslAuthenticationFailed => {
                (ErrorKind::Unauthorized, "kafka_unauthorized")
            }
            ErrorCode::UnknownTopicOrPartition | ErrorCode::UnknownTopicId => (ErrorKind::Mismatch, TOPIC_MISSING),
            ErrorCode::InvalidSessionTimeout | ErrorCode::InconsistentGroupProtocol | ErrorCode::InvalidGroupId => {
                (ErrorKind::Mismatch, "kafka_group_refused")
            }
            _ => (ErrorKind::Unavailable, "kafka_refused"),
        },
        _ if operation == "connect" => (ErrorKind::Unavailable, "kafka_connect_failed"),
        Cause::Client if operation == "receive" => {
            let text = format!(
                "{} (if a partition stands still, its next batch cannot be read: stop all members, and move the group \
                 past it with kafka-consumer-groups.sh --reset-offsets)",
                failure.text
            );
            return Error::new(ErrorKind::Unavailable, operation, "kafka_client_failed", text);
        }
        _ => (ErrorKind::Unavailable, "kafka_unreachable"),
    };
    Error::new(kind, operation, code, failure.text.clone())
}

#[cfg(test)]
mod tests {
    use krafka::KrafkaError;

    use super::*;

    fn broker(code: ErrorCode) -> KrafkaError {
        KrafkaError::broker(code, "why")
    }

    #[test]
    fn every_failure_has_one_meaning() {
        use ErrorCode as E;
        for (error, expected, expected_code) in [
            (KrafkaError::delivery_timeout(false, "x"), "unavailable", "kafka_unreachable"),
            (KrafkaError::delivery_timeout(true, "x"), "ambiguous", "kafka_ack_timeout"),
            (KrafkaError::timeout("x"), "unavailable", "kafka_unreachable"),
            (KrafkaError::network(std::io::ErrorKind::ConnectionReset.into()), "unavailable", "kafka_unreachable"),
            (KrafkaError::auth("x"), "unavailable", "kafka_unauthorized"),
            (KrafkaError::unknown_topic("t"), "ambiguous", "kafka_topic_missing"),
            (broker(E::UnknownTopicOrPartition), "ambiguous", "kafka_topic_missing"),
            (broker(E::TopicAuthorizationFailed), "ambiguous", "kafka_not_permitted"),
            (broker(E::ClusterAuthorizationFailed), "unavailable", "kafka_unauthorized"),
            (broker(E::MessageTooLarge), "ambiguous", "kafka_message_too_large"),
            (broker(E::InvalidRecord), "ambiguous", "kafka_refused"),
            (broker(E::Unknown(999)), "ambiguous", "kafka_refused"),
            (KrafkaError::out_of_order_sequence("t", 0, "x"), "ambiguous", "kafka_sequence_lost"),
            (KrafkaError::fenced("x"), "ambiguous", "kafka_sequence_lost"),
            (KrafkaError::closed("x"), "ambiguous", "kafka_producer_closed"),
            (KrafkaError::illegal_state("x"), "ambiguous", "kafka_client_failed"),
        ] {
            let text = error.to_string();
            let found = match failure(&Failure::from(error), "t") {
                Outcome::Unavailable { code, .. } => ("unavailable", code),
                Outcome::Ambiguous { code, .. } => ("ambiguous", code),
                other => panic!("{other:?}"),
            };
            assert_eq!(found, (expected, expected_code.into()), "{text}");
        }
    }

    #[test]
    fn what_a_person_must_mend_is_said_so() {
        let kind = |code| error("receive", &broker(code).into()).kind();
        assert_eq!(kind(ErrorCode::GroupAuthorizationFailed), ErrorKind::Unauthorized);
        assert_eq!(kind(ErrorCode::UnknownTopicOrPartition), ErrorKind::Mismatch);
        assert_eq!(kind(ErrorCode::CoordinatorNotAvailable), ErrorKind::Unavailable);
        assert_eq!(error("connect", &KrafkaError::auth("x").into()).kind(), ErrorKind::Unauthorized);
        assert_eq!(error("connect", &KrafkaError::timeout("x").into()).code(), "kafka_connect_failed");
    }

    #[test]
    fn a_broker_s_text_is_one_harmless_line() {
        let hostile = KrafkaError::broker(ErrorCode::InvalidRecord, "a\r\nb\u{1b}[1m".repeat(1_000));
        let Outcome::Ambiguous { error, .. } = failure(&Failure::from(hostile), "t") else { panic!("ambiguous") };
        assert!(!error.contains(['\r', '\n', '\u{1b}']) && error.len() < 4_000, "{error}");
    }
}
