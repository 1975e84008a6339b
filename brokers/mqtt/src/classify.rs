//! Classifies the server's answers, missing answers and failures of the client.

use std::io;

use postbox_core::{Down, ErrorKind, Outcome, excerpt};
use rumqttc::v5::mqttbytes::Error as MqttError;
use rumqttc::v5::mqttbytes::v5::{ConnectReturnCode, DisconnectReasonCode, PubAckReason, SubscribeReasonCode};
use rumqttc::v5::{ConnectionError, StateError, TlsError};

/// Returns the outcome of an event from its PUBACK. `mandatory`: the topic must have a subscriber.
pub(crate) fn answer(reason: PubAckReason, mandatory: bool) -> Outcome {
    let refused = |code: &'static str, why: &str| Outcome::ambiguous(code, format!("the server refused it: {why}"));
    match reason {
        PubAckReason::Success => Outcome::DELIVERED,
        PubAckReason::NoMatchingSubscribers if mandatory => Outcome::ambiguous(
            "mqtt_no_subscriber",
            "the server dropped it: nobody has subscribed to the topic; subscribe, or write mandatory = false",
        ),
        PubAckReason::NoMatchingSubscribers => Outcome::DELIVERED,
        PubAckReason::NotAuthorized => {
            refused("mqtt_not_permitted", "not authorized; allow the user to publish to the topic")
        }
        PubAckReason::TopicNameInvalid => {
            Outcome::dead(crate::topic::RULES.code, "the server refused it: the topic name is invalid")
        }
        PubAckReason::PayloadFormatInvalid => {
            Outcome::dead("payload_invalid", "the server refused it: the payload format is invalid")
        }
        PubAckReason::QuotaExceeded => {
            let (code, error) = ("mqtt_quota_exceeded".into(), "the server refused it: quota exceeded".to_owned());
            Outcome::Throttled { code, error, after: None }
        }
        PubAckReason::UnspecifiedError
        | PubAckReason::ImplementationSpecificError
        | PubAckReason::PacketIdentifierInUse => refused("mqtt_refused", &format!("{reason:?}")),
    }
}

/// The deadline passed; the server may have stored the event.
pub(crate) fn no_ack() -> Outcome {
    Outcome::ambiguous("mqtt_ack_timeout", "the server did not acknowledge it in time")
}

/// Makes a [`Down`] whose text is one harmless line.
pub(crate) fn down(kind: ErrorKind, code: &'static str, text: impl AsRef<str>) -> Down {
    Down::new(kind, code, excerpt(text.as_ref()))
}

/// The server answers, but cannot do what is asked.
pub(crate) fn mismatch(code: &'static str, text: impl AsRef<str>) -> Down {
    down(ErrorKind::Mismatch, code, text)
}

/// There was no connection in time.
pub(crate) fn no_answer(url: &str) -> Down {
    down(ErrorKind::Unavailable, "connect_timeout", format!("no connection to {url}: no answer in time"))
}

/// A call was not answered in time, so its connection was given up.
pub(crate) fn given_up() -> Down {
    let text = "the connection was closed: a call on it was not answered in time";
    down(ErrorKind::Unavailable, "mqtt_connection_lost", text)
}

/// The task that reads the connection ended before it was lost.
pub(crate) fn broken_off() -> Down {
    let text = "the connection was closed: the task that reads it broke off; unless we stop, this is a defect";
    down(ErrorKind::Unavailable, "mqtt_connection_lost", text)
}

/// Connecting to this server failed.
pub(crate) fn connecting(url: &str, error: &ConnectionError) -> Down {
    let (kind, code) = match error {
        ConnectionError::Timeout(_) => (ErrorKind::Unavailable, "connect_timeout"),
        ConnectionError::Tls(TlsError::Io(_) | TlsError::TLS(_)) => (ErrorKind::Unavailable, "tls_failed"),
        ConnectionError::Tls(_) => (ErrorKind::Mismatch, "mqtt_config_invalid"),
        ConnectionError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            (ErrorKind::Unavailable, "connect_refused")
        }
        ConnectionError::ConnectionRefused(code) => refused(*code),
        _ => (ErrorKind::Unavailable, "connect_failed"),
    };
    down(kind, code, format!("no connection to {url}: {error}"))
}

fn refused(code: ConnectReturnCode) -> (ErrorKind, &'static str) {
    use ConnectReturnCode as Code;
    match code {
        Code::BadUserNamePassword | Code::NotAuthorized | Code::Banned | Code::BadAuthenticationMethod => {
            (ErrorKind::Unauthorized, "mqtt_unauthorized")
        }
        Code::BadClientId
        | Code::ClientIdentifierNotValid
        | Code::RefusedProtocolVersion
        | Code::UnsupportedProtocolVersion
        | Code::UseAnotherServer
        | Code::ServerMoved => (ErrorKind::Mismatch, "mqtt_refused"),
        _ => (ErrorKind::Unavailable, "mqtt_server_unavailable"),
    }
}

/// The connection was lost.
pub(crate) fn lost(error: &ConnectionError) -> Down {
    let text = format!("the connection was lost: {error}");
    let too_large = || {
        let text = format!("{text} (the server takes less than the sink's message_max)");
        down(ErrorKind::Unavailable, "mqtt_message_too_large", text)
    };
    match error {
        // Mosquitto's answer, which the client cannot parse.
        ConnectionError::MqttState(StateError::Deserialization(MqttError::InvalidConnectReturnCode(0x95))) => {
            too_large()
        }
        ConnectionError::MqttState(StateError::ConnectionAborted) => down(
            ErrorKind::Unavailable,
            "mqtt_connection_lost",
            "the server closed the connection; if that continues, look at its log: another client may use this client_id",
        ),
        ConnectionError::MqttState(StateError::ServerDisconnect { reason_code, .. }) => match reason_code {
            DisconnectReasonCode::SessionTakenOver => down(
                ErrorKind::Unavailable,
                "mqtt_session_taken_over",
                "another client connected with this client_id; give every process one of its own",
            ),
            DisconnectReasonCode::PacketTooLarge => too_large(),
            _ => down(ErrorKind::Unavailable, "mqtt_disconnected", text),
        },
        _ => down(ErrorKind::Unavailable, "mqtt_connection_lost", text),
    }
}

/// The connection of the source with this client id was lost.
pub(crate) fn reading(client_id: &str, error: &ConnectionError) -> Down {
    use MqttError as Fault;
    match error {
        // A failed read or write of the connection is a `Deserialization` too.
        ConnectionError::MqttState(StateError::Deserialization(
            fault @ (Fault::TopicNotUtf8
            | Fault::BoundaryCrossed(_)
            | Fault::InvalidPropertyType(_)
            | Fault::MalformedPacket),
        )) => {
            let text = format!(
                "a message cannot be read, and ends the connection each time it comes: {fault}; a user property, its \
                 content type or its response topic is no UTF-8. The others wait. End the session, with all \
                 messages in it: connect once with the client_id {client_id} and a clean start. If it is retained, \
                 clear it first: publish an empty retained message to its topic"
            );
            Down::new(ErrorKind::Invalid, "mqtt_message_unreadable", text)
        }
        _ => lost(error),
    }
}

/// Returns what is wrong with a subscription; `None` if it was granted.
pub(crate) fn subscribing(filter: &str, codes: &[SubscribeReasonCode]) -> Option<Down> {
    let why = match codes {
        [SubscribeReasonCode::Success(rumqttc::v5::mqttbytes::QoS::AtMostOnce)] => "it grants QoS 0 only".to_owned(),
        [SubscribeReasonCode::Success(_)] => return None,
        codes => format!("{codes:?}"),
    };
    Some(mismatch("mqtt_subscribe_refused", format!("the server refused the subscription {filter}: {why}")))
}

#[cfg(test)]
mod tests {
    use postbox_testkit::sending::said;

    use super::*;

    #[test]
    fn every_answer_has_one_meaning() {
        for (reason, mandatory, expected) in [
            (PubAckReason::Success, true, "delivered"),
            (PubAckReason::NoMatchingSubscribers, true, "ambiguous mqtt_no_subscriber"),
            (PubAckReason::NoMatchingSubscribers, false, "delivered"),
            (PubAckReason::UnspecifiedError, true, "ambiguous mqtt_refused"),
            (PubAckReason::ImplementationSpecificError, true, "ambiguous mqtt_refused"),
            (PubAckReason::PacketIdentifierInUse, true, "ambiguous mqtt_refused"),
            (PubAckReason::NotAuthorized, true, "ambiguous mqtt_not_permitted"),
            (PubAckReason::TopicNameInvalid, true, "dead topic_invalid"),
            (PubAckReason::PayloadFormatInvalid, true, "dead payload_invalid"),
            (PubAckReason::QuotaExceeded, true, "throttled mqtt_quota_exceeded"),
        ] {
            assert_eq!(said(&answer(reason, mandatory)), expected, "{reason:?}");
        }
    }

    #[test]
    fn a_refused_connection_says_whether_a_person_must_mend_it() {
        for (code, kind, expected) in [
            (ConnectReturnCode::BadUserNamePassword, ErrorKind::Unauthorized, "mqtt_unauthorized"),
            (ConnectReturnCode::NotAuthorized, ErrorKind::Unauthorized, "mqtt_unauthorized"),
            (ConnectReturnCode::UnsupportedProtocolVersion, ErrorKind::Mismatch, "mqtt_refused"),
            (ConnectReturnCode::ServerBusy, ErrorKind::Unavailable, "mqtt_server_unavailable"),
        ] {
            let error = connecting("mqtt://h", &ConnectionError::ConnectionRefused(code)).error("connect");
            assert_eq!((error.kind(), error.code()), (kind, expected), "{code:?}");
        }
    }

    #[test]
    fn only_what_a_message_may_contain_makes_it_unreadable() {
        for (fault, expected) in [
            (MqttError::TopicNotUtf8, "mqtt_message_unreadable"),
            (MqttError::Io(io::ErrorKind::ConnectionReset.into()), "mqtt_connection_lost"),
            (MqttError::InvalidConnectReturnCode(0x95), "mqtt_message_too_large"),
        ] {
            let error = ConnectionError::MqttState(StateError::Deserialization(fault));
            assert_eq!(reading("orders-1", &error).code(), expected, "{error}");
        }
    }

    #[test]
    fn a_subscription_without_confirmations_is_none() {
        use rumqttc::v5::mqttbytes::QoS;
        assert!(subscribing("a", &[SubscribeReasonCode::Success(QoS::AtLeastOnce)]).is_none());
        assert!(subscribing("a", &[SubscribeReasonCode::Success(QoS::AtMostOnce)]).is_some());
        assert!(subscribing("a", &[SubscribeReasonCode::NotAuthorized]).is_some());
    }
}
