//! The messages on the wire, and what arrives at the other end.

use postbox_config::SourceConfig as _;
use postbox_core::{Delivery, NewEvent};
use postbox_sqs::SqsSourceTable;
use postbox_testkit::hostile;

use crate::support::{Broker, make_topic, queue_keys, said, sink, source, subscribe, topic_keys, unique};
use postbox_testkit::sending::{deliver, deliveries, table};

fn full() -> Delivery {
    let event = NewEvent::json("order.paid", "{ \"cents\":100 }").key("order 42").aggregate("order").version(7);
    let event =
        event.kind("integration").source("billing").tenant("acme").header("traceparent", "00-ab").header("x", "");
    deliveries([event]).remove(0)
}

/// From our sink to our source: through a queue, through a topic as SNS wraps it, and through a raw
/// one.
#[tokio::test]
async fn an_event_is_itself_again_whichever_way_it_goes() {
    let broker = Broker::launch().await;
    let topic = make_topic(&broker, "events").await;
    for (queue, raw) in [("direct", None), ("wrapped", Some(false)), ("raw", Some(true))] {
        for envelope in ["raw", "cloudevents-binary"] {
            let name = format!("{queue}-{envelope}");
            let url = broker.queue(&name).await;
            let keys = match raw {
                None => queue_keys(&url, &broker.server.url()),
                Some(raw) => {
                    subscribe(&broker, &topic, &name, raw).await;
                    topic_keys("events", &broker.server.url())
                }
            };
            let sent = full();
            let sink = sink(&format!("{keys}envelope = {envelope:?}\n")).await;
            assert_eq!(said(&deliver(&sink, std::slice::from_ref(&sent)).await), ["delivered"]);
            let keys = queue_keys(&url, &broker.server.url());
            let source = source(&keys).await;
            let given = source.next(10).await.expect("a message").remove(0);
            let name = "orders".parse().expect("a name");
            let inbound = table::<SqsSourceTable>(&keys).decode(&name, &given.message).expect("an event").expect("one");
            let event = &inbound.event;
            assert_eq!(inbound.message_id, sent.dedupe_id(), "{queue} {envelope}");
            assert_eq!((event.topic.as_str(), event.key.as_deref()), ("order.paid", Some("order 42")));
            assert_eq!(event.payload, sent.event.payload, "{queue} {envelope}");
            assert_eq!((&*event.headers["traceparent"], &*event.headers["x"]), ("00-ab", ""));
            let version = (envelope == "cloudevents-binary").then_some(7);
            assert_eq!(event.version, version);
            source.ack(&[given.token]).await.expect("deleted");
            source.close().await;
        }
    }
}

#[tokio::test]
async fn a_fifo_queue_has_the_key_as_group_and_knows_repetitions() {
    let broker = Broker::shared().await;
    let queue = broker.queue(&unique("events.fifo")).await;
    let sink = sink(&queue_keys(&queue, &broker.url)).await;
    let mut sent = deliveries([
        NewEvent::json("t", "1").key("order-42"),
        NewEvent::json("t", "2").key("a key with spaces"),
        NewEvent::json("t", "3"),
    ]);
    for _ in 0..2 {
        assert_eq!(said(&deliver(&sink, &sent).await), ["delivered"; 3]);
    }
    sent[0].replay = 1;
    assert_eq!(said(&deliver(&sink, &sent[..1]).await), ["delivered"]);
    let taken = broker.take(&queue).await;
    let bodies: Vec<&str> = taken.iter().map(|it| it.body.as_str()).collect();
    assert_eq!(taken.len(), 4, "repetitions are none, a replay is: {bodies:?}");
    let by_id = |id: &str| taken.iter().find(|it| it.dedupe_id.as_deref() == Some(id)).expect("it is there");
    assert_eq!(by_id(&sent[0].dedupe_id()).group.as_deref(), Some("order-42"));
    let hashed = by_id(&sent[1].dedupe_id());
    assert!(hashed.group.as_deref().is_some_and(|group| group.starts_with("sha256:")), "{hashed:?}");
    assert_eq!(hashed.attributes["postbox-key"], "a key with spaces");
    assert_eq!(by_id(&sent[2].dedupe_id()).group, Some(sent[2].dedupe_id()));
}

/// Every event that a store can hold is delivered unchanged, or is dead with a stable code. The
/// other events of the call are delivered.
#[tokio::test]
async fn hostile_events_are_delivered_as_they_are_or_die_alone() {
    let broker = Broker::shared().await;
    let queue = broker.queue(&unique("events")).await;
    let sink = sink(&queue_keys(&queue, &broker.url)).await;
    let mut delivered = 0;
    for case in hostile::accepted() {
        let sent = deliveries([case.event, NewEvent::json("plain", "{}")]);
        let outcomes = said(&deliver(&sink, &sent).await);
        assert_eq!(outcomes[1], "delivered", "after {}", case.name);
        let taken = broker.take(&queue).await;
        match outcomes[0].as_str() {
            "delivered" => {
                delivered += 1;
                let own = taken.iter().find(|it| it.attributes["postbox-id"] == sent[0].dedupe_id());
                let own = own.unwrap_or_else(|| panic!("{}: it is not there", case.name));
                let event = &sent[0].event;
                assert_eq!(own.body.as_bytes(), &event.payload[..], "{}", case.name);
                assert_eq!(own.attributes["postbox-topic"], event.topic.as_str(), "{}", case.name);
                let key = event.key.as_ref().map(|key| key.as_str());
                assert_eq!(own.attributes.get("postbox-key").map(String::as_str), key, "{}", case.name);
                assert!(own.attributes.len() <= 10, "{}: {:?}", case.name, own.attributes);
            }
            "dead body_empty" | "dead body_not_text" | "dead attribute_invalid" | "dead payload_too_large" => {
                assert_eq!(taken.len(), 1, "{}: it never reached the wire", case.name);
            }
            other => panic!("{}: {other}", case.name),
        }
    }
    assert!(delivered > 50, "{delivered}");
}
