//! Webhook ingress: `POST /in/{source}`, verified on the raw bytes, stored once, answered only then.
//!
//! ```no_run
//! use std::sync::Arc;
//! use postbox_core::{Clock, LogName, Receive, SourceName};
//! use postbox_http::ingress::{self, Ingress, WebhookSource};
//! use postbox_webhook::{Scheme, Settings, verifier};
//!
//! # fn build(store: Arc<dyn Receive>, clock: Arc<dyn Clock>, secret: &str) -> Result<axum::Router, Box<dyn std::error::Error>> {
//! let stripe = verifier(Scheme::Stripe, &[secret], &Settings::default())?;
//! let source = WebhookSource::new(SourceName::new("stripe")?, LogName::inbox(), stripe);
//! let ingress = Ingress::new(vec![source], store, clock)?;
//! let router = ingress::router(Arc::clone(&ingress)); // merge it into your own
//! let counts = ingress.counts(); // for your metrics
//! # Ok(router) }
//! ```
//!
//! # Answers
//!
//! | status | when |
//! |---|---|
//! | 202 | stored, durably |
//! | 200 | stored before: the same body (duplicate), or another one (conflict: kept out, counted, logged); a handshake; or your own function ([`WebhookSource::convert`]) wants nothing of it |
//! | 401 | not verified; the body never says why, the counter does |
//! | 404 | no such source |
//! | 408, 413, 415, 501 | the body comes too slowly (or is the one that began first when all together are too many), is too large, has a content encoding, or another transfer coding than `chunked` |
//! | 422 | genuine, but it has no id, topic or tenant where the mapping says, or breaks a limit of events |
//! | 429 + `Retry-After` | genuine, but more than the source's rate; nothing is stored |
//! | 500 | your own function panicked |
//! | 503 + `Retry-After` | the store is down or too slow, or too much is being received at once |
//!
//! More than half of a source's genuine arrivals within a minute being repetitions (known ids, times that are too old), and at least 100: that is a replay
//! storm, and it is logged as a warning once in ten minutes.
//!
//! Nothing of a request that is not verified is stored, not even its id. A conflict is answered with success because no repetition
//! could change it, and a sender that hears an error repeats for days.

mod answer;
mod body;
mod buffer;
mod convert;
mod gather;
mod handshake;
mod headers;
mod json;
mod mapping;
mod receive;
mod sns;
mod storm;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use postbox_core::limits::PAYLOAD_BYTES_MAX;
use postbox_core::{BoxError, Bucket, Clock, Error, LogName, NewEvent, Rate, Receive, Result, SourceName};
use postbox_webhook::{Scheme, Verify};
use tokio::sync::Semaphore;
use tracing::warn;

pub use answer::Count;
pub use convert::Message;
pub use mapping::{Mapping, Origin};

use answer::Counters;
use buffer::Buffer;
use convert::Convert;
use gather::Gather;
use headers::Dropped;
use sns::Sns;
use storm::Storm;

/// What of an unused rate is kept for a burst: senders that send once a second should not be told to slow down.
const BURST: Duration = Duration::from_secs(1);

/// How many of the largest bodies can be on their way at once, however large they may be: those that never end must not be all there is room for.
const BODIES_MIN: usize = 3;

/// Most genuine messages that are no events which the log names, one by one, in a time.
const UNMAPPED_TOLD_PER_SECOND: u32 = 1;
/// What of them may come at once: a whole topic that the mapping does not fit.
const UNMAPPED_TOLD_BURST: Duration = Duration::from_secs(60);

/// Bounds on what one source may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceLimits {
    /// Largest body. Default 1 MiB; at most 16 MiB, because it becomes a payload.
    pub body_bytes: usize,
    /// All bodies that are being received at one time, together. Default 16 MiB, and at least three largest bodies. What has not arrived does not
    /// count, so slow senders of little hold up nobody. When it is full, the body that began first and is not verified makes room (408).
    pub buffered_bytes: usize,
    /// Longest time for a body to arrive. Default 10 s.
    pub body_timeout: Duration,
    /// Most verified messages on their way into the store at once. Default 256.
    pub concurrency: usize,
    /// Most verified messages in a time. Default: no limit. What is not verified does not count, so nobody else can use it up.
    pub rate: Option<Rate>,
    /// Longest wait for the store. Default 10 s; after that the sender comes again.
    pub store_timeout: Duration,
}

impl Default for SourceLimits {
    fn default() -> Self {
        Self {
            body_bytes: 1024 * 1024,
            buffered_bytes: 16 * 1024 * 1024,
            body_timeout: Duration::from_secs(10),
            concurrency: 256,
            rate: None,
            store_timeout: Duration::from_secs(10),
        }
    }
}

/// One sender: how its messages are verified, understood and bounded.
#[derive(Debug)]
pub struct WebhookSource {
    /// Its name, which is its path: `/in/NAME`.
    pub name: SourceName,
    /// The log it stores into.
    pub log: LogName,
    check: Check,
    /// Where id, topic, key and tenant come from.
    pub mapping: Mapping,
    /// Bounds.
    pub limits: SourceLimits,
    /// CloudEvents: who gets consent by the `OPTIONS` handshake, by the names they send in `WebHook-Request-Origin`. Default: nobody. Consent is not
    /// authentication: what then comes is verified as everything else.
    pub allowed_origins: Vec<String>,
    convert: Option<Convert>,
    dropped: Dropped,
}

/// How a message is verified.
#[derive(Debug)]
enum Check {
    /// By keys that both sides know.
    Keys(Box<dyn Verify>),
    /// By a certificate that AWS has.
    Sns(Box<Sns>),
}

impl Check {
    fn scheme(&self) -> Scheme {
        match self {
            Self::Keys(verifier) => verifier.scheme(),
            Self::Sns(_) => Scheme::Sns,
        }
    }
}

impl From<Sns> for Check {
    fn from(sns: Sns) -> Self {
        Self::Sns(Box::new(sns))
    }
}

impl WebhookSource {
    /// A source with the scheme's usual mapping and the default limits.
    pub fn new(name: SourceName, log: LogName, verifier: Box<dyn Verify>) -> Self {
        Self::checked_by(name, log, Check::Keys(verifier))
    }

    /// A source for AWS SNS, which has no shared secret: the ingress fetches the certificates that messages name, from hosts of AWS only.
    ///
    /// With `confirm`, a genuine request to confirm a subscription to one of the verifier's topics is answered by visiting its URL; without, it is
    /// logged, and you confirm in AWS.
    pub fn sns(
        name: SourceName,
        log: LogName,
        verifier: postbox_webhook::sns::Verifier,
        confirm: bool,
    ) -> Result<Self> {
        Ok(Self::checked_by(name, log, Sns::new(verifier, confirm)?.into()))
    }

    fn checked_by(name: SourceName, log: LogName, check: Check) -> Self {
        let mapping = Mapping::usual(check.scheme(), &name);
        Self {
            name,
            log,
            check,
            mapping,
            limits: SourceLimits::default(),
            allowed_origins: Vec::new(),
            convert: None,
            dropped: Dropped::default(),
        }
    }

    /// Stores events of your own making instead of the messages as they came: `convert` gets each verified message once per request, and gives the event
    /// to store, or `None` if there is nothing to store. The id by which it is stored once is the message's, from the mapping; so is the tenant, if
    /// the mapping has one. If it has none and your function sets a tenant, take it from the body: a message is known by source, tenant and id, so
    /// one captured message would be stored again under every tenant that an unsigned header says.
    ///
    /// An error is answered with 422 and logged; a panic with 500, and the sender comes again.
    ///
    /// ```
    /// # use postbox_core::{LogName, NewEvent, SourceName};
    /// # use postbox_http::ingress::WebhookSource;
    /// # use postbox_webhook::{Scheme, Settings, verifier};
    /// # fn example(secret: &str) -> Result<WebhookSource, Box<dyn std::error::Error>> {
    /// # let stripe = verifier(Scheme::Stripe, &[secret], &Settings::default())?;
    /// let source = WebhookSource::new(SourceName::new("stripe")?, LogName::inbox(), stripe).convert(|message| {
    ///     let body: serde_json::Value = serde_json::from_slice(message.body)?;
    ///     let Some(invoice) = body["data"]["object"]["id"].as_str().filter(|_| body["type"] == "invoice.paid") else {
    ///         return Ok(None);
    ///     };
    ///     Ok(Some(NewEvent::json("billing.paid", message.body.clone()).key(invoice)))
    /// });
    /// # Ok(source) }
    /// ```
    #[must_use]
    pub fn convert<F>(mut self, convert: F) -> Self
    where
        F: Fn(&Message<'_>) -> std::result::Result<Option<NewEvent>, BoxError> + Send + Sync + 'static,
    {
        self.convert = Some(Convert::new(convert));
        self
    }
}

/// All sources of a process, ready to be served.
pub struct Ingress {
    gates: BTreeMap<String, Gate>,
    unknown: Counters,
    clock: Arc<dyn Clock>,
}

/// One source and what it is using.
struct Gate {
    source: WebhookSource,
    buffer: Buffer,
    storing: Semaphore,
    gather: Arc<Gather>,
    rate: Option<Mutex<Bucket>>,
    counters: Counters,
    storm: Mutex<Storm>,
    unmapped_told: Mutex<Bucket>,
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
    fn storm(&self) -> MutexGuard<'_, Storm> {
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
/// to them. Serve them with [`serve`](crate::serve::serve), or with something else that has deadlines for heads and a bound on connections.
pub fn router(ingress: Arc<Ingress>) -> Router {
    Router::new().route("/in/{source}", post(receive::receive).options(handshake::consent)).with_state(ingress)
}
