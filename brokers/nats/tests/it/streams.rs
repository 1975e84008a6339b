//! Streams that are missing, created by the sink, full, or not the expected one.

use std::time::Duration;

use postbox_config::{SinkConfig as _, SinkContext, SourceConfig as _};
use postbox_core::{NewEvent, Outcome};
use postbox_nats::NatsSinkTable;
use postbox_testkit::receiving::source_context;
use postbox_testkit::sending::{PATIENCE, context, deliver, deliveries, said, send, table};
use postbox_testkit::servers::NatsVersion;
use postbox_testkit::warnings::Warnings;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::broker::{Broker, api};
use crate::stand::{self, AS_BLIND, LIMITED, SHORT, sink, sink_with, source};

fn event(topic: &str) -> NewEvent {
    NewEvent::json(topic, "{}")
}

#[tokio::test]
async fn a_missing_stream_is_an_outage_with_the_command_that_makes_it() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        let sink = sink(&broker.server.url(), "subject = \"in.{topic}\"\nstream = \"EVENTS\"").await;
        let Outcome::Unavailable { code, error } = send(&sink, event("t")).await else { panic!("nobody takes it") };
        assert_eq!(code, "nats_no_stream");
        assert!(error.contains("nats stream add EVENTS --subjects 'in.>'"), "{error}");
        broker.stream("EVENTS", &["in.a"], json!({})).await;
        // The other event of the call is accepted: no stream takes the subject of this one.
        let outcomes = deliver(&sink, &deliveries([event("a"), event("b")])).await;
        assert_eq!(said(&outcomes[0]), "delivered");
        assert_eq!(said(&outcomes[1]), "ambiguous nats_no_stream");
    }
}

/// The name of a stream must not turn the request into another one of JetStream's API.
#[tokio::test]
async fn only_a_stream_has_a_mark() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    let sink = sink(&broker.server.url(), "subject = \"in.{topic}\"\nstream = \"EVENTS\"").await;
    assert_eq!(said(&send(&sink, event("t")).await), "delivered");
    let marks = sink.high_water_marks().expect("JetStream has marks");
    assert_eq!(marks.streams(9).await.expect("an answer"), ["EVENTS"]);
    for (name, mark) in [("EVENTS", Some("1")), ("OTHER", None), ("", None), ("EVENTS.x", None), (">", None)] {
        assert_eq!(marks.high_water_mark(name).await.expect("an answer").as_deref(), mark, "{name}");
    }
}

/// `check-config --connect` reports what exists, and creates nothing.
#[tokio::test]
async fn a_look_makes_nothing() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    let url = broker.server.url();
    let context = context(PATIENCE);
    let sink = async |keys: &str| {
        let table: NatsSinkTable = table(&format!("url = {url:?}\nsubject = \"in.{{topic}}\"\n{keys}"));
        table.connect(&context).await.map_err(|error| error.to_string())
    };
    let source = async |keys: &str| {
        let table = stand::table(&url, &format!("stream = \"EVENTS\"\n{keys}"));
        table.connect(&source_context()).await.map_err(|error| error.to_string())
    };
    assert!(sink("").await.is_err_and(|text| text.contains("nats stream add NAME --subjects 'in.>'")));
    assert!(sink("stream = \"EVENTS\"").await.is_err_and(|text| text.contains("nats stream add EVENTS")));
    assert!(source("").await.is_err_and(|text| text.contains("nats stream add EVENTS")));
    let will = sink("stream = \"EVENTS\"\ncreate = {}").await;
    assert_eq!(will.as_deref(), Ok("answers; the stream EVENTS will be created"));
    assert_eq!(api(&broker.client, "STREAM.INFO.EVENTS", Value::Null).await.err(), Some(10_059), "nothing was made");
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    assert_eq!(sink("").await.as_deref(), Ok("answers; the stream EVENTS exists"));
    assert_eq!(source("").await.as_deref(), Ok("answers; the consumer postbox of EVENTS will be created"));
    assert!(source("create = false").await.is_err_and(|text| text.contains("nats consumer add EVENTS postbox")));
    assert_eq!(api(&broker.client, "CONSUMER.INFO.EVENTS.postbox", Value::Null).await.err(), Some(10_014));
}

#[tokio::test]
async fn a_missing_stream_is_made_where_that_is_configured() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        let keys = "subject = \"in.{topic}\"\nstream = \"EVENTS\"\ncreate = { duplicate_window = \"10m\" }";
        let sink = sink(&broker.server.url(), keys).await;
        assert_eq!(said(&send(&sink, event("t")).await), "delivered");
        let info = api(&broker.client, "STREAM.INFO.EVENTS", Value::Null).await.expect("it is there");
        assert_eq!(info["config"]["subjects"], json!(["in.>"]));
        assert_eq!(info["config"]["duplicate_window"], 600_000_000_000_u64);
        // The stream is deleted: the first call notices that, and the next one has it again.
        api(&broker.client, "STREAM.DELETE.EVENTS", Value::Null).await.expect("deleted");
        assert_eq!(said(&send(&sink, event("t")).await), "unavailable nats_no_stream");
        assert_eq!(said(&send(&sink, event("t")).await), "delivered");
    }
}

#[tokio::test]
async fn what_a_stream_refuses_is_classified() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({ "max_msg_size": 1_000 })).await;
    broker.stream("OTHER", &["other.>"], json!({})).await;
    let sink_of = async |subject: &str| {
        sink(&broker.server.url(), &format!("subject = \"{subject}.{{topic}}\"\nstream = \"EVENTS\"")).await
    };
    let (right, other) = (sink_of("in").await, sink_of("other").await);
    let outcomes = deliver(&right, &deliveries([NewEvent::json("t", vec![b' '; 1_000]), event("t")])).await;
    assert_eq!(said(&outcomes[0]), "dead payload_too_large");
    assert_eq!(said(&outcomes[1]), "delivered");
    assert_eq!(said(&send(&other, event("t")).await), "ambiguous nats_stream_other");
    assert!(broker.stored("OTHER").await.is_empty());
}

/// Whichever limit the stream has reached, the event waits and no attempt is counted.
#[tokio::test]
async fn a_full_stream_is_waited_for() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        let limits = [
            json!({ "max_msgs": 1 }),
            json!({ "max_bytes": 400 }),
            json!({ "max_msgs_per_subject": 1, "discard_new_per_subject": true }),
        ];
        for (n, mut limit) in limits.into_iter().enumerate() {
            let (stream, subject) = (format!("FULL{n}"), format!("full{n}.>"));
            limit["discard"] = "new".into();
            broker.stream(&stream, &[&subject], limit).await;
            let keys = format!("subject = \"full{n}.{{topic}}\"\nstream = {stream:?}");
            let sink = sink(&broker.server.url(), &keys).await;
            assert_eq!(said(&send(&sink, event("t")).await), "delivered", "{version:?} {stream}");
            let full = send(&sink, event("t")).await;
            assert_eq!(said(&full), "throttled nats_stream_full", "{version:?} {stream}: {full:?}");
            assert_eq!(broker.stored(&stream).await.len(), 1);
            api(&broker.client, &format!("STREAM.PURGE.{stream}"), Value::Null).await.expect("purged");
            assert_eq!(said(&send(&sink, event("t")).await), "delivered", "{version:?} {stream}");
        }
    }
}

/// Receives a message of `in.>` and acknowledges it, until the stream has deleted it.
async fn acknowledged(broker: &Broker) {
    let consumer = source(&broker.server.url(), "stream = \"EVENTS\"\nfilter = \"in.>\"").await;
    let taken = timeout(PATIENCE, consumer.next(1)).await.expect("in time").expect("it comes");
    consumer.ack(&[taken[0].token]).await.expect("acknowledged");
    let gone = async { while !broker.stored("EVENTS").await.is_empty() {} };
    timeout(PATIENCE, gone).await.expect("deleted");
}

/// The stream knows the id of a message that it has no more, so nobody can see its subject.
#[tokio::test]
async fn two_subscriptions_may_publish_to_a_stream_that_deletes_what_is_acknowledged() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        let url = broker.server.url();
        let billing = sink(&url, "subject = \"in.{topic}\"").await;
        let audit = sink(&url, "subject = \"audit.{topic}\"").await;
        // The stream is made after the first connection.
        for sink in [&billing, &audit] {
            assert_eq!(said(&send(sink, event("t")).await), "unavailable nats_no_stream", "{version:?}");
        }
        broker.stream("EVENTS", &["in.>", "audit.>"], json!({ "retention": "workqueue" })).await;
        let sent = deliveries([event("t")]);
        assert_eq!(said(&deliver(&billing, &sent).await[0]), "delivered", "{version:?}");
        acknowledged(&broker).await;
        assert_eq!(said(&deliver(&audit, &sent).await[0]), "delivered", "{version:?}");
        for sink in [&billing, &audit] {
            assert_eq!(said(&deliver(sink, &sent).await[0]), "duplicate", "{version:?}");
        }
        let stored = broker.stored("EVENTS").await;
        let subjects: Vec<&str> = stored.iter().map(|message| message.subject.as_str()).collect();
        assert_eq!(subjects, ["audit.t"], "{version:?}");
    }
}

/// The stream is made anew after the connection, which asked the former one for its retention.
#[tokio::test]
async fn a_stream_that_deletes_what_is_acknowledged_only_now_is_noticed() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        let url = broker.server.url();
        broker.stream("EVENTS", &["in.>", "audit.>"], json!({})).await;
        let billing = sink(&url, "subject = \"in.{topic}\"").await;
        let audit = sink(&url, "subject = \"audit.{topic}\"").await;
        for sink in [&billing, &audit] {
            assert_eq!(said(&send(sink, event("t")).await), "delivered", "{version:?}");
        }
        api(&broker.client, "STREAM.DELETE.EVENTS", Value::Null).await.expect("deleted");
        broker.stream("EVENTS", &["in.>", "audit.>"], json!({ "retention": "workqueue" })).await;
        let sent = deliveries([event("t")]);
        assert_eq!(said(&deliver(&billing, &sent).await[0]), "delivered", "{version:?}");
        acknowledged(&broker).await;
        for expected in ["delivered", "duplicate"] {
            assert_eq!(said(&deliver(&audit, &sent).await[0]), expected, "{version:?}");
        }
        let stored = broker.stored("EVENTS").await;
        assert_eq!(stored.iter().map(|message| message.subject.as_str()).collect::<Vec<_>>(), ["audit.t"]);
    }
}

/// A connection that learns the retention would repeat the event under another id.
#[tokio::test]
async fn nothing_is_published_before_the_settings_of_the_stream_are_known() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, LIMITED).await;
        broker.stream("EVENTS", &["in.>"], json!({ "retention": "workqueue" })).await;
        for keys in ["", "stream = \"EVENTS\"\n"] {
            let keys =
                format!("subject = \"in.{{topic}}\"\n{keys}auth = {{ user = \"unanswered\", password = \"e\" }}");
            let sink = sink_with(&broker.server.url(), &keys, &context(SHORT)).await;
            for _ in 0..2 {
                assert_eq!(said(&send(&sink, event("t")).await), "unavailable nats_api_timeout", "{version:?}");
            }
        }
        assert!(broker.stored("EVENTS").await.is_empty(), "{version:?}");
    }
}

/// A known message that is gone may have been another subscription's.
#[tokio::test]
async fn on_a_stream_that_nobody_may_look_at_an_event_is_rather_stored_twice_than_never() {
    let broker = Broker::launch(NatsVersion::V2_15, LIMITED).await;
    broker.stream("EVENTS", &["in.>", "audit.>"], json!({ "retention": "workqueue" })).await;
    let url = broker.server.url();
    let billing = sink_with(&url, &format!("subject = \"in.{{topic}}\"\n{AS_BLIND}"), &context(6 * SHORT)).await;
    let audit = sink_with(&url, &format!("subject = \"audit.{{topic}}\"\n{AS_BLIND}"), &context(6 * SHORT)).await;
    let sent = deliveries([event("t")]);
    assert_eq!(said(&deliver(&billing, &sent).await[0]), "delivered");
    acknowledged(&broker).await;
    for expected in ["delivered", "duplicate"] {
        assert_eq!(said(&deliver(&audit, &sent).await[0]), expected);
    }
    let stored = broker.stored("EVENTS").await;
    assert_eq!(stored.iter().map(|message| message.subject.as_str()).collect::<Vec<_>>(), ["audit.t"]);
}

#[tokio::test]
async fn a_stream_that_throws_away_what_nobody_wants_is_warned_of_once() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        let url = broker.server.url();
        broker.stream("EVENTS", &["in.>"], json!({ "retention": "interest" })).await;
        let keys = "subject = \"in.{topic}\"\nstream = \"EVENTS\"";
        let look = async || {
            let table: NatsSinkTable = table(&format!("url = {url:?}\n{keys}"));
            table.connect(&context(PATIENCE)).await.expect("it answers").contains("throws away")
        };
        let sink = sink(&url, keys).await;
        let (warnings, _guard) = Warnings::hear();
        for _ in 0..2 {
            assert_eq!(said(&send(&sink, event("t")).await), "delivered");
            sink.close().await;
        }
        assert!(broker.stored("EVENTS").await.is_empty());
        let warned = warnings.all().into_iter().filter(|line| line.contains("nats_interest_none")).count();
        assert_eq!(warned, 1, "{version:?}");
        assert!(look().await, "{version:?}");
        let config = json!({ "durable_name": "c", "ack_policy": "explicit" });
        let consumer = json!({ "stream_name": "EVENTS", "config": config });
        api(&broker.client, "CONSUMER.DURABLE.CREATE.EVENTS.c", consumer).await.expect("made");
        assert!(!look().await, "{version:?}");
    }
}

#[tokio::test]
async fn a_stream_that_acknowledges_nothing_is_warned_of_once() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    let url = broker.server.url();
    broker.stream("EVENTS", &["in.>"], json!({ "no_ack": true })).await;
    let keys = "subject = \"in.{topic}\"\nstream = \"EVENTS\"";
    for keys in [keys, "subject = \"in.{topic}\""] {
        let table: NatsSinkTable = table(&format!("url = {url:?}\n{keys}"));
        assert!(table.connect(&context(PATIENCE)).await.expect("it answers").contains("no_ack = false"), "{keys}");
    }
    let sink = sink_with(&url, keys, &context(SHORT)).await;
    let (warnings, _guard) = Warnings::hear();
    for _ in 0..2 {
        assert_eq!(said(&send(&sink, event("t")).await), "ambiguous nats_ack_timeout");
        sink.close().await;
    }
    let warned = warnings.all().into_iter().filter(|line| line.contains("nats_no_ack")).count();
    assert_eq!(warned, 1);
}

#[tokio::test]
async fn a_stream_that_forgets_ids_too_soon_is_warned_of_once() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({ "duplicate_window": 60_000_000_000_u64 })).await;
    for (keys, within, count) in [("stream = \"EVENTS\"", 61, 1), ("", 61, 1), ("stream = \"EVENTS\"", 60, 0)] {
        let context = SinkContext { repeats_within: Duration::from_secs(within), ..context(PATIENCE) };
        let sink = sink_with(&broker.server.url(), &format!("subject = \"in.{{topic}}\"\n{keys}"), &context).await;
        let (warnings, _guard) = Warnings::hear();
        for _ in 0..2 {
            assert_eq!(said(&send(&sink, event("t")).await), "delivered");
            sink.close().await;
        }
        let short: Vec<_> = warnings.all().into_iter().filter(|line| line.contains("dedupe_window_short")).collect();
        assert_eq!(short.len(), count, "{keys} {within}: {short:?}");
        assert!(short.iter().all(|line| line.contains("nats stream edit EVENTS --dupe-window 61s")), "{short:?}");
    }
}
