//! From a stream into an inbox.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use postbox_config::SourceConfig as _;
use postbox_core::{ErrorKind, LogName, NewEvent, RawMessage, Unreadable};
use postbox_engine::Receiver;
use postbox_testkit::inbox::{Inbox, Mode};
use postbox_testkit::servers::NatsVersion;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::broker::{Broker, PATIENCE, api, publish};
use crate::stand::{deliver, deliveries, said, sink, source, source_context, table};

struct Receiving {
    inbox: Arc<Inbox>,
    receiver: Arc<Receiver>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Receiving {
    async fn start(url: &str, keys: &str) -> Self {
        let (inbox, table, context) = (Arc::new(Inbox::default()), table(url, keys), source_context());
        let source = table.build(&context).await.expect("a source");
        let receiver = Receiver::builder(inbox.clone(), context.name.clone(), LogName::inbox())
            .pull(source)
            .decode(move |message: &RawMessage| table.decode(&context.name, message))
            .build();
        let (receiver, stop) = (Arc::new(receiver.expect("good settings")), CancellationToken::new());
        let task = tokio::spawn({
            let (receiver, stop) = (receiver.clone(), stop.clone());
            async move { receiver.run(stop).await }
        });
        Self { inbox, receiver, stop, task }
    }

    async fn until(&self, condition: impl Fn(&Self) -> bool) {
        let met = async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, met).await.expect("it happens in time");
    }

    async fn stop(self) {
        self.stop.cancel();
        timeout(PATIENCE, self.task).await.expect("in time").expect("it stops");
    }
}

/// How many messages the consumer waits for, and how many it has not given out.
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
        let headers = (0..64).map(|n| (format!("h{n}"), "v".to_owned())).collect();
        let sent = deliveries([
            NewEvent::new("order.paid", &b"\xff\0"[..], "text/plain")
                .key("Zoë 1")
                .kind("fact")
                .aggregate("order")
                .version(7),
            NewEvent { headers, ..NewEvent::json("order.sent", "{}").tenant("acme") },
        ]);
        for outcome in deliver(&sink, &sent).await {
            assert_eq!(said(&outcome).0, "delivered");
        }
        // And one of somebody who knows nothing of CloudEvents.
        publish(&broker.client, "in.plain", &[("a", "b")], b"{}").await;
        let receiving = Receiving::start(&broker.server.url(), "stream = \"EVENTS\"").await;
        receiving.until(|it| it.inbox.all().len() == 3).await;
        let stored = receiving.inbox.all();
        let by_topic = |topic: &str| &stored.iter().find(|it| it.event.topic == topic).expect(topic).event;
        let paid = by_topic("order.paid");
        assert_eq!(paid.key.as_deref(), Some("Zoë 1"));
        assert_eq!(
            (paid.kind.as_deref(), paid.aggregate.as_deref(), paid.version),
            (Some("fact"), Some("order"), Some(7))
        );
        assert_eq!((paid.content_type.as_deref(), &paid.payload[..]), (Some("text/plain"), &b"\xff\0"[..]));
        assert_eq!(paid.occurred_at, Some(sent[0].event.occurred_at));
        assert_eq!(paid.headers["ce-id"], sent[0].event.id.to_string());
        let full = by_topic("order.sent");
        assert!((0..64).all(|n| full.headers.contains_key(&format!("h{n}"))), "{:?}", full.headers);
        assert_eq!(full.tenant, None, "whoever may publish could name any");
        assert_eq!(
            (by_topic("in.plain").headers["a"].as_str(), by_topic("in.plain").content_type.as_deref()),
            ("b", None)
        );
        let ids: BTreeSet<String> = stored.iter().map(|it| it.message_id.clone()).collect();
        let expected = [sent[0].dedupe_id(), sent[1].dedupe_id(), "EVENTS:3".to_owned()];
        assert_eq!(ids, expected.into());
        receiving.stop().await;
        assert_eq!(pending(&broker, "EVENTS.postbox").await, (0, 0), "all of it is acknowledged");
    }
}

#[tokio::test]
async fn duplicates_conflicts_and_poison_are_settled() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    // It forgets ids at once, so that all of them are stored.
    broker.stream("EVENTS", &["in.>"], json!({ "duplicate_window": 100_000_000_u64 })).await;
    let receiving = Receiving::start(&broker.server.url(), "stream = \"EVENTS\"").await;
    let long = format!("in.{}", "t".repeat(300));
    let send = async |subject: &str, id: &str, body: &str| {
        publish(&broker.client, subject, &[("Nats-Msg-Id", id)], body.as_bytes()).await;
        tokio::time::sleep(Duration::from_millis(150)).await;
    };
    send("in.a", "1", "one").await;
    send("in.a", "1", "one").await;
    send("in.a", "1", "another").await;
    send(&long, "2", "poison").await;
    send("in.a", "3", "three").await;
    receiving.until(|it| it.receiver.metrics().snapshot().accepted == 3).await;
    receiving.until(|it| it.receiver.metrics().snapshot().conflicts == 1).await;
    let counted = receiving.receiver.metrics().snapshot();
    assert_eq!((counted.duplicates, counted.poison, counted.rejected), (1, 1, 0));
    let poison: Vec<_> = receiving
        .inbox
        .all()
        .into_iter()
        .filter(|stored| Unreadable::poison(&stored.event.headers).is_some())
        .collect();
    assert_eq!((poison.len(), &poison[0].event.payload[..]), (1, &b"poison"[..]), "with its bytes");
    receiving.stop().await;
    assert_eq!(pending(&broker, "EVENTS.postbox").await, (0, 0));
}

#[tokio::test]
async fn a_slow_store_is_waited_for() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        let receiving = Receiving::start(&broker.server.url(), "stream = \"EVENTS\"\nack_wait = \"1s\"").await;
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
        let receiving = Receiving::start(&broker.server.url(), "stream = \"EVENTS\"\nack_wait = \"1s\"").await;
        let mut published = 0;
        for _ in 0..4 {
            for _ in 0..200 {
                publish(&broker.client, "in.a", &[], published.to_string().as_bytes()).await;
                published += 1;
            }
            broker.server.kill();
            broker.start().await;
        }
        // A publish that was tried again may be stored under a second number.
        let bodies = |it: &Receiving| -> BTreeSet<Vec<u8>> {
            it.inbox.all().iter().map(|it| it.event.payload.to_vec()).collect()
        };
        receiving.until(|it| bodies(it).len() == published).await;
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
}

#[tokio::test]
async fn a_consumer_that_is_made_has_what_is_configured() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        publish(&broker.client, "in.b", &[], b"no").await;
        publish(&broker.client, "in.a", &[], b"yes").await;
        let keys = "stream = \"EVENTS\"\nconsumer = \"c\"\nfilter = \"in.a\"\nack_wait = \"7s\"\nin_flight = 9";
        let receiving = Receiving::start(&broker.server.url(), keys).await;
        receiving.until(|it| it.inbox.all().len() == 1).await;
        assert_eq!(&receiving.inbox.all()[0].event.payload[..], b"yes");
        let info = api(&broker.client, "CONSUMER.INFO.EVENTS.c", Value::Null).await.expect("it is there");
        assert_eq!(info["config"]["ack_wait"], 7_000_000_000_u64);
        assert_eq!(
            (&info["config"]["max_ack_pending"], &info["config"]["filter_subject"]),
            (&json!(9), &json!("in.a"))
        );
        // Deleted while we wait: it is found and made again.
        api(&broker.client, "CONSUMER.DELETE.EVENTS.c", Value::Null).await.expect("deleted");
        publish(&broker.client, "in.a", &[("Nats-Msg-Id", "2")], b"again").await;
        receiving.until(|it| it.inbox.all().iter().any(|it| it.message_id == "2")).await;
        receiving.stop().await;
    }
}
