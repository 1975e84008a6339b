//! A member of a consumer group on librdkafka.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ::krafka::ConsumerRecord;
use ::rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, Rebalance};
use ::rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use ::rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use ::rdkafka::{Offset, TopicPartitionList};
use bytes::Bytes;
use postbox_core::{Result, lock};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tracing::debug;

use super::super::{POLL_MAX, REQUEST_TIMEOUT};
use super::{Context, Native, blocking, closed, config, failed, look, millis, partitions};
use crate::classify::Failure;
use crate::connection::Cluster;
use crate::group::{Membership, OPERATION, OffsetReset, Partition, Rebalances};

/// The most that a consumer fetches ahead, in KiB.
const FETCHED_KIB_MAX: usize = 16 * 1024;
/// A member that does not poll for so long loses its partitions.
const POLL_INTERVAL_MAX: Duration = Duration::from_secs(300);
/// How long each poll waits while the group is being left.
const LEAVE_POLL: Duration = Duration::from_millis(100);

/// A member of a consumer group.
pub(crate) struct Consumer {
    native: Native<BaseConsumer<Context>>,
    poll_max: usize,
}

impl Consumer {
    pub(crate) async fn join(
        cluster: &Cluster,
        membership: &Membership,
        rebalances: &Arc<impl Rebalances>,
    ) -> Result<Self> {
        let Membership { topics, group, offset_reset, session_timeout, in_flight_max, .. } = membership;
        look(cluster, topics, REQUEST_TIMEOUT, OPERATION).await?;
        let mut config = config(cluster, REQUEST_TIMEOUT);
        config
            .set("group.id", group)
            .set("auto.offset.reset", if *offset_reset == OffsetReset::Earliest { "earliest" } else { "latest" })
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            // Records of open and aborted transactions are not received.
            .set("isolation.level", "read_committed")
            .set("session.timeout.ms", millis(*session_timeout))
            .set("heartbeat.interval.ms", millis(*session_timeout / 3))
            .set("max.poll.interval.ms", millis(POLL_INTERVAL_MAX.max(*session_timeout)))
            .set("queued.min.messages", in_flight_max.to_string())
            .set("queued.max.messages.kbytes", FETCHED_KIB_MAX.to_string());
        let (rebalances, runtime) = (Arc::clone(rebalances), Handle::current());
        let apply = move |rebalance: &Rebalance<'_>| match rebalance {
            Rebalance::Assign(list) => rebalances.assigned(&partitions(list)),
            Rebalance::Revoke(list) => runtime.block_on(rebalances.revoked(&partitions(list))),
            Rebalance::Error(error) => debug!(%error, "librdkafka"),
        };
        let context = Context { rebalance: Some(Box::new(apply)), ..Context::default() };
        let consumer: BaseConsumer<Context> = config.create_with_context(context).map_err(failed)?;
        let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
        consumer.subscribe(&topics).map_err(failed)?;
        Ok(Self { native: Native::new(consumer), poll_max: (*in_flight_max).min(POLL_MAX) })
    }

    /// Waits for messages; with all partitions paused, returns only what was fetched before.
    pub(crate) async fn poll(&self, wait: Duration, paused: bool) -> Result<Vec<ConsumerRecord>, Failure> {
        let (consumer, max) = (Arc::clone(self.native.get()?), self.poll_max);
        blocking(move |_| {
            if !paused {
                return poll(&consumer, wait, max);
            }
            let assigned = consumer.assignment()?;
            consumer.pause(&assigned)?;
            let polled = poll(&consumer, wait, max);
            consumer.resume(&assigned)?;
            polled
        })
        .await
    }

    /// Commits offsets. If the library takes too long, the caller gives up, but the commit may
    /// still go on.
    pub(crate) async fn commit(&self, offsets: &[(Partition, i64)]) -> Result<(), Failure> {
        let consumer = Arc::clone(self.native.get()?);
        let mut list = TopicPartitionList::with_capacity(offsets.len());
        for ((topic, partition), offset) in offsets {
            list.add_partition_offset(topic, *partition, Offset::Offset(*offset))?;
        }
        blocking(move |caller| {
            let _committing = lock(&consumer.context().committing);
            // One that waited for another until its caller gave up must not follow it: its
            // partitions may be another member's by then.
            match caller.is_closed() {
                true => Err(closed()),
                false => Ok(consumer.commit(&list, CommitMode::Sync)?),
            }
        })
        .await
    }

    pub(crate) async fn close(&self, within: Duration) {
        let Ok(consumer) = self.native.get().cloned() else { return };
        let left = blocking(move |_| {
            consumer.close_queue()?;
            let begun = Instant::now();
            while !consumer.closed() && begun.elapsed() < within {
                consumer.poll(LEAVE_POLL);
            }
            Ok(())
        });
        // An error means that the group will remove this member when its session times out.
        let _ = timeout(within, left).await;
    }
}

/// Takes messages: waits for the first, then adds those that are there.
fn poll(consumer: &BaseConsumer<Context>, wait: Duration, max: usize) -> Result<Vec<ConsumerRecord>, Failure> {
    let context = consumer.context();
    if let Some(failure) = lock(&context.postponed).take() {
        return Err(failure);
    }
    let revocations = context.revocations.load(Ordering::SeqCst);
    let mut records = Vec::new();
    while records.len() < max {
        let wait = if records.is_empty() { wait } else { Duration::ZERO };
        match consumer.poll(wait) {
            None => break,
            Some(Ok(message)) => records.push(record(&message)),
            // The library goes on with other brokers, and reports if all are down.
            Some(Err(error)) if is_passing(&error) => {}
            Some(Err(error)) => {
                let failure = context.explained(error);
                if records.is_empty() {
                    return Err(failure);
                }
                *lock(&context.postponed) = Some(failure);
                break;
            }
        }
    }
    // Partitions may have been revoked while this took the first messages. The source has forgotten
    // those partitions, and must not keep more of them.
    if context.revocations.load(Ordering::SeqCst) != revocations {
        let ours = partitions(&consumer.assignment()?);
        records.retain(|it: &ConsumerRecord| {
            ours.iter().any(|(topic, partition)| *topic == it.topic && *partition == it.partition)
        });
    }
    Ok(records)
}

fn is_passing(error: &KafkaError) -> bool {
    let code = error.rdkafka_error_code();
    matches!(code, Some(Code::BrokerTransportFailure | Code::Resolve | Code::OperationTimedOut))
}

fn record(message: &BorrowedMessage<'_>) -> ConsumerRecord {
    let bytes = |bytes: Option<&[u8]>| bytes.map(Bytes::copy_from_slice);
    let (key, value) = (bytes(message.key()), bytes(message.payload()));
    let mut record = ConsumerRecord::new(message.topic(), message.partition(), message.offset(), key, value);
    if let Some(headers) = message.headers() {
        // `rdkafka` panics if a name is not UTF-8. Such a header is left out: no event can have it.
        let header = |place| catch_unwind(AssertUnwindSafe(|| headers.try_get(place))).ok().flatten();
        let headers = (0..headers.count()).filter_map(header);
        record.headers = headers.map(|it| (it.key.to_owned(), bytes(it.value))).collect();
    }
    record
}
