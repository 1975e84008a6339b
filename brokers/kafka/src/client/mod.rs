//! The clients of Kafka's protocol, and what the sink and the source need of one.
//!
//! The sink and the source know only the types here, so their rules are the same with each client.
//! Records are passed in krafka's types, which are plain data.

mod krafka;
#[cfg(feature = "rdkafka")]
mod librdkafka;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ::krafka::ConsumerRecord;
use ::krafka::producer::Record;
#[cfg(not(feature = "rdkafka"))]
use postbox_core::{Error, ErrorKind};
use postbox_core::{Outcome, Result};

use crate::classify::Failure;
use crate::connection::Cluster;
use crate::group::{Membership, Partition, Rebalances};

/// The longest wait until a broker accepts a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait for a broker's answer to a source.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How old the client's knowledge of topics may be. A topic that was deleted and created again is
/// noticed after this time.
const METADATA_MAX_AGE: Duration = Duration::from_secs(10);
/// How old the certificates may be that a new connection uses: files that are renewed are read
/// again after this time.
const TLS_MAX_AGE: Duration = Duration::from_secs(60);
/// The largest batch for one partition, in bytes: half of a topic's default `max.message.bytes`.
const BATCH_BYTES_MAX: usize = 512 * 1024;
/// The producer's buffer, in bytes. While it is full, calls wait.
const MEMORY_BYTES: usize = 64 * 1024 * 1024;
/// How long the producer waits for more records before it sends a batch. All records of a call are
/// enqueued within this time, so they leave in one request.
const LINGER: Duration = Duration::from_millis(1);
/// The longest wait for the metadata of an unknown topic, or for space in the buffer. The other
/// events of the call wait with it.
const ENQUEUE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time of a call is divided among this many requests, so an unanswered request is repeated
/// twice.
const REQUESTS_A_CALL: u32 = 3;
/// The most messages of one poll.
const POLL_MAX: usize = 1_000;

/// The client that speaks with the brokers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Client {
    /// krafka, written in Rust. Needs Kafka 3.9.
    #[default]
    Krafka,
    /// librdkafka, written in C. Only with the feature `rdkafka`.
    Librdkafka,
}

/// What a build without the feature says about [`Client::Librdkafka`].
#[cfg(not(feature = "rdkafka"))]
pub(crate) const MISSING: &str = "client = \"librdkafka\", but this program was built without it: build it with \
     --features rdkafka, or write client = \"krafka\"";

/// Which replicas must confirm a record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Acks {
    /// All in-sync replicas.
    #[default]
    All,
    /// The partition's leader alone.
    Leader,
}

/// How a producer sends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Producing {
    pub(crate) acks: Acks,
    /// A record that is not confirmed for so long is given up.
    pub(crate) confirm_within: Duration,
    /// The size of the largest record.
    pub(crate) message_bytes_max: usize,
}

impl Producing {
    /// The size of the largest batch. Whoever limits records below it has a topic that takes no
    /// larger batches.
    fn batch_bytes_max(&self) -> usize {
        BATCH_BYTES_MAX.min(self.message_bytes_max)
    }

    /// The longest wait for the answer to one request.
    fn request_timeout(&self) -> Duration {
        self.confirm_within / REQUESTS_A_CALL
    }

    /// The longest wait until a record is enqueued.
    fn enqueue_timeout(&self) -> Duration {
        ENQUEUE_TIMEOUT.min(self.request_timeout())
    }
}

/// A connected producer.
#[derive(Clone)]
pub(crate) enum Producer {
    Krafka(Arc<::krafka::producer::Producer>),
    #[cfg(feature = "rdkafka")]
    Librdkafka(Arc<librdkafka::Producer>),
}

impl Producer {
    pub(crate) async fn connect(cluster: &Cluster, how: &Producing) -> Result<Self> {
        match cluster.client {
            Client::Krafka => krafka::producer(cluster, how).await.map(|it| Self::Krafka(Arc::new(it))),
            #[cfg(feature = "rdkafka")]
            Client::Librdkafka => {
                librdkafka::Producer::connect(cluster, how).await.map(|it| Self::Librdkafka(Arc::new(it)))
            }
            #[cfg(not(feature = "rdkafka"))]
            Client::Librdkafka => Err(missing()),
        }
    }

    /// Sends a record and waits for its confirmation.
    pub(crate) async fn send(&self, record: Record) -> Result<Outcome, Failure> {
        match self {
            Self::Krafka(producer) => krafka::send(producer, record).await,
            #[cfg(feature = "rdkafka")]
            Self::Librdkafka(producer) => producer.send(&record).await,
        }
    }

    /// Waits for what was enqueued, then gives up the rest: those records fail and are not sent any
    /// more.
    pub(crate) async fn close(&self, within: Duration) {
        match self {
            Self::Krafka(producer) => krafka::close_producer(producer, within).await,
            #[cfg(feature = "rdkafka")]
            Self::Librdkafka(producer) => producer.close(within).await,
        }
    }
}

/// The outcome of a confirmed record. The offset is negative if the brokers do not say it.
fn confirmed(duplicate: bool, partition: i32, offset: i64) -> Outcome {
    match offset {
        0.. => Outcome::delivered_at(duplicate, format_args!("{partition}@{offset}")),
        _ => Outcome::Delivered { duplicate, position: None },
    }
}

/// A member of a consumer group.
#[derive(Clone)]
pub(crate) enum Consumer {
    Krafka(Arc<krafka::Joined>),
    #[cfg(feature = "rdkafka")]
    Librdkafka(Arc<librdkafka::Consumer>),
}

impl Consumer {
    /// Joins the group. Topics are looked up before, so that a missing one leaves no member behind.
    /// `rebalances` learns which partitions are ours from then on.
    pub(crate) async fn join(
        cluster: &Cluster,
        membership: &Membership,
        rebalances: &Arc<impl Rebalances>,
    ) -> Result<Self> {
        match cluster.client {
            Client::Krafka => Ok(Self::Krafka(Arc::new(krafka::join(cluster, membership, rebalances).await?))),
            #[cfg(feature = "rdkafka")]
            Client::Librdkafka => {
                let consumer = librdkafka::Consumer::join(cluster, membership, rebalances).await?;
                Ok(Self::Librdkafka(Arc::new(consumer)))
            }
            #[cfg(not(feature = "rdkafka"))]
            Client::Librdkafka => Err(missing()),
        }
    }

    /// Returns a topic that is another than when we joined, if there is one, or an error if a topic
    /// is missing. Asks the cluster only if the client's metadata is old. librdkafka does not
    /// report topic ids, so it never knows of one.
    pub(crate) async fn recreated(&self, topics: &[String]) -> Result<Option<String>> {
        match self {
            Self::Krafka(joined) => krafka::recreated(joined, topics).await,
            #[cfg(feature = "rdkafka")]
            Self::Librdkafka(_) => Ok(None),
        }
    }

    /// Waits for messages.
    pub(crate) async fn poll(&self, wait: Duration) -> Result<Vec<ConsumerRecord>, Failure> {
        match self {
            Self::Krafka(joined) => Ok(joined.consumer.poll(wait).await?),
            #[cfg(feature = "rdkafka")]
            Self::Librdkafka(consumer) => consumer.poll(wait, false).await,
        }
    }

    /// Polls with all partitions paused, only to stay in the group. Returns what was fetched
    /// before.
    pub(crate) async fn poll_paused(&self, wait: Duration) -> Result<Vec<ConsumerRecord>, Failure> {
        match self {
            Self::Krafka(joined) => krafka::poll_paused(&joined.consumer, wait).await,
            #[cfg(feature = "rdkafka")]
            Self::Librdkafka(consumer) => consumer.poll(wait, true).await,
        }
    }

    /// Returns the offset of the next message in each of our partitions, as far as it is known.
    /// librdkafka knows it only once a message was read.
    pub(crate) async fn positions(&self) -> Vec<(Partition, i64)> {
        match self {
            Self::Krafka(joined) => krafka::positions(&joined.consumer).await,
            #[cfg(feature = "rdkafka")]
            Self::Librdkafka(_) => Vec::new(),
        }
    }

    /// Moves those of our new partitions to their beginning whose committed offset is of a former
    /// topic with the same name. Returns them, each with its first offset as far as that is known.
    /// librdkafka does not report topic ids, so it moves none.
    pub(crate) async fn rewind(
        &self,
        assigned: &BTreeSet<Partition>,
    ) -> Result<Vec<(Partition, Option<i64>)>, Failure> {
        match self {
            Self::Krafka(joined) => krafka::rewind(joined, assigned).await,
            #[cfg(feature = "rdkafka")]
            Self::Librdkafka(_) => Ok(Vec::new()),
        }
    }

    pub(crate) async fn commit(&self, offsets: &[(Partition, i64)]) -> Result<(), Failure> {
        match self {
            Self::Krafka(joined) => krafka::commit(joined, offsets).await,
            #[cfg(feature = "rdkafka")]
            Self::Librdkafka(consumer) => consumer.commit(offsets).await,
        }
    }

    /// Leaves the group. If it takes longer than `within`, the group removes the member when its
    /// session times out.
    pub(crate) async fn close(&self, within: Duration) {
        match self {
            Self::Krafka(joined) => krafka::close_consumer(&joined.consumer, within).await,
            #[cfg(feature = "rdkafka")]
            Self::Librdkafka(consumer) => consumer.close(within).await,
        }
    }
}

impl Cluster {
    /// Connects anew and disconnects, to see whether any broker answers.
    pub(crate) async fn probe(&self, within: Duration) -> Result<()> {
        match self.client {
            Client::Krafka => krafka::connect(self, within).await.map(drop),
            #[cfg(feature = "rdkafka")]
            Client::Librdkafka => librdkafka::look(self, &[], within, "connect").await,
            #[cfg(not(feature = "rdkafka"))]
            Client::Librdkafka => Err(missing()),
        }
    }

    /// Checks for an operator whether these topics exist.
    pub(crate) async fn look(&self, topics: &[String]) -> Result<String> {
        match self.client {
            Client::Krafka => krafka::look(self, topics).await?,
            #[cfg(feature = "rdkafka")]
            Client::Librdkafka => librdkafka::look(self, topics, CONNECT_TIMEOUT, "connect").await?,
            #[cfg(not(feature = "rdkafka"))]
            Client::Librdkafka => return Err(missing()),
        }
        Ok(match topics {
            [] => "answers".to_owned(),
            topics => format!("answers; the topic {} is there", topics.join(", ")),
        })
    }
}

#[cfg(not(feature = "rdkafka"))]
fn missing() -> Error {
    Error::new(ErrorKind::Mismatch, "connect", "kafka_client_missing", MISSING)
}
