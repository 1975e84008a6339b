//! Converts a message of a stream for a receiver.

use async_nats::header::{HeaderMap, NATS_MESSAGE_ID};
use async_nats::{Message, Subject};
use postbox_core::{Headers, RawMessage, header};
use sha2::{Digest as _, Sha256};

/// Converts a message. Its id is the producer's (`Nats-Msg-Id`), or else the stream's name, its
/// number in the stream, and its time: a stream that is deleted and created again numbers from 1.
pub(crate) fn raw_message(message: Message, content_type: &str) -> RawMessage {
    let digest = Sha256::digest(&message.payload).into();
    let headers = message.headers.unwrap_or_default();
    let id = headers.get(NATS_MESSAGE_ID).map(|id| id.as_str().to_owned());
    let content_type =
        headers.get("Content-Type").map_or_else(|| content_type.to_owned(), |value| value.as_str().to_owned());
    RawMessage {
        id: id.or_else(|| message.reply.as_ref().and_then(place)),
        digest,
        topic: message.subject.to_string(),
        key: None,
        headers: kept(&headers),
        content_type,
        payload: message.payload,
    }
}

/// Whether this is the subject that acknowledges a consumer's message. Only the server sends
/// messages with such a reply subject.
pub(crate) fn is_ack(reply: &Subject) -> bool {
    reply.starts_with("$JS.ACK.")
}

/// Returns `STREAM:NUMBER:TIME` from the subject that acknowledges the message:
/// `$JS.ACK.STREAM.CONSUMER.TIMES.NUMBER.NUMBER.TIME.…`, with a domain and an account before the
/// stream since 2.10.
fn place(reply: &Subject) -> Option<String> {
    let tokens: Vec<&str> = reply.split('.').collect();
    let (stream, number, time) = match tokens[..] {
        ["$JS", "ACK", stream, _, _, number, _, time, _] => (stream, number, time),
        ["$JS", "ACK", _, _, stream, _, _, number, _, time, ..] => (stream, number, time),
        _ => return None,
    };
    Some(format!("{stream}:{number}:{time}"))
}

/// Returns the application's headers that an event can have. Several values of one name are joined.
fn kept(headers: &HeaderMap) -> Headers {
    let is_ours = |name: &str| {
        name.get(..5).is_some_and(|begins| begins.eq_ignore_ascii_case("nats-"))
            || name.eq_ignore_ascii_case("content-type")
    };
    let mut kept = Headers::new();
    for (name, values) in headers.iter() {
        let name: &str = name.as_ref();
        let value = values.iter().map(|value| value.as_str()).collect::<Vec<_>>().join(", ");
        if header::is_name(name) && !is_ours(name) && header::is_value(&value) {
            kept.insert(name.to_owned(), value);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_found_in_both_forms() {
        for reply in ["$JS.ACK.S.c.1.7.3.1700000000.0", "$JS.ACK._.h4sh.S.c.1.7.3.1700000000.0.r4nd"] {
            assert_eq!(place(&reply.into()).as_deref(), Some("S:7:1700000000"), "{reply}");
        }
        assert_eq!(place(&"_INBOX.x".into()), None);
    }
}
