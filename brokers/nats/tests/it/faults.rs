//! A server that is killed, comes back empty, or is cut off at the worst moment.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use postbox_core::NewEvent;
use postbox_testkit::proxy::{Direction, FaultProxy};
use postbox_testkit::sending::{PATIENCE, Working, context, deliver, deliveries, said, send};
use postbox_testkit::servers::NatsVersion;
use serde_json::json;
use tokio::time::timeout;

use crate::broker::{Broker, Stored, stored};
use crate::stand::{SHORT, sink, sink_with};

const KEYS: &str = "subject = \"in.{topic}\"\nstream = \"EVENTS\"\ncreate = {}\n";

fn event(payload: &str) -> NewEvent {
    NewEvent::json("t", payload.to_owned())
}

/// Waits until `count` messages are stored, and returns them.
pub(crate) async fn until_stored(client: &async_nats::Client, count: usize) -> Vec<Stored> {
    let there = async {
        loop {
            let info = crate::broker::api(client, "STREAM.INFO.EVENTS", serde_json::Value::Null).await;
            if info.is_ok_and(|info| info["state"]["messages"].as_u64() >= Some(count as u64)) {
                return stored(client, "EVENTS").await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE * 2, there).await.expect("all of them, in time")
}

/// Checks that every number is stored once, and that those of a key are in order.
pub(crate) fn whole_and_in_order(stored: &[Stored], count: usize) {
    let mut by_key: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for message in stored {
        let number = String::from_utf8_lossy(&message.payload).parse().expect("a number");
        by_key.entry(message.header("ce-subject").expect("a key")).or_default().push(number);
    }
    for (key, numbers) in &by_key {
        assert!(numbers.is_sorted(), "key {key} in order: {numbers:?}");
    }
    let mut all: Vec<usize> = by_key.into_values().flatten().collect();
    all.sort_unstable();
    assert_eq!(all, (0..count).collect::<Vec<_>>(), "each once, none lost");
}

#[tokio::test]
async fn a_server_that_is_killed_under_load_loses_and_repeats_nothing() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let mut broker = Broker::launch(version, "").await;
        let working = Working::start(sink(&broker.server.url(), KEYS).await);
        let mut appended = 0;
        for _ in 0..4 {
            working.append(appended..appended + 500).await;
            appended += 500;
            // In the middle of the work.
            until_stored(&broker.client, appended - 450).await;
            broker.server.kill();
            working.append(appended..appended + 50).await;
            appended += 50;
            broker.start().await;
        }
        whole_and_in_order(&until_stored(&broker.client, appended).await, appended);
        let snapshot = working.relay.metrics().snapshot();
        assert_eq!((snapshot.dead, snapshot.delivered), (0, appended as u64));
        working.stop().await;
    }
}

#[tokio::test]
async fn a_server_that_comes_back_empty_is_an_outage_until_its_stream_is_there() {
    let mut broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    let with = sink(&broker.server.url(), KEYS).await;
    let without = sink(&broker.server.url(), "subject = \"in.{topic}\"").await;
    for sink in [&with, &without] {
        assert_eq!(said(&send(sink, event("1")).await), "delivered");
    }
    broker.server.kill();
    let outcome = said(&send(&without, event("2")).await);
    assert!(outcome.starts_with("unavailable ") || outcome.starts_with("ambiguous "), "{outcome}");
    broker.server.empty();
    broker.start().await;
    let outcome = said(&send(&without, event("2")).await);
    assert_eq!(outcome, "unavailable nats_no_stream");
    // The stream is created again where that is configured. The dead connection may have to be
    // noticed first.
    let made = async { while said(&send(&with, event("3")).await) != "delivered" {} };
    timeout(PATIENCE, made).await.expect("made");
    assert_eq!(said(&send(&without, event("4")).await), "delivered");
    assert_eq!(broker.stored("EVENTS").await.len(), 2);
}

#[tokio::test]
async fn a_lost_ack_is_ambiguous_and_its_repetition_a_duplicate() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    let proxy = FaultProxy::in_front_of(&broker.server.url()).await;
    let sink = sink(&proxy.url(&broker.server.url()), KEYS).await;
    assert_eq!(said(&send(&sink, event("0")).await), "delivered");
    proxy.swallow(&[Direction::ToClient]);
    let sent = deliveries((1..=100).map(|n| event(&n.to_string())));
    let cut = async {
        proxy.swallowed(Direction::ToClient).await;
        until_stored(&broker.client, 101).await;
        proxy.reset();
        proxy.heal();
    };
    let (outcomes, ()) = tokio::join!(deliver(&sink, &sent), cut);
    for outcome in &outcomes {
        assert_eq!(said(outcome), "ambiguous nats_disconnected");
    }
    for outcome in deliver(&sink, &sent).await {
        assert_eq!(said(&outcome), "duplicate");
    }
    assert_eq!(broker.stored("EVENTS").await.len(), 101);
}

/// Messages queued on a lost connection are not sent on the next one.
#[tokio::test]
async fn nothing_is_sent_in_secret_once_a_call_has_ended() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    let sink = sink(&broker.server.url(), KEYS).await;
    assert_eq!(said(&send(&sink, event("first")).await), "delivered");
    broker.server.freeze();
    // Far more than the system buffers for a server that reads nothing.
    let large = || NewEvent::json("t", vec![b' '; 500_000]);
    let sent = deliveries(std::iter::repeat_with(large).take(100));
    let began = Instant::now();
    for outcome in deliver(&sink, &sent).await {
        assert_eq!(said(&outcome), "ambiguous nats_disconnected");
    }
    assert!(began.elapsed() < PATIENCE / 2, "in time: {:?}", began.elapsed());
    broker.server.thaw();
    let delivered = async { while said(&send(&sink, event("last")).await) != "delivered" {} };
    timeout(PATIENCE, delivered).await.expect("connected again");
    let stored = broker.stored("EVENTS").await.len();
    assert!(stored < sent.len(), "the queue was not sent: {stored}");
}

/// Bytes go out, and nothing comes back.
#[tokio::test]
async fn a_black_hole_is_ambiguous_and_then_an_outage() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    let proxy = FaultProxy::in_front_of(&broker.server.url()).await;
    let sink = sink_with(&proxy.url(&broker.server.url()), KEYS, &context(SHORT)).await;
    assert_eq!(said(&send(&sink, event("first")).await), "delivered");
    proxy.swallow(&[Direction::ToServer, Direction::ToClient]);
    let began = Instant::now();
    for outcome in deliver(&sink, &deliveries([event("1"), event("2")])).await {
        assert_eq!(said(&outcome), "ambiguous nats_ack_timeout");
    }
    assert!(began.elapsed() < SHORT * 5, "its own deadline: {:?}", began.elapsed());
    // Nothing came back, so the connection was given up, and no new one can be opened.
    assert_eq!(said(&send(&sink, event("no")).await), "unavailable connect_timeout");
    proxy.reset();
    proxy.heal();
    assert_eq!(said(&send(&sink, event("last")).await), "delivered");
    let payloads: Vec<Vec<u8>> = broker.stored("EVENTS").await.into_iter().map(|message| message.payload).collect();
    assert_eq!(payloads, [&b"first"[..], b"last"]);
}

#[tokio::test]
async fn a_server_that_is_frozen_is_ambiguous_and_then_an_outage() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    let context = context(SHORT);
    let sink = sink_with(&broker.server.url(), KEYS, &context).await;
    assert_eq!(said(&send(&sink, event("1")).await), "delivered");
    broker.server.freeze();
    let sent = deliveries([event("2")]);
    assert_eq!(said(&deliver(&sink, &sent).await[0]), "ambiguous nats_ack_timeout");
    assert_eq!(said(&deliver(&sink, &sent).await[0]), "unavailable connect_timeout");
    broker.server.thaw();
    // The server had the publish all along.
    let known = async { while said(&deliver(&sink, &sent).await[0]) != "duplicate" {} };
    timeout(PATIENCE, known).await.expect("known");
    assert_eq!(broker.stored("EVENTS").await.len(), 2);
}

#[tokio::test]
async fn a_connection_that_was_lost_meanwhile_is_made_again_by_the_next_call() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    let proxy = FaultProxy::in_front_of(&broker.server.url()).await;
    let sink = sink(&proxy.url(&broker.server.url()), KEYS).await;
    for n in 0..20 {
        proxy.reset();
        while proxy.connections() > 0 {
            tokio::task::yield_now().await;
        }
        let outcome = said(&send(&sink, event(&n.to_string())).await);
        // Whether anything was sent depends on which side notices first that the connection is
        // lost.
        assert!(outcome == "delivered" || outcome.ends_with(" nats_disconnected"), "{outcome}");
        let delivered = async { while said(&send(&sink, event("again")).await) != "delivered" {} };
        timeout(PATIENCE, delivered).await.expect("connected again");
    }
}
