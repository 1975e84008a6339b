//! Converts events to records, and records to messages.

use bytes::Bytes;
use krafka::ConsumerRecord;
use krafka::producer::Record;
use postbox_core::envelope::{Binding, Wrapped};
use postbox_core::limits::KEY_BYTES_MAX;
use postbox_core::{Delivery, Headers, Key, RawMessage, header, hex};
use sha2::{Digest as _, Sha256};

/// The header with the id to deduplicate by.
pub(crate) const ID: &str = "postbox-id";
const CONTENT_TYPE: &str = "content-type";

/// Makes the record of an event in its envelope. Also returns the size of its key, headers and
/// value, in bytes.
pub(crate) fn record(topic: String, delivery: &Delivery, wrapped: &Wrapped<'_>) -> (Record, usize) {
    let event = &delivery.event;
    let is_reserved = |name: &str| Binding::KAFKA.is_reserved(name) || name.eq_ignore_ascii_case(ID);
    let own = delivery.headers().filter(|(name, _)| !is_reserved(name));
    let mut headers: Vec<(String, Option<Bytes>)> =
        own.map(|(name, value)| (name.to_owned(), Some(Bytes::from(value.to_owned())))).collect();
    let attributes = Binding::KAFKA.spell(wrapped);
    headers.extend(attributes.map(|(name, value)| (name, Some(Bytes::from(value.into_owned())))));
    headers.push((CONTENT_TYPE.to_owned(), Some(Bytes::from(wrapped.content_type.clone().into_owned()))));
    headers.push((ID.to_owned(), Some(Bytes::from(delivery.dedupe_id()))));
    let key = event.key.as_ref().map(|key| Bytes::copy_from_slice(key.as_str().as_bytes()));
    let of_headers = headers.iter().map(|(name, value)| name.len() + value.as_ref().map_or(0, Bytes::len));
    let bytes = of_headers.sum::<usize>() + key.as_ref().map_or(0, Bytes::len) + wrapped.body.len();
    // The client sets the record's time to now. Retention goes by that time, so with the event's
    // own time an old event would be deleted at once.
    let mut record = Record::new(topic, wrapped.body.clone());
    (record.key, record.headers) = (key, headers);
    (record, bytes)
}

/// Converts a record to a message. Its id is the value of the header `id_header`, or else the
/// record's position `TOPIC/PARTITION/OFFSET`. A record without a value has an empty payload. A key
/// that is not text becomes its bytes in hexadecimal, so that different keys stay different.
pub(crate) fn raw_message(record: ConsumerRecord, id_header: &str, content_type: &str) -> RawMessage {
    let payload = record.value.clone().unwrap_or_default();
    let word = |name: &str| {
        let named = record.headers.iter().find(|(its, _)| its.eq_ignore_ascii_case(name))?;
        let text = str::from_utf8(named.1.as_deref()?).ok()?;
        Some(text.to_owned()).filter(|text| !text.is_empty())
    };
    let place = || format!("{}/{}/{}", record.topic, record.partition, record.offset);
    // A CloudEvent's id is unique only beside its source.
    let id = if Binding::KAFKA.is_named(id_header, "id") { Binding::KAFKA.id_of(&kept(&record, "")) } else { None };
    RawMessage {
        id: id.or_else(|| word(id_header)).or_else(|| Some(place())),
        digest: Sha256::digest(&payload).into(),
        topic: record.topic.to_string(),
        key: record.key.as_deref().and_then(key),
        headers: kept(&record, id_header),
        content_type: word(CONTENT_TYPE).unwrap_or_else(|| content_type.to_owned()),
        payload,
    }
}

/// Returns the text of a key, or else its bytes in hexadecimal: `42` as a number is text with null
/// characters. Of a key that is too long as well, the digest. An empty key is none.
fn key(bytes: &[u8]) -> Option<String> {
    match str::from_utf8(bytes) {
        Ok("") => None,
        Ok(text) if Key::new(text).is_ok() => Some(text.to_owned()),
        _ if 2 * bytes.len() <= KEY_BYTES_MAX => Some(hex(bytes)),
        _ => Some(format!("sha256:{}", hex(&Sha256::digest(bytes)))),
    }
}

/// Returns the headers that an event can have. Several values of one name are joined.
fn kept(record: &ConsumerRecord, id_header: &str) -> Headers {
    let is_ours = |name: &str| name.eq_ignore_ascii_case(id_header) || name.eq_ignore_ascii_case(CONTENT_TYPE);
    let mut kept = Headers::new();
    for (name, value) in record.headers.iter().filter(|(name, _)| !is_ours(name)) {
        let Some(value) = value.as_deref().and_then(|value| str::from_utf8(value).ok()) else { continue };
        header::join(&mut kept, name, value);
    }
    kept
}

#[cfg(test)]
mod tests {
    use postbox_core::{Envelope, EventId, NewEvent, Seq, SourceName};

    use super::*;

    fn sent(event: NewEvent, envelope: Envelope) -> (Delivery, Record) {
        let event = event.into_event(EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH);
        let delivery = Delivery { event, seq: Seq(1), attempt: 1, replay: 1, trace: None };
        let wrapped = envelope.wrap(&delivery.event, "us").expect("it fits");
        let (record, _) = record("orders".into(), &delivery, &wrapped);
        (delivery, record)
    }

    fn received(record: Record) -> RawMessage {
        let mut got = ConsumerRecord::new("orders", 2, 7, record.key, record.value);
        got.headers = record.headers;
        raw_message(got, ID, "text/plain")
    }

    #[test]
    fn what_is_written_is_read_again() {
        let event = NewEvent::new("order.paid", &b"\xff\0"[..], "a/b").key("k").kind("x").aggregate("order");
        let event = event.header("a", "1").header("Postbox-Id", "forged").header("CE_id", "forged");
        let (delivery, record) = sent(event, Envelope::CloudEventsBinary);
        let message = received(record);
        assert_eq!(message.id, Some(delivery.dedupe_id()));
        let source: SourceName = "orders".parse().expect("a name");
        let read = Binding::KAFKA.read(&message, &source).expect("an event").event;
        assert_eq!((read.topic.as_str(), read.key.as_deref()), ("order.paid", Some("k")));
        assert_eq!((read.kind.as_deref(), read.aggregate.as_deref()), (Some("x"), Some("order")));
        assert_eq!((read.payload.as_ref(), read.content_type.as_deref()), (&b"\xff\0"[..], Some("a/b")));
        assert_eq!(read.headers["a"], "1");
        assert!(read.headers.values().all(|value| value != "forged"), "no event can pose as another");
    }

    #[test]
    fn attributes_are_spelled_as_the_binding_says() {
        let (delivery, record) = sent(NewEvent::json("order.paid", "{}"), Envelope::CloudEventsBinary);
        let header = |name: &str| {
            let found = record.headers.iter().find(|(its, _)| its == name);
            found.and_then(|(_, value)| Some(String::from_utf8(value.as_ref()?.to_vec()).expect("text")))
        };
        assert_eq!(header("ce_id"), Some(delivery.event.id.to_string()));
        assert_eq!(header("ce_type").as_deref(), Some("order.paid"));
        assert_eq!(header("content-type").as_deref(), Some("application/json"));
        assert_eq!(header("ce_datacontenttype"), None);
        let (_, record) = sent(NewEvent::json("order.paid", "{}"), Envelope::CloudEvents);
        let structured = record.headers.iter().find(|(name, _)| name == "content-type");
        let structured = structured.and_then(|(_, value)| value.clone()).expect("a value");
        assert!(structured.starts_with(b"application/cloudevents+json"), "{structured:?}");
    }

    #[test]
    fn every_key_is_one_that_an_event_can_have() {
        let key = |bytes: &[u8]| {
            let record = ConsumerRecord::new("orders", 2, 7, Some(Bytes::copy_from_slice(bytes)), None);
            let source: SourceName = "orders".parse().expect("a name");
            raw_message(record, ID, "text/plain").into_inbound(&source).expect("an event").event.key
        };
        assert_eq!(key(&42_i64.to_be_bytes()).as_deref(), Some("000000000000002a"));
        assert_eq!(key(b""), None);
        assert_eq!(key(b"42").as_deref(), Some("42"));
        assert!(key(&[0xff; 600]).is_some_and(|key| key.starts_with("sha256:")));
        assert!(key(&[b'k'; 1_025]).is_some_and(|key| key.starts_with("sha256:")));
    }

    #[test]
    fn records_of_others_are_kept_whole() {
        let mut record = ConsumerRecord::new("orders", 2, 7, Some(Bytes::from_static(b"\xff\x01")), None);
        let text = |text: &'static str| Some(Bytes::from_static(text.as_bytes()));
        record.headers = vec![
            ("a".into(), text("1")),
            ("a".into(), text("2")),
            ("null".into(), None),
            ("binary".into(), Some(Bytes::from_static(b"\xff"))),
            ("b c".into(), text("1")),
            ("line".into(), text("1\r\n2")),
            ("postbox-id".into(), text("")),
        ];
        let message = raw_message(record, ID, "text/plain");
        assert_eq!(message.id.as_deref(), Some("orders/2/7"));
        assert_eq!(message.key.as_deref(), Some("ff01"));
        assert_eq!((message.payload.len(), message.content_type.as_str()), (0, "text/plain"));
        assert_eq!(message.headers, [("a".to_owned(), "1, 2".to_owned())].into());
        // Adding one to a copy of those before would take minutes.
        let mut record = ConsumerRecord::new("orders", 2, 7, None, None);
        record.headers = vec![("a".into(), text("1234567")); 200_000];
        assert_eq!(raw_message(record, ID, "text/plain").headers["a"].len(), 200_000 * 9 - 2);
        let mut record = ConsumerRecord::new("orders", 2, 7, None, None);
        let attributes = [("ce_specversion", "1.0"), ("ce_source", "/door"), ("ce_id", "7")];
        record.headers = attributes.map(|(name, value)| (name.to_owned(), text(value))).into();
        assert_eq!(raw_message(record, "ce_id", "text/plain").id.as_deref(), Some("/door 7"));
    }
}
