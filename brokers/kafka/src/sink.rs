//! The sink: a call passes all its events to the producer, then waits for their confirmations.

use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::{FuturesUnordered, StreamExt as _};
use krafka::producer::Record;
use postbox_core::{Capabilities, Delivery, Error, Outcome, Result, Sink, lock};
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use crate::classify::{self, Failure};
use crate::client::{Producer, Producing};
use crate::config::KafkaSinkTable;
use crate::connection::Cluster;
use crate::{message, topic};

/// The most events of a call. More would only wait in the producer.
const BATCH_MAX: usize = 1_000;
/// How many calls run at once, unless the subscription sets it. While a request for a partition is
/// in flight, the producer collects the next batch.
const CONCURRENCY: usize = 8;
/// A call that takes longer than this checks whether any broker can be reached, and then again at
/// this interval.
const PROBE_INTERVAL: Duration = Duration::from_millis(500);
/// The longest wait for a broker's answer to such a check.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// After this many calls in a row in which records failed and none was confirmed, the producer is
/// replaced: one that lost its state may never recover.
const SILENT_CALLS_MAX: u32 = 3;

/// Publishes events to Kafka.
///
/// A call never holds two events of a key. A broker may refuse a batch and accept the next one of
/// its partition, so a later event of the key could be stored although an earlier one was refused.
///
/// Cancel-safety: if a call is dropped, records on their way to a broker may still be stored.
pub struct KafkaSink {
    cluster: Cluster,
    table: KafkaSinkTable,
    /// The longest time of a call.
    timeout: Duration,
    concurrency: usize,
    /// The producer that all calls use.
    shared: Mutex<Option<Arc<Session>>>,
    connecting: AsyncMutex<()>,
}

impl KafkaSink {
    /// Returns a sink that connects when the first event is sent.
    pub(crate) fn new(cluster: Cluster, table: KafkaSinkTable, timeout: Duration, concurrency: Option<usize>) -> Self {
        let concurrency = concurrency.unwrap_or(CONCURRENCY);
        Self { cluster, table, timeout, concurrency, shared: Mutex::default(), connecting: AsyncMutex::default() }
    }

    /// Makes the record of an event, or returns why there can be none.
    fn record(&self, delivery: &Delivery) -> Result<Record, Outcome> {
        let topic = topic::RULES.name(&self.table.topic, &delivery.event)?;
        let wrapped = self.table.envelope.wrap(&delivery.event, &self.table.source)?;
        let (record, bytes) = message::record(topic, delivery, &wrapped);
        let most = self.table.message_max;
        if bytes > most {
            let text = format!("key, headers and value have {bytes} bytes; the sink's message_max is {most}");
            return Err(Outcome::dead("payload_too_large", text));
        }
        Ok(record)
    }

    async fn publish(&self, producer: &Producer, delivery: &Delivery) -> Published {
        let record = match self.record(delivery) {
            Ok(record) => record,
            Err(outcome) => return Published::Refused(outcome),
        };
        let topic = record.topic.clone();
        match producer.send(record).await {
            Ok(outcome) => Published::Confirmed(outcome),
            Err(failure) => Published::Failed(failure, topic),
        }
    }

    /// Returns the producer that all calls use, and makes one if there is none.
    async fn session(&self) -> Result<Arc<Session>> {
        let _connecting = self.connecting.lock().await;
        if let Some(session) = &*lock(&self.shared) {
            return Ok(Arc::clone(session));
        }
        let how = Producing {
            acks: self.table.acks,
            confirm_within: self.timeout - self.timeout / 10,
            message_bytes_max: self.table.message_max,
        };
        let producer = Producer::connect(&self.cluster, &how).await?;
        let session = Arc::new(Session { producer, silent_calls: AtomicU32::new(0) });
        *lock(&self.shared) = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Keeps new calls from using this producer. It is closed when the last call that uses it ends.
    fn retire(&self, session: &Arc<Session>) {
        let mut shared = lock(&self.shared);
        if shared.as_ref().is_some_and(|known| Arc::ptr_eq(known, session)) {
            *shared = None;
        }
    }
}

/// A producer, which is closed when its last user drops it.
struct Session {
    producer: Producer,
    /// Calls in a row in which records failed and none was confirmed.
    silent_calls: AtomicU32,
}

impl Drop for Session {
    /// Closes the producer. Records that it still holds belong to calls that were given up: they
    /// fail and are not sent any more.
    fn drop(&mut self) {
        let producer = self.producer.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { producer.close(Duration::ZERO).await });
        }
    }
}

/// A call in progress. If it is dropped before all its records have a result, the producer is
/// retired: what it still holds must not be sent after newer records.
struct Call<'a> {
    sink: &'a KafkaSink,
    session: Arc<Session>,
    is_over: bool,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.sink.retire(&self.session);
        }
    }
}

/// The result of one event of a call.
enum Published {
    Confirmed(Outcome),
    Failed(Failure, String),
    /// It was never passed to the producer.
    Refused(Outcome),
}

#[async_trait]
impl Sink for KafkaSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: BATCH_MAX, concurrency: self.concurrency, prefix: false, system: Some("kafka") }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        if deliveries.is_empty() {
            return Vec::new();
        }
        let deadline = Instant::now() + self.timeout;
        let session = match timeout_at(deadline, self.session()).await {
            Ok(Ok(session)) => session,
            Ok(Err(error)) => {
                let outcome = Outcome::unavailable(error.code().to_owned(), error.message());
                return vec![outcome; deliveries.len()];
            }
            Err(_) => {
                let text = "no connection in time";
                return vec![Outcome::unavailable("kafka_connect_timeout", text); deliveries.len()];
            }
        };
        let mut call = Call { sink: self, session, is_over: false };
        let producer = call.session.producer.clone();
        let mut published: Vec<Option<Published>> = deliveries.iter().map(|_| None).collect();
        let mut publishing: FuturesUnordered<_> = (0..)
            .zip(deliveries)
            .map(|(place, delivery): (usize, _)| {
                let producer = &producer;
                async move { (place, self.publish(producer, delivery).await) }
            })
            .collect();
        let mut unreachable = pin!(self.unreachable());
        let mut unanswered = classify::no_ack();
        loop {
            tokio::select! {
                biased;
                next = timeout_at(deadline, publishing.next()) => match next {
                    Ok(Some((place, what))) => published[place] = Some(what),
                    Ok(None) | Err(_) => break,
                },
                error = &mut unreachable => {
                    unanswered = Outcome::unavailable(error.code().to_owned(), error.message());
                    break;
                }
            }
        }
        call.is_over = publishing.is_empty();
        self.conclude(&call.session, published, &unanswered)
    }

    async fn close(&self) {
        let session = lock(&self.shared).take();
        if let Some(session) = session {
            session.producer.close(self.timeout).await;
        }
    }
}

impl KafkaSink {
    /// Resolves once no broker can be reached. The client does not report this: it tries until the
    /// call's time is over, and meanwhile later events of the call's keys would pile up.
    async fn unreachable(&self) -> Error {
        loop {
            tokio::time::sleep(PROBE_INTERVAL).await;
            if let Err(error) = self.cluster.probe(PROBE_TIMEOUT).await {
                return error;
            }
        }
    }

    /// Returns the outcomes of a call; `unanswered` is that of events without a result. Retires the
    /// producer if it cannot continue, has confirmed nothing for too long, or cannot reach a
    /// broker.
    fn conclude(
        &self,
        session: &Arc<Session>,
        published: Vec<Option<Published>>,
        unanswered: &Outcome,
    ) -> Vec<Outcome> {
        let any = |is: fn(&Published) -> bool| published.iter().flatten().any(is);
        let confirmed = any(|it| matches!(it, Published::Confirmed(_)));
        let failed = any(|it| matches!(it, Published::Failed(..)));
        let calls = match (confirmed, failed) {
            (true, _) => session.silent_calls.swap(0, Ordering::Relaxed),
            (false, true) => session.silent_calls.fetch_add(1, Ordering::Relaxed) + 1,
            (false, false) => 0,
        };
        let is_final = any(|it| matches!(it, Published::Failed(failure, _) if failure.is_final));
        if is_final || (!confirmed && calls >= SILENT_CALLS_MAX) {
            warn!(code = "kafka_producer_given_up", calls, "producer replaced");
            self.retire(session);
        }
        // A new producer fails at once while no broker can be reached, and works as soon as one
        // can. The old one would wait longer and longer between its attempts.
        let is_unreachable = any(|it| matches!(it, Published::Failed(failure, _) if failure.is_unreachable()));
        if is_unreachable && !confirmed {
            self.retire(session);
        }
        let outcome = |published: Option<Published>| match published {
            None => unanswered.clone(),
            Some(Published::Refused(outcome) | Published::Confirmed(outcome)) => outcome,
            Some(Published::Failed(failure, topic)) => match classify::failure(&failure, &topic) {
                // Other records of the call were confirmed, so brokers can be reached. Only the
                // leader of this partition may be down.
                Outcome::Unavailable { code, error } if confirmed => Outcome::ambiguous(code, error),
                outcome => outcome,
            },
        };
        published.into_iter().map(outcome).collect()
    }
}
