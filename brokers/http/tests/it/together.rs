//! From the sink over a real connection into a real inbox.

use std::sync::Arc;

use jiff::Timestamp;
use postbox_core::{LogName, MemoryStore, NewEvent, Receive, SourceName};
use postbox_http::ingress::{self, Ingress, WebhookSource};
use postbox_webhook::{Scheme, Settings, verifier};

use crate::stand::{Inbox, SECRET, StillClock, config, delivery, event_id, send, serve, short, sink};

async fn inbox_at(receive: Arc<dyn Receive>) -> (Arc<Ingress>, String) {
    let verifier = verifier(Scheme::StandardWebhooks, &[SECRET], &Settings::default()).unwrap();
    let source = WebhookSource::new(SourceName::new("peer").unwrap(), LogName::inbox(), verifier);
    let ingress = Ingress::new(vec![source], receive, Arc::new(StillClock)).unwrap();
    let address = serve(ingress::router(Arc::clone(&ingress))).await;
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
    assert_eq!(short(&send(&sink(config(url)), &delivery(5, event.clone())).await), ("delivered", ""));
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
async fn a_second_delivery_is_a_success_and_a_replay_a_new_message() {
    let store = Arc::new(MemoryStore::new(Arc::new(StillClock)));
    let (ingress, url) = inbox_at(store).await;
    let sink = sink(config(url));
    let mut delivery = delivery(5, NewEvent::json("order.paid", "{}"));
    for _ in 0..3 {
        assert!(send(&sink, &delivery).await.is_delivered());
    }
    delivery.replay = 1;
    assert!(send(&sink, &delivery).await.is_delivered());
    let count = |code| ingress.counts().iter().filter(|count| count.code == code).map(|count| count.count).sum::<u64>();
    assert_eq!((count("accepted"), count("duplicate")), (2, 2));
}
