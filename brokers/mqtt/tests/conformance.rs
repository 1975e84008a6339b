//! Runs the suites that every sink and every source passes, against Mosquitto.

mod support;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_config::{SourceConfig as _, SourceContext};
use postbox_core::{NewEvent, RawMessage, Sink, Source};
use postbox_testkit::clock::ManualClock;
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits, SourceFixture};
use postbox_testkit::receiving::source_context;
use postbox_testkit::servers::PrivateMqtt;
use rumqttc::v5::mqttbytes::v5::PublishProperties;
use tokio::sync::Mutex;

use support::{Gateway, Mode, Peer, server, sink, table};

/// Largest packet, in bytes. An event that needs a larger one is dead.
const MESSAGE_MAX: usize = 512 * 1024;
/// The properties of an event with topic `t` and no key.
const PROPERTIES: [(&str, &str); 6] = [
    ("specversion", "1.0"),
    ("id", "01900000-0000-7000-8000-000000000001"),
    ("type", "t"),
    ("source", "postbox"),
    ("time", "1970-01-01T00:00:00Z"),
    ("postbox-id", "01900000-0000-7000-8000-000000000001"),
];

/// Returns the number of bytes around the payload of the largest event with topic `t`.
fn around_payload() -> usize {
    // Type and length of the packet, packet id, length of the properties.
    let fixed = 1 + 3 + 2 + 2;
    let text = |text: &str| 2 + text.len();
    let properties: usize = PROPERTIES.iter().map(|(name, value)| 1 + text(name) + text(value)).sum();
    fixed + text("events/t") + properties + 1 + text("application/octet-stream")
}

struct Topic {
    _server: PrivateMqtt,
    gateway: Gateway,
    sink: Arc<dyn Sink>,
    /// Receives what the server accepts. Beside it, the payloads received so far.
    subscriber: Mutex<(Peer, Vec<Vec<u8>>)>,
}

async fn topic() -> Topic {
    let server = server().await;
    let gateway = Gateway::in_front_of(&server.url()).await;
    let mut subscriber = Peer::connect(&server.url()).await;
    subscriber.subscribe("events/#").await;
    subscriber.subscribe("fence").await;
    let keys = format!("topic = \"events/{{topic}}\"\nmessage_max = \"{MESSAGE_MAX}B\"");
    let sink = sink(&gateway.url(), &keys).await;
    Topic { _server: server, gateway, sink, subscriber: Mutex::new((subscriber, Vec::new())) }
}

#[async_trait]
impl SinkFixture for Topic {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink)
    }

    fn traits(&self) -> SinkTraits {
        SinkTraits { positions: false, payload_bytes_max: Some(MESSAGE_MAX - around_payload()), ..SinkTraits::ALL }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        self.gateway.attempts()
    }

    fn poison(&self, event: NewEvent) -> NewEvent {
        event.header("poison", "a\0b")
    }

    async fn set(&self, destination: Destination) {
        match destination {
            Destination::Works => {
                self.gateway.set(Mode::Pass);
                self.gateway.start().await;
            }
            Destination::Fails => self.gateway.set(Mode::Say(0x80)),
            Destination::Throttles => self.gateway.set(Mode::Say(0x97)),
            Destination::Hangs => self.gateway.set(Mode::Hang),
            Destination::Down => self.gateway.stop().await,
        }
    }

    async fn arrived(&self) -> Vec<Vec<u8>> {
        let mut subscriber = self.subscriber.lock().await;
        let new = subscriber.0.drain().await;
        subscriber.1.extend(new.into_iter().map(|message| message.payload.to_vec()));
        subscriber.1.clone()
    }
}

struct Subscription {
    _server: PrivateMqtt,
    gateway: Gateway,
    publisher: Mutex<Peer>,
    clock: Arc<ManualClock>,
    source: Arc<dyn Source>,
}

/// Creates the session first, so that messages published before the first call are kept.
async fn subscription(share: &str) -> Subscription {
    let server = server().await;
    let gateway = Gateway::in_front_of(&server.url()).await;
    let mut before = Peer::connect_as(&server.url(), "orders-1", |options| {
        options.set_clean_start(false).set_session_expiry_interval(Some(60));
    })
    .await;
    let filter = if share.is_empty() { "order.paid".to_owned() } else { format!("$share/{share}/order.paid") };
    before.subscribe(&filter).await;
    drop(before);
    let publisher = Mutex::new(Peer::connect(&server.url()).await);
    let share = if share.is_empty() { String::new() } else { format!("share = {share:?}\n") };
    let keys = format!("client_id = \"orders-1\"\ntopic = \"order.paid\"\nin_flight = 8\n{share}");
    let clock = Arc::new(ManualClock::default());
    let context = SourceContext { clock: Arc::clone(&clock) as _, ..source_context() };
    let source = table(&gateway.url(), &keys).build(&context).await.expect("a source");
    Subscription { _server: server, gateway, publisher, clock, source }
}

#[async_trait]
impl SourceFixture for Subscription {
    fn source(&self) -> Arc<dyn Source> {
        Arc::clone(&self.source)
    }

    async fn publish(&self, message: RawMessage) {
        let mut user_properties = vec![("postbox-id".to_owned(), message.id.expect("an id"))];
        user_properties.extend(message.headers);
        let content_type = Some(message.content_type);
        let properties = PublishProperties { user_properties, content_type, ..Default::default() };
        self.publisher.lock().await.publish_with(&message.topic, properties, &message.payload).await;
    }

    async fn disconnect(&self) {
        self.gateway.cut().await;
    }

    async fn dead_letters(&self) -> Vec<RawMessage> {
        Vec::new()
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }
}

mod one {
    use super::*;

    async fn source() -> Subscription {
        subscription("").await
    }

    postbox_testkit::sink_suite!(topic);
    postbox_testkit::source_suite!(source);
}

mod shared {
    use super::*;

    async fn source() -> Subscription {
        subscription("group").await
    }

    postbox_testkit::source_suite!(source);
}
