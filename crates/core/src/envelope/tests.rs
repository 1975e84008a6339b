//! The content of each envelope, and the examples of the CloudEvents specification.

use jiff::Timestamp;

use super::{Binding, Envelope, Wrapped};
use crate::event::{Event, EventId, NewEvent, header};
use crate::outcome::Outcome;

const ID: &str = "01890000-0000-7000-8000-000000000001";

fn at(text: &str) -> Timestamp {
    text.parse().expect("a time")
}

fn event(event: NewEvent) -> Event {
    event.into_event(ID.parse().expect("an id"), at("2018-04-05T03:56:25Z"))
}

/// The event in the specification's examples.
fn example(content_type: &str, payload: &'static [u8]) -> Event {
    let example = NewEvent::new("com.example.someevent", payload, content_type).source("/mycontext");
    event(example.occurred_at(at("2018-04-05T03:56:24Z")))
}

fn body(envelope: Envelope, event: &Event) -> String {
    let wrapped = envelope.wrap(event, "postbox").expect("wrapped");
    assert!(wrapped.attributes.is_empty(), "{envelope:?} has all in its body");
    String::from_utf8(wrapped.body.to_vec()).expect("UTF-8")
}

fn code(envelope: Envelope, event: &Event) -> String {
    match envelope.wrap(event, "postbox") {
        Err(Outcome::Dead { code, .. }) => code.into_owned(),
        other => panic!("{envelope:?}: {other:?}"),
    }
}

fn full() -> Event {
    let full = NewEvent::json("order.paid", "{ \"cents\":100 }").key("Zoë 42").aggregate("order").version(1 << 40);
    let full = full.kind("integration").source("billing").tenant("acme").header("traceparent", "00-ab-cd-01");
    event(full.header("x-note", "hi").occurred_at(at("2018-04-05T03:56:24.5Z")))
}

#[test]
fn raw_is_the_payload_alone() {
    let event = example("application/x-thing; v=1", b"\x00\xff");
    let raw = Wrapped {
        body: event.payload.clone(),
        content_type: "application/x-thing; v=1".into(),
        attributes: Vec::new(),
    };
    assert_eq!(Envelope::Raw.wrap(&event, "postbox"), Ok(raw));
}

#[test]
fn json_has_every_field() {
    let expected = format!(
        "{}{ID}{}",
        r#"{"id":""#,
        r#"","topic":"order.paid","key":"Zoë 42","aggregate":"order","version":1099511627776,"kind":"integration","source":"billing","tenant":"acme","headers":{"traceparent":"00-ab-cd-01","x-note":"hi"},"occurred_at":"2018-04-05T03:56:24.5Z","content_type":"application/json","payload":{ "cents":100 }}"#
    );
    assert_eq!(body(Envelope::Json, &full()), expected);
    let expected = format!(
        "{}{ID}{}",
        r#"{"id":""#,
        r#"","topic":"t","key":null,"aggregate":null,"version":null,"kind":"domain","source":null,"tenant":null,"headers":{},"occurred_at":"2018-04-05T03:56:25Z","content_type":"text/plain","payload_base64":"aGk="}"#
    );
    assert_eq!(body(Envelope::Json, &event(NewEvent::new("t", "hi", "text/plain"))), expected);
}

#[test]
fn structured_cloudevents_hold_all_attributes_the_trace_and_the_data() {
    let expected = format!(
        "{}{ID}{}",
        r#"{"specversion":"1.0","id":""#,
        r#"","type":"order.paid","source":"billing","time":"2018-04-05T03:56:24.5Z","subject":"Zoë 42","kind":"integration","aggregate":"order","version":"1099511627776","tenant":"acme","traceparent":"00-ab-cd-01","datacontenttype":"application/json","data":{ "cents":100 }}"#
    );
    assert_eq!(body(Envelope::CloudEvents, &full()), expected);
    let wrapped = full();
    let wrapped = Envelope::CloudEvents.wrap(&wrapped, "postbox").expect("wrapped");
    assert_eq!(wrapped.content_type, "application/cloudevents+json; charset=UTF-8");
    let other_case = event(NewEvent::json("t", "{}").header("TraceParent", "00-ab-cd-01"));
    assert!(body(Envelope::CloudEvents, &other_case).contains(r#""traceparent":"00-ab-cd-01""#));
}

/// JSON format §3.2: an object of members, `data` for JSON and `data_base64` for bytes.
#[test]
fn the_json_format_s_examples() {
    let value = |event: &Event| -> serde_json::Value {
        serde_json::from_str(&body(Envelope::CloudEvents, event)).expect("JSON")
    };
    let mut expected = serde_json::json!({
        "specversion": "1.0",
        "type": "com.example.someevent",
        "source": "/mycontext",
        "id": ID,
        "time": "2018-04-05T03:56:24Z",
        "datacontenttype": "application/json",
        "data": { "appinfoA": "abc", "appinfoB": 123, "appinfoC": true },
    });
    let payload = br#"{ "appinfoA" : "abc", "appinfoB" : 123, "appinfoC" : true }"#;
    assert_eq!(value(&example("application/json", payload)), expected);
    expected.as_object_mut().expect("an object").remove("data");
    expected["datacontenttype"] = "application/vnd.apache.thrift.binary".into();
    expected["data_base64"] = "AP8=".into();
    assert_eq!(value(&example("application/vnd.apache.thrift.binary", b"\x00\xff")), expected);
}

/// The examples of the bindings: HTTP §3.1.4, NATS §3.1.4, Kafka §3.2.5, AMQP §3.1.4, MQTT §3.1.4.
#[test]
fn the_bindings_examples_in_binary_mode() {
    let attributes = [
        ("specversion", "1.0"),
        ("id", ID),
        ("type", "com.example.someevent"),
        ("source", "/mycontext"),
        ("time", "2018-04-05T03:56:24Z"),
    ];
    let event = example("application/json; charset=utf-8", b"{}");
    let wrapped = Envelope::CloudEventsBinary.wrap(&event, "postbox").expect("wrapped");
    assert_eq!((&wrapped.body[..], &*wrapped.content_type), (&b"{}"[..], "application/json; charset=utf-8"));
    for (binding, prefix, content_type) in [
        (Binding::HTTP, "ce-", None),
        (Binding::NATS, "ce-", Some("application/json;%20charset=utf-8")),
        (Binding::KAFKA, "ce_", None),
        (Binding::AMQP, "cloudEvents_", None),
        (Binding::MQTT, "", None),
        (Binding::FIELDS, "ce-", Some("application/json; charset=utf-8")),
    ] {
        let content_type = content_type.map(|value| ("datacontenttype", value));
        let expected = attributes.into_iter().chain(content_type);
        let expected: Vec<_> = expected.map(|(name, value)| (format!("{prefix}{name}"), value.into())).collect();
        assert_eq!(binding.spell(&wrapped).collect::<Vec<_>>(), expected);
    }
    // Other envelopes have no attributes, not even one that a transport adds.
    let raw = Envelope::Raw.wrap(&event, "postbox").expect("wrapped");
    assert_eq!(Binding::NATS.spell(&raw).count(), 0);
}

#[test]
fn only_http_and_nats_encode_values() {
    let event = event(NewEvent::json("t", "{}").key("Euro € 😀"));
    let wrapped = Envelope::CloudEventsBinary.wrap(&event, "postbox").expect("wrapped");
    let subject =
        |binding: Binding| binding.spell(&wrapped).find(|(name, _)| name.ends_with("subject")).expect("one").1;
    for encoded in [Binding::HTTP, Binding::NATS] {
        assert_eq!(subject(encoded), "Euro%20%E2%82%AC%20%F0%9F%98%80");
    }
    for plain in [Binding::KAFKA, Binding::AMQP, Binding::MQTT, Binding::FIELDS] {
        assert_eq!(subject(plain), "Euro € 😀");
    }
}

#[test]
fn the_source_is_the_event_s_own_or_the_sink_s() {
    for (event, source) in [(full(), "billing"), (event(NewEvent::json("t", "{}")), "the sink's")] {
        let wrapped = Envelope::CloudEventsBinary.wrap(&event, "the sink's").expect("wrapped");
        assert!(wrapped.attributes.contains(&("source", source.into())), "{wrapped:?}");
    }
}

#[test]
fn standard_has_the_topic_and_the_event_s_time_inside() {
    let expected = r#"{"type":"order.paid","timestamp":"2018-04-05T03:56:24.5Z","data":{ "cents":100 }}"#;
    assert_eq!(body(Envelope::Standard, &full()), expected);
    assert_eq!(Envelope::Standard.wrap(&full(), "postbox").expect("wrapped").content_type, "application/json");
}

#[test]
fn a_replica_has_exactly_these_members() {
    let expected = format!(
        "{}{ID}{}",
        r#"{"event_id":""#,
        r#"","topic":"order.paid","aggregate_kind":"order","aggregate_id":"Zoë 42","entity_version":1099511627776,"payload":{ "cents":100 ,"_telemetry":{"traceparent":"00-ab-cd-01"}},"stream_id":null,"committed_at":"2018-04-05T03:56:25Z"}"#
    );
    assert_eq!(body(Envelope::Replica, &full()), expected);
}

#[test]
fn the_trace_is_folded_into_objects_that_have_none() {
    let traced = |payload: &'static str| {
        let headers = [header::TRACESTATE, header::CORRELATION_ID, header::CAUSATION_ID];
        let traced = headers.iter().fold(NewEvent::json("t", payload), |event, name| event.header(*name, "x\"y"));
        body(Envelope::Replica, &event(traced))
    };
    let telemetry = r#""_telemetry":{"causation_id":"x\"y","correlation_id":"x\"y","tracestate":"x\"y"}"#;
    for (payload, expected) in [
        ("{}", format!("{{{telemetry}}}")),
        (" { } ", format!("{{ {telemetry}}}")),
        (r#"{"a":{"_telemetry":1}}"#, format!(r#"{{"a":{{"_telemetry":1}},{telemetry}}}"#)),
        (r#"{"_telemetry":{}}"#, r#"{"_telemetry":{}}"#.into()),
        (r#"{"\u005ftelemetry":null}"#, r#"{"\u005ftelemetry":null}"#.into()),
        ("[1]", "[1]".into()),
        ("\"}\"", "\"}\"".into()),
        ("7", "7".into()),
    ] {
        assert!(traced(payload).contains(&format!("\"payload\":{expected},")), "{payload}: {}", traced(payload));
    }
    assert!(body(Envelope::Replica, &event(NewEvent::json("t", "{}"))).contains("\"payload\":{},"));
    let other_case = event(NewEvent::json("t", "{}").header("Correlation-Id", "c"));
    assert!(body(Envelope::Replica, &other_case).contains(r#""_telemetry":{"correlation_id":"c"}"#));
}

#[test]
fn a_payload_that_is_no_json_is_dead_where_there_is_no_place_for_it() {
    for payload in [&b"{"[..], b"\xff", b"", b"{} {}"] {
        let event = event(NewEvent::json("t", payload));
        for envelope in [Envelope::Replica, Envelope::Standard] {
            assert_eq!(code(envelope, &event), "payload_not_json");
        }
        assert!(body(Envelope::CloudEvents, &event).contains("\"data_base64\":"));
        assert!(body(Envelope::Json, &event).contains("\"payload_base64\":"));
    }
    assert_eq!(code(Envelope::Standard, &event(NewEvent::new("t", "{}", "text/plain"))), "payload_not_json");
}

#[test]
fn json_stays_as_it_is_written() {
    let deep = "[".repeat(10_000) + &"]".repeat(10_000);
    let numbers = r#"{"big":1234567890123456789012345,"tiny":1e400,"b":1,"a":-0,"b":2}"#.to_owned();
    for payload in [deep, numbers] {
        let event = event(NewEvent::json("t", payload.clone()).header("traceparent", "00"));
        let inside = payload.trim_end_matches('}');
        for envelope in Envelope::OBJECTS {
            assert!(body(envelope, &event).contains(inside), "{envelope:?}");
        }
    }
}

#[test]
fn an_id_is_the_event_s_in_every_envelope() {
    let id: EventId = ID.parse().expect("an id");
    for envelope in [Envelope::Json, Envelope::Replica, Envelope::CloudEvents] {
        assert!(body(envelope, &full()).contains(&id.to_string()), "{envelope:?}");
    }
}
