//! Runs the suites that every sink and every source passes.

#[path = "it/broker.rs"]
#[allow(dead_code)]
mod broker;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use lapin::BasicProperties;
use lapin::types::AMQPValue;
use postbox_config::{SourceConfig as _, SourceContext};
use postbox_core::{NewEvent, RawMessage, Sink, Source};
use postbox_rabbitmq::{RabbitmqSinkTable, RabbitmqSourceTable};
use postbox_testkit::clock::ManualClock;
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits, SourceFixture};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::Rabbitmq;
use postbox_testkit::{receiving, sending};
use tokio::sync::Mutex as AsyncMutex;

use self::broker::{Broker, arguments, message_id, quorum, unique};

/// Interval of the checks whether a connection has gone.
const LOOK: Duration = Duration::from_millis(1);
/// Largest message, in bytes. An event that needs a larger one is dead.
const MESSAGE_MAX: usize = 512 * 1024;

struct Exchange {
    server: Rabbitmq,
    broker: Broker,
    proxy: FaultProxy,
    name: String,
    sink: Arc<dyn Sink>,
    /// What arrived in the queue that takes everything.
    seen: AsyncMutex<Vec<Attempt>>,
    state: Mutex<Destination>,
}

impl Exchange {
    /// Name of a queue: the one for accepted events, the one that takes everything, or the full
    /// one.
    fn queue(&self, which: &str) -> String {
        format!("{}-{which}", self.name)
    }

    async fn unbind(&self, queue: &str) {
        let (name, key) = (self.name.as_str(), "#");
        let unbound = self.broker.channel.queue_unbind(queue.into(), name.into(), key.into(), arguments(&[]));
        unbound.await.expect("unbound");
    }

    /// Suspends or resumes the process of the queue. A message then arrives, but is not confirmed.
    fn main_queue(&self, verb: &str) {
        let lookup = format!("rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"{}\">>))", self.queue("main"));
        self.server.ctl(&["eval", &format!("{{ok, Q}} = {lookup}, sys:{verb}(amqqueue:get_pid(Q)).")]);
    }
}

async fn sink() -> Exchange {
    let server = Rabbitmq::shared().await;
    let (broker, proxy) = (Broker::connect(&server.url()).await, FaultProxy::in_front_of(&server.url()).await);
    let name = unique("events");
    broker.exchange(&name).await;
    let full =
        [("x-max-length", AMQPValue::LongInt(0)), ("x-overflow", AMQPValue::LongString("reject-publish".into()))];
    broker.queue(&format!("{name}-main"), quorum(&[]), &name, "#").await;
    broker.queue(&format!("{name}-seen"), arguments(&[]), &name, "#").await;
    broker.queue(&format!("{name}-full"), arguments(&full), &name, "never").await;
    let keys = format!("url = {:?}\nexchange = {name:?}\nmessage_max = \"{MESSAGE_MAX}B\"", proxy.url(&server.url()));
    let sink = sending::sink::<RabbitmqSinkTable>(&keys, &sending::context(sending::PATIENCE / 2)).await;
    let (seen, state) = (AsyncMutex::default(), Mutex::new(Destination::Works));
    Exchange { server, broker, proxy, name, sink, seen, state }
}

#[async_trait]
impl SinkFixture for Exchange {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink)
    }

    fn traits(&self) -> SinkTraits {
        SinkTraits {
            // It blocks a connection or refuses a message, but never asks a sender to slow down.
            throttles: false,
            positions: false,
            payload_bytes_max: Some(MESSAGE_MAX),
            ..SinkTraits::ALL
        }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        let mut seen = self.seen.lock().await;
        let accepted = *self.state.lock().expect("no panic while held") == Destination::Works;
        let new = self.broker.drain(&self.queue("seen")).await;
        seen.extend(new.into_iter().map(|message| Attempt {
            dedupe_id: Some(message_id(&message)),
            payload: message.data,
            accepted,
        }));
        seen.clone()
    }

    /// Larger than what the sink sends.
    fn poison(&self, event: NewEvent) -> NewEvent {
        NewEvent { payload: vec![b'x'; MESSAGE_MAX + 1].into(), ..event }
    }

    async fn set(&self, destination: Destination) {
        self.attempts().await;
        let before = std::mem::replace(&mut *self.state.lock().expect("no panic while held"), destination);
        let (full, main) = (self.queue("full"), self.queue("main"));
        match destination {
            Destination::Down => {
                self.proxy.refuse(true);
                while self.proxy.connections() > 0 {
                    tokio::time::sleep(LOOK).await;
                }
            }
            Destination::Hangs => self.main_queue("suspend"),
            Destination::Fails => {
                self.broker.bind(&full, &self.name, "#").await;
                self.unbind(&main).await;
            }
            Destination::Works if before == Destination::Hangs => self.main_queue("resume"),
            Destination::Works if before == Destination::Fails => {
                self.broker.bind(&main, &self.name, "#").await;
                self.unbind(&full).await;
            }
            Destination::Works => self.proxy.refuse(false),
            Destination::Throttles => panic!("not claimed"),
        }
    }
}

struct Queue {
    broker: Broker,
    proxy: FaultProxy,
    name: String,
    clock: Arc<ManualClock>,
    source: Arc<dyn Source>,
}

async fn source() -> Queue {
    let server = Rabbitmq::shared().await;
    let (broker, proxy) = (Broker::connect(&server.url()).await, FaultProxy::in_front_of(&server.url()).await);
    let name = unique("orders");
    let dead = format!("{name}-dead");
    broker.exchange(&name).await;
    broker.exchange(&dead).await;
    let dead_letters = [("x-dead-letter-exchange", AMQPValue::LongString(dead.as_str().into()))];
    broker.queue(&name, quorum(&dead_letters), &name, "#").await;
    broker.queue(&dead, quorum(&[]), &dead, "#").await;
    let keys = format!(
        "url = {:?}\nqueue = {name:?}\ncreate = false\ndead_letter_exchange = {dead:?}\nin_flight = 8",
        proxy.url(&server.url())
    );
    let clock = Arc::new(ManualClock::default());
    let context = SourceContext { clock: Arc::clone(&clock) as _, ..receiving::source_context() };
    let source = sending::table::<RabbitmqSourceTable>(&keys).build(&context).await.expect("a source");
    Queue { broker, proxy, name, clock, source }
}

#[async_trait]
impl SourceFixture for Queue {
    fn source(&self) -> Arc<dyn Source> {
        Arc::clone(&self.source)
    }

    async fn publish(&self, message: RawMessage) {
        let headers: Vec<(&str, AMQPValue)> = message
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), AMQPValue::LongString(value.as_str().into())))
            .collect();
        let properties = BasicProperties::default()
            .with_content_type(message.content_type.as_str().into())
            .with_message_id(message.id.as_deref().expect("an id").into())
            .with_headers(arguments(&headers));
        self.broker.publish(&self.name, &message.topic, properties, &message.payload).await;
    }

    async fn disconnect(&self) {
        self.proxy.reset();
        // Until then an ack could still pass.
        while self.proxy.connections() > 0 {
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn dead_letters(&self) -> Vec<RawMessage> {
        let message = |message: lapin::message::Delivery| RawMessage {
            id: Some(message_id(&message)),
            // As in the suite's own messages.
            digest: [1; 32],
            topic: message.routing_key.to_string(),
            key: None,
            headers: Default::default(),
            content_type: message.properties.content_type().as_ref().map(ToString::to_string).expect("a type"),
            payload: message.data.into(),
        };
        self.broker.drain(&format!("{}-dead", self.name)).await.into_iter().map(message).collect()
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }
}

postbox_testkit::sink_suite!(sink);
postbox_testkit::source_suite!(source);
