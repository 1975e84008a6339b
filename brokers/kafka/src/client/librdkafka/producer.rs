//! A producer on librdkafka.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::krafka::producer::Record;
use ::rdkafka::error::RDKafkaErrorCode as Code;
use ::rdkafka::message::{Header, OwnedHeaders};
use ::rdkafka::producer::{BaseRecord, Producer as _, PurgeConfig};
use postbox_core::{Outcome, Result};
use tokio::sync::oneshot;

use super::super::{Acks, LINGER, MEMORY_BYTES, Producing, confirmed};
use super::{Context, Native, Threaded, blocking, closed, config, millis, reach};
use crate::classify::{self, Failure};
use crate::connection::Cluster;

/// How long a record waits before it is enqueued again, while the producer's buffer is full.
const FULL_WAIT: Duration = Duration::from_millis(5);
/// The most records in the producer's buffer. Its size in bytes is limited, too.
const RECORDS_MAX: usize = 100_000;
/// What a request has besides its records, in bytes, at most.
const FRAME_BYTES_MAX: usize = 64 * 1024;
/// The least `message.max.bytes`, which is the library's default.
const REQUEST_BYTES_MIN: usize = 1_000_000;

/// A producer.
pub(crate) struct Producer {
    native: Native<Threaded>,
    enqueue_timeout: Duration,
}

impl Producer {
    pub(crate) async fn connect(cluster: &Cluster, how: &Producing) -> Result<Self> {
        let request_timeout = how.request_timeout();
        let mut config = config(cluster, request_timeout);
        let request_bytes_max = (how.message_bytes_max + FRAME_BYTES_MAX).max(REQUEST_BYTES_MIN);
        config
            .set("enable.idempotence", (how.acks == Acks::All).to_string())
            .set("acks", if how.acks == Acks::All { "all" } else { "1" })
            .set("message.timeout.ms", millis(how.confirm_within))
            .set("request.timeout.ms", millis(request_timeout))
            .set("linger.ms", millis(LINGER))
            .set("batch.size", how.batch_bytes_max().to_string())
            .set("message.max.bytes", request_bytes_max.to_string())
            .set("queue.buffering.max.kbytes", (MEMORY_BYTES / 1024).to_string())
            .set("queue.buffering.max.messages", RECORDS_MAX.to_string())
            .set("topic.metadata.propagation.max.ms", millis(how.enqueue_timeout()))
            // The hash of the Java client.
            .set("partitioner", "murmur2_random");
        let connected = blocking(move |_| {
            let producer: Threaded = config.create_with_context(Context::default())?;
            reach(&producer, request_timeout).map(|()| producer)
        });
        let producer = connected.await.map_err(|failure| classify::error("connect", &failure))?;
        Ok(Self { native: Native::new(producer), enqueue_timeout: how.enqueue_timeout() })
    }

    /// Sends a record and waits for its confirmation. The library does not say whether the brokers
    /// had it already, so the outcome is never a duplicate.
    pub(crate) async fn send(&self, record: &Record) -> Result<Outcome, Failure> {
        let producer = self.native.get()?;
        let (confirm, confirmation) = oneshot::channel();
        let headers = OwnedHeaders::new_with_capacity(record.headers.len());
        let headers = record
            .headers
            .iter()
            .fold(headers, |headers, (key, value)| headers.insert(Header { key, value: value.as_deref() }));
        let mut next = BaseRecord::with_opaque_to(&record.topic, Box::new(confirm)).headers(headers);
        (next.key, next.payload) = (record.key.as_deref(), record.value.as_deref());
        let deadline = Instant::now() + self.enqueue_timeout;
        let mut is_known = false;
        while let Err((error, refused)) = producer.send(next) {
            match error.rdkafka_error_code() {
                Some(Code::QueueFull) if Instant::now() < deadline => tokio::time::sleep(FULL_WAIT).await,
                // The library goes by what it last heard of the topic, which may have changed.
                Some(Code::TopicAuthorizationFailed | Code::UnknownTopic | Code::UnknownTopicOrPartition)
                    if !is_known =>
                {
                    is_known = true;
                    self.ask_for(&record.topic).await?;
                }
                _ => return Err(error.into()),
            }
            next = refused;
        }
        match confirmation.await {
            Ok(result) => Ok(result.map(|(partition, offset)| confirmed(false, partition, offset))?),
            Err(_) => Err(closed()),
        }
    }

    /// Asks the brokers for a topic, and so updates what the library knows of it.
    async fn ask_for(&self, topic: &str) -> Result<(), Failure> {
        let (producer, topic, within) = (Arc::clone(self.native.get()?), topic.to_owned(), self.enqueue_timeout);
        blocking(move |_| Ok(producer.client().fetch_metadata(Some(&topic), within).map(drop)?)).await
    }

    pub(crate) async fn close(&self, within: Duration) {
        let Ok(producer) = self.native.get().cloned() else { return };
        let closed = blocking(move |_| {
            if !within.is_zero() {
                // An error means that not all were sent in time.
                let _ = producer.flush(within);
            }
            producer.purge(PurgeConfig::default().queue().inflight());
            Ok(())
        });
        // An error means that the runtime is shutting down, and the producer with it.
        let _ = closed.await;
    }
}
