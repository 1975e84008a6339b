//! krafka: a client in Rust.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ::krafka::admin::{AdminClient, ListConsumerGroupOffsetsOptions};
use ::krafka::auth::{AuthConfig, TlsConfig};
use ::krafka::consumer::{
    AutoOffsetReset, Consumer, ConsumerRebalanceListener, IsolationLevel, OffsetAndMetadata, TopicPartition,
};
use ::krafka::producer::{Producer, Record};
use ::krafka::{CloseOptions, ConsumerRecord, Kafka, KafkaBuilder, KrafkaError, ProtocolErrorKind};
use postbox_core::{Error, ErrorKind, Outcome, Result};
use tokio::time::timeout;

use super::{
    Acks, CONNECT_TIMEOUT, LINGER, MEMORY_BYTES, METADATA_MAX_AGE, POLL_MAX, Producing, REQUEST_TIMEOUT, TLS_MAX_AGE,
    confirmed,
};
use crate::classify::{self, Cause, Failure};
use crate::connection::{AuthTable, Cluster, Mechanism, TopicIds};
use crate::group::{Membership, OPERATION, OffsetReset, Partition, Rebalances};

impl From<KrafkaError> for Failure {
    fn from(error: KrafkaError) -> Self {
        use KrafkaError as K;
        let cause = match &error {
            K::DeliveryTimeout { possibly_written: true, .. } => Cause::NoAnswer,
            K::DeliveryTimeout { possibly_written: false, .. } | K::Network(_) | K::Timeout { .. } => {
                Cause::Unreachable
            }
            K::Auth { .. } => Cause::Unauthorized,
            K::UnknownTopic { .. } => Cause::TopicMissing,
            K::Broker { code, .. } => Cause::Refused(*code),
            K::OutOfOrderSequence { .. } | K::Fenced { .. } => Cause::SequenceLost,
            K::Closed { .. } => Cause::Closed,
            K::Config { .. } => Cause::Config,
            K::Protocol { kind: ProtocolErrorKind::UnknownApiVersion, .. } => Cause::Unsupported,
            _ => Cause::Client,
        };
        let is_final = error.is_fatal() || matches!(error, K::IllegalState { .. });
        // After a semicolon, a reader of our errors finds the cure.
        Self { is_final, ..Self::new(cause, error.to_string().replace("; last error: ", ": ")) }
    }
}

/// What a broker reports that has no ids.
const NO_ID: [u8; 16] = [0; 16];
/// What begins the metadata of our offsets. The topic's id follows.
const TOPIC_ID: &str = "topic-id:";

/// A member of a consumer group.
pub(crate) struct Joined {
    pub(super) consumer: Consumer,
    admin: AdminClient,
    group: String,
    /// The topics' ids when it joined.
    ids: TopicIds,
}

fn failed(error: KrafkaError) -> Error {
    classify::error("connect", &error.into())
}

/// Connects to the first broker that answers. `request_timeout` limits connecting as a whole, and
/// then each request.
pub(super) async fn connect(cluster: &Cluster, request_timeout: Duration) -> Result<Kafka> {
    match timeout(request_timeout, builder(cluster, request_timeout).connect()).await {
        Ok(connected) => connected.map_err(failed),
        Err(_) => {
            let text = format!("no broker of {} answered in time", cluster.brokers);
            Err(Error::new(ErrorKind::Unavailable, "connect", "kafka_connect_timeout", text))
        }
    }
}

fn builder(cluster: &Cluster, request_timeout: Duration) -> KafkaBuilder {
    let builder = Kafka::builder(cluster.brokers.as_str())
        .client_id("postbox")
        .request_timeout(request_timeout)
        .connect_timeout(CONNECT_TIMEOUT.min(request_timeout))
        .metadata_max_age(METADATA_MAX_AGE)
        .tls_reload_interval(Some(TLS_MAX_AGE));
    match security(cluster) {
        Some(security) => builder.security(security),
        None => builder,
    }
}

fn security(cluster: &Cluster) -> Option<AuthConfig> {
    let auth = cluster.auth.as_ref().map(|AuthTable { mechanism, user, password }| {
        let with = match mechanism {
            Mechanism::Plain => AuthConfig::sasl_plain,
            Mechanism::ScramSha256 => AuthConfig::sasl_scram_sha256,
            Mechanism::ScramSha512 => AuthConfig::sasl_scram_sha512,
        };
        with(user.clone(), password.expose().to_owned())
    });
    let Some(tls) = &cluster.tls else { return auth };
    let shown = |path: &Path| path.to_string_lossy().into_owned();
    let mut config = match &tls.ca_file {
        Some(ca_file) => TlsConfig::new().with_ca_cert(shown(ca_file)),
        None => TlsConfig::new().with_native_roots(),
    };
    if let Some((cert, key)) = tls.client_cert() {
        config = config.with_client_cert(shown(cert), shown(key));
    }
    Some(auth.map_or_else(|| AuthConfig::ssl(config.clone()), |auth| auth.with_tls(config.clone())))
}

/// Returns the ids of these topics as far as brokers report them, or the error of `operation` if a
/// topic is missing. Asks the cluster only if the client's metadata is old.
async fn topic_ids(consumer: &Consumer, topics: &[String], operation: &'static str) -> Result<TopicIds> {
    let mut ids = TopicIds::new();
    for topic in topics {
        let found = consumer.fetch_metadata(Some(topic)).await.map_err(failed)?.topics;
        let Some(found) = found.first() else {
            return Err(classify::missing(operation, topic));
        };
        if found.topic_id != NO_ID {
            ids.insert(topic.clone(), found.topic_id);
        }
    }
    Ok(ids)
}

/// Checks whether these topics exist.
pub(super) async fn look(cluster: &Cluster, topics: &[String]) -> Result<()> {
    let kafka = connect(cluster, CONNECT_TIMEOUT).await?;
    // This consumer has no group and reads no records. It only fetches metadata.
    let consumer = kafka.consumer_without_group().metrics_push(false).build().await.map_err(failed)?;
    topic_ids(&consumer, topics, "connect").await?;
    // An error means that it is closed already.
    let _ = consumer.close().await;
    Ok(())
}

pub(super) async fn producer(cluster: &Cluster, how: &Producing) -> Result<Producer> {
    let kafka = connect(cluster, how.request_timeout()).await?;
    let producer = kafka
        .producer()
        .acks(match how.acks {
            Acks::All => ::krafka::producer::Acks::All,
            Acks::Leader => ::krafka::producer::Acks::Leader,
        })
        .idempotent(how.acks == Acks::All)
        .batch_size(how.batch_bytes_max())
        .buffer_memory(MEMORY_BYTES)
        .linger(LINGER.min(how.request_timeout()))
        .delivery_timeout(how.confirm_within)
        .max_block(how.enqueue_timeout())
        .metrics_push(false)
        .build();
    producer.await.map_err(failed)
}

pub(super) async fn send(producer: &Producer, record: Record) -> Result<Outcome, Failure> {
    let stored = producer.enqueue(record).await?.await?;
    Ok(confirmed(stored.is_deduplicated(), stored.partition, stored.offset))
}

/// Closes a producer. An error only lists what could not be sent any more, which the calls have
/// reported.
pub(super) async fn close_producer(producer: &Producer, within: Duration) {
    let _ = producer.close_with(CloseOptions::new().timeout(within)).await;
}

pub(super) async fn join(
    cluster: &Cluster,
    membership: &Membership,
    rebalances: &Arc<impl Rebalances>,
) -> Result<Joined> {
    let Membership { topics, group, offset_reset, session_timeout, in_flight_max, .. } = membership;
    let kafka = connect(cluster, REQUEST_TIMEOUT).await?;
    let consumer = kafka
        .consumer(group.as_str())
        .auto_offset_reset(match offset_reset {
            OffsetReset::Earliest => AutoOffsetReset::Earliest,
            OffsetReset::Latest => AutoOffsetReset::Latest,
        })
        .enable_auto_commit(false)
        // Records of open and aborted transactions are not received.
        .isolation_level(IsolationLevel::ReadCommitted)
        .session_timeout(*session_timeout)
        .heartbeat_interval(*session_timeout / 3)
        .max_poll_records(i32::try_from((*in_flight_max).min(POLL_MAX)).unwrap_or(i32::MAX))
        .metrics_push(false)
        .rebalance_listener(Listener(Arc::clone(rebalances)))
        .build();
    let consumer = consumer.await.map_err(failed)?;
    let ids = topic_ids(&consumer, topics, OPERATION).await?;
    consumer.subscribe(topics).await.map_err(failed)?;
    Ok(Joined { consumer, admin: kafka.admin(), group: group.clone(), ids })
}

/// Returns the first topic that has another id than when we joined. Asks the cluster only if the
/// client's metadata is old.
pub(super) async fn recreated(joined: &Joined, topics: &[String]) -> Result<Option<String>> {
    let now = topic_ids(&joined.consumer, topics, OPERATION).await?;
    let other = joined.ids.iter().find(|(topic, id)| now.get(*topic).is_some_and(|now| now != *id));
    Ok(other.map(|(topic, _)| topic.clone()))
}

/// Returns the offset of the next message in each of our partitions, as far as it is known.
pub(super) async fn positions(consumer: &Consumer) -> Vec<(Partition, i64)> {
    let mut positions = Vec::new();
    for (topic, partitions) in consumer.assignment().await {
        let topic: Arc<str> = topic.into();
        for partition in partitions {
            if let Some(offset) = consumer.position(&topic, partition).await {
                positions.push(((Arc::clone(&topic), partition), offset));
            }
        }
    }
    positions
}

fn place((topic, partition): &Partition) -> TopicPartition {
    TopicPartition::new(topic.to_string(), *partition)
}

/// The metadata of our offsets: whoever reads one later sees whether it is of this topic or of a
/// former one with the same name.
fn metadata_of(id: &[u8; 16]) -> String {
    format!("{TOPIC_ID}{:032x}", u128::from_be_bytes(*id))
}

/// Whether an offset is of another topic than the one with this id. Offsets of other clients, and
/// of older versions, do not say it.
fn is_former(metadata: &str, id: Option<&[u8; 16]>) -> bool {
    metadata.starts_with(TOPIC_ID) && id.is_some_and(|id| metadata != metadata_of(id))
}

/// Moves those of these partitions to their beginning whose committed offset is of a former topic.
/// Returns them, each with its first offset as far as that is known.
pub(super) async fn rewind(
    joined: &Joined,
    assigned: &BTreeSet<Partition>,
) -> Result<Vec<(Partition, Option<i64>)>, Failure> {
    let Joined { consumer, admin, group, ids } = joined;
    let places = assigned.iter().map(place).collect();
    // Only the admin client reads metadata.
    let options = ListConsumerGroupOffsetsOptions::default().timeout(REQUEST_TIMEOUT).partitions(places);
    let mut offsets = admin.list_consumer_group_offsets(group.as_str(), options).await?;
    let mut rewound = Vec::new();
    for at in assigned {
        let (topic, partition) = at;
        // The client, too, takes a partition's error for no committed offset.
        let metadata = offsets.remove(&place(at)).and_then(|committed| committed.ok()?.metadata);
        // An error means that it is ours no longer.
        if is_former(&metadata.unwrap_or_default(), ids.get(&**topic))
            && consumer.seek_to_beginning(topic, *partition).await.is_ok()
        {
            rewound.push((at.clone(), consumer.position(topic, *partition).await));
        }
    }
    Ok(rewound)
}

pub(super) async fn poll_paused(consumer: &Consumer, wait: Duration) -> Result<Vec<ConsumerRecord>, Failure> {
    let assigned = consumer.assignment().await;
    for (topic, partitions) in &assigned {
        consumer.pause(topic, partitions).await;
    }
    let polled = consumer.poll(wait).await;
    for (topic, partitions) in &assigned {
        consumer.resume(topic, partitions).await;
    }
    Ok(polled?)
}

pub(super) async fn commit(joined: &Joined, offsets: &[(Partition, i64)]) -> Result<(), Failure> {
    let placed = |(at, offset): &(Partition, i64)| {
        let committed = match joined.ids.get(&*at.0) {
            Some(id) => OffsetAndMetadata::with_metadata(*offset, metadata_of(id)),
            None => OffsetAndMetadata::new(*offset),
        };
        (place(at), committed)
    };
    let offsets: Vec<_> = offsets.iter().map(placed).collect();
    Ok(joined.consumer.commit_offsets(offsets).await?)
}

/// Leaves the group. An error means that the group has removed this member already, or will.
pub(super) async fn close_consumer(consumer: &Consumer, within: Duration) {
    let _ = consumer.close_with(CloseOptions::new().timeout(within)).await;
}

/// Reports rebalances to the source.
struct Listener<R>(Arc<R>);

fn partitions(list: &[TopicPartition]) -> Vec<Partition> {
    list.iter().map(|it| (it.topic().into(), it.partition())).collect()
}

impl<R: Rebalances> ConsumerRebalanceListener for Listener<R> {
    async fn on_partitions_assigned(&self, list: &[TopicPartition]) {
        self.0.assigned(&partitions(list));
    }

    async fn on_partitions_revoked(&self, list: &[TopicPartition]) {
        self.0.revoked(&partitions(list)).await;
    }

    async fn on_partitions_lost(&self, list: &[TopicPartition]) {
        self.0.revoked(&partitions(list)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_offset_with_another_topic_id_is_of_a_former_topic() {
        let (id, other) = ([7; 16], [8; 16]);
        assert!(is_former(&metadata_of(&other), Some(&id)));
        assert!(!is_former(&metadata_of(&id), Some(&id)));
        assert!(!is_former(&metadata_of(&other), None), "the brokers report no id");
        for others in ["", "checkpoint-7"] {
            assert!(!is_former(others, Some(&id)), "{others}");
        }
    }
}
