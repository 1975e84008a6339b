//! All sources of a process, and the state of each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use postbox_core::limits::PAYLOAD_BYTES_MAX;
use postbox_core::{Bucket, Clock, Error, Outage, Rate, Receive, Result, SourceName, lock};
use postbox_receiver::{LogThrottle, Receiver, ReceiverSettings, Storm};
use tokio::sync::Semaphore;
use tracing::warn;

use crate::answer::{Count, Counters};
use crate::buffer::Buffer;
use crate::source::WebhookSource;
use crate::{handshake, receive};

/// Burst allowance of a source's rate: senders that send once a second must not be delayed.
const BURST: Duration = Duration::from_secs(1);

/// The buffer holds at least this many bodies of the largest size, so that a body that never ends
/// cannot take all of it.
const BODIES_MIN: usize = 3;

/// Rate of log lines about unmapped messages, per second.
const UNMAPPED_LOGGED_PER_SECOND: u32 = 1;
/// Burst of such log lines: one minute's worth, for a whole topic that the mapping does not fit.
const UNMAPPED_LOGGED_BURST: Duration = Duration::from_secs(60);

/// Interval between log lines about stale timestamps.
const STALE_LOGGED_EVERY: Duration = Duration::from_secs(600);

/// All sources of a process, ready to be served.
pub struct Ingress {
    pub(crate) sources: BTreeMap<String, SourceState>,
    pub(crate) unknown: Counters,
    pub(crate) clock: Arc<dyn Clock>,
    /// Places for messages being stored, shared by all sources.
    pub(crate) places: Semaphore,
}

/// One source and its state.
pub(crate) struct SourceState {
    pub(crate) source: WebhookSource,
    pub(crate) buffer: Buffer,
    pub(crate) receiver: Receiver,
    pub(crate) rate: Option<Mutex<Bucket>>,
    pub(crate) counters: Counters,
    logging: Mutex<Logging>,
}

/// Rate limits of log lines.
pub(crate) struct Logging {
    pub(crate) pushed_out: LogThrottle,
    pub(crate) unmapped: Bucket,
    stale_at: Option<Duration>,
}

impl Logging {
    fn new() -> Self {
        let unmapped = Rate::per_second(UNMAPPED_LOGGED_PER_SECOND).expect("a positive number a second is a rate");
        let unmapped = Bucket::new(unmapped, UNMAPPED_LOGGED_BURST);
        Self { pushed_out: LogThrottle::default(), unmapped, stale_at: None }
    }

    /// Whether to log a verified message with a stale timestamp: the first in ten minutes. The
    /// clock of this machine may be wrong.
    pub(crate) fn stale(&mut self, now: Duration) -> bool {
        let logs = self.stale_at.is_none_or(|at| now.saturating_sub(at) >= STALE_LOGGED_EVERY);
        if logs {
            self.stale_at = Some(now);
        }
        logs
    }
}

impl Ingress {
    /// Builds the ingress. Rejects two sources with one name, contradictory limits, and an unsigned
    /// tenant ([`Mapping::fault`](crate::Mapping::fault)).
    pub fn new(sources: Vec<WebhookSource>, receive: Arc<dyn Receive>, clock: Arc<dyn Clock>) -> Result<Arc<Self>> {
        Self::bounded(sources, receive, clock, Semaphore::MAX_PERMITS)
    }

    /// As [`Self::new`], with at most `storing_max` messages of all sources together being stored
    /// at once; others get 503. Each source keeps its own limit.
    pub fn bounded(
        sources: Vec<WebhookSource>,
        receive: Arc<dyn Receive>,
        clock: Arc<dyn Clock>,
        storing_max: usize,
    ) -> Result<Arc<Self>> {
        let mut states = BTreeMap::new();
        for source in sources {
            let name = source.name.to_string();
            let state = SourceState::new(source, &receive, &clock)?;
            if states.insert(name.clone(), state).is_some() {
                return Err(Error::invalid("configure", "source_twice", format!("there are two sources named {name}")));
            }
        }
        let places = Semaphore::new(storing_max.min(Semaphore::MAX_PERMITS));
        Ok(Arc::new(Self { sources: states, unknown: Counters::default(), clock, places }))
    }

    /// How often each source gave each answer, zeros included: `accepted`, `duplicate` (a replayed
    /// id), `conflict`, `timestamp_too_old` (stale), every other refusal by its code, …
    pub fn counts(&self) -> Vec<Count> {
        let known = self.sources.values().flat_map(|state| state.counters.counts(Some(&state.source.name)));
        known.chain(self.unknown.counts(None).filter(|count| count.count > 0)).collect()
    }

    /// The sources with a replay storm, and its size.
    pub fn storms(&self) -> Vec<(SourceName, Storm)> {
        let storm = |state: &SourceState| Some((state.source.name.clone(), state.receiver.storm()?));
        self.sources.values().filter_map(storm).collect()
    }

    /// The sources whose messages cannot be stored, since when and why.
    pub fn store_outages(&self) -> Vec<(SourceName, Outage)> {
        let outage = |state: &SourceState| Some((state.source.name.clone(), state.receiver.store_outage()?));
        self.sources.values().filter_map(outage).collect()
    }

    /// Number of headers that were left out of each source's events because they did not fit or are
    /// not text.
    pub fn headers_dropped(&self) -> Vec<(SourceName, u64)> {
        self.sources.values().map(|state| (state.source.name.clone(), state.source.dropped.headers())).collect()
    }
}

impl SourceState {
    pub(crate) fn logging(&self) -> MutexGuard<'_, Logging> {
        lock(&self.logging)
    }

    fn new(source: WebhookSource, receive: &Arc<dyn Receive>, clock: &Arc<dyn Clock>) -> Result<Self> {
        let limits = source.limits;
        let (scheme, time_header) = (source.check.scheme(), source.check.chosen_time_header());
        if let Some(fault) = source.mapping.fault(scheme, time_header) {
            return Err(Error::invalid("configure", "tenant_unsigned", format!("source {}: {fault}", source.name)));
        }
        if let Some(risk) = source.mapping.risk(scheme, time_header) {
            warn!(source = %source.name, code = "id_unsigned", why = %risk, "message id unsigned");
        }
        let fault = |text: &str| {
            Error::invalid("configure", "source_limits_invalid", format!("source {}: {text}", source.name))
        };
        if !(1..=PAYLOAD_BYTES_MAX).contains(&limits.body_bytes) {
            return Err(fault("the largest body must have 1 byte to 16 MiB"));
        }
        if limits.body_timeout.is_zero() {
            return Err(fault("the timeouts must be longer than zero"));
        }
        let settings = ReceiverSettings {
            in_flight_max: limits.concurrency,
            store_timeout: limits.store_timeout,
            ..ReceiverSettings::default()
        };
        let receiver =
            Receiver::builder(Arc::clone(receive), source.name.clone(), source.log.clone(), Arc::clone(clock))
                .settings(settings)
                .build()
                .map_err(|error| fault(error.message()))?;
        Ok(Self {
            buffer: Buffer::new(limits.buffered_bytes.max(BODIES_MIN * limits.body_bytes)),
            receiver,
            rate: limits.rate.map(|rate| Mutex::new(Bucket::new(rate, BURST))),
            counters: Counters::default(),
            logging: Mutex::new(Logging::new()),
            source,
        })
    }
}

/// The source that a path names. Taken by its name: the routes may be below other parameters.
#[derive(serde::Deserialize)]
pub(crate) struct Named {
    pub(crate) source: String,
}

/// The routes: `POST /in/{source}`, and `OPTIONS` for the CloudEvents handshake. Mount or merge
/// them anywhere; axum's own body limit does not apply to them. Serve them with `postbox-listen`,
/// or with another server that limits connections and the time for a request head.
pub fn router(ingress: Arc<Ingress>) -> Router {
    router_below("/in", ingress)
}

/// The same below another path, e.g. `/in/acme`, for one of several stores.
pub fn router_below(path: &str, ingress: Arc<Ingress>) -> Router {
    let route = format!("{path}/{{source}}");
    Router::new().route(&route, post(receive::receive).options(handshake::consent)).with_state(ingress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_messages_are_logged_once_in_ten_minutes() {
        let mut logging = Logging::new();
        let logged = (0..1_800).filter(|n| logging.stale(Duration::from_secs(1_000 + *n))).count();
        assert_eq!(logged, 3);
    }
}
