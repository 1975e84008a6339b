//! Real brokers: Postbox compared with the broker's own client.

pub(crate) mod kafka;
mod nats;
mod rabbitmq;
mod redis;
mod sqs;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use clap::ValueEnum;
use postbox_config::SourceConfig;
use postbox_core::envelope::Wrapped;
use postbox_core::{Delivery, Envelope, EventId, Seq, Sink};

use crate::bed::event;
use crate::figure::Figure;
use crate::machine;

/// Longest call of a sink; the engine's default.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The CloudEvents source of events without one; the sinks' default.
const SOURCE: &str = "postbox";

/// Which brokers to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Redis,
    Nats,
    Kafka,
    Rabbitmq,
    Sqs,
}

impl Kind {
    /// Starts a private server.
    pub(crate) async fn start(self) -> anyhow::Result<Box<dyn Broker>> {
        Ok(match self {
            Self::Redis => Box::new(redis::Broker::start().await?),
            Self::Nats => Box::new(nats::Broker::start().await?),
            Self::Kafka => Box::new(kafka::Broker::start().await?),
            Self::Rabbitmq => Box::new(rabbitmq::Broker::start().await?),
            Self::Sqs => Box::new(sqs::Broker::start().await?),
        })
    }

    /// The name for tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Redis => "Redis 7, everysec",
            Self::Nats => "JetStream 2.15, file",
            Self::Kafka => "Kafka's test broker",
            Self::Rabbitmq => "RabbitMQ 3.10, quorum",
            Self::Sqs => "SQS (moto)",
        }
    }

    /// The least share of the client's rate that Postbox must reach.
    pub(crate) fn wanted(self) -> &'static str {
        match self {
            Self::Redis => "≥ 70 %",
            Self::Nats | Self::Sqs => "≥ 80 %",
            Self::Kafka | Self::Rabbitmq => "≥ 60 %",
        }
    }

    /// Reduces the number of events for an emulator, which takes a few hundred a second.
    pub(crate) fn rows(self, rows: usize) -> usize {
        if self == Self::Sqs { (rows / 50).max(10) } else { rows }
    }
}

/// A broker and its client. A place is a stream, topic or queue.
#[async_trait]
pub(crate) trait Broker: Send + Sync {
    /// The server's process.
    fn pid(&self) -> u32;

    /// Creates an empty place.
    async fn make(&self, place: &str) -> anyhow::Result<()>;

    async fn remove(&self, place: &str) -> anyhow::Result<()>;

    /// The number of messages in a place.
    async fn count(&self, place: &str) -> anyhow::Result<usize>;

    /// The Postbox sink to a place.
    async fn sink(&self, place: &str) -> Arc<dyn Sink>;

    /// Publishes the messages that the sink would make of these events, as fast as the client can.
    /// Everything is prepared before the clock starts.
    async fn publish(&self, place: &str, deliveries: &[Delivery]) -> anyhow::Result<Figure>;

    /// The Postbox source from a place.
    fn source(&self, _place: &str, _in_flight: usize) -> Option<Arc<dyn SourceConfig>> {
        None
    }

    /// Consumes and acknowledges this many messages of a place with the client alone, keeping none.
    async fn consume(&self, place: &str, count: usize) -> anyhow::Result<Figure> {
        anyhow::bail!("no client consumes {count} messages of {place} here")
    }
}

/// Measures work of this process: elapsed time and processor time.
pub(crate) async fn timed(count: usize, work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<Figure> {
    let (used, start) = (machine::processor_seconds()?, Instant::now());
    work.await?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(Figure { count, seconds, processor_seconds: machine::processor_seconds()? - used, ..Figure::default() })
}

/// Events as a relay would have read them; different ones in each call.
pub(crate) fn deliveries(count: usize, keys: usize) -> Vec<Delivery> {
    // The database keeps microseconds.
    let now = jiff::Timestamp::now().as_microsecond();
    let now = jiff::Timestamp::from_microsecond(now).expect("it was one");
    let delivery = |n: usize| {
        let event = event(n, keys).into_event(EventId::now_v7(), now);
        Delivery { event, seq: Seq(n as i64), attempt: 1, replay: 0, trace: None }
    };
    (0..count).map(delivery).collect()
}

fn key(delivery: &Delivery) -> &str {
    delivery.event.key.as_ref().map_or("", |key| key.as_str())
}

fn topic(delivery: &Delivery) -> &str {
    delivery.event.topic.as_str()
}

/// The body and its metadata, as most sinks send them.
fn cloud_event(delivery: &Delivery) -> anyhow::Result<Wrapped<'_>> {
    let wrapped = Envelope::CloudEventsBinary.wrap(&delivery.event, SOURCE);
    wrapped.map_err(|outcome| anyhow::anyhow!("{outcome:?}"))
}
