//! The entries that a consumer reads, in every envelope.

use postbox_config::SourceConfig as _;
use postbox_core::{Envelope, NewEvent, Source as _};
use postbox_redis::RedisSourceConfig;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::support::{Broker, field, text};
use super::{PATIENCE, SERVERS, codes, deliver, deliveries, sink_with, source_with};

/// The replica envelope as declared by a consumer that keeps copies of entities: these names and no
/// others.
#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct ReplicaEvent {
    event_id: uuid::Uuid,
    topic: String,
    aggregate_kind: Option<String>,
    aggregate_id: Option<String>,
    entity_version: Option<i64>,
    payload: Value,
    stream_id: Option<String>,
    committed_at: String,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_is_one_field_that_its_consumer_can_read() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink = sink_with(&broker, PATIENCE, |config| config.envelope = Envelope::Replica);
        let mut event = NewEvent::json("tenant.member", r#"{"name":"Zoë","big":12345678901234567890123}"#);
        event = event.key("42").aggregate("member").header("traceparent", "00-ab-cd-01").header("correlation-id", "c1");
        event.version = Some(7);
        let sent = deliveries([event, NewEvent::new("t", "no json", "text/plain")]);
        assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered", "dead payload_not_json"]);
        let entries = broker.entries("events").await;
        assert_eq!(entries.len(), 1);
        let [(name, value)] = entries[0].as_slice() else { panic!("one field, not {:?}", entries[0]) };
        assert_eq!(name, "event");
        let read: ReplicaEvent = serde_json::from_slice(value).expect("as its consumer reads it");
        assert_eq!(read.event_id, sent[0].event.id.as_uuid());
        assert_eq!((read.topic.as_str(), read.aggregate_kind.as_deref()), ("tenant.member", Some("member")));
        assert_eq!((read.aggregate_id.as_deref(), read.entity_version), (Some("42"), Some(7)));
        assert_eq!(read.stream_id, None);
        assert_eq!(read.committed_at, "1970-01-01T00:00:00Z");
        assert_eq!(read.payload["name"], "Zoë");
        assert_eq!(read.payload["_telemetry"], json!({ "traceparent": "00-ab-cd-01", "correlation_id": "c1" }));
        assert!(String::from_utf8_lossy(value).contains("12345678901234567890123"), "the payload is as it was written");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_other_envelope_has_id_topic_and_key_beside_it() {
    for envelope in Envelope::ALL.into_iter().filter(|envelope| *envelope != Envelope::Replica) {
        let broker = Broker::start(SERVERS[0]).await;
        let sink = sink_with(&broker, PATIENCE, |config| config.envelope = envelope);
        let sent =
            deliveries([NewEvent::json("order.paid", "{\"cents\":1}").key("42").tenant("acme").header("a", "1")]);
        assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered"]);
        let fields = broker.entries("events").await.remove(0);
        assert_eq!(text(&fields, "id"), Some(sent[0].dedupe_id()));
        assert_eq!(text(&fields, "topic").as_deref(), Some("order.paid"));
        assert_eq!(text(&fields, "key").as_deref(), Some("42"));
        assert_eq!(text(&fields, "header:a").as_deref(), Some("1"));
        let binary = envelope == Envelope::CloudEventsBinary;
        assert_eq!(text(&fields, "ce-tenant").as_deref(), binary.then_some("acme"), "{envelope:?}");
        let wrapped = envelope.wrap(&sent[0].event, "postbox").expect("it fits");
        assert_eq!(text(&fields, "content-type").as_deref(), Some(wrapped.content_type.as_ref()));
        assert_eq!(field(&fields, "payload").expect("a payload"), wrapped.body);
    }
}

/// From our sink to our source.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cloud_event_is_itself_again() {
    let broker = Broker::start(SERVERS[0]).await;
    let sink = sink_with(&broker, PATIENCE, |config| config.envelope = Envelope::CloudEventsBinary);
    let event = NewEvent::new("order.paid", &b"\xff"[..], "a/b").key("42").kind("fact").aggregate("order").version(7);
    let sent = deliveries([event.header("a", "1")]);
    assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered"]);
    let source = source_with(&broker, |_| ());
    let given = timeout(PATIENCE, source.next(1)).await.expect("in time").expect("a message").remove(0);
    let name = "orders".parse().expect("a name");
    let inbound = RedisSourceConfig::default().decode(&name, &given.message).expect("an event").expect("one");
    let (event, sent, id) = (&inbound.event, &sent[0].event, sent[0].dedupe_id());
    assert_eq!(inbound.message_id, id);
    assert_eq!((event.topic.as_str(), event.key.as_deref()), ("order.paid", Some("42")));
    assert_eq!((&event.kind, &event.aggregate, event.version), (&sent.kind, &sent.aggregate, Some(7)));
    assert_eq!((event.occurred_at, &event.payload), (Some(sent.occurred_at), &sent.payload));
    assert_eq!((event.content_type.as_deref(), event.headers["a"].as_str()), (Some("a/b"), "1"));
}
