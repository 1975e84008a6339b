//! Messages of SQS and SNS in both directions: a body of text and at most ten attributes.

use std::collections::{BTreeMap, HashMap};

use aws_sdk_sqs::types::{Message, MessageAttributeValue, MessageSystemAttributeName};
use postbox_core::envelope::Binding;
use postbox_core::{Delivery, Envelope, Headers, Outcome, RawMessage, header, hex};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::config::SqsSourceTable;

/// The id to deduplicate by. Another producer's `id` may be anything, so this name is our own.
const ID: &str = "postbox-id";
const TOPIC: &str = "postbox-topic";
const KEY: &str = "postbox-key";
const CONTENT_TYPE: &str = "content-type";
/// A JSON object of the headers that cannot be attributes.
const HEADERS: &str = "postbox-headers";
/// Attributes that are not headers.
const RESERVED: [&str; 5] = [ID, TOPIC, KEY, CONTENT_TYPE, HEADERS];

/// The most attributes of a message: SNS does not pass a message with more on to a queue.
const ATTRIBUTES_MAX: usize = 10;
/// The longest name of an attribute, in bytes.
const NAME_BYTES_MAX: usize = 256;
/// The type of every attribute, which counts towards the message's size.
pub(crate) const STRING: &str = "String";
/// The longest name of a group, in bytes.
const GROUP_BYTES_MAX: usize = 128;

/// An event as a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outgoing {
    pub(crate) body: String,
    pub(crate) attributes: Vec<(String, String)>,
    /// Only for a FIFO queue or topic.
    pub(crate) fifo: Option<Fifo>,
    /// The size that AWS counts, in bytes.
    pub(crate) bytes: usize,
}

/// The ids by which a FIFO queue or topic orders and deduplicates messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fifo {
    pub(crate) group: String,
    pub(crate) id: String,
}

/// How events are converted to messages.
#[derive(Debug, Clone)]
pub(crate) struct Writing {
    pub(crate) envelope: Envelope,
    /// The CloudEvents source of events that have none.
    pub(crate) source: String,
    pub(crate) fifo: bool,
    pub(crate) bytes_max: usize,
}

impl Writing {
    /// Makes the message of an event, or returns why there can be none.
    pub(crate) fn message(&self, delivery: &Delivery) -> Result<Outgoing, Outcome> {
        let event = &delivery.event;
        let wrapped = self.envelope.wrap(event, &self.source)?;
        let body = body(wrapped.body.to_vec(), self.envelope)?;
        let id = delivery.dedupe_id();
        let mut attributes = vec![(ID.to_owned(), id.clone())];
        if self.envelope != Envelope::CloudEventsBinary {
            attributes.push((TOPIC.to_owned(), event.topic.to_string()));
            attributes.extend(event.key.as_ref().map(|key| (KEY.to_owned(), key.to_string())));
            attributes.push((CONTENT_TYPE.to_owned(), wrapped.content_type.to_string()));
        }
        if let Some((name, _)) = attributes.iter().find(|(_, value)| !is_text(value)) {
            let text = format!("{name} would hold characters that SQS and SNS do not carry");
            return Err(Outcome::dead("attribute_invalid", text));
        }
        let spelled = Binding::FIELDS.spell(&wrapped).map(|(name, value)| (name, value.into_owned()));
        let headers = delivery.headers().filter(|(name, _)| !Binding::FIELDS.is_reserved(name));
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
        add(&mut attributes, spelled.chain(headers));
        let of = |(name, value): &(String, String)| name.len() + STRING.len() + value.len();
        let bytes = body.len() + attributes.iter().map(of).sum::<usize>();
        if bytes > self.bytes_max {
            let text = format!("the message has {bytes} bytes with its attributes; at most {}", self.bytes_max);
            return Err(Outcome::dead("payload_too_large", text));
        }
        let fifo =
            self.fifo.then(|| Fifo { group: event.key.as_ref().map_or(id.clone(), |key| group(key.as_str())), id });
        Ok(Outgoing { body, attributes, fifo, bytes })
    }
}

fn body(body: Vec<u8>, envelope: Envelope) -> Result<String, Outcome> {
    let body = String::from_utf8(body).unwrap_or_else(|_| "\0".to_owned());
    let body = if Envelope::OBJECTS.contains(&envelope) { escaped(body) } else { body };
    match body.as_str() {
        "" => Err(Outcome::dead("body_empty", "SQS and SNS cannot carry an empty message; choose another envelope")),
        body if !is_text(body) => {
            let text = "the body is not text, or has characters that SQS and SNS cannot carry; the envelopes \"cloudevents\" and \"json\" carry any bytes";
            Err(Outcome::dead("body_not_text", text))
        }
        _ => Ok(body),
    }
}

/// Adds headers as attributes as far as possible. The rest goes into one attribute together.
fn add(attributes: &mut Vec<(String, String)>, headers: impl Iterator<Item = (String, String)>) {
    let (mut plain, odd): (Vec<_>, Vec<_>) = headers.partition(|(name, value)| is_name(name) && is_text(value));
    let room = ATTRIBUTES_MAX - attributes.len();
    let mut rest = Headers::new();
    if plain.len() > room || !odd.is_empty() {
        rest.extend(plain.split_off(plain.len().min(room - 1)).into_iter().chain(odd));
    }
    attributes.append(&mut plain);
    if !rest.is_empty() {
        attributes.push((HEADERS.to_owned(), escaped(serde_json::json!(rest).to_string())));
    }
}

/// Escapes the two characters that JSON may contain as they are and a message may not. Valid JSON
/// has them in strings only.
fn escaped(json: String) -> String {
    match json.contains(['\u{fffe}', '\u{ffff}']) {
        true => json.replace('\u{fffe}', r"\ufffe").replace('\u{ffff}', r"\uffff"),
        false => json,
    }
}

/// Whether a text may be a body or a value.
fn is_text(text: &str) -> bool {
    let allowed = |c| matches!(c, '\t' | '\n' | '\r' | ' '..='\u{fffd}' | '\u{10000}'..);
    !text.is_empty() && text.chars().all(allowed)
}

/// Whether an attribute can have this name and then is a header.
fn is_name(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(allowed)
        && !(name.starts_with('.') || name.ends_with('.') || name.contains(".."))
        && !(lower.starts_with("aws.") || lower.starts_with("amazon."))
        && !RESERVED.contains(&lower.as_str())
}

/// Returns the group of a key: the key itself, or its digest if it cannot be a group's name.
fn group(key: &str) -> String {
    let is_name = (1..=GROUP_BYTES_MAX).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic());
    if is_name { key.to_owned() } else { format!("sha256:{}", hex(&Sha256::digest(key))) }
}

/// The JSON that SNS wraps a message in for a queue whose subscription is not raw.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Notification {
    r#type: String,
    message_id: String,
    topic_arn: String,
    message: String,
    #[serde(default)]
    message_attributes: HashMap<String, NotificationAttribute>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct NotificationAttribute {
    r#type: String,
    value: String,
}

/// A message from a queue, without the wrapping of SNS.
struct Incoming {
    id: Option<String>,
    sns_topic: Option<String>,
    body: String,
    attributes: BTreeMap<String, String>,
}

impl Incoming {
    fn new(message: Message) -> Self {
        let text = |(name, value): (String, MessageAttributeValue)| Some((name, value.string_value?));
        let attributes: BTreeMap<_, _> =
            message.message_attributes.unwrap_or_default().into_iter().filter_map(text).collect();
        let body = message.body.unwrap_or_default();
        let wrapped = attributes.is_empty().then(|| serde_json::from_str::<Notification>(&body).ok()).flatten();
        match wrapped.filter(|it| it.r#type == "Notification") {
            Some(it) => Self {
                id: Some(it.message_id),
                sns_topic: it.topic_arn.rsplit(':').next().map(str::to_owned),
                body: it.message,
                attributes: it
                    .message_attributes
                    .into_iter()
                    .filter(|(_, attribute)| attribute.r#type != "Binary")
                    .map(|(name, attribute)| (name, attribute.value))
                    .collect(),
            },
            None => Self { id: message.message_id, sns_topic: None, body, attributes },
        }
    }
}

impl SqsSourceTable {
    /// Converts a message back to what the producer sent. Its id is the producer's if that is
    /// Postbox, and otherwise the one from SNS or SQS.
    pub(crate) fn message(&self, mut message: Message) -> RawMessage {
        let group = message.attributes.as_mut().and_then(|all| all.remove(&MessageSystemAttributeName::MessageGroupId));
        let Incoming { id, sns_topic, body, mut attributes } = Incoming::new(message);
        let own_id = attributes.remove(ID);
        let key = attributes.remove(KEY);
        let topic = attributes.remove(TOPIC).or_else(|| self.topic.clone()).or(sns_topic);
        let content_type = attributes.remove(CONTENT_TYPE);
        // Last, because everything in it is a header, whatever its name.
        if let Some(rest) = attributes.get(HEADERS).and_then(|json| serde_json::from_str::<Headers>(json).ok()) {
            attributes.remove(HEADERS);
            rest.into_iter().for_each(|(name, value)| _ = attributes.entry(name).or_insert(value));
        }
        // SQS allows line breaks in a value, headers do not. Those of a CloudEvent become fields.
        attributes.retain(|name, value| name.starts_with("ce-") || header::is_value(value));
        RawMessage {
            // A group that Postbox set for an event without a key is no key.
            key: if own_id.is_some() { key } else { key.or(group) },
            id: own_id.or(id),
            digest: Sha256::digest(&body).into(),
            topic: topic.unwrap_or_else(|| self.queue_url.name.clone()),
            content_type: content_type.unwrap_or_else(|| self.content_type.clone()),
            headers: attributes,
            payload: body.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use postbox_core::limits::HEADERS_MAX;
    use postbox_core::{EventId, NewEvent, Seq};

    use super::*;

    fn delivery(event: NewEvent) -> Delivery {
        let event = event.into_event(EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH);
        Delivery { event, seq: Seq(1), attempt: 1, replay: 0, trace: None }
    }

    fn writing(envelope: Envelope) -> Writing {
        Writing { envelope, source: "us".into(), fifo: true, bytes_max: 1024 * 1024 }
    }

    fn reading() -> SqsSourceTable {
        let queue_url = "https://sqs.eu-west-1.amazonaws.com/1/orders".parse().expect("a queue");
        SqsSourceTable { queue_url, ..SqsSourceTable::default() }
    }

    fn received(outgoing: &Outgoing) -> Message {
        let value = |text: &String| MessageAttributeValue::builder().data_type(STRING).string_value(text).build();
        let mut message = Message::builder().message_id("sqs-id").body(&outgoing.body);
        for (name, text) in &outgoing.attributes {
            message = message.message_attributes(name, value(text).expect("a type"));
        }
        let fifo = outgoing.fifo.as_ref().expect("a queue that keeps order");
        message.attributes(MessageSystemAttributeName::MessageGroupId, &fifo.group).build()
    }

    fn code(event: NewEvent) -> String {
        match writing(Envelope::Raw).message(&delivery(event)) {
            Err(Outcome::Dead { code, .. }) => code.into_owned(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let event = || NewEvent::new("order.paid", "{ \"é\": 1 }", "a/b").header("a", "1");
        let many = (0..HEADERS_MAX - 3).fold(event().key("k"), |event, n| event.header(format!("h{n}"), "v"));
        let odd = event().key("line\nbreak é").header("empty", "").header("!#$%&'*+-.^_`|~", "x").header("AWS.x", "y");
        let odd = odd.header("noncharacters", "\u{ffff} and \u{fffe}");
        let forged = RESERVED[..3].iter().fold(event(), |event, name| event.header(*name, "forged"));
        let forged = forged.header("Postbox-Key", "forged").header(HEADERS, "{}");
        for event in [event(), event().key("k"), many, odd, forged] {
            let delivery = Delivery { replay: 1, ..delivery(event) };
            let outgoing = writing(Envelope::Raw).message(&delivery).expect("a message");
            assert!(outgoing.attributes.len() <= ATTRIBUTES_MAX, "{:?}", outgoing.attributes);
            assert!(outgoing.attributes.iter().all(|(_, value)| is_text(value)), "{:?}", outgoing.attributes);
            let message = reading().message(received(&outgoing));
            let event = &delivery.event;
            assert_eq!(message.id, Some(delivery.dedupe_id()));
            assert_eq!((message.topic.as_str(), message.content_type.as_str()), ("order.paid", "a/b"));
            assert_eq!(message.key.as_deref(), event.key.as_ref().map(|key| key.as_str()));
            assert_eq!((message.headers, message.payload), (event.headers.clone(), event.payload.clone()));
        }
        let payload = "\"a \u{fffe} b \u{ffff}\"";
        for envelope in Envelope::OBJECTS {
            let event = delivery(NewEvent::json("t", payload).header("a", "\u{ffff}"));
            let body = writing(envelope).message(&event).expect("a message").body;
            let of = |json: &[u8]| serde_json::from_slice::<serde_json::Value>(json).expect("JSON");
            let wrapped = envelope.wrap(&event.event, "us").expect("a body");
            assert!(is_text(&body) && of(body.as_bytes()) == of(&wrapped.body), "{body}");
        }
    }

    #[test]
    fn a_cloud_event_is_itself_again_however_many_attributes_it_has() {
        let event =
            NewEvent::json("order.paid", "{}").key("k\u{1b}").aggregate("order").version(7).kind("x").tenant("t");
        let delivery = delivery(event.header("own", "1").header("CE-Type", "forged"));
        let outgoing = writing(Envelope::CloudEventsBinary).message(&delivery).expect("a message");
        assert_eq!(outgoing.attributes.len(), ATTRIBUTES_MAX);
        let source = "orders".parse().expect("a name");
        let message = reading().message(received(&outgoing));
        let event = Binding::FIELDS.read(&message, &source).expect("an event").event;
        assert_eq!((event.topic.as_str(), event.key.as_deref()), ("order.paid", Some("k\u{1b}")));
        assert_eq!((event.aggregate.as_deref(), event.version), (Some("order"), Some(7)));
        assert_eq!(event.headers["own"], "1");
    }

    #[test]
    fn what_a_message_cannot_hold_is_dead_before_it_is_sent() {
        assert_eq!(code(NewEvent::json("t", "")), "body_empty");
        for body in [&b"\xff"[..], b"\0", b"a\x1bb", "\u{ffff}".as_bytes()] {
            assert_eq!(code(NewEvent::json("t", body.to_vec())), "body_not_text");
        }
        assert_eq!(code(NewEvent::json("t", "{}").key("a\u{1}b")), "attribute_invalid");
        let fits = |bytes: usize| NewEvent::json("t", "x".repeat(bytes));
        let small = writing(Envelope::Raw).message(&delivery(fits(1))).expect("a message").bytes;
        assert_eq!(code(fits(1024 * 1024 - small + 2)), "payload_too_large");
        let most = writing(Envelope::Raw).message(&delivery(fits(1024 * 1024 - small + 1))).expect("it fits");
        assert_eq!(most.bytes, 1024 * 1024);
    }

    #[test]
    fn each_key_has_a_group_of_its_own() {
        let group = |event: NewEvent| writing(Envelope::Raw).message(&delivery(event)).expect("a message").fifo;
        let of = |key: &str| group(NewEvent::json("t", "{}").key(key)).expect("a group").group;
        assert_eq!(of("order-42"), "order-42");
        for key in ["a b", "é", &"k".repeat(129)] {
            assert!(of(key).starts_with("sha256:") && of(key).len() == 71, "{key}");
        }
        assert_ne!(of("a b"), of("a  b"));
        let none = group(NewEvent::json("t", "{}")).expect("a group");
        assert_eq!(none.group, none.id, "it waits for nobody");
    }

    #[test]
    fn messages_of_others_are_taken_as_they_are() {
        let plain = || Message::builder().message_id("m-1").body("hello");
        let message = reading().message(plain().build());
        assert_eq!((message.id.as_deref(), message.topic.as_str()), (Some("m-1"), "orders"));
        let grouped = plain().attributes(MessageSystemAttributeName::MessageGroupId, "g");
        assert_eq!(reading().message(grouped.build()).key.as_deref(), Some("g"));
        let id = MessageAttributeValue::builder().data_type(STRING).string_value("42").build().expect("a type");
        let message = reading().message(plain().message_attributes("id", id).build());
        assert_eq!(
            (message.id.as_deref(), message.headers["id"].as_str()),
            (Some("m-1"), "42"),
            "42 is no message's id"
        );
    }

    #[test]
    fn a_line_break_in_an_attribute_costs_the_attribute_only() {
        let value = |text: &str| MessageAttributeValue::builder().data_type(STRING).string_value(text).build();
        let message = Message::builder().message_id("1").body("{}");
        let message = message.message_attributes("note", value("one\ntwo").expect("a type"));
        let read = reading().message(message.message_attributes("tab", value("a\tb").expect("a type")).build());
        assert_eq!(read.headers.into_iter().collect::<Vec<_>>(), [("tab".to_owned(), "a\tb".to_owned())]);
    }

    #[test]
    fn what_sns_wrapped_is_unwrapped() {
        let body = r#"{"Type":"Notification","MessageId":"sns-1","TopicArn":"arn:aws:sns:r:1:paid","Message":"{\"a\":1}",
            "Timestamp":"2026-01-01T00:00:00Z","MessageAttributes":{"x":{"Type":"String","Value":"1"},"b":{"Type":"Binary","Value":"/w=="}}}"#;
        let message = reading().message(Message::builder().message_id("sqs-1").body(body).build());
        assert_eq!((message.id.as_deref(), message.topic.as_str()), (Some("sns-1"), "paid"));
        assert_eq!((message.payload.as_ref(), message.headers.len()), (&b"{\"a\":1}"[..], 1));
        let named = SqsSourceTable { topic: Some("orders.paid".into()), ..reading() };
        assert_eq!(named.message(Message::builder().body(body).build()).topic, "orders.paid");
        // A notification that someone forwards with attributes of its own is a payload like any
        // other.
        let value = MessageAttributeValue::builder().data_type(STRING).string_value("1").build().expect("a type");
        let message = reading().message(Message::builder().body(body).message_attributes("x", value).build());
        assert_eq!(message.payload, body);
        for other in [r#"{"Type":"Notification"}"#, &body.replace("\"Notification\"", "\"SubscriptionConfirmation\"")] {
            assert_eq!(reading().message(Message::builder().body(other).build()).payload, other.to_owned());
        }
    }
}
