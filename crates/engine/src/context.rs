//! What all lanes of one relay share.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use postbox_core::{
    Acquired, BatchLimit, Capabilities, Clock, DeadLetters, Destination, Error, ErrorKind, Lease, Log, Ordering,
    OwnerId, Random, Result, Sink, Subscription, lock,
};
use tracing::warn;

use crate::apply_state::{APPLY_CHUNK_MAX, ApplyState};
use crate::breaker::Breaker;
use crate::failures::{FailureTracker, Sent};
use crate::lane::Turns;
use crate::limiter::{Limiter, SharedRate};
use crate::log_lines::LogLines;
use crate::metrics::Metrics;
use crate::poll::Siblings;
use crate::settings::RelaySettings;

/// First and longest wait before a failed store call is repeated. With this cap a relay notices
/// within half a second that its database is back.
const STORE_BACKOFF_MIN: Duration = Duration::from_millis(20);
const STORE_BACKOFF_MAX: Duration = Duration::from_millis(500);

/// How long a stopping relay waits for the store to note that it left.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// How long a relay with a rate needs for what it reads at once. What an operator does to an event
/// that is read already has no effect. Of a shared rate it may get less, and then needs longer.
const READ_FOR: Duration = Duration::from_secs(5);

/// Error code of a relay whose subscription was removed or renamed while it ran.
pub const SUBSCRIPTION_REMOVED: &str = "subscription_removed";

/// The sink for dead events, and the store that knows which ones it has not received yet.
#[derive(Clone)]
pub(crate) struct DeadLetterSink {
    pub(crate) sink: Arc<dyn Sink>,
    pub(crate) store: Arc<dyn DeadLetters>,
}

pub(crate) struct RelayContext {
    pub(crate) log: Arc<dyn Log>,
    pub(crate) destination: Destination,
    pub(crate) dead_letters: Option<DeadLetterSink>,
    pub(crate) capabilities: Capabilities,
    pub(crate) subscription: Subscription,
    pub(crate) settings: RelaySettings,
    /// The most that one read may bring: a batch, or less if there is a rate.
    pub(crate) read: BatchLimit,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) random: Arc<dyn Random>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) health: Health,
    pub(crate) limiter: Limiter,
    pub(crate) siblings: Siblings,
    pub(crate) apply: ApplyState,
    pub(crate) log_lines: LogLines,
    pub(crate) turns: Turns,
}

/// What the relay knows about the destination.
pub(crate) struct Health {
    pub(crate) breaker: Breaker,
    pub(crate) failures: FailureTracker,
    /// Why the destination must not be called again, if it said so.
    gone: Mutex<Option<String>>,
}

impl Health {
    /// Returns whether events may be sent freely.
    pub(crate) fn is_good(&self) -> bool {
        !self.is_gone() && self.breaker.is_closed()
    }

    /// Returns the mark for a call that is sent now.
    pub(crate) fn sent(&self) -> Sent {
        self.failures.sent(self.breaker.openings())
    }

    pub(crate) fn set_gone(&self, why: Option<String>) {
        *lock(&self.gone) = why;
    }

    pub(crate) fn is_gone(&self) -> bool {
        lock(&self.gone).is_some()
    }

    pub(crate) fn gone(&self) -> Option<String> {
        lock(&self.gone).clone()
    }
}

impl RelayContext {
    pub(crate) fn new(
        log: Arc<dyn Log>,
        (destination, dead_letters): (Destination, Option<DeadLetterSink>),
        subscription: Subscription,
        (mut settings, shared_rate): (RelaySettings, Option<Arc<SharedRate>>),
        (clock, random): (Arc<dyn Clock>, Arc<dyn Random>),
        (metrics, turns): (Arc<Metrics>, Turns),
    ) -> Self {
        let declared = match &destination {
            Destination::Sink(sink) => sink.capabilities(),
            Destination::Apply(_) => {
                Capabilities { batch_max: APPLY_CHUNK_MAX, concurrency: 1, prefix: true, system: None }
            }
        };
        settings.rate = shared_rate.as_ref().map(|shared| shared.rate()).or(settings.rate);
        let (limiter, capabilities) = Limiter::new(declared, &settings, shared_rate);
        let events_max = settings.rate.map_or(usize::MAX, |rate| rate.within(READ_FOR));
        let read = BatchLimit { events: settings.batch.events.min(events_max), ..settings.batch };
        let health = Health {
            breaker: Breaker::new(settings.breaker.clone()),
            failures: FailureTracker::new(settings.breaker.clone()),
            gone: Mutex::new(None),
        };
        let (apply, log_lines) = (ApplyState::default(), LogLines::default());
        Self {
            log,
            destination,
            dead_letters,
            capabilities,
            subscription,
            settings,
            read,
            clock,
            random,
            metrics,
            health,
            limiter,
            siblings: Siblings::default(),
            apply,
            log_lines,
            turns,
        }
    }

    /// Returns whether a failed event holds back later events of its key.
    pub(crate) fn holds_keys(&self) -> bool {
        self.subscription.ordering == Ordering::Key
    }

    pub(crate) fn name(&self) -> &str {
        self.subscription.name.as_str()
    }

    /// Asks the store for a lane. Never creates the subscription: it existed when the relay
    /// started, so if it is missing now, a person removed it.
    pub(crate) async fn acquire(&self, owner: &OwnerId, held: &[u16]) -> Result<Acquired> {
        let (name, ttl) = (&self.subscription.name, self.settings.lease_ttl);
        let acquired = self.log.acquire(name, owner, held, ttl).await;
        self.metrics.lease_answered(acquired.as_ref().err(), self.clock.now());
        acquired.map_err(|error| match error.code() {
            "subscription_unknown" => removed(self.name()),
            _ => error,
        })
    }

    /// Gives back a lane that was not used. If the call fails, others wait for the lease to end.
    pub(crate) async fn release(&self, lease: &Lease) {
        if let Err(error) = self.log.release(lease).await {
            self.store_failed(&error);
        }
    }

    /// Tells the store that `owner` no longer asks for lanes. If the call fails, other relays wait
    /// for the lease to end.
    pub(crate) async fn leave(&self, owner: &OwnerId) {
        tokio::select! {
            biased;
            left = self.log.leave(&self.subscription.name, owner) => {
                if let Err(error) = left {
                    self.store_failed(&error);
                }
            }
            () = self.clock.sleep(LEAVE_MAX) => {}
        }
    }

    /// Records a failed store call. Returns whether to repeat it.
    pub(crate) fn store_failed(&self, error: &Error) -> bool {
        if error.is_permanent() {
            return false;
        }
        self.metrics.add(&self.metrics.store_errors, 1);
        if let Some(left_out) = self.log_line("store call failed", error.code()) {
            let code = error.code();
            warn!(subscription = self.name(), code, error = %error, left_out, "store call failed");
        }
        true
    }

    /// Returns the number of similar lines left out before if a line is to be logged now, else
    /// `None`.
    pub(crate) fn log_line(&self, what: &'static str, code: &str) -> Option<u64> {
        self.log_lines.observe(what, code, self.clock.monotonic())
    }

    /// Logs, at the end, the counts of lines left out that no later line has reported.
    pub(crate) fn log_left_out(&self) {
        for (what, code, left_out) in self.log_lines.take_left_out() {
            warn!(subscription = self.name(), what, code, left_out, "more of the same");
        }
    }

    /// Records a failed store call of one lane. Returns whether to repeat it.
    pub(crate) fn lane_failed(&self, lane: u16, operation: &'static str, error: &Error) -> bool {
        self.metrics.lane_failed(lane, operation, error, self.clock.now());
        self.store_failed(error)
    }

    /// Returns the wait before repetition number `failures` of a store call.
    pub(crate) fn store_backoff(&self, failures: u32) -> Duration {
        let ceiling = STORE_BACKOFF_MIN.saturating_mul(1 << failures.min(10)).min(STORE_BACKOFF_MAX);
        ceiling.mul_f64(0.5 + self.random.unit() / 2.0)
    }
}

/// The error of a relay whose subscription is gone.
pub(crate) fn removed(name: &str) -> Error {
    let message = format!(
        "subscription {name} was removed or renamed while this relay ran; write its new name into the configuration, \
         or remove it there, and restart (a relay of a {name} that does not exist creates it as a new subscription)"
    );
    Error::new(ErrorKind::NotFound, "acquire", SUBSCRIPTION_REMOVED, message)
}
