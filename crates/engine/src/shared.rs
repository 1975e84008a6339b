//! What all lanes of one relay share: the store, the destination, the settings, the breaker.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering as Atomic};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postbox_core::limits::ERROR_BYTES_MAX;
use postbox_core::{
    Apply, Bucket, Capabilities, Clock, Delivery, Disposition, Error, Log, Ordering, Outcome, Random, Seq, Sink,
    Subscription,
};
use tokio::sync::Semaphore;
use tracing::{error, info, warn};

use crate::breaker::{Breaker, Culprit};
use crate::metrics::Metrics;
use crate::settings::{OnDead, RelaySettings};

/// First and longest wait before a failed call to the store is repeated. The cap keeps a relay within half a second of a
/// database that comes back.
const STORE_BACKOFF_MIN: Duration = Duration::from_millis(20);
const STORE_BACKOFF_MAX: Duration = Duration::from_millis(500);
/// What of an unused rate is kept for a burst: enough that short waits between calls do not cost throughput, too little to be felt by the destination.
const RATE_BURST: Duration = Duration::from_millis(100);
/// Most deliveries one transaction of an apply handler covers: bounds both the transaction and what a rollback repeats.
const APPLY_CHUNK_MAX: usize = 64;

/// Where a relay's events go.
#[derive(Clone)]
pub(crate) enum Destination {
    Sink(Arc<dyn Sink>),
    Apply(Arc<dyn Apply>),
}

pub(crate) struct Shared {
    pub(crate) log: Arc<dyn Log>,
    pub(crate) destination: Destination,
    pub(crate) capabilities: Capabilities,
    pub(crate) subscription: Subscription,
    pub(crate) settings: RelaySettings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) random: Arc<dyn Random>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) breaker: Breaker,
    /// Calls to the sink in flight over all lanes.
    pub(crate) permits: Arc<Semaphore>,
    /// Keeps all lanes together to the subscription's rate.
    pace: Option<Mutex<Bucket>>,
    /// Set by a `Gone` outcome: why the destination must not be called again.
    gone: Mutex<Option<String>>,
    /// How many deliveries the next apply transaction takes. Shrinks to one when a transaction overruns its time, to find the culprit.
    apply_chunk: AtomicUsize,
    /// Events whose apply transaction overran alone, with the attempt and replay that it was; settled as a failed attempt when they are
    /// read again. At another attempt they are not: the transaction was committed after all, and has its verdict.
    overran: Mutex<HashMap<Seq, (u32, u32)>>,
}

impl Shared {
    #[expect(clippy::too_many_arguments, reason = "called once, by the builder, which names every field")]
    pub(crate) fn new(
        log: Arc<dyn Log>,
        destination: Destination,
        subscription: Subscription,
        settings: RelaySettings,
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
        metrics: Arc<Metrics>,
        breaker: Breaker,
    ) -> Self {
        let mut capabilities = match &destination {
            Destination::Sink(sink) => sink.capabilities(),
            Destination::Apply(_) => Capabilities { batch_max: APPLY_CHUNK_MAX, concurrency: 1, prefix: true },
        };
        capabilities.batch_max = capabilities.batch_max.max(1);
        capabilities.concurrency = capabilities.concurrency.max(1).min(settings.concurrency.unwrap_or(usize::MAX));
        if let Some(rate) = settings.rate {
            // A larger call would be far ahead of the rate at once, and make the rest wait for long.
            let at_once = RATE_BURST.as_nanos() / rate.interval().as_nanos().max(1);
            capabilities.batch_max = capabilities.batch_max.min(usize::try_from(at_once).unwrap_or(usize::MAX).max(1));
        }
        let pace = settings.rate.map(|rate| Mutex::new(Bucket::new(rate, RATE_BURST)));
        let permits = Arc::new(Semaphore::new(capabilities.concurrency.min(Semaphore::MAX_PERMITS)));
        Self {
            log,
            destination,
            capabilities,
            subscription,
            settings,
            clock,
            random,
            metrics,
            breaker,
            permits,
            pace,
            gone: Mutex::new(None),
            apply_chunk: AtomicUsize::new(APPLY_CHUNK_MAX),
            overran: Mutex::new(HashMap::new()),
        }
    }

    /// Whether a failed event holds back the later ones of its key.
    pub(crate) fn holds_keys(&self) -> bool {
        self.subscription.ordering == Ordering::Key
    }

    pub(crate) fn name(&self) -> &str {
        self.subscription.name.as_str()
    }

    /// What becomes of a delivery, given its outcome. Pure but for the jitter.
    pub(crate) fn decide(&self, delivery: &Delivery, outcome: &Outcome) -> Disposition {
        let halt = self.settings.on_dead == OnDead::Halt && self.holds_keys() && delivery.event.key.is_some();
        match outcome {
            Outcome::Delivered { .. } => Disposition::Delivered,
            Outcome::Retry { code, error, after } => {
                let error = clip(error);
                match self.settings.retry.next_delay(delivery.attempt, *after, &*self.random) {
                    Some(after) => Disposition::Retry { after, counted: true, code: code.clone(), error },
                    None => Disposition::Dead { code: code.clone(), error, halt },
                }
            }
            Outcome::Dead { code, error } | Outcome::Gone { code, error } => {
                Disposition::Dead { code: code.clone(), error: clip(error), halt }
            }
            Outcome::Unavailable { code, error, .. } => {
                Disposition::Retry { after: Duration::ZERO, counted: false, code: code.clone(), error: clip(error) }
            }
        }
    }

    /// Counts and logs what was decided of a failed delivery.
    pub(crate) fn record(&self, delivery: &Delivery, disposition: &Disposition) {
        let metrics = &self.metrics;
        let event = &delivery.event;
        match disposition {
            Disposition::Retry { counted, code, error, after } => {
                metrics.failure(&event.topic, code);
                metrics.add(if *counted { &metrics.retries } else { &metrics.unavailable }, 1);
                warn!(
                    subscription = self.name(), id = %event.id, topic = %event.topic, attempt = delivery.attempt,
                    code = %code, error = %error, counted, after = ?after, "delivery failed"
                );
            }
            Disposition::Dead { code, error, halt } => {
                metrics.failure(&event.topic, code);
                metrics.add(&metrics.dead, 1);
                error!(
                    subscription = self.name(), id = %event.id, seq = %delivery.seq, topic = %event.topic,
                    attempt = delivery.attempt, code = %code, error = %error, halt, "event is dead"
                );
            }
            _ => {}
        }
    }

    /// An event found the destination down. Gives its disposition if it is the culprit; otherwise the breaker opens.
    pub(crate) fn found_down(
        &self,
        delivery: &Delivery,
        code: &str,
        error: &str,
        after: Option<Duration>,
    ) -> Option<Disposition> {
        let owned = || Cow::Owned(code.to_owned());
        match self.breaker.blame(delivery.seq, after) {
            Culprit::Destination => {
                self.unavailable(code, error, after);
                None
            }
            // Others get through again and again, this one never: an attempt like any other.
            Culprit::Event => {
                Some(self.decide(delivery, &Outcome::Retry { code: owned(), error: error.to_owned(), after }))
            }
            Culprit::Early(after) => {
                Some(Disposition::Retry { after, counted: false, code: owned(), error: clip(error) })
            }
        }
    }

    /// The destination did not answer: opens the breaker.
    pub(crate) fn unavailable(&self, code: &str, error: &str, after: Option<Duration>) {
        let Some(wait) = self.breaker.unavailable(self.clock.monotonic(), after, &*self.random) else { return };
        self.metrics.add(&self.metrics.breaker_opened, 1);
        self.metrics.destination_down(self.clock.now(), code);
        self.metrics.set_breaker(self.breaker.state());
        warn!(subscription = self.name(), code, error = clip(error), wait = ?wait, "destination is down, breaker open");
    }

    /// The destination said something of an event. Only what is final closes the breaker: one that is to be tried again may well have
    /// met a destination that is still down.
    pub(crate) fn answered(&self, outcome: &Outcome) {
        if outcome.is_delivered() {
            self.breaker.accepted();
        }
        if matches!(outcome, Outcome::Retry { .. } | Outcome::Unavailable { .. }) {
            return;
        }
        if self.breaker.answered() {
            self.metrics.destination_up();
            self.metrics.set_breaker(self.breaker.state());
            info!(subscription = self.name(), "destination answers again, breaker closed");
        }
    }

    /// How long the rate wants to be waited for; `None`: send now.
    pub(crate) fn rate_wait(&self) -> Option<Duration> {
        lock(self.pace.as_ref()?).wait(self.clock.monotonic())
    }

    /// So many events go out now. A call of several may exceed the rate for a moment; the next one waits the longer.
    pub(crate) fn rate_spend(&self, count: usize) {
        if let Some(pace) = &self.pace {
            lock(pace).spend(u32::try_from(count).unwrap_or(u32::MAX), self.clock.monotonic());
        }
    }

    pub(crate) fn set_gone(&self, why: String) {
        *lock(&self.gone) = Some(why);
    }

    pub(crate) fn is_gone(&self) -> bool {
        lock(&self.gone).is_some()
    }

    pub(crate) fn take_gone(&self) -> Option<String> {
        lock(&self.gone).take()
    }

    pub(crate) fn apply_chunk(&self) -> usize {
        self.apply_chunk.load(Atomic::Relaxed)
    }

    /// An apply transaction was committed in time: larger ones may be tried again.
    pub(crate) fn apply_in_time(&self) {
        let chunk = self.apply_chunk();
        if chunk < APPLY_CHUNK_MAX {
            self.apply_chunk.store((chunk * 2).min(APPLY_CHUNK_MAX), Atomic::Relaxed);
        }
    }

    /// An apply transaction overran or panicked. A single delivery is the culprit itself.
    pub(crate) fn apply_overran(&self, deliveries: &[&Delivery]) {
        self.apply_chunk.store(1, Atomic::Relaxed);
        if let [culprit] = deliveries {
            lock(&self.overran).insert(culprit.seq, (culprit.attempt, culprit.replay));
        }
    }

    /// Whether this delivery's transaction overran alone before; asked once.
    pub(crate) fn take_overran(&self, delivery: &Delivery) -> bool {
        lock(&self.overran).remove(&delivery.seq) == Some((delivery.attempt, delivery.replay))
    }

    /// Whether a failed call to the store is worth repeating; logs it.
    pub(crate) fn store_failed(&self, error: &Error) -> bool {
        if error.is_permanent() {
            return false;
        }
        self.metrics.add(&self.metrics.store_errors, 1);
        warn!(subscription = self.name(), code = error.code(), error = %error, "store call failed, trying again");
        true
    }

    /// Takes note of how a call of a lane ended; whether a failed one is worth repeating.
    pub(crate) fn lane_failed(&self, lane: u16, operation: &'static str, error: &Error) -> bool {
        self.metrics.lane_failed(lane, operation, error, self.clock.now());
        self.store_failed(error)
    }

    /// The wait before the `failures`-th repetition of a call to the store.
    pub(crate) fn store_backoff(&self, failures: u32) -> Duration {
        let ceiling = STORE_BACKOFF_MIN.saturating_mul(1 << failures.min(10)).min(STORE_BACKOFF_MAX);
        ceiling.mul_f64(0.5 + self.random.unit() / 2.0)
    }
}

/// Cuts an error text to what is kept with a delivery, at a character border.
pub(crate) fn clip(text: &str) -> String {
    text[..text.floor_char_boundary(ERROR_BYTES_MAX)].to_owned()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
