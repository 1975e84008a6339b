//! The sink: a call hands all its events to the producer, then waits for their confirmations.

use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::{FuturesUnordered, StreamExt as _};
use krafka::producer::{Producer, Record};
use krafka::{CloseOptions, KrafkaError};
use postbox_core::{Capabilities, Delivery, Envelope, Error, Outcome, Result, Sink, Template};
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use crate::classify;
use crate::connection::Cluster;
use crate::message;
use crate::topic;

/// Most events of a call; what is larger only waits in the producer.
const BATCH_MAX: usize = 1_000;
/// Most calls at once unless the subscription says so: while one request of a partition is
/// answered, the producer gathers the next.
const CONCURRENCY: usize = 8;
/// Most bytes of a request's part for one partition: half of what a topic takes by default.
const BATCH_BYTES_MAX: usize = 512 * 1024;
/// What the producer may hold; beyond it, a call waits.
const MEMORY_BYTES: usize = 64 * 1024 * 1024;
/// The records of a call reach the producer within it, and leave in one request.
const LINGER: Duration = Duration::from_millis(1);
/// Longest wait for a topic that nobody has heard of, which all events of the call share.
const ENQUEUE_TIMEOUT: Duration = Duration::from_secs(5);
/// So many requests fit into the time of a call: an unanswered one is repeated twice.
const REQUESTS_A_CALL: u32 = 3;
/// A call that takes longer looks whether anybody is there, and again after as long.
const SLOW: Duration = Duration::from_millis(500);
/// Longest wait for somebody who is there.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);
/// After so many calls in a row without any confirmation, another producer is made: one that lost
/// its state may never recover.
const SILENT_CALLS_MAX: u32 = 3;

/// Publishes events to Kafka.
///
/// A call never holds two events of a key: a batch may be refused and the next one of its partition
/// taken, so a later event of the key could be there though an earlier one is not.
///
/// Cancel-safety: of a dropped call, what is on its way to a broker may arrive.
pub struct KafkaSink {
    cluster: Cluster,
    topic: Template,
    envelope: Envelope,
    source: String,
    acks: Acks,
    message_bytes_max: usize,
    timeout: Duration,
    concurrency: usize,
    /// The producer of all calls.
    shared: Mutex<Option<Arc<Session>>>,
    connecting: AsyncMutex<()>,
}

/// Who confirms a record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Acks {
    /// All in-sync replicas.
    #[default]
    All,
    /// The partition's leader alone.
    Leader,
}

/// How events are published.
pub(crate) struct Publishing {
    pub(crate) topic: Template,
    pub(crate) envelope: Envelope,
    /// The CloudEvents source of events that name none.
    pub(crate) source: String,
    pub(crate) acks: Acks,
    pub(crate) message_bytes_max: usize,
    /// Longest time of a call.
    pub(crate) timeout: Duration,
    pub(crate) concurrency: Option<usize>,
}

impl KafkaSink {
    /// A sink that connects when the first event is sent.
    pub(crate) fn new(cluster: Cluster, how: Publishing) -> Self {
        Self {
            cluster,
            topic: how.topic,
            envelope: how.envelope,
            source: how.source,
            acks: how.acks,
            message_bytes_max: how.message_bytes_max,
            timeout: how.timeout,
            concurrency: how.concurrency.unwrap_or(CONCURRENCY),
            shared: Mutex::default(),
            connecting: AsyncMutex::default(),
        }
    }

    /// The record of an event, or why there can be none.
    fn record(&self, delivery: &Delivery) -> Result<Record, Outcome> {
        let topic = topic::render(&self.topic, &delivery.event)?;
        let wrapped = self.envelope.wrap(&delivery.event, &self.source)?;
        let (record, bytes) = message::record(topic, delivery, &wrapped);
        if bytes > self.message_bytes_max {
            let most = self.message_bytes_max;
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
        let confirmed = async { producer.enqueue(record).await?.await };
        match confirmed.await {
            Ok(confirmed) => Published::Confirmed { duplicate: confirmed.is_deduplicated() },
            Err(error) => Published::Failed(error, topic),
        }
    }

    /// The producer of all calls; a new one if there is none.
    async fn session(&self) -> Result<Arc<Session>> {
        let _connecting = self.connecting.lock().await;
        if let Some(session) = &*self.shared() {
            return Ok(Arc::clone(session));
        }
        let confirm_within = self.timeout - self.timeout / 10;
        let request_timeout = confirm_within / REQUESTS_A_CALL;
        let kafka = self.cluster.connect(request_timeout).await?;
        let producer = kafka
            .producer()
            .acks(match self.acks {
                Acks::All => krafka::producer::Acks::All,
                Acks::Leader => krafka::producer::Acks::Leader,
            })
            .idempotent(self.acks == Acks::All)
            .batch_size(BATCH_BYTES_MAX)
            .buffer_memory(MEMORY_BYTES)
            .linger(LINGER.min(request_timeout))
            .delivery_timeout(confirm_within)
            .max_block(ENQUEUE_TIMEOUT.min(request_timeout))
            .metrics_push(false)
            .build();
        let producer = producer.await.map_err(|error| classify::error("connect", &error))?;
        let session = Arc::new(Session { producer: Arc::new(producer), silent_calls: AtomicU32::new(0) });
        *self.shared() = Some(Arc::clone(&session));
        Ok(session)
    }

    fn shared(&self) -> MutexGuard<'_, Option<Arc<Session>>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets nobody else use this producer. It ends with the last call that does.
    fn retire(&self, session: &Arc<Session>) {
        let mut shared = self.shared();
        if shared.as_ref().is_some_and(|known| Arc::ptr_eq(known, session)) {
            *shared = None;
        }
    }
}

/// A producer, for as long as somebody uses it.
struct Session {
    producer: Arc<Producer>,
    /// Calls in a row in which it confirmed nothing.
    silent_calls: AtomicU32,
}

impl Drop for Session {
    /// What it still holds is of calls that were given up: it fails, and is sent no more.
    fn drop(&mut self) {
        let producer = Arc::clone(&self.producer);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { end(&producer, Duration::ZERO).await });
        }
    }
}

/// A call that has begun. Dropped, what it handed to the producer must not go out behind what is
/// sent next, so another producer does that.
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

/// What became of one event of a call.
enum Published {
    Confirmed {
        duplicate: bool,
    },
    Failed(KrafkaError, String),
    /// It was never handed to the producer.
    Refused(Outcome),
}

/// Closes a producer. An error says what it could not send any more, which its calls heard.
async fn end(producer: &Producer, within: Duration) {
    let _ = producer.close_with(CloseOptions::new().timeout(within)).await;
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
        let producer = Arc::clone(&call.session.producer);
        let mut published: Vec<Option<Published>> = deliveries.iter().map(|_| None).collect();
        let mut publishing: FuturesUnordered<_> = (0..)
            .zip(deliveries)
            .map(|(place, delivery): (usize, _)| {
                let producer = &producer;
                async move { (place, self.publish(producer, delivery).await) }
            })
            .collect();
        let mut gone = pin!(self.gone());
        let mut unanswered = classify::no_ack();
        loop {
            tokio::select! {
                biased;
                next = timeout_at(deadline, publishing.next()) => match next {
                    Ok(Some((place, what))) => published[place] = Some(what),
                    Ok(None) | Err(_) => break,
                },
                error = &mut gone => {
                    unanswered = Outcome::unavailable(error.code().to_owned(), error.message());
                    break;
                }
            }
        }
        call.is_over = publishing.is_empty();
        self.conclude(&call.session, published, &unanswered)
    }

    async fn close(&self) {
        let session = self.shared().take();
        if let Some(session) = session {
            end(&session.producer, self.timeout).await;
        }
    }
}

impl KafkaSink {
    /// Resolves once no broker can be reached. The client says nothing of it: it goes on trying
    /// until the call's time is over, and whatever follows in the keys of the call would pile up.
    async fn gone(&self) -> Error {
        loop {
            tokio::time::sleep(SLOW).await;
            if let Err(error) = self.cluster.connect(LOOK_TIMEOUT).await {
                return error;
            }
        }
    }

    /// The outcomes of a call, in the light of each other, and that of what was not answered.
    fn conclude(
        &self,
        session: &Arc<Session>,
        published: Vec<Option<Published>>,
        unanswered: &Outcome,
    ) -> Vec<Outcome> {
        let any = |is: fn(&Published) -> bool| published.iter().flatten().any(is);
        let confirmed = any(|it| matches!(it, Published::Confirmed { .. }));
        let failed = any(|it| matches!(it, Published::Failed(..)));
        let calls = match (confirmed, failed) {
            (true, _) => session.silent_calls.swap(0, Ordering::Relaxed),
            (false, true) => session.silent_calls.fetch_add(1, Ordering::Relaxed) + 1,
            (false, false) => 0,
        };
        let is_final = any(|it| matches!(it, Published::Failed(error, _) if classify::is_final(error)));
        if is_final || (!confirmed && calls >= SILENT_CALLS_MAX) {
            warn!(code = "kafka_producer_given_up", calls, "producer replaced");
            self.retire(session);
        }
        // A new connection fails at once while nobody is there, and stands as soon as somebody is.
        let is_unreachable = any(|it| matches!(it, Published::Failed(error, _) if classify::is_unreachable(error)));
        if is_unreachable && !confirmed {
            self.retire(session);
        }
        let outcome = |published: Option<Published>| match published {
            None => unanswered.clone(),
            Some(Published::Refused(outcome)) => outcome,
            Some(Published::Confirmed { duplicate }) => Outcome::Delivered { duplicate },
            Some(Published::Failed(error, topic)) => match classify::failure(&error, &topic) {
                // Others that were confirmed prove that the brokers are there; this partition's may
                // not be.
                Outcome::Unavailable { code, error } if confirmed => Outcome::ambiguous(code, error),
                outcome => outcome,
            },
        };
        published.into_iter().map(outcome).collect()
    }
}
