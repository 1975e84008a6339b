//! A server that is killed, cut off at the worst moment, silent, or without subscribers.

use std::collections::BTreeMap;
use std::time::Instant;

use postbox_core::NewEvent;
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::sending::{PATIENCE, Working, codes, context, deliver, numbered, said, send};
use postbox_testkit::servers::PrivateMqtt;
use postbox_testkit::sink_faults;
use tokio::time::timeout;

use crate::support::{Gateway, Mode, Peer, SHORT, property, server, sink, sink_with};

const KEYS: &str = "topic = \"in/{topic}\"";

fn event(payload: &str) -> NewEvent {
    NewEvent::json("t", payload.to_owned())
}

async fn subscriber(server: &PrivateMqtt) -> Peer {
    let mut subscriber = Peer::connect(&server.url()).await;
    subscriber.subscribe("in/#").await;
    subscriber.subscribe("fence").await;
    subscriber
}

#[tokio::test]
async fn an_event_that_nobody_subscribed_to_is_not_delivered_unless_that_is_allowed() {
    let server = server().await;
    let strict = sink(&server.url(), KEYS).await;
    let loose = sink(&server.url(), &format!("{KEYS}\nmandatory = false")).await;
    assert_eq!(said(&send(&strict, event("1")).await), "ambiguous mqtt_no_subscriber");
    assert_eq!(said(&send(&loose, event("1")).await), "delivered");
    let mut subscriber = subscriber(&server).await;
    assert_eq!(said(&send(&strict, event("2")).await), "delivered");
    assert_eq!(subscriber.drain().await.len(), 1);
}

/// A task that reads a connection ends by a panic, or with the runtime that it was started in.
#[tokio::test]
async fn a_connection_whose_task_is_gone_is_replaced() {
    let server = server().await;
    let sink = sink(&server.url(), &format!("{KEYS}\nmandatory = false")).await;
    let first = sink.clone();
    let elsewhere = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        assert_eq!(said(&runtime.block_on(send(&first, event("1")))), "delivered");
    });
    elsewhere.await.expect("no panic");
    assert_eq!(said(&send(&sink, event("2")).await), "delivered");
}

/// Far more events than the server takes at once, in concurrent calls.
#[tokio::test]
async fn the_server_s_receive_maximum_is_kept_and_keys_stay_in_order() {
    let server = server().await;
    let mut subscriber = subscriber(&server).await;
    let working = Working::start(sink(&server.url(), KEYS).await);
    working.append(0..2_000).await;
    let mut by_key: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for _ in 0..2_000 {
        let message = subscriber.next().await;
        let number = String::from_utf8_lossy(&message.payload).parse().expect("a number");
        by_key.entry(property(&message, "subject").expect("a key")).or_default().push(number);
    }
    assert!(by_key.len() == 10 && by_key.values().all(|numbers| numbers.is_sorted()), "{by_key:?}");
    working.stop().await;
    assert!(subscriber.drain().await.is_empty(), "each once");
}

#[tokio::test]
async fn a_server_that_is_killed_is_an_outage_and_what_it_did_not_confirm_goes_again() {
    let mut server = server().await;
    let mut before = subscriber(&server).await;
    let sink = sink(&server.url(), KEYS).await;
    assert_eq!(said(&send(&sink, event("1")).await), "delivered");
    assert_eq!(before.drain().await.len(), 1);
    let working = Working::start(sink);
    server.kill();
    working.append(0..50).await;
    let failed = async {
        while working.relay.metrics().snapshot().unavailable == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, failed).await.expect("it tries");
    server.start().await;
    // Until a client has subscribed, the server drops the events and says so.
    let mut after = subscriber(&server).await;
    let mut numbers = Vec::new();
    while numbers.len() < 50 {
        numbers.push(String::from_utf8_lossy(&after.next().await.payload).parse::<usize>().expect("a number"));
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (0..50).collect::<Vec<_>>());
    working.stop().await;
}

#[tokio::test]
async fn a_lost_answer_is_ambiguous_and_the_event_may_be_there_twice() {
    let server = server().await;
    let mut subscriber = subscriber(&server).await;
    let gateway = Gateway::in_front_of(&server.url()).await;
    let sink = sink(&gateway.url(), KEYS).await;
    let sent = numbered(10);
    assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered"]);
    gateway.set(Mode::Lose);
    let cut = async {
        while gateway.attempts().len() < 20 {
            tokio::task::yield_now().await;
        }
        gateway.cut().await;
    };
    let (outcomes, ()) = tokio::join!(deliver(&sink, &sent), cut);
    assert_eq!(codes(&outcomes), ["ambiguous mqtt_connection_lost"]);
    gateway.set(Mode::Pass);
    assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered"]);
    let ids: Vec<_> = subscriber.drain().await.iter().map(|message| property(message, "postbox-id")).collect();
    assert_eq!(ids.len(), 30, "the server knows no repetition");
    assert_eq!(ids[..10], ids[20..], "the consumer does, by the id");
}

/// The server takes 20 messages at once and does not answer. The others were never sent, and never
/// will be.
#[tokio::test]
async fn nothing_is_sent_in_secret_once_a_call_has_ended() {
    let server = server().await;
    let mut subscriber = subscriber(&server).await;
    let gateway = Gateway::in_front_of(&server.url()).await;
    let sink = sink_with(&gateway.url(), KEYS, &context(SHORT)).await;
    assert_eq!(said(&send(&sink, event("first")).await), "delivered");
    gateway.set(Mode::Lose);
    let began = Instant::now();
    assert_eq!(codes(&deliver(&sink, &numbered(100)).await), ["ambiguous mqtt_ack_timeout"]);
    assert!(began.elapsed() < SHORT * 5, "its own deadline: {:?}", began.elapsed());
    gateway.set(Mode::Pass);
    assert_eq!(said(&send(&sink, event("last")).await), "delivered");
    let arrived = subscriber.drain().await;
    assert_eq!(&arrived.last().expect("messages").payload[..], b"last");
    assert_eq!(arrived.len(), 1 + 20 + 1, "what was queued was thrown away");
}

#[tokio::test]
async fn a_frozen_server_is_ambiguous_and_then_an_outage() {
    let server = server().await;
    let mut subscriber = subscriber(&server).await;
    let sink = sink_with(&server.url(), KEYS, &context(SHORT)).await;
    assert_eq!(said(&send(&sink, event("1")).await), "delivered");
    server.freeze();
    assert_eq!(said(&send(&sink, event("2")).await), "ambiguous mqtt_ack_timeout");
    assert_eq!(said(&send(&sink, event("3")).await), "unavailable connect_timeout");
    server.thaw();
    let delivered = async { while said(&send(&sink, event("4")).await) != "delivered" {} };
    timeout(PATIENCE, delivered).await.expect("connected again");
    let payloads: Vec<_> = subscriber.drain().await.into_iter().map(|message| message.payload).collect();
    assert!(payloads.starts_with(&[b"1"[..].into(), b"2"[..].into()]), "it had the second all along: {payloads:?}");
}

#[tokio::test]
async fn a_connection_that_was_lost_meanwhile_is_made_again_by_the_next_call() {
    let server = server().await;
    let _subscriber = subscriber(&server).await;
    let proxy = FaultProxy::in_front_of(&server.url()).await;
    let sink = sink(&proxy.url(&server.url()), KEYS).await;
    sink_faults::connections_are_lost(&sink, &proxy, "mqtt_connection_lost").await;
}
