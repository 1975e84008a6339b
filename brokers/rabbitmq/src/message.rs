//! Converts an event to a message, and a message for a receiver.

use std::borrow::Cow;

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::message::Delivery as Message;
use lapin::types::{AMQPValue, DecimalValue, FieldTable, ShortString};
use postbox_core::envelope::Binding;
use postbox_core::{Delivery, Headers, Outcome, RawMessage, header};
use sha2::{Digest as _, Sha256};

use crate::config::RabbitmqSinkTable;
use crate::route;

/// The longest name, key or property, in bytes: its length is one byte on the wire.
pub(crate) const SHORT_BYTES_MAX: usize = 255;
/// The `delivery-mode` of a message that must be on disk before it is confirmed.
const PERSISTENT: u8 = 2;
/// The fixed bytes of the frame with the properties: the frame itself 8, class and weight 4, size
/// of the body 8, flags 2, size of the table 4, delivery mode 1.
const FRAME_BYTES: usize = 8 + 4 + 8 + 2 + 4 + 1;

/// Bytes reserved for what the server adds before delivery (`x-delivery-count`, `x-death`). It
/// would accept a message that fills the frame, and then could deliver it to nobody.
const SERVERS_BYTES: usize = 4_096;

/// Headers that the server uses or writes itself. No event may set them, and they are not the
/// application's.
const SERVERS_OWN: [&str; 9] = [
    "bcc",
    "cc",
    "x-acquired-count",
    "x-death",
    "x-delay",
    "x-delivery-count",
    "x-received-from",
    "x-routed-by",
    "x-stream-filter-value",
];
const SERVERS_OWN_PREFIXES: [&str; 2] = ["x-first-death-", "x-last-death-"];

/// A message to publish.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) exchange: ShortString,
    pub(crate) routing_key: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: Bytes,
    pub(crate) id: String,
}

impl RabbitmqSinkTable {
    /// Makes the message of an event, or returns why there can be none.
    pub(crate) fn message(&self, delivery: &Delivery, frame_bytes_max: usize) -> Result<Outgoing, Outcome> {
        let event = &delivery.event;
        let exchange = route::render(&self.exchange, event)?;
        let routing_key = route::render(&self.routing_key, event)?;
        let wrapped = self.envelope.wrap(event, &self.source)?;
        if wrapped.body.len() > self.message_max {
            let text = format!(
                "the message has {} bytes; at most {} are sent (message_max)",
                wrapped.body.len(),
                self.message_max
            );
            return Err(Outcome::dead("payload_too_large", text));
        }
        let own = delivery.headers().filter(|(name, _)| !Binding::AMQP.is_reserved(name) && !is_servers_own(name));
        let own = own.map(|(name, value)| (name.to_owned(), Cow::Borrowed(value)));
        let (mut headers, mut bytes) = (FieldTable::default(), FRAME_BYTES);
        for (name, value) in own.chain(Binding::AMQP.spell(&wrapped)) {
            // The length of the name; then the type and length of the value.
            bytes += 1 + name.len() + 5 + value.len();
            headers.insert(short(name, "header's name")?, AMQPValue::LongString(value.as_ref().into()));
        }
        let (id, content_type) = (delivery.dedupe_id(), wrapped.content_type.as_ref());
        bytes += 2 + id.len() + content_type.len();
        let most = frame_bytes_max.saturating_sub(SERVERS_BYTES);
        if bytes > most {
            let text = format!("its headers need {bytes} bytes of a frame; at most {most} are sent to this server");
            return Err(Outcome::dead("headers_too_large", text));
        }
        let properties = BasicProperties::default()
            .with_content_type(short(content_type, "content type")?)
            .with_delivery_mode(PERSISTENT)
            .with_headers(headers)
            .with_message_id(short(id.as_str(), "id")?);
        let (exchange, routing_key) = (short(exchange, "exchange")?, short(routing_key, "routing key")?);
        Ok(Outgoing { exchange, routing_key, properties, body: wrapped.body, id })
    }
}

fn short(text: impl Into<String>, what: &str) -> Result<ShortString, Outcome> {
    ShortString::try_new(text).map_err(|_| {
        Outcome::dead("header_invalid", format!("the event's {what} is longer than {SHORT_BYTES_MAX} bytes"))
    })
}

fn is_servers_own(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SERVERS_OWN.contains(&name.as_str()) || SERVERS_OWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Converts a message. Its id is the producer's `message-id`, or a CloudEvent's own. Without a
/// routing key, it gets the topic of the settings.
pub(crate) fn raw_message(message: Message, topic: &str, content_type: &str) -> RawMessage {
    let Message { routing_key, properties, data, .. } = message;
    let headers = properties.headers().as_ref().map(kept).unwrap_or_default();
    let key = properties.headers().as_ref().and_then(|table| odd_key(table, &headers));
    let id = properties.message_id().as_ref().map(ToString::to_string).filter(|id| !id.is_empty());
    RawMessage {
        id: id.or_else(|| Binding::AMQP.id_of(&headers)),
        digest: Sha256::digest(&data).into(),
        topic: if routing_key.as_str().is_empty() { topic.to_owned() } else { routing_key.to_string() },
        key,
        content_type: properties.content_type().as_ref().map_or_else(|| content_type.to_owned(), ToString::to_string),
        payload: data.into(),
        headers,
    }
}

/// Returns the key of a CloudEvent that is no header, because it has control characters.
fn odd_key(table: &FieldTable, kept: &Headers) -> Option<String> {
    if kept.contains_key("cloudEvents_subject") || !kept.contains_key("cloudEvents_specversion") {
        return None;
    }
    let is_subject = |name: &str| name == "cloudEvents_subject" || name == "cloudEvents:subject";
    match table.into_iter().find(|(name, _)| is_subject(name.as_str()))?.1 {
        AMQPValue::LongString(text) => str::from_utf8(text.as_bytes()).ok().map(str::to_owned),
        _ => None,
    }
}

/// Returns the application's headers that an event can have. Numbers and booleans become text.
fn kept(table: &FieldTable) -> Headers {
    let mut kept = Headers::new();
    for (name, value) in table {
        let value = match value {
            AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok().map(str::to_owned),
            AMQPValue::Boolean(value) => Some(value.to_string()),
            AMQPValue::ShortShortInt(value) => Some(value.to_string()),
            AMQPValue::ShortShortUInt(value) => Some(value.to_string()),
            AMQPValue::ShortInt(value) => Some(value.to_string()),
            AMQPValue::ShortUInt(value) => Some(value.to_string()),
            AMQPValue::LongInt(value) => Some(value.to_string()),
            AMQPValue::LongUInt(value) => Some(value.to_string()),
            AMQPValue::LongLongInt(value) => Some(value.to_string()),
            AMQPValue::Float(value) => Some(value.to_string()),
            AMQPValue::Double(value) => Some(value.to_string()),
            AMQPValue::DecimalValue(value) => Some(decimal(value)),
            _ => None,
        };
        let value = value.filter(|value| header::is_value(value));
        // Both spellings of CloudEvents headers become one.
        let name = name.as_str().replacen("cloudEvents:", "cloudEvents_", 1);
        if let Some(value) = value
            && header::is_name(&name)
            && !is_servers_own(&name)
            && !name.eq_ignore_ascii_case("content-type")
        {
            kept.insert(name, value);
        }
    }
    kept
}

/// `value`, which clients write with a sign, with a point before the last `scale` digits.
fn decimal(DecimalValue { scale, value }: &DecimalValue) -> String {
    let (scale, value) = (usize::from(*scale), value.cast_signed());
    let mut text = format!("{:0>width$}", value.unsigned_abs(), width = scale + 1);
    if scale > 0 {
        text.insert(text.len() - scale, '.');
    }
    if value < 0 { format!("-{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_may_have_control_characters() {
        let mut table = FieldTable::default();
        table.insert("cloudEvents_subject".into(), AMQPValue::LongString("acc\u{1}42".into()));
        assert_eq!(odd_key(&table, &kept(&table)), None, "no CloudEvent");
        table.insert("cloudEvents_specversion".into(), AMQPValue::LongString("1.0".into()));
        assert_eq!(odd_key(&table, &kept(&table)).as_deref(), Some("acc\u{1}42"));
        table.insert("cloudEvents_subject".into(), AMQPValue::LongString("acc42".into()));
        assert_eq!(odd_key(&table, &kept(&table)), None, "it is a header");
    }

    #[test]
    fn of_foreign_headers_the_readable_ones_are_kept() {
        let mut table = FieldTable::default();
        let mut insert = |name: &str, value: AMQPValue| _ = table.insert(name.into(), value);
        insert("a", AMQPValue::LongString("text".into()));
        insert("n", AMQPValue::LongLongInt(-7));
        insert("f", AMQPValue::Float(0.1));
        insert("g", AMQPValue::Double(-2.5));
        insert("h", AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 5 }));
        insert("i", AMQPValue::DecimalValue(DecimalValue { scale: 0, value: 12 }));
        insert("j", AMQPValue::DecimalValue(DecimalValue { scale: 2, value: u32::MAX - 4 }));
        insert("cloudEvents:id", AMQPValue::LongString("1".into()));
        insert("x-delivery-count", AMQPValue::LongLongInt(3));
        insert("X-Death", AMQPValue::FieldArray(Default::default()));
        insert("bytes", AMQPValue::LongString(vec![0xff].into()));
        insert("line", AMQPValue::LongString("a\nb".into()));
        insert("a b", AMQPValue::LongString("no name".into()));
        insert("void", AMQPValue::Void);
        let kept: Vec<(String, String)> = kept(&table).into_iter().collect();
        let expected = [
            ("a", "text"),
            ("cloudEvents_id", "1"),
            ("f", "0.1"),
            ("g", "-2.5"),
            ("h", "0.05"),
            ("i", "12"),
            ("j", "-0.05"),
            ("n", "-7"),
        ];
        assert_eq!(kept, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
