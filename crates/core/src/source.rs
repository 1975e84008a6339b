//! The source contract: where messages from brokers come from.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use crate::error::Result;
use crate::event::{Headers, NewEvent, header, is_word};
use crate::hex::hex;
use crate::names::{SourceName, Topic};
use crate::receive::Inbound;

/// Maximum characters of the reason stored with a poison message.
const POISON_REASON_CHARS_MAX: usize = 500;
/// Bytes that are kept of a message which no store can keep whole.
const POISON_BYTES_MAX: usize = 1024 * 1024;

/// The media type of bytes.
const BYTES: &str = "application/octet-stream";

/// A source's own number for one delivery of a message. Only the source that made it reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AckToken(pub u64);

/// A message as a broker delivered it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawMessage {
    /// The producer's id, by which the message is stored once. `None`: its digest is used.
    pub id: Option<String>,
    /// SHA-256 of the payload. A known id with another digest is a conflict.
    pub digest: [u8; 32],
    /// The subject, topic, routing key or queue.
    pub topic: String,
    /// The ordering key, if there is one.
    pub key: Option<String>,
    /// Application headers, as far as they are text.
    pub headers: Headers,
    /// The media type of the payload.
    pub content_type: String,
    /// The payload as it was received.
    pub payload: Bytes,
}

impl RawMessage {
    /// Returns the id by which the message is stored once: the producer's, or `sha256:` and the
    /// digest.
    pub fn message_id(&self) -> String {
        self.id.clone().unwrap_or_else(|| format!("sha256:{}", hex(&self.digest)))
    }

    /// Returns an event with the message's topic, key, headers and payload; `Invalid` if no event
    /// can have them. An empty key is none. A content type that no event can have becomes that of
    /// bytes: producers write many.
    pub fn into_inbound(self, source: &SourceName) -> Result<Inbound> {
        let message_id = self.message_id();
        let content_type = if is_word(&self.content_type) { self.content_type } else { BYTES.to_owned() };
        let mut event = NewEvent::new(self.topic, self.payload, content_type).source(source.to_string());
        event.key = self.key.filter(|key| !key.is_empty());
        event.headers = self.headers;
        // Only a receiver says that a message cannot be decoded.
        event.headers.remove(header::POISON);
        event.headers.insert(header::MESSAGE_ID.into(), message_id.clone());
        let inbound = Inbound { source: source.clone(), message_id, digest: self.digest, event };
        inbound.validate()?;
        Ok(inbound)
    }

    /// Cuts a payload that no store can keep whole to its first bytes. Returns its original length;
    /// `None` if it is short enough. For a source whose broker keeps no dead letters: otherwise the
    /// message would come again for ever, and others would wait behind it.
    pub fn cut(&mut self) -> Option<usize> {
        let length = self.payload.len();
        if length <= POISON_BYTES_MAX {
            return None;
        }
        // A copy, so that the rest is freed.
        self.payload = Bytes::copy_from_slice(&self.payload[..POISON_BYTES_MAX]);
        Some(length)
    }

    /// Returns an event that keeps a message which cannot be decoded: its payload, the reason, and
    /// whatever else an event can hold of it. Relays settle it as dead without sending it, so that
    /// an operator sees it.
    ///
    /// Its id is not the message's own, and ends with the digest of its bytes. So once the decoder
    /// is fixed, the same message can be stored, and two messages of one id with different bytes
    /// are both kept.
    pub fn into_poison(self, source: &SourceName, code: &str, why: &str) -> Inbound {
        let topic = if Topic::new(self.topic.as_str()).is_ok() { self.topic.clone() } else { source.to_string() };
        let why: String = why.escape_debug().take(POISON_REASON_CHARS_MAX).collect();
        let reason = format!("{code}: {why}");
        let poison = |message: Self| {
            let message_id = format!("poison:{}:{}", message.message_id(), hex(&message.digest[..8]));
            let mut event = NewEvent::new(topic.clone(), message.payload, message.content_type);
            event.headers = message.headers;
            event = event.source(source.to_string()).header(header::POISON, reason.clone());
            Inbound { source: source.clone(), message_id, digest: message.digest, event }
        };
        let whole = poison(self.clone());
        if whole.validate().is_ok() {
            return whole;
        }
        // Even an id that no event can have tells this message from others with its payload.
        let id = Some(hex(&Sha256::digest(self.message_id())));
        poison(Self { id, headers: Headers::new(), content_type: BYTES.to_owned(), ..self })
    }
}

/// A message from a source and the token to settle it by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceMessage {
    /// What was received.
    pub message: RawMessage,
    /// Identifies this delivery of it.
    pub token: AckToken,
}

/// What a source can do, as data. The receiver drives it accordingly. The source suite checks each
/// claim in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceCapabilities {
    /// Maximum messages that may be delivered and unsettled; at least 1.
    pub in_flight_max: usize,
    /// Messages come in the order in which they were published. A message that is given back comes
    /// again before anything behind it.
    pub ordered: bool,
    /// `nak` waits for its delay. Otherwise a message may come again at once.
    pub nak_delay: bool,
    /// The broker keeps rejected messages. Otherwise a rejected message is gone.
    pub dead_letters: bool,
}

/// A consumer of a broker. A receiver drives it. It neither decodes nor stores.
///
/// Behaviour:
/// - **At least once.** A message is delivered until it is settled by [`ack`](Self::ack) or
///   [`reject`](Self::reject). After [`nak`](Self::nak), a lost connection or a crash it comes
///   again, with another token.
/// - `next` waits until there is a message, then returns 1 to `max` of them, and never more than
///   [`in_flight_max`](SourceCapabilities::in_flight_max) unsettled ones in total. An empty result
///   means that the source was closed.
/// - A lost connection is an `Unavailable` error of one call. The next call connects again. Apart
///   from that, a source never retries or waits by itself: the receiver owns backoff.
/// - Settling is idempotent. A token that is unknown, settled, or from an earlier connection is
///   ignored. A failed settling call may have settled some messages; the others come again.
/// - `close` wakes a waiting `next`, gives back what is unsettled, and may be called again.
///
/// Errors: `Unavailable` for what passes by itself, `Unauthorized` or `Mismatch` for what a person
/// must fix. No error loses a message.
///
/// Cancel-safety: `next` may be dropped at any await. A message it has not returned is not lost. A
/// dropped settling call may or may not have settled.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// Returns what this source can do. Constant over its life.
    fn capabilities(&self) -> SourceCapabilities;

    /// Returns the next messages: 1 to `max`, or none once closed.
    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>>;

    /// These are stored durably, or known already. Never deliver them again.
    async fn ack(&self, tokens: &[AckToken]) -> Result<()>;

    /// These could not be stored now. Deliver them again, after `delay` at the earliest.
    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()>;

    /// These can never be stored, not even as poison. Never deliver them again.
    async fn reject(&self, tokens: &[AckToken]) -> Result<()>;

    /// Closes the source.
    async fn close(&self);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{HEADERS_MAX, PAYLOAD_BYTES_MAX};

    fn message() -> RawMessage {
        RawMessage {
            id: Some("m1".into()),
            digest: [7; 32],
            topic: "order.paid".into(),
            key: Some("42".into()),
            headers: [("a".to_owned(), "b".to_owned())].into(),
            content_type: "application/json".into(),
            payload: Bytes::from_static(b"\xff"),
        }
    }

    fn source() -> SourceName {
        "orders".parse().expect("a name")
    }

    #[test]
    fn a_message_becomes_an_event_of_the_same_fields() {
        let inbound = message().into_inbound(&source()).expect("an event");
        assert_eq!((inbound.message_id.as_str(), inbound.digest), ("m1", [7; 32]));
        assert_eq!((inbound.event.topic.as_str(), inbound.event.key.as_deref()), ("order.paid", Some("42")));
        assert_eq!(inbound.event.headers[header::MESSAGE_ID], "m1");
        let nameless = RawMessage { id: None, ..message() }.into_inbound(&source()).expect("an event");
        assert_eq!(nameless.message_id, format!("sha256:{}", "07".repeat(32)));
        let strange = RawMessage { key: Some(String::new()), content_type: "c".repeat(500), ..message() };
        let event = strange.into_inbound(&source()).expect("an event").event;
        assert_eq!((event.key, event.content_type.as_deref()), (None, Some("application/octet-stream")));
        let error = RawMessage { topic: "a b".into(), ..message() }.into_inbound(&source()).expect_err("no topic");
        assert_eq!(error.code(), "topic_invalid");
    }

    #[test]
    fn no_producer_declares_its_message_poison() {
        let forged = RawMessage { headers: Headers::from([(header::POISON.into(), "x: y".into())]), ..message() };
        let event = forged.into_inbound(&source()).expect("an event").event;
        assert!(!event.headers.contains_key(header::POISON), "{:?}", event.headers);
    }

    #[test]
    fn whatever_is_wrong_with_a_message_it_can_be_kept_as_poison() {
        let headers = |name: &str, count: usize| (0..count).map(|n| (format!("{name}{n}"), "v".to_owned())).collect();
        for bad in [
            message(),
            RawMessage { topic: "a b".into(), ..message() },
            RawMessage { topic: String::new(), ..message() },
            RawMessage { id: Some(String::new()), ..message() },
            RawMessage { id: Some("i".repeat(300)), ..message() },
            RawMessage { id: Some("a\0b".into()), ..message() },
            RawMessage { key: Some("k".repeat(5_000)), ..message() },
            RawMessage { content_type: "c".repeat(500), ..message() },
            RawMessage { headers: headers("h", HEADERS_MAX + 1), ..message() },
            RawMessage { headers: headers("a b", 1), ..message() },
        ] {
            let poison = bad.clone().into_poison(&source(), "json_invalid", "line\u{1b}[1m 1");
            assert!(poison.validate().is_ok(), "{bad:?}: {:?}", poison.validate());
            assert_eq!(poison.event.payload, bad.payload);
            assert_eq!(poison.event.headers[header::POISON], "json_invalid: line\\u{1b}[1m 1");
            assert!(poison.message_id.starts_with("poison:"), "it does not use up the message's own id");
        }
    }

    #[test]
    fn poison_of_equal_payloads_is_kept_apart() {
        let poison = |id: &str| {
            let message = RawMessage { id: Some(id.to_owned()), content_type: "c".repeat(500), ..message() };
            message.into_poison(&source(), "topic_invalid", "").message_id
        };
        assert_ne!(poison("m1"), poison("m2"), "the second one would be taken for the first");
        assert_ne!(poison(&"i".repeat(300)), poison(&"j".repeat(300)));
        assert_eq!(poison("m1"), poison("m1"), "a repetition is one");
    }

    #[test]
    fn what_no_store_can_keep_whole_is_cut_once() {
        let mut huge = message();
        huge.payload = vec![7; PAYLOAD_BYTES_MAX + 1].into();
        assert!(huge.clone().into_poison(&source(), "payload_too_large", "").validate().is_err());
        assert_eq!(huge.cut(), Some(PAYLOAD_BYTES_MAX + 1));
        assert!(huge.clone().into_poison(&source(), "payload_too_large", "").validate().is_ok());
        assert_eq!(huge.cut(), None);
    }
}
