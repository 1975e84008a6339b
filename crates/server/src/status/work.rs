//! What only the running service knows: how fast it delivers, and what fails.

use std::time::Duration;

use jiff::Timestamp;
use postbox_core::{Outage, SourceName, StoreName, SubscriptionName};
use postbox_engine::{Pace, SupervisedRelay};
use postbox_receiver::Storm;
use serde::{Deserialize, Serialize};

/// How one subscription proceeds, over the last minute or less.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkJson {
    /// Its store, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<StoreName>,
    /// The subscription.
    pub subscription: SubscriptionName,
    /// Calls to the destination; `None` if there were none.
    pub calls: Option<CallsJson>,
    /// The destination is down: only one event at a time is sent, as a probe.
    pub destination_fails: Option<FailsJson>,
    /// In how many seconds it is tried again, while it is down.
    #[serde(default)]
    pub probe_in_seconds: Option<f64>,
    /// Reads or settlements fail because the store is unreachable, full or busy.
    pub store_fails: Option<FailsJson>,
    /// The `dead_to` sink does not accept dead events.
    pub dead_to_fails: Option<FailsJson>,
}

/// Calls to a destination, over the last minute or less.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallsJson {
    /// Number of calls that ended.
    pub ended: u64,
    /// Average number of events per call.
    pub events_each: f64,
    /// Average duration of a call; if none ended, the average age of those in flight.
    pub seconds_each: f64,
    /// Average number of calls in flight, over the time in which there was any.
    pub at_once: f64,
    /// Most calls that may be in flight.
    pub at_once_max: usize,
    /// Calls in flight now.
    pub in_flight: u32,
    /// The configured rate.
    pub rate: Option<String>,
    /// The same as events per second.
    pub rate_per_second: Option<f64>,
    /// Whether events are held back by the rate.
    pub held_by_rate: bool,
    /// Whether other subscriptions or stores share the rate.
    #[serde(default)]
    pub rate_shared: bool,
}

/// Something that fails now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailsJson {
    /// Since when it fails.
    pub since: String,
    /// Code of the last failure.
    pub code: String,
}

/// A source with a replay storm, and its messages of the last minute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StormJson {
    /// Its store, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<StoreName>,
    /// The source.
    pub source: SourceName,
    /// All its messages.
    pub arrivals: u64,
    /// Those that had arrived before.
    pub repeats: u64,
}

impl WorkJson {
    /// The wait until a destination that is down is tried again.
    pub fn probe_in(&self) -> Option<Duration> {
        self.destination_fails.as_ref()?;
        Duration::try_from_secs_f64(self.probe_in_seconds?).ok()
    }

    pub(crate) fn of(store: Option<&StoreName>, relay: &SupervisedRelay) -> Self {
        let (metrics, name) = (relay.relay().metrics(), relay.name());
        Self {
            store: store.cloned(),
            subscription: name.clone(),
            calls: relay.relay().pace().and_then(CallsJson::of),
            destination_fails: metrics.outage().map(FailsJson::from),
            probe_in_seconds: relay.relay().probe_in().map(|wait| wait.as_secs_f64()),
            store_fails: relay.relay().store_outage().map(FailsJson::from),
            dead_to_fails: metrics.dead_letters_outage().map(FailsJson::from),
        }
    }
}

impl CallsJson {
    /// `None`: no call in the last minute.
    fn of(pace: Pace) -> Option<Self> {
        let each = |sum: f64, count: u64| if count > 0 { sum / count as f64 } else { 0.0 };
        if pace.calls == 0 && pace.in_flight == 0 {
            return None;
        }
        let (busy, going_on) = (pace.busy.as_secs_f64(), pace.in_flight_for.as_secs_f64());
        let seconds_each = match pace.calls {
            0 => each(going_on, u64::from(pace.in_flight)),
            calls => each(busy, calls),
        };
        Some(Self {
            ended: pace.calls,
            events_each: each(pace.events as f64, pace.calls).max(1.0),
            seconds_each,
            at_once: ((busy + going_on) / pace.active.as_secs_f64().max(1e-6)).min(pace.concurrency as f64),
            at_once_max: pace.concurrency,
            in_flight: pace.in_flight,
            rate: pace.rate.map(|rate| rate.to_string()),
            rate_per_second: pace.rate.map(|rate| 1.0 / rate.interval().as_secs_f64().max(1e-6)),
            held_by_rate: pace.held_by_rate,
            rate_shared: pace.rate_shared,
        })
    }

    /// Events per second that the destination takes with `at_once` calls in flight.
    pub fn events_per_second(&self, at_once: f64) -> f64 {
        at_once * self.events_each / self.seconds_each.max(1e-6)
    }
}

impl From<Outage> for FailsJson {
    fn from(outage: Outage) -> Self {
        let since: Timestamp = outage.since;
        Self { since: format!("{since:.0}"), code: outage.code }
    }
}

impl StormJson {
    pub(crate) fn of(store: Option<&StoreName>, (source, storm): (SourceName, Storm)) -> Self {
        Self { store: store.cloned(), source, arrivals: storm.arrivals, repeats: storm.repeats }
    }
}
