//! All sources of a process, and what each is using.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use postbox_core::limits::PAYLOAD_BYTES_MAX;
use postbox_core::{Bucket, Clock, Error, Rate, Receive, Result, SourceName};
use tokio::sync::Semaphore;
use tracing::warn;

use crate::answer::{Count, Counters};
use crate::buffer::Buffer;
use crate::gather::Gather;
use crate::source::WebhookSource;
use crate::storm::Storm;
use crate::{handshake, receive};

/// What of an unused rate is kept for a burst: senders that send once a second should not be told to slow down.
const BURST: Duration = Duration::from_secs(1);

/// How many of the largest bodies can be on their way at once, however large they may be: those that never end must not be all there is room for.
const BODIES_MIN: usize = 3;

/// Most genuine messages that are no events which the log names, one by one, in a time.
const UNMAPPED_TOLD_PER_SECOND: u32 = 1;
/// What of them may come at once: a whole topic that the mapping does not fit.
const UNMAPPED_TOLD_BURST: Duration = Duration::from_secs(60);

/// All sources of a process, ready to be served.
pub struct Ingress {
    pub(crate) gates: BTreeMap<String, Gate>,
    pub(crate) unknown: Counters,
    pub(crate) clock: Arc<dyn Clock>,
}

/// One source and what it is using.
pub(crate) struct Gate {
    pub(crate) source: WebhookSource,
    pub(crate) buffer: Buffer,
    pub(crate) storing: Semaphore,
    pub(crate) gather: Arc<Gather>,
    pub(crate) rate: Option<Mutex<Bucket>>,
    pub(crate) counters: Counters,
    storm: Mutex<Storm>,
    pub(crate) unmapped_told: Mutex<Bucket>,
}

impl Ingress {
    /// Takes the sources; two of one name, limits that contradict themselves, or a tenant that nobody signed ([`Mapping::fault`]) are refused.
    pub fn new(sources: Vec<WebhookSource>, receive: Arc<dyn Receive>, clock: Arc<dyn Clock>) -> Result<Arc<Self>> {
        let mut gates = BTreeMap::new();
        for source in sources {
            let name = source.name.to_string();
            let gate = Gate::new(source, &receive, &clock)?;
            if gates.insert(name.clone(), gate).is_some() {
                return Err(Error::invalid("configure", "source_twice", format!("there are two sources named {name}")));
            }
        }
        Ok(Arc::new(Self { gates, unknown: Counters::default(), clock }))
    }

    /// How often each source gave each answer, zeros included: `accepted`, `duplicate` (replayed id), `conflict`,
    /// `timestamp_too_old` (stale), every other refusal by its code, …
    pub fn counts(&self) -> Vec<Count> {
        let known = self.gates.values().flat_map(|gate| gate.counters.counts(Some(&gate.source.name)));
        known.chain(self.unknown.counts(None).filter(|count| count.count > 0)).collect()
    }

    /// How many headers of each source's messages were not kept, because an event has no room for them or they are no text.
    pub fn headers_dropped(&self) -> Vec<(SourceName, u64)> {
        self.gates.values().map(|gate| (gate.source.name.clone(), gate.source.dropped.headers())).collect()
    }
}

impl Gate {
    pub(crate) fn storm(&self) -> MutexGuard<'_, Storm> {
        self.storm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new(source: WebhookSource, receive: &Arc<dyn Receive>, clock: &Arc<dyn Clock>) -> Result<Self> {
        let limits = source.limits;
        let scheme = source.check.scheme();
        if let Some(fault) = source.mapping.fault(scheme) {
            return Err(Error::invalid("configure", "tenant_unsigned", format!("source {}: {fault}", source.name)));
        }
        if let Some(risk) = source.mapping.risk(scheme) {
            warn!(source = %source.name, code = "id_unsigned", "{risk}");
        }
        let fault = |text: &str| {
            Err(Error::invalid("configure", "source_limits_invalid", format!("source {}: {text}", source.name)))
        };
        if !(1..=PAYLOAD_BYTES_MAX).contains(&limits.body_bytes) {
            return fault("the largest body must have 1 byte to 16 MiB");
        }
        if limits.concurrency == 0 || limits.concurrency > Semaphore::MAX_PERMITS {
            return fault("concurrency must be at least 1");
        }
        if limits.body_timeout.is_zero() || limits.store_timeout.is_zero() {
            return fault("the timeouts must be longer than nothing");
        }
        let told = Rate::per_second(UNMAPPED_TOLD_PER_SECOND).expect("a positive number a second is a rate");
        Ok(Self {
            buffer: Buffer::new(limits.buffered_bytes.max(BODIES_MIN * limits.body_bytes)),
            storing: Semaphore::new(limits.concurrency),
            gather: Gather::new(Arc::clone(receive), Arc::clone(clock), source.log.clone(), limits.store_timeout),
            rate: limits.rate.map(|rate| Mutex::new(Bucket::new(rate, BURST))),
            counters: Counters::default(),
            storm: Mutex::default(),
            unmapped_told: Mutex::new(Bucket::new(told, UNMAPPED_TOLD_BURST)),
            source,
        })
    }
}

/// The routes: `POST /in/{source}`, and `OPTIONS` for the CloudEvents handshake. Mount or merge them anywhere; axum's own body limit does not apply
/// to them. Serve them with `postbox-listen`, or with something else that has deadlines for heads and a bound on connections.
pub fn router(ingress: Arc<Ingress>) -> Router {
    Router::new().route("/in/{source}", post(receive::receive).options(handshake::consent)).with_state(ingress)
}
