//! The receiver: stores every message from outside in a log, whether it is pulled from a source or
//! pushed by a sender that waits for the answer.
//!
//! # What this crate deliberately does not do
//!
//! It contains no SQL and no network client: stores and brokers are the contracts of
//! `postbox-core`. It verifies no signature.
//!
//! # Guarantees
//!
//! - A source hears that a message arrived only after the commit that stores it.
//! - A message that cannot be decoded is kept as poison and acknowledged, so it never loops.
//! - A store that is down makes the receiver wait. Nothing is acknowledged meanwhile.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod duplicate_rate;
mod group_commit;
mod log_throttle;
mod metrics;
mod pull;
mod unstored;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use postbox_core::{
    Clock, Error, ErrorKind, Inbound, LogName, Outage, RawMessage, Receive, Received, Result, Source, SourceName, lock,
};
use tokio::sync::Semaphore;
use tracing::{error, warn};

pub use duplicate_rate::Storm;
pub use log_throttle::{LogThrottle, log_excerpt};
pub use metrics::{ReceiverMetrics, ReceiverSnapshot};

use duplicate_rate::DuplicateRate;
use group_commit::GroupCommit;
use unstored::Unstored;

/// A source that failed within this time counts as failing. It is asked again within a moment, and
/// an idle source returns nothing that would show it is back, so the state must expire. A source
/// has to end a failing call within this time, or it would count as back in between: SQS takes 30 s
/// to find that its endpoint is silent.
const FAILING_KEPT: Duration = Duration::from_secs(45);

/// The result of one message, or why it is not stored. Messages of a commit may share one error.
pub type Committed = Result<Received, Arc<Error>>;

/// Decodes a message. `None`: nothing is stored, and the message is settled.
type Decode = dyn Fn(&RawMessage) -> Result<Option<Inbound>> + Send + Sync;

/// How a receiver works. Every field has a default that is right for most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiverSettings {
    /// Maximum messages being stored at once. Default 256.
    pub in_flight_max: usize,
    /// Longest wait for the store. Default 10 s.
    pub store_timeout: Duration,
    /// How long a stop waits for messages that are being stored. Default 10 s.
    pub drain_timeout: Duration,
}

impl Default for ReceiverSettings {
    fn default() -> Self {
        let [store_timeout, drain_timeout] = [Duration::from_secs(10); 2];
        Self { in_flight_max: 256, store_timeout, drain_timeout }
    }
}

impl ReceiverSettings {
    fn validate(&self) -> Result<()> {
        let fault = match () {
            () if !(1..=Semaphore::MAX_PERMITS).contains(&self.in_flight_max) => {
                "in_flight_max must be at least 1, and no more than a semaphore holds"
            }
            () if self.store_timeout.is_zero() => "store_timeout must be longer than zero",
            () => return Ok(()),
        };
        Err(Error::invalid("configure", "receiver_settings_invalid", fault))
    }
}

/// Builds a [`Receiver`].
#[must_use = "a builder that is not built receives nothing"]
pub struct ReceiverBuilder {
    store: Arc<dyn Receive>,
    source: SourceName,
    log: LogName,
    settings: ReceiverSettings,
    clock: Arc<dyn Clock>,
    decode: Option<Box<Decode>>,
    pulled: Option<Arc<dyn Source>>,
}

impl ReceiverBuilder {
    /// Sets how it works.
    pub fn settings(mut self, settings: ReceiverSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Sets how a message becomes an event; `None` if nothing is to be stored. An error or a panic
    /// makes the message poison. Default: [`RawMessage::into_inbound`].
    pub fn decode(mut self, decode: impl Fn(&RawMessage) -> Result<Option<Inbound>> + Send + Sync + 'static) -> Self {
        self.decode = Some(Box::new(decode));
        self
    }

    /// Sets the source that [`Receiver::run`] pulls from. Without one, messages arrive only by
    /// [`Receiver::receive`].
    pub fn pull(mut self, source: Arc<dyn Source>) -> Self {
        self.pulled = Some(source);
        self
    }

    /// Checks the settings and builds. Does not access the store.
    pub fn build(self) -> Result<Receiver> {
        self.settings.validate()?;
        let clock = self.clock;
        let source = self.source.clone();
        let as_it_is = move |message: &RawMessage| message.clone().into_inbound(&source).map(Some);
        let metrics = Arc::<ReceiverMetrics>::default();
        let group = GroupCommit {
            store: self.store,
            clock: Arc::clone(&clock),
            log: self.log,
            timeout: self.settings.store_timeout,
            // With two commits at once, the later one might finish first.
            ordered: self.pulled.as_ref().is_some_and(|source| source.capabilities().ordered),
            queue: Mutex::default(),
        };
        Ok(Receiver {
            source: self.source,
            settings: self.settings,
            decode: self.decode.unwrap_or_else(|| Box::new(as_it_is)),
            permits: Semaphore::new(self.settings.in_flight_max),
            group: Arc::new(group),
            pulled: Mutex::new(self.pulled),
            clock,
            metrics,
            watch: Mutex::default(),
        })
    }
}

/// Stores the messages of one source, each once.
///
/// [`run`](Self::run) pulls messages from a source; [`receive`](Self::receive) serves a sender that
/// waits for the answer. Either way, messages that arrive together share a commit.
pub struct Receiver {
    source: SourceName,
    settings: ReceiverSettings,
    decode: Box<Decode>,
    permits: Semaphore,
    group: Arc<GroupCommit>,
    pulled: Mutex<Option<Arc<dyn Source>>>,
    clock: Arc<dyn Clock>,
    metrics: Arc<ReceiverMetrics>,
    watch: Mutex<Watch>,
}

/// State of the rate-limited log lines, and of the source's health.
#[derive(Default)]
struct Watch {
    duplicates: DuplicateRate,
    conflicts: LogThrottle,
    failures: LogThrottle,
    source_failures: LogThrottle,
    poison: LogThrottle,
    cut: LogThrottle,
    rejected: LogThrottle,
    unstored: Unstored,
    /// Since when the source fails, and when it last failed (monotonic).
    failing: Option<(Outage, Duration)>,
}

impl Receiver {
    /// Error code of a message refused because too many are being stored.
    pub const BUSY: &'static str = "receiver_busy";

    /// Builds a receiver for one source that stores into `log`.
    pub fn builder(
        store: Arc<dyn Receive>,
        source: SourceName,
        log: LogName,
        clock: Arc<dyn Clock>,
    ) -> ReceiverBuilder {
        let settings = ReceiverSettings::default();
        ReceiverBuilder { store, source, log, settings, clock, decode: None, pulled: None }
    }

    /// Stores one message. Fails at once with `RateLimited` and the code [`Self::BUSY`] if too many
    /// are being stored.
    ///
    /// Cancel-safety: if dropped, the message may or may not be stored.
    pub async fn receive(&self, inbound: Inbound) -> Committed {
        let Ok(_permit) = self.permits.try_acquire() else {
            self.metrics.add(&self.metrics.busy, 1);
            return Err(Arc::new(busy()));
        };
        let message_id = inbound.message_id.clone();
        let committed = self.group.commit(vec![inbound]).await.pop();
        let committed = committed.unwrap_or_else(|| Err(Arc::new(group_commit::broken_off())));
        self.observe(&message_id, &committed);
        committed
    }

    /// Counts an arrival that the source judged itself, e.g. by its age, towards the detection of a
    /// replay storm.
    pub fn note_arrival(&self, repeat: bool) {
        let warning = self.watch().duplicates.observe(self.clock.monotonic(), repeat);
        if let Some(Storm { repeats, arrivals }) = warning {
            warn!(source = %self.source, repeats, arrivals, "replay storm");
        }
    }

    /// Returns the replay storm under way: most of what the sender sends are repetitions.
    pub fn storm(&self) -> Option<Storm> {
        self.watch().duplicates.storm(self.clock.monotonic())
    }

    /// Returns the counters.
    pub fn metrics(&self) -> Arc<ReceiverMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Returns since when and why the pulled source fails, if it does.
    pub fn outage(&self) -> Option<Outage> {
        let (outage, last) = self.watch().failing.clone()?;
        (self.clock.monotonic().saturating_sub(last) <= FAILING_KEPT).then_some(outage)
    }

    /// Returns since when and why its messages cannot be stored, if that is so: several failed in a
    /// row. One message that the store refuses does not count.
    pub fn store_outage(&self) -> Option<Outage> {
        self.watch().unstored.outage(self.clock.monotonic())
    }

    /// Counts and logs the result of a message.
    fn observe(&self, message_id: &str, committed: &Committed) {
        let metrics = &self.metrics;
        match committed {
            Ok(Received::Accepted(_)) => metrics.add(&metrics.accepted, 1),
            Ok(Received::Duplicate) => metrics.add(&metrics.duplicates, 1),
            Ok(Received::Conflict) => {
                metrics.add(&metrics.conflicts, 1);
                // Rate limited, because anyone who can sign can cause any number of conflicts.
                if let Some(conflicts) = self.watch().conflicts.observe(self.clock.monotonic()) {
                    let message_id = log_excerpt(message_id);
                    warn!(source = %self.source, message_id, conflicts, "message kept out: known id with another body");
                }
            }
            Err(failure) if group_commit::is_held_up(failure) => {}
            Err(failure) => self.observe_failure(message_id, failure),
        }
        if let Ok(received) = committed {
            self.watch().unstored.clear();
            self.note_arrival(*received == Received::Duplicate);
        }
    }

    fn observe_failure(&self, message_id: &str, failure: &Error) {
        // An invalid message says nothing about the store.
        if failure.kind() != ErrorKind::Invalid {
            self.metrics.add(&self.metrics.store_errors, 1);
            let outage = Outage { since: self.clock.now(), code: failure.code().to_owned() };
            self.watch().unstored.observe(message_id, failure, outage, self.clock.monotonic());
        }
        let Some(failures) = self.watch().failures.observe(self.clock.monotonic()) else { return };
        let (source, code) = (&self.source, failure.code());
        match failure.kind() {
            ErrorKind::Invalid => {
                let message_id = log_excerpt(message_id);
                warn!(%source, code, message_id, error = %failure, failures, "message refused");
            }
            ErrorKind::Unavailable | ErrorKind::RateLimited => {
                warn!(%source, code, error = %failure, failures, "store unavailable");
            }
            // It may be this message alone, and in an ordered source all others wait for it.
            _ if failure.is_refused_alone() => {
                let message_id = log_excerpt(message_id);
                error!(%source, code, message_id, error = %failure, failures, "store failed");
            }
            // A wrong log or schema, for example. Once a person fixes it, a repetition succeeds.
            _ => error!(%source, code, error = %failure, failures, "store failed"),
        }
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        lock(&self.watch)
    }
}

fn busy() -> Error {
    let text = "too many messages are being stored; send it again later";
    Error::new(ErrorKind::RateLimited, "receive", Receiver::BUSY, text)
}
