//! One store served by a service: waits for it, runs its work and reports its faults.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use futures::future::BoxFuture;
use jiff::Timestamp;
use postbox_core::kit::check_logs;
use postbox_core::{Clock, Error, ErrorKind, Inbound, LogName, Receive, Received, Result, Store, StoreName, lock};
use postbox_engine::{
    FailingPart, Schedule, SupervisedRelay, Sweeper, UnroutedFinder, note_subscribed, wait_for_store,
};
use postbox_ingress::SnsClient;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span, error_span, warn};

use crate::cache::Cached;
use crate::config::Config;
use crate::fault::Fault;
use crate::lease::LaneLeases;
use crate::metrics::Measured;
use crate::service::join;
use crate::sources::Sources;
use crate::stores::{open_store, validate_schema};
use crate::wiring::{self, Sinks};

/// Longest wait for an answer before the store counts as unreachable: probes give up after a few
/// seconds.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// The same with several stores. Probes give up after one second by default, and one store that
/// does not answer must not delay the answer about the others.
const ANSWER_WAIT_OF_MANY: Duration = Duration::from_millis(500);
/// How long readiness is cached. Probes come every second at most, and strangers must not be able
/// to put load on the store.
const READY_TTL: Duration = Duration::from_secs(1);
/// How long depth and lag are cached: scrapers ask every 10 to 60 s, and several share one answer.
const MEASURED_TTL: Duration = Duration::from_secs(5);

/// One store and everything this service does for it.
pub(crate) struct ServedStore {
    /// `None` if it is the only store.
    pub(crate) name: Option<StoreName>,
    /// Its share of the configuration, as if it were the only store.
    config: Config,
    /// Opened by the caller; `None`: as configured.
    given: Option<Arc<dyn Store>>,
    sinks: Arc<Sinks>,
    leases: LaneLeases,
    sources: Sources,
    taken_up: Arc<TakenUp>,
    /// Set once they run.
    parts: OnceLock<(Arc<Sweeper>, Arc<UnroutedFinder>)>,
    /// Why the store is not taken up yet.
    missing: Mutex<Option<Fault>>,
    /// When the store was created; `None`: not known yet.
    created_at: Mutex<Option<Timestamp>>,
    clock: Arc<dyn Clock>,
    faults: Cached<Vec<Fault>>,
    measured: Cached<Measured>,
}

/// The store and its relays, set once its subscriptions exist.
#[derive(Default)]
struct TakenUp(OnceLock<(Arc<dyn Store>, Relays)>);

type Relays = Vec<Arc<SupervisedRelay>>;

/// An attempt to take the store up.
type Opening = BoxFuture<'static, Result<()>>;

impl ServedStore {
    /// Builds it without touching the store. `connections` is how many requests may wait for the
    /// store, `drain_timeout` how long a stop waits for what is in flight.
    pub(crate) async fn new(
        (name, mut config): (Option<StoreName>, Config),
        given: Option<Arc<dyn Store>>,
        (sinks, leases, sns): (Arc<Sinks>, LaneLeases, SnsClient),
        (connections, drain_timeout): (usize, Duration),
        clock: &Arc<dyn Clock>,
    ) -> Result<Arc<Self>> {
        config.subscriptions.iter_mut().for_each(|it| it.settings.drain_timeout = drain_timeout);
        let taken_up = Arc::<TakenUp>::default();
        let receive: Arc<dyn Receive> = taken_up.clone();
        let sources =
            Sources::build(&config.sources, name.as_ref(), (connections, drain_timeout), &sns, &receive, clock).await?;
        Ok(Arc::new(Self {
            name,
            config,
            given,
            sinks,
            leases,
            sources,
            taken_up,
            parts: OnceLock::new(),
            missing: Mutex::default(),
            created_at: Mutex::default(),
            clock: Arc::clone(clock),
            faults: Cached::new(Arc::clone(clock), READY_TTL),
            measured: Cached::new(Arc::clone(clock), MEASURED_TTL),
        }))
    }

    /// The span of its log lines: with several stores, each line names its store. It has level
    /// error, so that no level filter removes it.
    pub(crate) fn span(&self) -> Span {
        self.name.as_ref().map_or_else(Span::none, |name| error_span!("postbox", store = %name))
    }

    /// The routes of its webhooks.
    pub(crate) fn router(&self) -> Router {
        let (router, span) = (self.sources.router(), self.span());
        if span.is_none() {
            return router;
        }
        router.layer(from_fn(move |request: Request, next: Next| next.run(request).instrument(span.clone())))
    }

    /// Takes the store up: creates its subscriptions and their relays. May be tried again after a
    /// failure.
    async fn take_up(&self, store: Arc<dyn Store>) -> Result<()> {
        let mut relays = Vec::with_capacity(self.config.subscriptions.len());
        let known = store.subscriptions().await?;
        for subscription in &self.config.subscriptions {
            store.subscribe(&subscription.subscription).await?;
            note_subscribed(&subscription.subscription, &known, |name| {
                self.config.subscriptions.iter().any(|it| it.subscription.name == *name)
            });
            let log = self.leases.log(&store, self.name.as_ref());
            let relay = wiring::relay(&store, log, (&self.config.server, subscription), &self.sinks, &self.clock)?;
            let of_log = self.sources.of_log(&subscription.subscription.log);
            relay.metrics().name_sources(of_log.map(ToString::to_string));
            let schedule = subscription.schedule.clone().map(|cron| Box::new(cron) as Box<dyn Schedule>);
            relays.push(SupervisedRelay::new(relay, schedule));
        }
        self.note_missing(None);
        _ = self.taken_up.0.set((store, relays));
        Ok(())
    }

    /// Tries to take the store up. Fails with what waiting cannot mend. An attempt that takes
    /// longer than [`ANSWER_WAIT`] is returned: [`Self::run`] goes on with it, not anew.
    pub(crate) async fn try_once(self: &Arc<Self>) -> Result<Option<Opening>> {
        let this = Arc::clone(self);
        let mut opening: Opening = Box::pin(async move {
            match this.open().await {
                Err(error) if this.is_waited_for(&error) => Ok(()),
                tried => tried,
            }
        });
        if let Ok(tried) = timeout(ANSWER_WAIT, &mut opening).await {
            return tried.map(|()| None);
        }
        let why = "the store is still being taken up: it answers slowly, or waits for a lock (postbox doctor names it)";
        warn!(code = "store_timeout", why, "store away");
        self.note_missing(Some(Fault::of_store("store_timeout", why.to_owned())));
        Ok(Some(opening))
    }

    /// Works until `stop`, as soon as the store can be taken up.
    pub(crate) async fn run(self: Arc<Self>, opening: Option<Opening>, stop: CancellationToken) -> Result<()> {
        let opened = async {
            if let Some(opening) = opening {
                opening.await?;
            }
            match self.taken_up.0.get() {
                Some(_) => Ok(()),
                None => wait_for_store(&*self.clock, |error| self.is_waited_for(error), || self.open()).await,
            }
        };
        match stop.run_until_cancelled(opened).await {
            None => return Ok(()),
            Some(opened) => opened?,
        }
        let Some(store) = self.store().cloned() else { return Ok(()) };
        let mut tasks: JoinSet<Result<()>> = JoinSet::new();
        for relay in self.relays().iter().map(Arc::clone) {
            begin(&mut tasks, relay.supervise(Arc::clone(&self.clock), stop.clone()));
        }
        for receiver in self.sources.receivers().iter().map(Arc::clone) {
            begin(&mut tasks, receiver.supervise(Arc::clone(&self.clock), stop.clone()));
        }
        let sweeper = self.sweeper(&store)?;
        let finder = UnroutedFinder::new(Arc::clone(&store) as _, logs(&self.config), Arc::clone(&self.clock));
        let (sweeper, finder) = self.parts.get_or_init(|| (Arc::new(sweeper), Arc::new(finder)));
        // Refused to a store that works for one tenant.
        if !self.config.store.is_of_one_tenant() {
            begin(&mut tasks, Arc::clone(finder).supervise(stop.clone()));
        }
        begin(&mut tasks, Arc::clone(sweeper).supervise(stop.clone()));
        join(&mut tasks, &stop).await
    }

    /// Whether to try again after an error, which is noted then. One store of several is waited for
    /// whatever is wrong with it, because the others must go on.
    fn is_waited_for(&self, error: &Error) -> bool {
        let is_waited_for = self.name.is_some() || error.kind() == ErrorKind::Unavailable;
        if is_waited_for {
            self.note_missing(Some(Fault::of_store(error.code(), error.message().to_owned())));
        }
        is_waited_for
    }

    async fn open(&self) -> Result<()> {
        let store = match &self.given {
            Some(store) => Arc::clone(store),
            None => open_store(&self.config.store).await?,
        };
        let created_at = validate_schema(store.as_ref()).await?;
        *lock(&self.created_at) = Some(created_at);
        if !self.config.sources.is_empty() {
            let has = store.logs().await?;
            match (check_logs("open", self.config.sources.iter().map(|it| &it.log), &has), &self.name) {
                // One source of one store must not keep its relays from working.
                (Err(error), Some(store)) => warn!(%store, code = error.code(), %error, "log of a source missing"),
                (checked, _) => checked?,
            }
            store.check_receiving().await?;
        }
        self.take_up(store).await
    }

    fn note_missing(&self, fault: Option<Fault>) {
        *lock(&self.missing) = fault;
    }

    fn sweeper(&self, store: &Arc<dyn Store>) -> Result<Sweeper> {
        let retention = &self.config.retention;
        Sweeper::new(Arc::clone(store), logs(&self.config), Arc::clone(&self.clock))
            .events_older_than(retention.older_than)
            .message_ids_older_than(retention.remember_ids)?
            .schedule(retention.schedule.clone())
            .dead_older_than(retention.dead)
    }

    /// The store, once it is taken up.
    pub(crate) fn store(&self) -> Option<&Arc<dyn Store>> {
        self.taken_up.0.get().map(|(store, _)| store)
    }

    /// When the store was created, as far as it was last known.
    pub(crate) fn created_at(&self) -> Option<Timestamp> {
        *lock(&self.created_at)
    }

    /// Its relays, once it is taken up.
    pub(crate) fn relays(&self) -> &[Arc<SupervisedRelay>] {
        self.taken_up.0.get().map_or(&[], |(_, relays)| relays)
    }

    /// Its sources.
    pub(crate) fn sources(&self) -> &Sources {
        &self.sources
    }

    /// The parts beside its relays that fail at every try, each by its name.
    pub(crate) fn failing_parts(&self) -> Vec<(&'static str, FailingPart)> {
        let Some((sweeper, finder)) = self.parts.get() else { return Vec::new() };
        let parts = [(Fault::RETENTION, sweeper.failing()), (Fault::UNROUTED, finder.failing())];
        let failing = parts.into_iter().filter_map(|(part, failing)| Some((part, failing?)));
        // One tenant's service must leave pruning to that of all tenants.
        failing.filter(|(_, it)| it.code != "tenant_limited").collect()
    }

    /// Returns everything that keeps it from working.
    pub(crate) async fn faults(self: &Arc<Self>) -> Vec<Fault> {
        // For a single store, the query itself times out before this does.
        let wait = if self.name.is_some() { ANSWER_WAIT_OF_MANY } else { ANSWER_WAIT * 2 };
        let this = Arc::clone(self);
        let found = self.faults.get(async move { Some(this.find_faults().await) });
        let mut faults = match timeout(wait, found).await {
            Ok(Some(faults)) => faults.to_vec(),
            Ok(None) => vec![Fault::of_store("check_failed", "the check itself failed; this is a defect".into())],
            Err(_) => vec![Fault::of_store("store_timeout", format!("no answer within {wait:?}"))],
        };
        faults.iter_mut().for_each(|fault| fault.store.clone_from(&self.name));
        faults
    }

    async fn find_faults(&self) -> Vec<Fault> {
        let Some(store) = self.store() else {
            let missing = lock(&self.missing).clone();
            return vec![missing.unwrap_or_else(|| not_taken_up().into())];
        };
        let of_the_store = match timeout(ANSWER_WAIT, store.validate()).await {
            Ok(Ok(created_at)) => {
                // Somebody may have migrated it down and up again.
                *lock(&self.created_at) = Some(created_at);
                None
            }
            Ok(Err(error)) => Some(error.into()),
            Err(_) => Some(Fault::of_store("store_timeout", format!("no answer within {ANSWER_WAIT:?}"))),
        };
        let store_is_up = of_the_store.is_none();
        let of_relays = self.relays().iter().filter_map(|relay| Fault::of_relay(relay, store_is_up));
        let of_sources = self.sources.faults(store_is_up);
        let of_parts = self.failing_parts().into_iter().filter(|_| store_is_up);
        let of_parts = of_parts.map(|(part, failing)| Fault::of_part(part, &failing));
        of_the_store.into_iter().chain(of_relays).chain(of_sources).chain(of_parts).collect()
    }

    /// Returns the store's depth and lag; `None` if it does not answer.
    pub(crate) async fn measured(self: &Arc<Self>) -> Option<Arc<Measured>> {
        let this = Arc::clone(self);
        let is_of_one_tenant = self.config.store.is_of_one_tenant();
        let ask = async move { Measured::ask(this.store()?.as_ref(), this.relays(), is_of_one_tenant).await.ok() };
        self.measured.get(ask).await
    }
}

/// Spawns a part of the work. Its log lines name the store.
fn begin(tasks: &mut JoinSet<Result<()>>, work: impl Future<Output = ()> + Send + 'static) {
    let work = async {
        work.await;
        Ok(())
    };
    tasks.spawn(work.in_current_span());
}

/// Messages that arrive before the store is taken up are refused; their senders repeat them.
#[async_trait]
impl Receive for TakenUp {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        let (store, _) = self.0.get().ok_or_else(not_taken_up)?;
        store.receive_many(log, inbound).await
    }

    async fn forget(&self, older_than: Duration) -> Result<u64> {
        let (store, _) = self.0.get().ok_or_else(not_taken_up)?;
        store.forget(older_than).await
    }
}

fn not_taken_up() -> Error {
    Error::new(ErrorKind::Unavailable, "open", "store_unreachable", "the store has not been reached yet")
}

/// Every log that is read or written here.
fn logs(config: &Config) -> Vec<LogName> {
    let mut logs: Vec<LogName> = config.subscriptions.iter().map(|config| config.subscription.log.clone()).collect();
    logs.extend([LogName::outbox(), LogName::inbox()]);
    logs.extend(config.sources.iter().map(|source| source.log.clone()));
    logs.sort();
    logs.dedup();
    logs
}
