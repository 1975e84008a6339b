//! Runs the suites that every sink and every source passes, against both server versions.

#[path = "it/broker.rs"]
#[allow(dead_code)]
mod broker;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::Subscriber;
use async_trait::async_trait;
use postbox_core::{NewEvent, RawMessage, Sink, Source};
use postbox_nats::{NatsSinkTable, NatsSourceTable};
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits, SourceFixture};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::NatsVersion;
use postbox_testkit::{receiving, sending};
use serde_json::json;
use tokio::sync::Mutex as AsyncMutex;

use self::broker::{Broker, drain, publish};

/// Interval of the checks whether a connection has gone.
const LOOK: Duration = Duration::from_millis(1);
/// Largest message that the server accepts, in bytes, headers included.
const MAX_PAYLOAD: usize = 512 * 1024;
/// The headers of an event with topic `t` and no key, as bytes on the wire.
const HEADERS: &str = "NATS/1.0\r\nce-specversion: 1.0\r\nce-id: 01900000-0000-7000-8000-000000000001\r\nce-type: t\r\n\
    ce-source: postbox\r\nce-time: 1970-01-01T00:00:00Z\r\nce-datacontenttype: application/octet-stream\r\n\
    Nats-Msg-Id: 01900000-0000-7000-8000-000000000001\r\n\r\n";

struct Stream {
    broker: AsyncMutex<Broker>,
    sink: Arc<dyn Sink>,
    /// Receives every publish, whether a stream takes it or not.
    seen: AsyncMutex<(Subscriber, Vec<Attempt>)>,
    state: Mutex<Destination>,
}

async fn stream(version: NatsVersion) -> Stream {
    let broker = Broker::launch(version, &format!("max_payload: {MAX_PAYLOAD}\n")).await;
    broker.stream("EVENTS", &["events.>"], json!({})).await;
    let seen = broker.client.subscribe("events.>").await.expect("subscribed");
    broker.reached().await;
    let keys = format!("url = {:?}\nsubject = \"events.{{topic}}\"", broker.server.url());
    let sink = sending::sink::<NatsSinkTable>(&keys, &sending::context(sending::PATIENCE / 2)).await;
    let (seen, state) = (AsyncMutex::new((seen, Vec::new())), Mutex::new(Destination::Works));
    Stream { broker: AsyncMutex::new(broker), sink, seen, state }
}

#[async_trait]
impl SinkFixture for Stream {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink)
    }

    fn traits(&self) -> SinkTraits {
        SinkTraits {
            // It never asks a sender to slow down.
            throttles: false,
            payload_bytes_max: Some(MAX_PAYLOAD - HEADERS.len()),
            ..SinkTraits::ALL
        }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        let broker = self.broker.lock().await;
        let mut seen = self.seen.lock().await;
        let accepted = *self.state.lock().expect("no panic while held") == Destination::Works;
        let new = drain(&broker.client, &mut seen.0).await;
        seen.1.extend(new.into_iter().map(|message| Attempt {
            dedupe_id: message.headers.and_then(|all| Some(all.get("Nats-Msg-Id")?.as_str().to_owned())),
            payload: message.payload.to_vec(),
            accepted,
        }));
        seen.1.clone()
    }

    /// Larger than the server takes.
    fn poison(&self, event: NewEvent) -> NewEvent {
        NewEvent { payload: vec![b'x'; MAX_PAYLOAD].into(), ..event }
    }

    async fn set(&self, destination: Destination) {
        self.attempts().await;
        let mut broker = self.broker.lock().await;
        if destination == Destination::Down {
            broker.server.kill();
            // Once the system refuses new connections, every existing one has been closed.
            tokio::net::TcpStream::connect(broker.server.url().trim_start_matches("nats://")).await.expect_err("down");
        } else if !broker.server.is_running() {
            broker.start().await;
        }
        match destination {
            // The subscriber exists, so the server does not report that there is none, and nobody
            // answers.
            Destination::Hangs => broker.stream("EVENTS", &["other.>"], json!({})).await,
            Destination::Fails => {
                broker.stream("EVENTS", &["events.>"], json!({ "discard": "new", "max_bytes": 1 })).await;
            }
            Destination::Works => broker.stream("EVENTS", &["events.>"], json!({})).await,
            Destination::Down | Destination::Throttles => {}
        }
        *self.state.lock().expect("no panic while held") = destination;
    }

    async fn arrived(&self) -> Vec<Vec<u8>> {
        let stored = self.broker.lock().await.stored("EVENTS").await;
        stored.into_iter().map(|message| message.payload).collect()
    }
}

struct Consumer {
    broker: Broker,
    proxy: FaultProxy,
    source: Arc<dyn Source>,
}

async fn consumer(version: NatsVersion) -> Consumer {
    let broker = Broker::launch(version, "").await;
    broker.stream("ORDERS", &["order.>"], json!({})).await;
    let proxy = FaultProxy::in_front_of(&broker.server.url()).await;
    let keys = format!("url = {:?}\nstream = \"ORDERS\"\nin_flight = 8", proxy.url(&broker.server.url()));
    let source = receiving::source::<NatsSourceTable>(&keys).await;
    Consumer { broker, proxy, source }
}

#[async_trait]
impl SourceFixture for Consumer {
    fn source(&self) -> Arc<dyn Source> {
        Arc::clone(&self.source)
    }

    async fn publish(&self, message: RawMessage) {
        let own = [("Nats-Msg-Id", message.id.as_deref().expect("an id")), ("Content-Type", &message.content_type)];
        let headers = message.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let headers: Vec<(&str, &str)> = own.into_iter().chain(headers).collect();
        publish(&self.broker.client, &message.topic, &headers, &message.payload).await;
    }

    async fn disconnect(&self) {
        self.proxy.reset();
        // Until then an ack could still pass.
        while self.proxy.connections() > 0 {
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn dead_letters(&self) -> Vec<RawMessage> {
        Vec::new()
    }
}

mod sink_2_9 {
    async fn fixture() -> super::Stream {
        super::stream(super::NatsVersion::V2_9).await
    }
    postbox_testkit::sink_suite!(fixture);
}

mod sink_2_15 {
    async fn fixture() -> super::Stream {
        super::stream(super::NatsVersion::V2_15).await
    }
    postbox_testkit::sink_suite!(fixture);
}

mod source_2_9 {
    async fn fixture() -> super::Consumer {
        super::consumer(super::NatsVersion::V2_9).await
    }
    postbox_testkit::source_suite!(fixture);
}

mod source_2_15 {
    async fn fixture() -> super::Consumer {
        super::consumer(super::NatsVersion::V2_15).await
    }
    postbox_testkit::source_suite!(fixture);
}
