//! Receives from a stream into an inbox.

use std::time::Duration;

use futures::StreamExt as _;
use postbox_core::ErrorKind;
use postbox_testkit::inbox::Mode;
use postbox_testkit::receiving::{Receiving, events};
use postbox_testkit::sending::{PATIENCE, deliver, said};
use postbox_testkit::servers::NatsVersion;
use postbox_testkit::warnings::Warnings;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::broker::{Broker, api, publish};
use crate::stand::{sink, source, table};

async fn receiving(broker: &Broker, keys: &str) -> Receiving {
    Receiving::start(table(&broker.server.url(), keys)).await
}

/// Returns the number of messages that wait for an ack, and of those not delivered yet.
async fn pending(broker: &Broker, consumer: &str) -> (u64, u64) {
    let info = api(&broker.client, &format!("CONSUMER.INFO.{consumer}"), Value::Null).await.expect("it is there");
    let number = |key: &str| info[key].as_u64().expect("a number");
    (number("num_ack_pending"), number("num_pending"))
}

#[tokio::test]
async fn an_event_comes_out_as_it_went_in() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        let sink = sink(&broker.server.url(), "subject = \"in.{topic}\"\nstream = \"EVENTS\"\ncreate = {}").await;
        let sent = events();
        for outcome in deliver(&sink, &sent).await {
            assert_eq!(said(&outcome), "delivered");
        }
        // And one message from a publisher that knows nothing of CloudEvents.
        publish(&broker.client, "in.plain", &[("a", "b")], b"{}").await;
        let receiving = receiving(&broker, "stream = \"EVENTS\"").await;
        receiving.until(|it| it.inbox.all().len() == 3).await;
        let stored = receiving.inbox.all();
        let by_topic = |topic: &str| &stored.iter().find(|it| it.event.topic == topic).expect(topic).event;
        receiving.has(&sent);
        assert_eq!(by_topic("order.paid").headers["ce-id"], sent[0].event.id.to_string());
        assert_eq!(
            (by_topic("in.plain").headers["a"].as_str(), by_topic("in.plain").content_type.as_deref()),
            ("b", None)
        );
        assert!(stored.iter().any(|it| it.message_id.starts_with("EVENTS:3:")));
        receiving.stop().await;
        assert_eq!(pending(&broker, "EVENTS.postbox").await, (0, 0), "all of it is acknowledged");
    }
}

/// Its numbers begin at 1 again. Messages without an id of their own are new all the same.
#[tokio::test]
async fn the_messages_of_a_stream_that_is_made_anew_are_new() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        let receiving = receiving(&broker, "stream = \"EVENTS\"").await;
        publish(&broker.client, "in.a", &[], b"one").await;
        receiving.until(|it| it.inbox.all().len() == 1).await;
        api(&broker.client, "STREAM.DELETE.EVENTS", Value::Null).await.expect("deleted");
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        for body in ["one", "another"] {
            publish(&broker.client, "in.a", &[], body.as_bytes()).await;
        }
        receiving.until(|it| it.inbox.all().len() == 3).await;
        receiving.stop().await;
    }
}

#[tokio::test]
async fn duplicates_conflicts_and_poison_are_settled() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    // A short duplicate window, so that the stream stores all of the messages.
    broker.stream("EVENTS", &["in.>"], json!({ "duplicate_window": 100_000_000_u64 })).await;
    let receiving = receiving(&broker, "stream = \"EVENTS\"").await;
    let long = format!("in.{}", "t".repeat(300));
    let send = async |id: &str, body: &str| {
        let subject = if body == "poison" { long.as_str() } else { "in.a" };
        publish(&broker.client, subject, &[("Nats-Msg-Id", id)], body.as_bytes()).await;
        tokio::time::sleep(Duration::from_millis(150)).await;
    };
    receiving.settles(send).await;
    receiving.stop().await;
    assert_eq!(pending(&broker, "EVENTS.postbox").await, (0, 0));
}

#[tokio::test]
async fn a_slow_store_is_waited_for() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        let receiving = receiving(&broker, "stream = \"EVENTS\"\nack_wait = \"1s\"").await;
        receiving.inbox.set(Mode::Hangs);
        for n in 0..10 {
            publish(&broker.client, "in.a", &[], n.to_string().as_bytes()).await;
        }
        receiving.until(|it| it.inbox.counts().in_flight > 0).await;
        // Three times as long as the consumer waits for an ack.
        tokio::time::sleep(Duration::from_secs(3)).await;
        receiving.inbox.set(Mode::Works);
        receiving.until(|it| it.inbox.all().len() == 10).await;
        receiving.stop().await;
        let info = api(&broker.client, "CONSUMER.INFO.EVENTS.postbox", Value::Null).await.expect("it is there");
        assert_eq!(info["num_redelivered"], 0, "nothing came twice: {info}");
        assert_eq!(pending(&broker, "EVENTS.postbox").await, (0, 0));
    }
}

#[tokio::test]
async fn a_server_that_is_killed_while_it_is_received_from_loses_nothing() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let mut broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        let receiving = receiving(&broker, "stream = \"EVENTS\"\nack_wait = \"1s\"").await;
        let mut published = 0;
        for _ in 0..4 {
            for _ in 0..200 {
                publish(&broker.client, "in.a", &[], published.to_string().as_bytes()).await;
                published += 1;
            }
            broker.server.kill();
            broker.start().await;
        }
        // A publish that was retried may be stored twice, under two numbers.
        receiving.until(|it| it.bodies().len() == published).await;
        let settled = async {
            while pending(&broker, "EVENTS.postbox").await != (0, 0) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, settled).await.expect("all of it is acknowledged");
        receiving.stop().await;
    }
}

#[tokio::test]
async fn what_is_missing_is_named_with_the_command_that_makes_it() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    let url = broker.server.url();
    let refused = async |keys: &str| source(&url, keys).await.next(1).await.expect_err("not there");
    let none = refused("stream = \"EVENTS\"").await;
    assert_eq!((none.kind(), none.code()), (ErrorKind::Mismatch, "nats_no_stream"));
    assert!(none.message().contains("nats stream add EVENTS"), "{none}");
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    let none = refused("stream = \"EVENTS\"\ncreate = false").await;
    assert_eq!((none.kind(), none.code()), (ErrorKind::Mismatch, "nats_no_consumer"));
    assert!(none.message().contains("nats consumer add EVENTS postbox --pull"), "{none}");
    let pushed = json!({ "stream_name": "EVENTS", "config": {
        "durable_name": "pushed", "deliver_subject": "x", "ack_policy": "explicit" } });
    api(&broker.client, "CONSUMER.DURABLE.CREATE.EVENTS.pushed", pushed).await.expect("made");
    let other = refused("stream = \"EVENTS\"\nconsumer = \"pushed\"").await;
    assert_eq!((other.kind(), other.code()), (ErrorKind::Mismatch, "nats_consumer_other"));
    let mut limited = json!({ "stream_name": "EVENTS", "config": {
        "durable_name": "limited", "ack_policy": "explicit", "max_deliver": 2 } });
    let made = async |config: &Value| {
        api(&broker.client, "CONSUMER.DURABLE.CREATE.EVENTS.limited", config.clone()).await.expect("made");
    };
    made(&limited).await;
    publish(&broker.client, "in.a", &[], b"{}").await;
    let gives_up = refused("stream = \"EVENTS\"\nconsumer = \"limited\"").await;
    assert_eq!((gives_up.kind(), gives_up.code()), (ErrorKind::Mismatch, "nats_consumer_gives_up"));
    assert!(gives_up.message().contains("nats consumer edit EVENTS limited --max-deliver=-1"), "{gives_up}");
    // The fix that the error suggests works.
    limited["config"]["max_deliver"] = (-1).into();
    made(&limited).await;
    let came = source(&url, "stream = \"EVENTS\"\nconsumer = \"limited\"").await.next(1).await;
    assert_eq!(came.expect("it gives messages").len(), 1);
}

/// Creates a pull consumer of `EVENTS`, with changes to its configuration.
async fn consumer(broker: &Broker, name: &str, change: Value) {
    let mut config = json!({ "durable_name": name, "ack_policy": "explicit", "max_deliver": -1 });
    for (key, value) in change.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    let body = json!({ "stream_name": "EVENTS", "config": config });
    api(&broker.client, &format!("CONSUMER.DURABLE.CREATE.EVENTS.{name}"), body).await.expect("made");
}

#[tokio::test]
async fn a_consumer_that_gives_other_messages_than_configured_is_refused() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    let priority = json!({ "priority_groups": ["a"], "priority_policy": "overflow" });
    for (name, change, keys, cure) in [
        ("bare", json!({ "headers_only": true }), "", "nats consumer edit EVENTS bare --no-headers-only"),
        ("groups", priority, "", "priority groups"),
        ("many", json!({}), "in_flight = 1", "nats consumer edit EVENTS many --max-pending=1"),
        ("less", json!({ "filter_subject": "in.b" }), "filter = \"in.a\"", "edit EVENTS less --filter 'in.a'"),
        ("more", json!({}), "filter = \"in.a\"", "takes >, but the source's filter is in.a"),
    ] {
        consumer(&broker, name, change).await;
        let keys = format!("stream = \"EVENTS\"\nconsumer = {name:?}\n{keys}");
        let refused = source(&broker.server.url(), &keys).await.next(1).await.expect_err("refused");
        assert_eq!((refused.kind(), refused.code()), (ErrorKind::Mismatch, "nats_consumer_other"), "{refused}");
        assert!(refused.message().contains(cure), "{refused}");
    }
}

#[tokio::test]
async fn a_consumer_s_limits_on_requests_are_kept() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        consumer(&broker, "c", json!({ "max_batch": 2, "max_expires": 1_000_000_000 })).await;
        let receiving = receiving(&broker, "stream = \"EVENTS\"\nconsumer = \"c\"").await;
        for n in 0..5 {
            publish(&broker.client, "in.a", &[], n.to_string().as_bytes()).await;
        }
        receiving.until(|it| it.bodies().len() == 5).await;
        assert_eq!(receiving.receiver.metrics().snapshot().source_errors, 0, "{version:?}");
        receiving.stop().await;
    }
}

/// A publisher may write anything into a message, even a status of the server.
#[tokio::test]
async fn a_status_in_a_message_is_not_the_server_s_word() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        publish(&broker.client, "in.a", &[], b"first").await;
        let statuses = ["100 Idle", "404 No Messages", "408 Request Timeout", "409 Consumer Deleted", "503"];
        for status in statuses {
            broker.raw(b"in.b", format!("NATS/1.0 {status}\r\na: b\r\n\r\n").as_bytes(), status.as_bytes()).await;
        }
        publish(&broker.client, "in.a", &[], b"last").await;
        let receiving = receiving(&broker, "stream = \"EVENTS\"\nin_flight = 1").await;
        receiving.until(|it| it.bodies().len() == statuses.len() + 2).await;
        receiving.stop().await;
        assert_eq!(pending(&broker, "EVENTS.postbox").await, (0, 0));
    }
}

#[tokio::test]
async fn a_consumer_that_is_made_has_what_is_configured() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        let (warnings, _guard) = Warnings::hear();
        publish(&broker.client, "in.b", &[], b"no").await;
        publish(&broker.client, "in.a", &[], b"yes").await;
        let keys = "stream = \"EVENTS\"\nconsumer = \"c\"\nfilter = \"in.a\"\nack_wait = \"7s\"\nin_flight = 9";
        let receiving = receiving(&broker, keys).await;
        receiving.until(|it| it.inbox.all().len() == 1).await;
        assert_eq!(&receiving.inbox.all()[0].event.payload[..], b"yes");
        let info = api(&broker.client, "CONSUMER.INFO.EVENTS.c", Value::Null).await.expect("it is there");
        assert_eq!(info["config"]["ack_wait"], 7_000_000_000_u64);
        assert_eq!(
            (&info["config"]["max_ack_pending"], &info["config"]["filter_subject"]),
            (&json!(9), &json!("in.a"))
        );
        assert_eq!(info["config"]["deliver_policy"], "all", "it was never there");
        // The server never said that all was acknowledged.
        let receiving = [receiving];
        assert_eq!(lost(&broker, &receiving, "again").await, "all", "{version:?}");
        let warned = created_again(&warnings);
        assert!(warned.len() == 1 && warned[0].contains("the first message"), "{:?}", warnings.all());
        let [receiving] = receiving;
        receiving.stop().await;
    }
}

/// Deletes the consumer `c` while sources wait. Returns where it begins, once they go on.
async fn lost(broker: &Broker, replicas: &[Receiving], body: &str) -> Value {
    api(&broker.client, "CONSUMER.DELETE.EVENTS.c", Value::Null).await.expect("deleted");
    publish(&broker.client, "in.a", &[], body.as_bytes()).await;
    let stored = |_: &Receiving| replicas.iter().any(|it| it.bodies().contains(body.as_bytes()));
    replicas[0].until(stored).await;
    wait_for(broker, replicas.len()).await["config"]["deliver_policy"].clone()
}

/// Waits until that many sources wait for messages of the consumer `c`, and all are acknowledged.
async fn wait_for(broker: &Broker, sources: usize) -> Value {
    let waiting = async {
        loop {
            match api(&broker.client, "CONSUMER.INFO.EVENTS.c", Value::Null).await {
                Ok(info)
                    if info["num_waiting"] == sources && info["num_pending"] == 0 && info["num_ack_pending"] == 0 =>
                {
                    return info;
                }
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    timeout(PATIENCE, waiting).await.expect("they wait for messages")
}

/// Returns the warnings of lost consumers.
fn created_again(warnings: &Warnings) -> Vec<String> {
    warnings.all().into_iter().filter(|line| line.contains("lost consumer created again")).collect()
}

#[tokio::test]
async fn replicas_go_on_with_a_lost_consumer() {
    for (version, retention, policy) in [
        (NatsVersion::V2_9, "limits", "by_start_time"),
        (NatsVersion::V2_15, "limits", "by_start_time"),
        (NatsVersion::V2_9, "workqueue", "all"),
        (NatsVersion::V2_15, "workqueue", "all"),
    ] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({ "retention": retention })).await;
        consumer(&broker, "c", json!({})).await;
        let (warnings, _guard) = Warnings::hear();
        let keys = "stream = \"EVENTS\"\nconsumer = \"c\"";
        let replicas = [receiving(&broker, keys).await, receiving(&broker, keys).await];
        wait_for(&broker, 2).await;
        for round in 1..=3_u64 {
            assert_eq!(lost(&broker, &replicas, &round.to_string()).await, policy, "{version:?}");
            // Each noticed the loss, and none was refused when it created the consumer.
            let errors = replicas.each_ref().map(|it| it.receiver.metrics().snapshot().source_errors);
            assert_eq!(errors, [round; 2], "{version:?}: {:?}", warnings.all());
        }
        let warned = created_again(&warnings);
        assert!(warned.len() >= 3 && !warned[0].contains("the first message"), "{:?}", warnings.all());
        for replica in replicas {
            replica.stop().await;
        }
    }
}

#[tokio::test]
async fn an_idle_source_notes_that_all_is_acknowledged() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    // Requests end after two seconds.
    consumer(&broker, "c", json!({ "max_expires": 2_000_000_000_u64 })).await;
    let mut asked = broker.client.subscribe("$JS.API.CONSUMER.INFO.EVENTS.c").await.expect("subscribed");
    broker.client.flush().await.expect("known to the server");
    publish(&broker.client, "in.a", &[], b"first").await;
    let receiving = [receiving(&broker, "stream = \"EVENTS\"\nconsumer = \"c\"").await];
    // When it connected, the message was pending. It waits again once it has the second answer.
    for _ in 0..2 {
        timeout(PATIENCE, asked.next()).await.expect("in time").expect("it asks");
    }
    wait_for(&broker, 1).await;
    assert_eq!(lost(&broker, &receiving, "again").await, "by_start_time");
    let [receiving] = receiving;
    receiving.stop().await;
}
