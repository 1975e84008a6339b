//! A server that is killed, comes back empty, or is cut off at the worst moment.

use std::time::Instant;

use postbox_core::NewEvent;
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::sending::{PATIENCE, context, deliver, deliveries, said, send};
use postbox_testkit::servers::NatsVersion;
use postbox_testkit::sink_faults::{self, Stored, until_stored, whole_and_in_order};
use serde_json::json;
use tokio::time::timeout;

use crate::broker::{Broker, stored};
use crate::stand::{SHORT, sink, sink_with};

const KEYS: &str = "subject = \"in.{topic}\"\nstream = \"EVENTS\"\ncreate = {}\n";

fn event(payload: &str) -> NewEvent {
    NewEvent::json("t", payload.to_owned())
}

/// Returns what the stream has.
pub(crate) async fn arrived(client: &async_nats::Client) -> Vec<Stored> {
    let read = |message: crate::broker::Stored| {
        let id = message.header("Nats-Msg-Id").expect("an id").to_owned();
        (id, String::from_utf8(message.payload).expect("text"))
    };
    stored(client, "EVENTS").await.into_iter().map(read).collect()
}

#[tokio::test]
async fn a_server_that_is_killed_under_load_loses_and_repeats_nothing() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let mut broker = Broker::launch(version, "").await;
        let sink = sink(&broker.server.url(), KEYS).await;
        let appended = sink_faults::kill_under_load(sink, &mut broker.server, 4).await;
        let stored = until_stored(async || arrived(&broker.client).await, appended).await;
        whole_and_in_order(&stored, appended);
        assert_eq!(stored.len(), appended, "each once");
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
    let said = ["ambiguous nats_disconnected", "duplicate"];
    sink_faults::an_answer_is_lost(&sink, &proxy, 100, said, async || arrived(&broker.client).await).await;
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

#[tokio::test]
async fn a_black_hole_is_ambiguous_and_then_an_outage() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    let proxy = FaultProxy::in_front_of(&broker.server.url()).await;
    let sink = sink_with(&proxy.url(&broker.server.url()), KEYS, &context(SHORT)).await;
    let said = ["ambiguous nats_ack_timeout", "unavailable connect_timeout"];
    sink_faults::a_black_hole(&sink, &proxy, SHORT, said, async || arrived(&broker.client).await).await;
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
    sink_faults::connections_are_lost(&sink, &proxy, "nats_disconnected").await;
}
