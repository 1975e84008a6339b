//! Messages that the client library cannot read: the connection is lost each time one arrives.

use postbox_testkit::receiving::{Receiving, ack, take};
use postbox_testkit::servers::NatsVersion;
use postbox_testkit::warnings::Warnings;
use serde_json::{Value, json};

use crate::broker::{Broker, api, publish};
use crate::stand::{AS_LIMITED, LIMITED, source, table};

/// Subject and header block of each message.
const UNREADABLE: [(&[u8], &[u8]); 6] = [
    (b"in.b", b"NATS/1.0\r\na: b\r\nno colon\r\n\r\n"),
    (b"in.b", b"NATS/1.0\r\na: b\r\nx: \xff\xfe\r\n\r\n"),
    (b"in.b", b"NATS/1.0\r\na: b\r\na b: c\r\n\r\n"),
    (b"in.b", b"NATS/1.0 abc\r\na: b\r\n\r\n"),
    (b"in.b", b"NATS/9.9\r\na: b\r\n\r\n"),
    (b"in.\xff", b"NATS/1.0\r\na: b\r\n\r\n"),
];

/// Publishes readable messages, with these unreadable ones between them.
async fn stream(broker: &Broker, unreadable: &[(&[u8], &[u8])]) {
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    for (n, (subject, headers)) in unreadable.iter().enumerate() {
        publish(&broker.client, "in.a", &[], format!("before {n}").as_bytes()).await;
        broker.raw(subject, headers, format!("unreadable {n}").as_bytes()).await;
        publish(&broker.client, "in.a", &[], format!("after {n}").as_bytes()).await;
    }
}

#[tokio::test]
async fn they_are_received_without_what_cannot_be_read() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, "").await;
        stream(&broker, &UNREADABLE).await;
        let (warnings, _guard) = Warnings::hear();
        let keys = "stream = \"EVENTS\"\nfilter = \"in.>\"\nack_wait = \"1s\"";
        let receiving = Receiving::start(table(&broker.server.url(), keys)).await;
        receiving.until(|it| it.bodies().len() == 3 * UNREADABLE.len()).await;
        let settled = async || {
            let info = api(&broker.client, "CONSUMER.INFO.EVENTS.postbox", Value::Null).await.expect("it is there");
            (info["num_ack_pending"].as_u64(), info["num_pending"].as_u64()) == (Some(0), Some(0))
        };
        let all = async { while !settled().await {} };
        tokio::time::timeout(postbox_testkit::sending::PATIENCE, all).await.expect("all of it is acknowledged");
        let stored = receiving.inbox.all();
        for n in 0..UNREADABLE.len() {
            let body = format!("unreadable {n}");
            let its = stored.iter().find(|it| it.event.payload == body.as_bytes()).expect("stored");
            assert_eq!(its.event.headers.get("a").map(String::as_str), Some("b"), "{version:?} {its:?}");
        }
        receiving.stop().await;
        let named = |line: &String| line.contains("nats_message_unreadable") && line.contains("stream rmm EVENTS 2");
        assert!(warnings.all().iter().any(named), "{:?}", warnings.all());
    }
}

/// The first message is never acknowledged, and one look is not enough to reach what is behind it.
#[tokio::test]
async fn they_are_found_however_far_behind_a_message_that_is_not_settled() {
    const READABLE: usize = 2_100;
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    for _ in 0..READABLE {
        broker.client.publish("in.a", "readable".into()).await.expect("sent");
    }
    let source = source(&broker.server.url(), "stream = \"EVENTS\"\nack_wait = \"1s\"").await;
    assert_eq!(take(&*source, 1).await.len(), 1);
    let mut left = READABLE - 1;
    while left > 0 {
        let some = take(&*source, left.min(100)).await;
        ack(&*source, &some).await;
        left -= some.len();
    }
    let (subject, headers) = UNREADABLE[0];
    broker.raw(subject, headers, b"unreadable").await;
    // The first message comes again on each connection.
    let found = async { while take(&*source, 1).await[0].message.payload != b"unreadable"[..] {} };
    tokio::time::timeout(postbox_testkit::sending::PATIENCE, found).await.expect("found in time");
}

#[tokio::test]
async fn whoever_may_not_look_for_them_is_warned_and_gets_the_others() {
    let broker = Broker::launch(NatsVersion::V2_15, LIMITED).await;
    stream(&broker, &UNREADABLE[..2]).await;
    let (warnings, _guard) = Warnings::hear();
    let keys = format!("stream = \"EVENTS\"\nack_wait = \"1s\"\n{AS_LIMITED}");
    let receiving = Receiving::start(table(&broker.server.url(), &keys)).await;
    receiving.until(|it| it.bodies().len() == 4).await;
    receiving.stop().await;
    let warned =
        |line: &String| line.contains("nats_message_unreadable") && line.contains("$JS.API.STREAM.MSG.GET.EVENTS");
    assert!(warnings.all().iter().any(warned), "{:?}", warnings.all());
}
