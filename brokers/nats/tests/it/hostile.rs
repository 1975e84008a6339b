//! Hostile events are dead with a code and never become something else on the wire. The connection
//! survives, and other events flow.

use async_nats::Message;
use bytes::Bytes;
use futures::StreamExt as _;
use postbox_core::{Delivery, NewEvent};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::sending::{context, deliver, deliveries, said, send};
use postbox_testkit::servers::NatsVersion;
use serde_json::json;

use crate::broker::{Broker, drain};
use crate::stand::{self, AS_LIMITED, LIMITED, SHORT, sink, sink_with};

#[tokio::test]
async fn hostile_events_never_become_another_message() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    let proxy = FaultProxy::in_front_of(&broker.server.url()).await;
    let sink = sink(&proxy.url(&broker.server.url()), "subject = \"in.{topic}.{key}\"").await;
    assert_eq!(said(&send(&sink, NewEvent::json("plain", "0").key("k")).await), "delivered");
    // Everything that clients publish.
    let mut all = broker.client.subscribe(">").await.expect("subscribed");
    broker.reached().await;
    drain(&broker.client, &mut all).await;
    let plain = || NewEvent::json("t", "{}").key("k");
    let bad_subject =
        ["a b", "a\r\nPUB other 2\r\nhi", "*", "a.*", ">", "a.>", "", ".", "a..b", "\0", "a\u{a0}b", "\t"];
    let mut bad: Vec<(NewEvent, &str)> =
        bad_subject.iter().map(|topic| (NewEvent { topic: (*topic).into(), ..plain() }, "subject_invalid")).collect();
    bad.extend(bad_subject.iter().map(|key| (plain().key(*key), "subject_invalid")));
    bad.push((NewEvent { key: None, ..plain() }, "subject_invalid"));
    bad.push((plain().key("a.b"), "subject_invalid"));
    bad.push((plain().key("k".repeat(1_100)), "subject_invalid"));
    for (name, value) in [
        ("x", "a\r\nNats-Msg-Id: forged"),
        ("x", "a\nb"),
        ("x", " a"),
        ("x", "a\t"),
        ("x", "a\0b"),
        ("x:y", "a"),
        ("x\r\ny", "a"),
        ("zażółć", "a"),
    ] {
        bad.push((plain().header(name, value), "header_invalid"));
    }
    bad.push((NewEvent::json("t", vec![b'x'; 1024 * 1024]).key("k"), "payload_too_large"));
    bad.push((plain().header("x", "h".repeat(1024 * 1024)), "payload_too_large"));
    for (event, code) in bad {
        let what = format!("{:?} {:?} {:?}", event.topic, event.key, event.headers.keys());
        let outcomes = deliver(&sink, &deliveries([event, plain()])).await;
        assert_eq!(said(&outcomes[0]), format!("dead {code}"), "{}", &what[..what.len().min(200)]);
        assert_eq!(said(&outcomes[1]), "delivered", "beside {}", &what[..what.len().min(200)]);
        let out = drain(&broker.client, &mut all).await;
        assert_eq!(subjects(&out), ["in.t.k"], "only the plain one went out");
    }
    // Here the subject comes from the event alone.
    let free = stand::sink(&broker.server.url(), "subject = \"{topic}\"").await;
    for topic in ["$JS.API.STREAM.DELETE.EVENTS", "$SYS.REQ.SERVER.PING", "_INBOX.somebody.s", ">", "*"] {
        let dead = said(&send(&free, NewEvent { topic: topic.into(), ..plain() }).await);
        assert_eq!(dead, "dead subject_invalid", "{topic}");
        assert!(subjects(&drain(&broker.client, &mut all).await).is_empty(), "{topic}");
    }
    assert!(!broker.stored("EVENTS").await.is_empty(), "the stream is there");
    assert_eq!(proxy.connections(), 1, "the connection survived all of it");
}

/// Returns the subjects of what was published, without answers, the server's own messages and our
/// lookups.
fn subjects(messages: &[Message]) -> Vec<&str> {
    let subjects = messages.iter().map(|message| message.subject.as_str());
    let asked = ["$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.EVENTS"];
    subjects.filter(|it| !it.starts_with("_INBOX.") && !it.starts_with("$JS.EVENT.") && !asked.contains(it)).collect()
}

#[tokio::test]
async fn an_event_is_what_its_envelope_says_and_nothing_else() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    let sink = sink(&broker.server.url(), "subject = \"in.{topic}\"\nstream = \"EVENTS\"").await;
    let event = NewEvent::new("order.paid", &b"\xff\0"[..], "text/plain")
        .key("Zoë 1")
        .tenant("acme")
        .version(7)
        .header("Traceparent", "00-ab")
        .header("empty", "")
        // An event may set none of these.
        .header("nats-msg-id", "forged")
        .header("Nats-Expected-Last-Sequence", "99")
        .header("Nats-Rollup", "all")
        .header("CE-Type", "forged")
        .header("Content-Type", "application/cloudevents+json");
    let sent = deliveries([event]);
    assert_eq!(said(&deliver(&sink, &sent).await[0]), "delivered");
    let stored = broker.stored("EVENTS").await;
    let id = sent[0].event.id.to_string();
    let mut expected = [
        "NATS/1.0",
        "Traceparent: 00-ab",
        "empty: ",
        "ce-specversion: 1.0",
        &format!("ce-id: {id}"),
        "ce-type: order.paid",
        "ce-source: postbox",
        "ce-time: 1970-01-01T00:00:00Z",
        "ce-subject: Zo%C3%AB%201",
        "ce-tenant: acme",
        "ce-version: 7",
        "ce-datacontenttype: text/plain",
        &format!("Nats-Msg-Id: {id}"),
        "Nats-Expected-Stream: EVENTS",
        "",
    ];
    let mut lines: Vec<&str> = stored[0].headers.trim_end_matches("\r\n\r\n").split("\r\n").chain([""]).collect();
    expected.sort_unstable();
    lines.sort_unstable();
    assert_eq!(lines, expected);
    assert_eq!((stored[0].subject.as_str(), stored[0].payload.as_slice()), ("in.order.paid", &b"\xff\0"[..]));
}

#[tokio::test]
async fn a_structured_event_says_so() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    for (envelope, content_type) in [
        ("raw", "application/json"),
        ("cloudevents", "application/cloudevents+json; charset=UTF-8"),
        ("standard", "application/json"),
    ] {
        let keys = format!("subject = \"in.{{topic}}\"\nenvelope = {envelope:?}");
        let sink = sink(&broker.server.url(), &keys).await;
        assert_eq!(said(&send(&sink, NewEvent::json("t", "{}")).await), "delivered");
        let stored = broker.stored("EVENTS").await;
        let last = stored.last().expect("stored");
        assert_eq!(last.header("Content-Type"), Some(content_type), "{envelope}");
        assert_eq!(last.header("ce-type"), None, "{envelope}");
    }
}

#[tokio::test]
async fn a_repetition_is_known_and_a_replay_is_new() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        let sink = sink(&broker.server.url(), "subject = \"in.{topic}\"").await;
        let mut sent: Vec<Delivery> = deliveries([NewEvent::json("t", "{}")]);
        assert_eq!(said(&deliver(&sink, &sent).await[0]), "delivered");
        assert_eq!(said(&deliver(&sink, &sent).await[0]), "duplicate");
        sent[0].replay = 1;
        assert_eq!(said(&deliver(&sink, &sent).await[0]), "delivered");
        assert_eq!(broker.stored("EVENTS").await.len(), 2);
    }
}

/// JetStream compares ids only, whatever the subjects.
#[tokio::test]
async fn two_subscriptions_may_publish_one_event_to_one_stream() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, LIMITED).await;
        broker.stream("EVENTS", &["in.>", "audit.>"], json!({})).await;
        let url = broker.server.url();
        // More than the server would answer in time if it were asked for all at once.
        let sent: Vec<Delivery> = deliveries((0..500).map(|n| NewEvent::json("t", n.to_string())));
        for (subject, expected) in [
            ("in.{topic}", "delivered"),
            ("audit.{topic}", "delivered"),
            ("in.{topic}", "duplicate"),
            ("audit.{topic}", "duplicate"),
        ] {
            let sink = sink(&url, &format!("subject = {subject:?}")).await;
            let outcomes: Vec<String> = deliver(&sink, &sent).await.iter().map(said).collect();
            assert_eq!(outcomes, [expected; 500], "{version:?}: {subject}");
        }
        assert_eq!(broker.stored("EVENTS").await.len(), 1_000);
        // Without the right to look, a known message is taken for a repetition.
        let keys = format!("subject = \"in.{{topic}}\"\nstream = \"EVENTS\"\n{AS_LIMITED}");
        let limited = sink_with(&url, &keys, &context(6 * SHORT)).await;
        for _ in 0..2 {
            assert_eq!(said(&deliver(&limited, &sent).await[0]), "duplicate");
        }
    }
}

/// Equal idempotency keys of several databases are equal ids.
#[tokio::test]
async fn another_event_with_a_known_id_is_stored_too() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        let mut sent = deliveries(["1", "2", "3"].map(|body| NewEvent::json("t", body)));
        let id = sent[0].event.id;
        sent.iter_mut().for_each(|delivery| delivery.event.id = id);
        let sink = sink(&broker.server.url(), "subject = \"in.{topic}\"").await;
        for expected in ["delivered", "duplicate"] {
            for delivery in &sent {
                assert_eq!(said(&deliver(&sink, std::slice::from_ref(delivery)).await[0]), expected, "{version:?}");
            }
        }
        let bodies: Vec<_> = broker.stored("EVENTS").await.into_iter().map(|message| message.payload).collect();
        assert_eq!(bodies, [b"1", b"2", b"3"]);
    }
}

/// All messages of a call are sent before the sink waits for the first ack.
#[tokio::test]
async fn a_call_does_not_wait_for_one_ack_after_the_other() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["other.>"], json!({})).await;
    let mut seen = broker.client.subscribe("in.>").await.expect("subscribed");
    broker.reached().await;
    let sink = sink(&broker.server.url(), "subject = \"in.{topic}\"").await;
    let sent = deliveries((0..1_000).map(|n| NewEvent::json("t", n.to_string())));
    let call = tokio::spawn(async move { deliver(&sink, &sent).await });
    // Nobody acknowledges anything.
    let mut all: Vec<Bytes> = Vec::new();
    while all.len() < 1_000 {
        all.push(seen.next().await.expect("published").payload);
    }
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 1_000, "each once");
    call.abort();
}
