//! From the HTTP sink over a real connection into a real inbox.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use jiff::Timestamp;
use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX};
use postbox_core::{Clock, Delivery, EventId, LogName, NewEvent, Outcome, Receive, Seq, Sink, SourceName};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_ingress::{Ingress, WebhookSource};
use postbox_memory::MemoryStore;
use postbox_testkit::clock::StillClock;
use postbox_testkit::inbox::Inbox;
use postbox_webhook::standard::SignKey;
use postbox_webhook::{Scheme, Settings, verifier};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::{DEADLINE, HOUR, SECRET};

/// Well-formed headers that anybody can write, with the time of the test clock.
const PLAUSIBLE: &str = "webhook-id: m\r\nwebhook-timestamp: 1767225600\r\nwebhook-signature: v1,AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\r\n";

async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

fn sink(url: String) -> HttpSink {
    let config = HttpSinkConfig {
        keys: vec![SignKey::parse(SECRET).unwrap()],
        timeout: HOUR,
        connect_timeout: HOUR,
        allow: vec!["127.0.0.0/8".parse().unwrap()],
        ..HttpSinkConfig::new(url)
    };
    HttpSink::new(config, Arc::new(StillClock)).unwrap()
}

fn event_id(number: u64) -> EventId {
    format!("00000000-0000-7000-8000-{number:012x}").parse().unwrap()
}

fn delivery(number: u64, event: NewEvent) -> Delivery {
    let event = event.into_event(event_id(number), StillClock.now());
    Delivery { event, seq: Seq(number as i64), attempt: 1, replay: 0, trace: None }
}

/// Delivers one event, within the deadline.
async fn send(sink: &HttpSink, delivery: &Delivery) -> Outcome {
    tokio::time::timeout(DEADLINE, sink.deliver(&[delivery])).await.expect("an outcome in time").remove(0)
}

async fn inbox_at(receive: Arc<dyn Receive>) -> (Arc<Ingress>, String) {
    let verifier = verifier(Scheme::StandardWebhooks, &[SECRET], &Settings::default()).unwrap();
    let source = WebhookSource::new(SourceName::new("peer").unwrap(), LogName::inbox(), verifier);
    let ingress = Ingress::new(vec![source], receive, Arc::new(StillClock)).unwrap();
    let address = serve(postbox_ingress::router(Arc::clone(&ingress))).await;
    (ingress, format!("http://{address}/in/peer"))
}

#[tokio::test]
async fn an_event_arrives_as_it_left() {
    let inbox = Arc::new(Inbox::default());
    let (_, url) = inbox_at(inbox.clone()).await;
    let occurred: Timestamp = "2025-12-24T18:00:00.123456Z".parse().unwrap();
    let event = NewEvent::new("order.päid", &b"\x00\xff raw \r\n"[..], "application/x-thing")
        .key("Zoë \"42\" %41\u{0301}")
        .aggregate("order")
        .version(-7)
        .kind("integration")
        .header("traceparent", "00-ab-cd-01")
        .header("correlation-id", "Zoë\t1")
        .header("empty", "")
        .occurred_at(occurred);
    assert_eq!(send(&sink(url), &delivery(5, event.clone())).await, Outcome::DELIVERED);
    let arrived = inbox.all().remove(0);
    assert_eq!(arrived.message_id, event_id(5).to_string());
    assert_eq!(arrived.event.topic, event.topic);
    assert_eq!(arrived.event.key, event.key);
    assert_eq!(arrived.event.payload, event.payload);
    assert_eq!(arrived.event.content_type, event.content_type);
    assert_eq!((&arrived.event.kind, &arrived.event.aggregate), (&event.kind, &event.aggregate));
    assert_eq!((arrived.event.version, arrived.event.occurred_at), (event.version, event.occurred_at));
    assert_eq!(arrived.event.source.as_deref(), Some("peer"), "who it is from is ours to say");
    for (name, value) in &event.headers {
        assert_eq!(arrived.event.headers.get(name), Some(value), "{name}");
    }
    assert_eq!(arrived.event.headers["ce-id"], event_id(5).to_string());
}

#[tokio::test]
async fn as_many_headers_as_an_event_can_have_arrive_all() {
    let inbox = Arc::new(Inbox::default());
    let (ingress, url) = inbox_at(inbox.clone()).await;
    let sink = sink(url);
    let dropped = || ingress.headers_dropped().iter().map(|(_, count)| count).sum::<u64>();
    // Filled to the last header and byte; and one event with room for what the sink adds.
    for (number, count) in [(1, 8), (2, HEADERS_MAX)] {
        let value = "v".repeat(HEADER_BYTES_MAX / HEADERS_MAX - 3);
        let event = NewEvent::json("t", "{}").source("billing").tenant("acme");
        let event = (0..count).fold(event, |event, n| event.header(format!("h{n:02}"), value.clone()));
        event.validate().expect("it can be appended");
        assert_eq!(send(&sink, &delivery(number, event.clone())).await, Outcome::DELIVERED);
        let arrived = inbox.all().into_iter().find(|it| it.message_id == event_id(number).to_string()).unwrap();
        for (name, value) in &event.headers {
            assert_eq!(arrived.event.headers.get(name), Some(value), "{name}");
        }
        assert_eq!(arrived.event.headers["postbox-message-id"], event_id(number).to_string());
        // Headers that only repeat event fields were left out, and counted.
        let repeated = ["ce-id", "ce-source", "ce-tenant", "webhook-id"];
        let kept = repeated.iter().filter(|name| arrived.event.headers.contains_key(**name)).count();
        assert_eq!((kept, dropped()), if count == HEADERS_MAX { (0, 4) } else { (4, 0) });
    }
}

#[tokio::test]
async fn a_second_delivery_is_a_success_and_a_replay_a_new_message() {
    let store = Arc::new(MemoryStore::new(Arc::new(StillClock)));
    let (ingress, url) = inbox_at(store).await;
    let sink = sink(url);
    let mut delivery = delivery(5, NewEvent::json("order.paid", "{}"));
    for _ in 0..3 {
        assert!(send(&sink, &delivery).await.is_delivered());
    }
    delivery.replay = 1;
    assert!(send(&sink, &delivery).await.is_delivered());
    let count = |code| ingress.counts().iter().filter(|count| count.code == code).map(|count| count.count).sum::<u64>();
    assert_eq!((count("accepted"), count("duplicate")), (2, 2));
}

/// Sends raw bytes and returns the first line of the answer.
async fn raw(url: &str, head: &str, piece: &[u8], pieces: usize) -> String {
    let address = url.trim_start_matches("http://").split('/').next().unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream
        .write_all(format!("POST /in/peer HTTP/1.1\r\nhost: x\r\n{PLAUSIBLE}{head}\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let (mut read, mut write) = stream.split();
    let mut answer = [0; 64];
    let sending = async {
        for _ in 0..pieces {
            if write.write_all(piece).await.is_err() {
                break;
            }
        }
        std::future::pending::<()>().await
    };
    let count = tokio::select! {
        count = read.read(&mut answer) => count.unwrap_or(0),
        () = sending => 0,
        () = tokio::time::sleep(DEADLINE) => panic!("no answer"),
    };
    String::from_utf8_lossy(&answer[..count]).lines().next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn over_a_real_connection_lengths_that_lie_get_nowhere() {
    let inbox = Arc::new(Inbox::default());
    let (ingress, url) = inbox_at(inbox.clone()).await;
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let answer = raw(&url, "transfer-encoding: chunked", chunk.as_bytes(), 10_000).await;
    assert!(answer.contains("413"), "{answer}");
    let answer = raw(&url, "content-length: 99999999999", b"x", 1).await;
    assert!(answer.contains("413"), "{answer}");
    let answer = raw(&url, "content-length: 99999999999999999999999", b"x", 1).await;
    assert!(answer.contains("400"), "{answer}");
    // Longer than declared: the extra bytes are not part of the message.
    let answer = raw(&url, "content-length: 1", b"xx", 1).await;
    assert!(answer.contains("401"), "{answer}");
    assert!(inbox.all().is_empty());
    // The next genuine message gets in.
    assert!(send(&sink(url), &delivery(1, NewEvent::json("order.paid", "{}"))).await.is_delivered());
    assert!(ingress.counts().iter().any(|count| count.code == "body_too_large" && count.count == 2));
}
