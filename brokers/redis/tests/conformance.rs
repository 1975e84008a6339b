//! Runs the suites that every sink and every source passes, against Redis 7 and Valkey 9.

mod support;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use postbox_core::{NewEvent, RawMessage, Sink, Source};
use postbox_redis::{RedisSink, RedisSinkConfig, RedisSource, RedisSourceConfig};
use postbox_testkit::clock::ManualClock;
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits, SourceFixture};
use postbox_testkit::proxy::Direction;
use postbox_testkit::servers::RedisKind;
use redis::{RedisResult, Value};

use support::{Broker, Fields, field, text};

const STREAM: &str = "events";
/// The largest payload, in bytes. Larger ones are dead.
const PAYLOAD_BYTES_MAX: usize = 1024 * 1024;

struct SinkBroker {
    broker: Broker,
    sink: Arc<RedisSink>,
}

impl SinkBroker {
    async fn settle(&self) {
        self.broker.settle(|| !self.sink.is_connected()).await;
    }

    async fn start(kind: RedisKind) -> Self {
        let broker = Broker::start(kind).await;
        let config = RedisSinkConfig {
            url: broker.url(),
            stream: STREAM.parse().expect("a template"),
            value_max: PAYLOAD_BYTES_MAX,
            ..RedisSinkConfig::default()
        };
        let sink = RedisSink::new(&config, Duration::from_secs(20), 4).expect("a sink");
        let sink = Self { broker, sink: Arc::new(sink) };
        // Connects the sink, so that `Destination::Hangs` meets an open connection.
        assert!(sink.sink.deliver(&[&warm_up()]).await[0].is_delivered());
        let _: () = sink.broker.ask(&format!("DEL {STREAM}")).await;
        sink
    }
}

fn warm_up() -> postbox_core::Delivery {
    let event = NewEvent::json("t", "{}").into_event(postbox_core::EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH);
    postbox_core::Delivery { event, seq: postbox_core::Seq(1), attempt: 1, replay: 0, trace: None }
}

#[async_trait]
impl SinkFixture for SinkBroker {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink) as _
    }

    fn traits(&self) -> SinkTraits {
        SinkTraits {
            // Redis never asks a sender to slow down.
            throttles: false,
            payload_bytes_max: Some(PAYLOAD_BYTES_MAX),
            ..SinkTraits::ALL
        }
    }

    /// Returns the entries of the stream, and a refused attempt for each command that failed.
    async fn attempts(&self) -> Vec<Attempt> {
        let entries = self.broker.entries(STREAM).await;
        let accepted = entries.iter().map(|fields| Attempt {
            dedupe_id: text(fields, "id"),
            payload: field(fields, "payload").expect("a payload"),
            accepted: true,
        });
        let stats: String = self.broker.ask("INFO commandstats").await;
        let refused = stats.lines().find_map(|line| line.strip_prefix("cmdstat_xadd:")).map_or(0, |line| {
            let count = |name: &str| line.split(',').find_map(|pair| pair.strip_prefix(name)?.trim().parse().ok());
            count("rejected_calls=").unwrap_or(0) + count("failed_calls=").unwrap_or(0_usize)
        });
        let refusal = Attempt { dedupe_id: None, payload: Vec::new(), accepted: false };
        accepted.chain(std::iter::repeat_n(refusal, refused)).collect()
    }

    fn poison(&self, event: NewEvent) -> NewEvent {
        NewEvent { payload: Bytes::from(vec![b'x'; PAYLOAD_BYTES_MAX + 1]), ..event }
    }

    async fn set(&self, destination: Destination) {
        match destination {
            Destination::Fails => self.broker.ask("CONFIG SET maxmemory 1").await,
            Destination::Hangs => self.broker.proxy.swallow(&[Direction::ToClient]),
            Destination::Down => {
                self.broker.server.lock().await.kill();
                self.settle().await;
            }
            Destination::Throttles => panic!("not claimed"),
            Destination::Works => {
                let mut server = self.broker.server.lock().await;
                if !server.is_running() {
                    server.start().await;
                }
                self.broker.ask::<()>("CONFIG SET maxmemory 0").await;
                self.broker.proxy.heal();
                // Answers that the proxy has dropped will never arrive.
                self.broker.proxy.reset();
                self.settle().await;
            }
        }
    }
}

struct SourceBroker {
    broker: Broker,
    clock: Arc<ManualClock>,
    source: Arc<RedisSource>,
}

impl SourceBroker {
    async fn start(kind: RedisKind) -> Self {
        let broker = Broker::start(kind).await;
        let config = RedisSourceConfig {
            url: broker.url(),
            stream: STREAM.into(),
            in_flight: 20,
            ..RedisSourceConfig::default()
        };
        let clock = Arc::new(ManualClock::default());
        let source = RedisSource::new(&config, Arc::clone(&clock) as _).expect("a source");
        Self { broker, clock, source: Arc::new(source) }
    }
}

/// Returns the fields of an entry as the sink writes them.
fn fields(message: &RawMessage) -> Fields {
    let mut fields = vec![("topic".to_owned(), message.topic.clone().into_bytes())];
    fields.push(("content-type".into(), message.content_type.clone().into_bytes()));
    fields.extend(message.id.iter().map(|id| ("id".to_owned(), id.clone().into_bytes())));
    fields.extend(message.headers.iter().map(|(name, value)| (format!("header:{name}"), value.clone().into_bytes())));
    fields.push(("payload".into(), message.payload.to_vec()));
    fields
}

#[async_trait]
impl SourceFixture for SourceBroker {
    fn source(&self) -> Arc<dyn Source> {
        Arc::clone(&self.source) as _
    }

    async fn publish(&self, message: RawMessage) {
        let mut command = redis::cmd("XADD");
        command.arg(STREAM).arg("*");
        fields(&message).into_iter().for_each(|(name, value)| _ = command.arg(name).arg(value));
        let added: RedisResult<Value> = command.query_async(&mut self.broker.connection().await).await;
        added.expect("added");
    }

    async fn disconnect(&self) {
        self.broker.proxy.reset();
        self.broker.settle(|| !self.source.is_connected()).await;
    }

    async fn dead_letters(&self) -> Vec<RawMessage> {
        let entries = self.broker.entries(&format!("{STREAM}:dead")).await;
        let message = |fields: Fields| RawMessage {
            id: text(&fields, "id"),
            // The digest that the suite gives a message whose id has one character.
            digest: [1; 32],
            topic: text(&fields, "topic").expect("a topic"),
            key: text(&fields, "key"),
            headers: Default::default(),
            content_type: text(&fields, "content-type").expect("a content type"),
            payload: field(&fields, "payload").expect("a payload").into(),
        };
        entries.into_iter().map(message).collect()
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }
}

mod redis_7 {
    use super::*;

    async fn sink() -> SinkBroker {
        SinkBroker::start(RedisKind::Redis7).await
    }

    async fn source() -> SourceBroker {
        SourceBroker::start(RedisKind::Redis7).await
    }

    postbox_testkit::sink_suite!(sink);
    postbox_testkit::source_suite!(source);
}

mod valkey_9 {
    use super::*;

    async fn sink() -> SinkBroker {
        SinkBroker::start(RedisKind::Valkey9).await
    }

    async fn source() -> SourceBroker {
        SourceBroker::start(RedisKind::Valkey9).await
    }

    postbox_testkit::sink_suite!(sink);
    postbox_testkit::source_suite!(source);
}
