//! The properties of an event, and the message in a publish.

use postbox_core::envelope::{Binding, Wrapped};
use postbox_core::{Delivery, Headers, Outcome, RawMessage, header};
use rumqttc::v5::mqttbytes::v5::{Publish, PublishProperties};
use sha2::{Digest as _, Sha256};

use crate::topic::check_text;

/// The user property with the id to deduplicate by.
pub(crate) const ID: &str = "postbox-id";

/// Makes the properties of an event in its envelope. The error is [`Outcome::Dead`]: no message can
/// have them.
pub(crate) fn properties(delivery: &Delivery, wrapped: &Wrapped<'_>) -> Result<PublishProperties, Outcome> {
    let is_reserved = |name: &str| Binding::MQTT.is_reserved(name) || name.eq_ignore_ascii_case(ID);
    let own = delivery.headers().filter(|(name, _)| !is_reserved(name));
    let mut user_properties: Vec<(String, String)> =
        own.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    user_properties.extend(Binding::MQTT.spell(wrapped).map(|(name, value)| (name, value.into_owned())));
    user_properties.push((ID.to_owned(), delivery.dedupe_id()));
    let content_type = wrapped.content_type.clone().into_owned();
    for text in user_properties.iter().flat_map(|(name, value)| [name, value]).chain([&content_type]) {
        check_text(text).map_err(|fault| {
            Outcome::dead("header_invalid", format!("a header, the key or the content type cannot be sent: {fault}"))
        })?;
    }
    Ok(PublishProperties { user_properties, content_type: Some(content_type), ..Default::default() })
}

/// Converts a publish. Its id is the value of the user property `id_property`, or a CloudEvent's
/// own.
pub(crate) fn raw_message(publish: Publish, id_property: &str, content_type: &str) -> RawMessage {
    let properties = publish.properties.unwrap_or_default();
    let is_id = |name: &str| name.eq_ignore_ascii_case(id_property);
    let named = properties.user_properties.iter().find(|(name, value)| is_id(name) && !value.is_empty());
    let named = named.map(|(_, id)| id.clone());
    let of_cloudevent = || Binding::MQTT.id_of(&kept(&properties, |_| false));
    let id = match Binding::MQTT.is_named(id_property, "id") {
        // A CloudEvent's id is unique only beside its source.
        true => of_cloudevent().or(named),
        false => named.or_else(of_cloudevent),
    };
    RawMessage {
        id,
        digest: Sha256::digest(&publish.payload).into(),
        topic: String::from_utf8_lossy(&publish.topic).into_owned(),
        key: None,
        headers: kept(&properties, is_id),
        content_type: properties.content_type.unwrap_or_else(|| content_type.to_owned()),
        payload: publish.payload,
    }
}

/// Returns the user properties that an event can have. Several values of one name are joined.
fn kept(properties: &PublishProperties, is_id: impl Fn(&str) -> bool) -> Headers {
    let mut kept = Headers::new();
    for (name, value) in properties.user_properties.iter().filter(|(name, _)| !is_id(name)) {
        header::join(&mut kept, name, value);
    }
    kept
}

#[cfg(test)]
mod tests {
    use postbox_core::{Envelope, EventId, NewEvent, Seq, SourceName};
    use rumqttc::v5::mqttbytes::QoS;

    use super::*;

    fn sent(event: NewEvent, envelope: Envelope) -> (Delivery, Result<Publish, Outcome>) {
        let event = event.into_event(EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH);
        let delivery = Delivery { event, seq: Seq(1), attempt: 1, replay: 1, trace: None };
        let wrapped = envelope.wrap(&delivery.event, "us").expect("it fits");
        let publish = properties(&delivery, &wrapped)
            .map(|properties| Publish::new("orders", QoS::AtLeastOnce, wrapped.body.clone(), Some(properties)));
        (delivery, publish)
    }

    #[test]
    fn what_is_written_is_read_again() {
        let event = NewEvent::new("order.paid", &b"\xff\0"[..], "a/b").key("k").kind("x").aggregate("order");
        let event = event.header("a", "1").header("Postbox-Id", "forged").header("Type", "forged");
        let (delivery, publish) = sent(event, Envelope::CloudEventsBinary);
        let message = raw_message(publish.expect("properties"), ID, "text/plain");
        assert_eq!(message.id, Some(delivery.dedupe_id()));
        let source: SourceName = "orders".parse().expect("a name");
        let read = Binding::MQTT.read(&message, &source).expect("an event").event;
        assert_eq!((read.topic.as_str(), read.key.as_deref()), ("order.paid", Some("k")));
        assert_eq!((read.kind.as_deref(), read.aggregate.as_deref()), (Some("x"), Some("order")));
        assert_eq!((read.payload.as_ref(), read.content_type.as_deref()), (&b"\xff\0"[..], Some("a/b")));
        assert_eq!(read.headers["a"], "1");
        assert!(read.headers.values().all(|value| value != "forged"), "no event can pose as another");
    }

    #[test]
    fn what_no_text_of_the_protocol_can_hold_is_dead() {
        for event in [
            NewEvent::json("t", "{}").header("a", "1\t2"),
            NewEvent::json("t", "{}").key("a\0"),
            NewEvent::json("t", "{}").header("a", "v".repeat(70_000)),
        ] {
            let (_, dead) = sent(event, Envelope::CloudEventsBinary);
            assert!(matches!(&dead, Err(Outcome::Dead { code, .. }) if code == "header_invalid"), "{dead:?}");
        }
    }

    #[test]
    fn messages_of_others_are_kept_whole() {
        let pairs = [("a", "1"), ("a", "2"), ("b c", "1"), ("line", "1\r\n2"), ("id", ""), ("ID", "7")];
        let user_properties = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let properties = PublishProperties { user_properties, ..Default::default() };
        let publish = Publish::new("in/łódź", QoS::AtLeastOnce, "x", Some(properties));
        let message = raw_message(publish, "id", "text/plain");
        assert_eq!((message.id.as_deref(), message.topic.as_str()), (Some("7"), "in/łódź"));
        assert_eq!(message.content_type, "text/plain");
        assert_eq!(message.headers, [("a".to_owned(), "1, 2".to_owned())].into());
        let many = vec![("a".to_owned(), "1234567".to_owned()); 200_000];
        let properties = PublishProperties { user_properties: many, ..Default::default() };
        // Adding one to a copy of those before would take minutes.
        let message = raw_message(Publish::new("in", QoS::AtLeastOnce, "x", Some(properties)), "id", "text/plain");
        assert_eq!(message.headers["a"].len(), 200_000 * 9 - 2);
        let pairs = [("specversion", "1.0"), ("type", "door.opened"), ("source", "/door"), ("id", "7")];
        let user_properties: Vec<_> = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        for id_property in ["id", ID] {
            let properties = PublishProperties { user_properties: user_properties.clone(), ..Default::default() };
            let message = raw_message(Publish::new("in", QoS::AtLeastOnce, "{}", Some(properties)), id_property, "a/b");
            assert_eq!(message.id.as_deref(), Some("/door 7"), "{id_property}");
        }
    }
}
