//! The fields of a stream entry: what the sink writes, and what the source reads.

use postbox_core::envelope::Binding;
use postbox_core::{Delivery, Envelope, Headers, Outcome, RawMessage};
use sha2::{Digest as _, Sha256};

/// The field with the id to deduplicate by.
const ID: &str = "id";
const TOPIC: &str = "topic";
const KEY: &str = "key";
const CONTENT_TYPE: &str = "content-type";
/// The field of the payload, unless the configuration names another.
pub(crate) const PAYLOAD: &str = "payload";
/// How the names of fields with a header begin.
const HEADER: &str = "header:";

/// The only field of an entry with the replica envelope.
const REPLICA: &str = "event";

/// Passes each field of an event in its envelope to `put`, with its name. The error is the outcome
/// of an event that no entry can be made of.
pub(crate) fn put(
    delivery: &Delivery,
    envelope: Envelope,
    source: &str,
    mut put: impl FnMut(&str, &[u8]) -> Result<(), Outcome>,
) -> Result<(), Outcome> {
    let event = &delivery.event;
    let wrapped = envelope.wrap(event, source)?;
    if envelope == Envelope::Replica {
        return put(REPLICA, &wrapped.body);
    }
    put(ID, delivery.dedupe_id().as_bytes())?;
    put(TOPIC, event.topic.as_str().as_bytes())?;
    if let Some(key) = &event.key {
        put(KEY, key.as_str().as_bytes())?;
    }
    put(CONTENT_TYPE, wrapped.content_type.as_bytes())?;
    for (name, value) in Binding::FIELDS.spell(&wrapped) {
        put(&name, value.as_bytes())?;
    }
    for (name, value) in delivery.headers().filter(|(name, _)| !Binding::FIELDS.is_reserved(name)) {
        put(&format!("{HEADER}{name}"), value.as_bytes())?;
    }
    put(PAYLOAD, &wrapped.body)
}

/// How entries of a stream are read.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The field of the payload.
    pub(crate) payload: String,
    /// The topic of entries that have none.
    pub(crate) topic: String,
    /// The stream's name, with which the ids of entries without an id begin.
    pub(crate) stream: String,
}

impl Layout {
    /// Converts an entry to a message.
    ///
    /// An entry without the payload's field comes from another program. Its payload is a JSON
    /// object of all its fields, and its id is that of the entry. If this is impossible because a
    /// field is not text or occurs twice, or if one of our fields in any entry is not text, the
    /// message has no topic. So it is kept as poison, with its bytes.
    pub(crate) fn message(&self, entry_id: &str, mut fields: Vec<(Vec<u8>, Vec<u8>)>) -> RawMessage {
        let own_id = || Some(format!("{}/{entry_id}", self.stream));
        let unreadable = |fields: &[_]| message(own_id(), String::new(), joined(fields), "application/octet-stream");
        if fields.iter().any(|(name, value)| is_ours(name) && str::from_utf8(value).is_err()) {
            return unreadable(&fields);
        }
        let Some(at) = fields.iter().position(|(name, _)| name == self.payload.as_bytes()) else {
            return match as_json(&fields) {
                Some(json) => message(own_id(), self.topic.clone(), json, "application/json"),
                None => unreadable(&fields),
            };
        };
        let (_, payload) = fields.swap_remove(at);
        let mut message = message(None, self.topic.clone(), payload, "application/json");
        for (name, value) in fields {
            // A field that is not text here is not one of ours.
            let (Ok(name), Ok(value)) = (String::from_utf8(name), String::from_utf8(value)) else { continue };
            match name.as_str() {
                // An empty value says nothing.
                ID | TOPIC | KEY | CONTENT_TYPE if value.is_empty() => {}
                ID => message.id = Some(value),
                TOPIC => message.topic = value,
                KEY => message.key = Some(value),
                CONTENT_TYPE => message.content_type = value,
                name => {
                    let header = name.strip_prefix(HEADER).or(Some(name).filter(|it| Binding::FIELDS.is_attribute(it)));
                    message.headers.extend(header.map(|name| (name.to_owned(), value)));
                }
            }
        }
        message.id = message.id.or_else(own_id);
        message
    }
}

/// Returns whether a field is one of ours, which must be text.
fn is_ours(name: &[u8]) -> bool {
    let Ok(name) = str::from_utf8(name) else { return false };
    [ID, TOPIC, KEY, CONTENT_TYPE].contains(&name) || name.starts_with(HEADER) || Binding::FIELDS.is_attribute(name)
}

fn message(id: Option<String>, topic: String, payload: Vec<u8>, content_type: &str) -> RawMessage {
    RawMessage {
        id,
        digest: Sha256::digest(&payload).into(),
        topic,
        key: None,
        headers: Headers::new(),
        content_type: content_type.to_owned(),
        payload: payload.into(),
    }
}

fn as_json(fields: &[(Vec<u8>, Vec<u8>)]) -> Option<Vec<u8>> {
    let mut object = serde_json::Map::new();
    for (name, value) in fields {
        let (name, value) = (str::from_utf8(name).ok()?, str::from_utf8(value).ok()?);
        // A second field of the same name would replace the first.
        if object.insert(name.to_owned(), value.into()).is_some() {
            return None;
        }
    }
    serde_json::to_vec(&object).ok()
}

/// Returns the fields as lines of `name=value`, with their bytes unchanged.
fn joined(fields: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    fields.iter().flat_map(|(name, value)| [name.as_slice(), b"=", value, b"\n"].concat()).collect()
}

#[cfg(test)]
mod tests {
    use postbox_core::{EventId, NewEvent, Seq};

    use super::*;

    fn layout() -> Layout {
        Layout { payload: PAYLOAD.into(), topic: "orders".into(), stream: "orders".into() }
    }

    fn fields(pairs: &[(&str, &[u8])]) -> Vec<(Vec<u8>, Vec<u8>)> {
        pairs.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.to_vec())).collect()
    }

    fn written(delivery: &Delivery, envelope: Envelope) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut fields = Vec::new();
        let note = |name: &str, value: &[u8]| {
            fields.push((name.as_bytes().to_vec(), value.to_vec()));
            Ok(())
        };
        put(delivery, envelope, "us", note).expect("it fits");
        fields
    }

    #[test]
    fn attributes_of_a_cloud_event_are_headers_again() {
        let event = NewEvent::json("order.paid", "{}").key("k").header("CE-Type", "forged").header("a", "1");
        let event = event.into_event(EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH);
        let delivery = Delivery { event, seq: Seq(1), attempt: 1, replay: 0, trace: None };
        let message = layout().message("5-1", written(&delivery, Envelope::CloudEventsBinary));
        assert_eq!((message.payload.as_ref(), message.content_type.as_str()), (&b"{}"[..], "application/json"));
        assert_eq!(message.headers["ce-type"], "order.paid");
        assert_eq!(message.headers["a"], "1");
        assert!(!message.headers.contains_key("CE-Type"), "no event can pose as another");
    }

    #[test]
    fn what_is_written_is_read_again() {
        let event = NewEvent::new("order.paid", &b"\xff\0"[..], "a/b").key("k").header("id", "forged").header("a", "1");
        let event = event.into_event(EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH);
        let delivery = Delivery { event, seq: Seq(1), attempt: 1, replay: 1, trace: None };
        let message = layout().message("5-1", written(&delivery, Envelope::Raw));
        assert_eq!(message.id, Some(delivery.dedupe_id()));
        assert_eq!((message.topic.as_str(), message.key.as_deref()), ("order.paid", Some("k")));
        assert_eq!(message.content_type, "a/b");
        assert_eq!(message.headers, delivery.event.headers);
        assert_eq!(message.payload, delivery.event.payload);
    }

    #[test]
    fn an_empty_field_says_nothing() {
        let entry = [("payload", &b"{}"[..]), ("id", b""), ("topic", b""), ("key", b""), ("content-type", b"")];
        let message = layout().message("5-1", fields(&entry));
        assert_eq!((message.id.as_deref(), message.topic.as_str()), (Some("orders/5-1"), "orders"));
        assert_eq!((message.key, message.content_type.as_str()), (None, "application/json"));
    }

    #[test]
    fn entries_of_others_are_kept_whole() {
        let flat = layout().message("5-1", fields(&[("id", b"42"), ("state", b"paid")]));
        assert_eq!(flat.payload, r#"{"id":"42","state":"paid"}"#);
        assert_eq!((flat.id.as_deref(), flat.topic.as_str()), (Some("orders/5-1"), "orders"), "42 is no message's id");
        for odd in [fields(&[("a", b"\xff")]), fields(&[("a", b"1"), ("a", b"2")])] {
            let kept = layout().message("5-2", odd.clone());
            assert_eq!(kept.topic, "", "poison");
            assert_eq!(kept.payload, joined(&odd));
        }
        for ours in ["id", "topic", "key", "content-type", "header:a"] {
            let odd = fields(&[("payload", b"{}"), (ours, b"\xff")]);
            let kept = layout().message("5-4", odd.clone());
            assert_eq!((kept.topic.as_str(), kept.payload.to_vec()), ("", joined(&odd)), "{ours}");
        }
        let other = Layout { payload: "body".into(), ..layout() };
        let named = other.message("5-3", fields(&[("body", b"x"), ("\u{1b}", b"y"), ("id", b"")]));
        assert_eq!((named.payload.as_ref(), named.id.as_deref()), (&b"x"[..], Some("orders/5-3")));
    }
}
