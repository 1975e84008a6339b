//! Runs the suites that every sink and every source passes: on queues and topics, with order and
//! without.

mod support;

use std::sync::Arc;

use async_trait::async_trait;
use aws_sdk_sqs::types::MessageAttributeValue;
use postbox_core::{NewEvent, RawMessage, Sink, Source};
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits, SourceFixture};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::Sqs;

use support::{Broker, Gateway, Mode, queue_keys, refusal, sink, sns_refusal, source, topic_keys, unique};

/// Largest message that AWS accepts, in bytes, attributes included.
const MESSAGE_BYTES_MAX: usize = 1024 * 1024;
/// Largest message that moto's SNS accepts, in bytes. The SNS of AWS accepts as much as SQS.
const MOTO_BYTES_MAX: usize = 256 * 1024;
/// Names, types and values of the attributes of an event with topic `t` and no key.
const ATTRIBUTES: [&str; 3] = [
    "postbox-idString01900000-0000-7000-8000-000000000001",
    "postbox-topicStringt",
    "content-typeStringapplication/octet-stream",
];

struct Target {
    gateway: Gateway,
    sink: Arc<dyn Sink>,
    refusal: fn(&str) -> String,
    bytes_max: usize,
}

async fn queue(name: &str) -> Target {
    let broker = Broker::shared().await;
    let gateway = Gateway::in_front_of(&broker).await;
    let sink = sink(&queue_keys(&broker.queue(&unique(name)).await, &gateway.url())).await;
    Target { gateway, sink, refusal, bytes_max: MESSAGE_BYTES_MAX }
}

async fn topic(name: &str) -> Target {
    let broker = Broker::shared().await;
    let gateway = Gateway::in_front_of(&broker).await;
    let name = unique(name);
    support::make_topic(&broker, &name).await;
    let sink = sink(&format!("{}message_max = \"256KiB\"\n", topic_keys(&name, &gateway.url()))).await;
    Target { gateway, sink, refusal: sns_refusal, bytes_max: MOTO_BYTES_MAX }
}

#[async_trait]
impl SinkFixture for Target {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink)
    }

    fn traits(&self) -> SinkTraits {
        let attributes: usize = ATTRIBUTES.iter().map(|attribute| attribute.len()).sum();
        SinkTraits { payload_bytes_max: Some(self.bytes_max - attributes), text_only: true, ..SinkTraits::ALL }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        self.gateway.attempts()
    }

    fn poison(&self, event: NewEvent) -> NewEvent {
        NewEvent { payload: "\0".into(), ..event }
    }

    async fn set(&self, destination: Destination) {
        match destination {
            Destination::Works => {
                self.gateway.set(Mode::Pass);
                self.gateway.start().await;
            }
            Destination::Fails => self.gateway.set(Mode::Say(500, (self.refusal)("InternalError"))),
            Destination::Throttles => self.gateway.set(Mode::Say(400, (self.refusal)("ThrottlingException"))),
            Destination::Hangs => self.gateway.set(Mode::Hang),
            Destination::Down => self.gateway.stop().await,
        }
    }
}

struct Queue {
    broker: Broker<Sqs>,
    url: String,
    proxy: FaultProxy,
    source: Arc<dyn Source>,
}

async fn orders(name: &str) -> Queue {
    let broker = Broker::shared().await;
    let url = broker.queue(&unique(name)).await;
    let proxy = FaultProxy::in_front_of(&broker.url).await;
    let by = proxy.url(&broker.url);
    let source = source(&format!("{}in_flight = 8\n", queue_keys(&url, &by))).await;
    Queue { broker, url, proxy, source }
}

#[async_trait]
impl SourceFixture for Queue {
    fn source(&self) -> Arc<dyn Source> {
        Arc::clone(&self.source)
    }

    async fn publish(&self, message: RawMessage) {
        let id = message.id.expect("an id");
        let body = String::from_utf8(message.payload.to_vec()).expect("text");
        let mut request = self.broker.client.send_message().queue_url(&self.url).message_body(body);
        let own = [("postbox-id", &id), ("postbox-topic", &message.topic), ("content-type", &message.content_type)];
        for (name, value) in own.into_iter().chain(message.headers.iter().map(|(name, value)| (name.as_str(), value))) {
            let value = MessageAttributeValue::builder().data_type("String").string_value(value).build();
            request = request.message_attributes(name, value.expect("a type"));
        }
        if self.url.ends_with(".fifo") {
            // Each message has its own group, because SQS hands out one of a group at a time.
            request = request.message_group_id(&id).message_deduplication_id(&id);
        }
        request.send().await.expect("sent");
    }

    async fn disconnect(&self) {
        self.proxy.reset();
        while self.proxy.connections() > 0 {
            tokio::task::yield_now().await;
        }
    }

    fn text_only(&self) -> bool {
        true
    }

    fn has_sessions(&self) -> bool {
        false
    }

    async fn dead_letters(&self) -> Vec<RawMessage> {
        Vec::new()
    }
}

mod sqs {
    async fn sink() -> super::Target {
        super::queue("events").await
    }

    async fn source() -> super::Queue {
        super::orders("orders").await
    }

    postbox_testkit::sink_suite!(sink);
    postbox_testkit::source_suite!(source);
}

mod sqs_fifo {
    async fn sink() -> super::Target {
        super::queue("events.fifo").await
    }

    async fn source() -> super::Queue {
        super::orders("orders.fifo").await
    }

    postbox_testkit::sink_suite!(sink);
    postbox_testkit::source_suite!(source);
}

mod sns {
    async fn sink() -> super::Target {
        super::topic("events").await
    }

    postbox_testkit::sink_suite!(sink);
}
