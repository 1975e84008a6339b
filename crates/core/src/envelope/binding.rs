//! How transports name CloudEvents attributes in binary mode.

use std::borrow::Cow;

use super::Wrapped;

/// How one transport names CloudEvents attributes in binary mode: its protocol binding, as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// The prefix of each name.
    pub(super) prefix: &'static str,
    /// Whether values are percent-encoded.
    pub(super) is_encoded: bool,
    /// Whether the media type is an attribute. Otherwise the transport has another place for it.
    has_content_type: bool,
}

/// Attribute names that an event's headers may not use on transports without a prefix.
const NAMES: [&str; 11] = [
    "specversion",
    "id",
    "type",
    "source",
    "time",
    "subject",
    "datacontenttype",
    "kind",
    "aggregate",
    "version",
    "tenant",
];

impl Binding {
    /// HTTP headers; the media type is in `content-type`.
    pub const HTTP: Self = Self { prefix: "ce-", is_encoded: true, has_content_type: false };
    /// NATS headers.
    pub const NATS: Self = Self { prefix: "ce-", is_encoded: true, has_content_type: true };
    /// Kafka headers; the media type is in `content-type`.
    pub const KAFKA: Self = Self { prefix: "ce_", is_encoded: false, has_content_type: false };
    /// AMQP headers; the media type is in the property `content-type`.
    pub const AMQP: Self = Self { prefix: "cloudEvents_", is_encoded: false, has_content_type: false };
    /// MQTT 5 user properties; the media type is in the property `Content Type`.
    pub const MQTT: Self = Self { prefix: "", is_encoded: false, has_content_type: false };
    /// Fields or attributes of a transport for which CloudEvents has no binding: Redis, SQS, SNS.
    pub const FIELDS: Self = Self { prefix: "ce-", is_encoded: false, has_content_type: true };

    /// Returns the attributes with this transport's names. Empty unless the envelope has
    /// attributes.
    pub fn spell<'w>(&self, wrapped: &'w Wrapped<'_>) -> impl Iterator<Item = (String, Cow<'w, str>)> {
        let content_type = Some(("datacontenttype", &wrapped.content_type));
        let content_type = content_type.filter(|_| self.has_content_type && !wrapped.attributes.is_empty());
        let attributes = wrapped.attributes.iter().map(|(name, value)| (*name, value)).chain(content_type);
        attributes.map(|(name, value)| {
            let value = if self.is_encoded { encode(value).into() } else { Cow::Borrowed(value.as_ref()) };
            (format!("{}{name}", self.prefix), value)
        })
    }

    /// Returns whether a header's name is that of an attribute.
    pub fn is_attribute(&self, header: &str) -> bool {
        let begins = header.as_bytes().get(..self.prefix.len());
        match self.prefix {
            "" => NAMES.iter().any(|name| name.eq_ignore_ascii_case(header)),
            prefix => begins.is_some_and(|begins| begins.eq_ignore_ascii_case(prefix.as_bytes())),
        }
    }

    /// Returns whether an event may not set this header, whatever the envelope. This prevents an
    /// event from posing as another.
    pub fn is_reserved(&self, header: &str) -> bool {
        self.is_attribute(header) || header.eq_ignore_ascii_case("content-type")
    }
}

/// Encodes a value for a header as visible ASCII. Everything else, the space, `"` and `%` are
/// percent-encoded (HTTP protocol binding §3.1.3.2).
fn encode(value: &str) -> String {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut encoded = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_graphic() && byte != b'"' && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            encoded.push('%');
            encoded.push(char::from(DIGITS[usize::from(byte >> 4)]));
            encoded.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
    }
    encoded
}

/// Decodes an HTTP or NATS header, or returns `None` if it is not text. A broken escape is kept as
/// it is. A quoted value is unquoted first.
pub fn decode(header: &[u8]) -> Option<String> {
    let unquoted = match header {
        [b'"', inner @ .., b'"'] => unescape(inner),
        plain => plain.to_vec(),
    };
    let hex = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut decoded = Vec::with_capacity(unquoted.len());
    let mut rest = unquoted.as_slice();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match (byte, tail) {
            (b'%', [high, low, after @ ..]) if hex(*high).is_some() && hex(*low).is_some() => {
                decoded.extend(hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low));
                rest = after;
            }
            _ => decoded.push(byte),
        }
    }
    String::from_utf8(decoded).ok()
}

fn unescape(quoted: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(quoted.len());
    let mut bytes = quoted.iter();
    while let Some(&byte) = bytes.next() {
        plain.push(if byte == b'\\' { bytes.next().copied().unwrap_or(byte) } else { byte });
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binding_s_examples() {
        assert_eq!(encode("Euro € 😀"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
        assert_eq!(encode("a\"b%c\r\n"), "a%22b%25c%0D%0A");
        assert_eq!(decode(b"\"a \\\"b\\\" %E2%82%AC\"").as_deref(), Some("a \"b\" €"));
        assert_eq!(decode(b"50%zz%4").as_deref(), Some("50%zz%4"));
        assert_eq!(decode(b"%FF"), None);
        assert_eq!(decode(b"%C0%A0"), None);
    }

    #[test]
    fn any_text_comes_back() {
        for text in ["", "order.paid", "a%20b", "\"q\"", "\u{0}\u{7f}\u{202e}", "Zoë 📦", "\\", "%", "%%41"] {
            assert_eq!(decode(encode(text).as_bytes()).as_deref(), Some(text));
        }
    }

    #[test]
    fn a_cloudevent_is_known_by_its_source_and_id() {
        let of = |pairs: &[(&str, &str)]| {
            Binding::MQTT.id_of(&pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
        };
        let spec = ("specversion", "1.0");
        assert_eq!(of(&[spec, ("id", "1"), ("source", "/billing")]).as_deref(), Some("/billing 1"));
        assert_eq!(of(&[spec, ("ID", "1")]).as_deref(), Some("1"));
        assert_eq!(of(&[("id", "1"), ("source", "/billing")]), None, "no CloudEvent");
        assert_eq!(of(&[spec, ("id", ""), ("source", "/billing")]), None);
        let long = |source: &str| of(&[spec, ("id", &"1".repeat(255)), ("source", source)]).expect("an id");
        assert_eq!((long("/a").len(), long("/a") == long("/b")), (64, false));
    }

    #[test]
    fn no_event_s_header_is_an_attribute() {
        for (binding, own, free) in [
            (Binding::HTTP, "CE-Type", "ce_type"),
            (Binding::NATS, "ce-anything", "c"),
            (Binding::KAFKA, "ce_id", "ce-id"),
            (Binding::AMQP, "CLOUDEVENTS_id", "cloudEvents:id"),
            (Binding::MQTT, "Subject", "subjects"),
            (Binding::FIELDS, "ce-id", "id"),
        ] {
            assert!(binding.is_reserved(own) && binding.is_reserved("Content-Type"), "{own}");
            assert!(!binding.is_reserved(free), "{free}");
        }
    }
}
