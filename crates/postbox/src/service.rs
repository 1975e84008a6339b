//! The service: everything a program does with events, started together and stopped together.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::future::join_all;
use postbox_core::kit::check_logs;
use postbox_core::{Clock, Error, ErrorKind, LogName, Result, Store, Subscription, SubscriptionInfo, SubscriptionName};
use postbox_engine::{
    Metrics, Relay, SupervisedRelay, Sweeper, TokioClock, UnroutedFinder, note_subscribed, wait_for_store,
};
#[cfg(feature = "http")]
use postbox_ingress::{Ingress, WebhookSource};
use postbox_router::{Place, Router};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tracing::info;

/// Longest wait of [`Service::ready`] for the store. Its callers have deadlines too, often of
/// seconds.
const READY_WAIT: Duration = Duration::from_secs(2);

/// Everything a program does with events: subscriptions with their handlers, sources of webhooks,
/// retention. Clones are the same service.
///
/// ```
/// use std::sync::Arc;
/// use postbox::router::{Event, Router, State};
/// use postbox::{MemoryStore, Postbox, Service, TokioClock};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(postbox::Event, Serialize, Deserialize)]
/// #[event(topic = "order.paid", key = "order")]
/// struct OrderPaid {
///     order: i64,
/// }
///
/// # type Mailer = tokio::sync::mpsc::Sender<i64>;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> postbox::Result<()> {
/// # let (mailed, mut signal) = tokio::sync::mpsc::channel(1);
/// let store = MemoryStore::new(Arc::new(TokioClock::new())); // or a database
/// let mail = async |Event(paid): Event<OrderPaid>, State(mailer): State<Mailer>| mailer.send(paid.order).await;
/// let mails = Router::new().on(mail).with_state(mailed);
/// let service = Service::builder(store.clone()).outbox("mails", mails).build()?;
///
/// let mut tx = store.begin();
/// Postbox::new(store).append(&mut tx, OrderPaid { order: 42 })?;
/// tx.commit();
/// service.run_until(signal.recv()).await // or tokio::signal::ctrl_c()
/// # }
/// ```
///
/// What runs, and how several programs share it on one store:
///
/// | part | with replicas |
/// |---|---|
/// | a relay for each subscription | they share its lanes |
/// | an hourly sweep: removes delivered events older than 7 days, and ids of messages from outside older than 30 | they take turns; the shortest age counts |
/// | a look every second for events that no subscription wants | they take turns |
///
/// Behaviour:
/// - It begins with the store and every subscription. It waits while the store is down. A permanent
///   fault (schema, rights, an unknown log) is an error, and nothing is delivered.
/// - A relay that fails later, or panics, is restarted, and the others go on; see [`Self::ready`].
///   A sweep or a look that panics is restarted as well.
///   A relay whose subscription was removed or renamed meanwhile is not restarted.
/// - The first of the signal and [`Self::stop`] ends it. Work in flight is finished and settled,
///   and lanes are released. What ends within
///   [`drain_timeout`](crate::RelaySettings::drain_timeout), 10 s by default, is not repeated. A
///   handler that takes longer is cut off, and its event is handled again: for such handlers, add
///   [a relay](ServiceBuilder::relay) with a longer one.
/// - It runs once.
/// - Waits follow tokio's time. With a [`MemoryStore`](crate::MemoryStore), a test may pause it.
#[derive(Clone)]
pub struct Service(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    relays: Vec<Arc<SupervisedRelay>>,
    #[cfg(feature = "http")]
    ingress: Arc<Ingress>,
    /// The logs that its sources write to.
    received: BTreeSet<LogName>,
    sweeper: Arc<Sweeper>,
    finder: Arc<UnroutedFinder>,
    clock: Arc<dyn Clock>,
    ran: AtomicBool,
    started: watch::Sender<bool>,
    stop: CancellationToken,
    /// Why it could not start: the kind, the code and the text.
    not_started: OnceLock<(ErrorKind, String, String)>,
}

impl Service {
    /// Starts building a service on a store.
    pub fn builder(store: impl Store) -> ServiceBuilder {
        ServiceBuilder {
            store: Arc::new(store),
            relays: Ok(Vec::new()),
            #[cfg(feature = "http")]
            sources: Vec::new(),
            received: BTreeSet::new(),
            events_age: Sweeper::EVENTS_AGE,
            message_ids_age: Sweeper::MESSAGE_IDS_AGE,
            dead_age: None,
        }
    }

    /// Returns the ingress of its sources. Pass it to [`ingress::router`](crate::ingress::router),
    /// and merge that into your router. It also has counters. It works as long as it is served,
    /// even if the service does not run.
    #[cfg(feature = "http")]
    pub fn ingress(&self) -> Arc<Ingress> {
        self.0.ingress.clone()
    }

    /// Runs until the signal, or [`Self::stop`], and then stops gracefully.
    ///
    /// An error comes from the start, or (`Conflict`, `service_ran`) says that it has run before.
    /// Dropping this future stops without settling. What was in flight may be handled again, and
    /// nothing is lost.
    pub async fn run_until(&self, signal: impl Future) -> Result<()> {
        let inner = &*self.0;
        if inner.ran.swap(true, Ordering::AcqRel) {
            let text = "this service runs, or has run; build another for the next run";
            return Err(Error::new(ErrorKind::Conflict, "serve", "service_ran", text));
        }
        // However it ends, everything that waits for the end is notified.
        let _ended = inner.stop.clone().drop_guard();
        let work = inner.work();
        tokio::pin!(work);
        tokio::select! {
            ended = &mut work => return ended,
            _ = signal => self.stop(),
        }
        work.await
    }

    /// Asks it to stop, and returns at once. Idempotent. If called before the start, it never
    /// starts.
    pub fn stop(&self) {
        self.0.stop.cancel();
    }

    /// Resolves when the service begins to stop, or has failed to start. Use it as the signal for
    /// everything that stops with it: `axum::serve(…).with_graceful_shutdown(service.stopping())`.
    pub fn stopping(&self) -> WaitForCancellationFutureOwned {
        self.0.stop.clone().cancelled_owned()
    }

    /// Waits until it has started or ended, and returns whether it is [ready](Self::ready). Then
    /// all subscriptions exist, so events appended from now on reach each of them.
    pub async fn started(&self) -> Result<()> {
        let mut started = self.0.started.subscribe();
        tokio::select! {
            _ = started.wait_for(|started| *started) => {}
            () = self.0.stop.cancelled() => {}
        }
        self.ready().await
    }

    /// Returns whether it works right now: it has started and is not stopping, the store answers
    /// within two seconds, and the events of every subscription flow. The error names what does not
    /// work, with the code of the reason.
    pub async fn ready(&self) -> Result<()> {
        let Inner { store, relays, started, stop, not_started, .. } = &*self.0;
        let unready = |code: &str, text: String| Error::new(ErrorKind::Unavailable, "serve", code.to_owned(), text);
        if let Some((kind, code, text)) = not_started.get() {
            return Err(Error::new(*kind, "serve", code.clone(), text.clone()));
        }
        if stop.is_cancelled() {
            return Err(unready("service_stopping", "the service stops, or has stopped".into()));
        }
        if !*started.borrow() {
            return Err(unready("service_starting", "the service has not started yet".into()));
        }
        let too_slow = |_| unready("store_timeout", format!("the store did not answer within {READY_WAIT:?}"));
        timeout(READY_WAIT, store.validate()).await.map_err(too_slow)??;
        let faults = relays.iter().filter_map(|relay| Some((relay.name(), relay.fault(true)?)));
        let faults: Vec<_> = faults.collect();
        let Some((_, first)) = faults.first() else { return Ok(()) };
        let lines: Vec<_> = faults.iter().map(|(name, fault)| format!("{name}: {fault}")).collect();
        Err(unready(first.code(), lines.join("; ")))
    }

    /// Returns the counters of each subscription.
    pub fn metrics(&self) -> impl Iterator<Item = (&SubscriptionName, Arc<Metrics>)> {
        self.0.relays.iter().map(|relay| (relay.name(), relay.relay().metrics()))
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.relays.iter().map(|relay| relay.name()).collect();
        f.debug_struct("Service").field("subscriptions", &names).finish_non_exhaustive()
    }
}

impl Inner {
    async fn work(&self) -> Result<()> {
        let begun = self.start().await.inspect_err(|error| {
            let why = (error.kind(), error.code().to_owned(), error.message().to_owned());
            _ = self.not_started.set(why);
        });
        if !begun? {
            return Ok(());
        }
        info!(subscriptions = self.relays.len(), "postbox service started");
        self.started.send_replace(true);
        let relays = self.relays.iter().map(|relay| relay.clone().supervise(self.clock.clone(), self.stop.clone()));
        tokio::join!(
            join_all(relays),
            // Each of their steps is a transaction, so a stop need not wait for them.
            self.stop.run_until_cancelled(self.sweeper.clone().supervise(self.stop.clone())),
            self.stop.run_until_cancelled(self.finder.clone().supervise(self.stop.clone())),
        );
        info!("postbox service stopped");
        Ok(())
    }

    /// Finds every permanent fault before the first event goes out. Returns false if stopped before
    /// that.
    async fn start(&self) -> Result<bool> {
        let checked = wait_for_store(&*self.clock, |error| !error.is_permanent(), || self.check());
        let Some(checked) = self.stop.run_until_cancelled(checked).await else { return Ok(false) };
        let known = checked?;
        for relay in &self.relays {
            let relay = relay.relay();
            if !relay.subscribe(&self.stop).await? {
                return Ok(false);
            }
            note_subscribed(relay.subscription(), &known, |name| self.relays.iter().any(|it| it.name() == name));
        }
        Ok(true)
    }

    /// Returns the subscriptions that the store has.
    async fn check(&self) -> Result<Vec<SubscriptionInfo>> {
        self.store.validate().await?;
        if !self.received.is_empty() {
            check_logs("serve", &self.received, &self.store.logs().await?)?;
            self.store.check_receiving().await?;
        }
        self.store.subscriptions().await
    }
}

/// Builds a [`Service`].
#[must_use = "a service that is not built does nothing"]
pub struct ServiceBuilder {
    store: Arc<dyn Store>,
    /// The first fault is returned by [`Self::build`].
    relays: Result<Vec<Relay>>,
    #[cfg(feature = "http")]
    sources: Vec<WebhookSource>,
    /// The logs that sources write to.
    received: BTreeSet<LogName>,
    events_age: Duration,
    message_ids_age: Duration,
    dead_age: Option<Duration>,
}

impl ServiceBuilder {
    /// Adds a subscription of this name to the log `outbox`. Its events go to the router. If the
    /// name is new, it begins with the oldest event in the log; to begin with those from now on,
    /// pass [a relay](Self::relay) whose subscription has [`StartAt::Now`](postbox_core::StartAt).
    pub fn outbox<D: Place>(self, name: &str, router: Router<(), D>) -> Self {
        self.subscription(LogName::outbox().as_str(), name, router)
    }

    /// Adds a subscription of this name to the log `inbox`, where [sources](Self::source) store.
    pub fn inbox<D: Place>(self, name: &str, router: Router<(), D>) -> Self {
        self.subscription(LogName::inbox().as_str(), name, router)
    }

    /// Adds a subscription of this name to any log, such as a bus that several services read.
    /// Create the log once, with [`create_log`](postbox_core::Maintain::create_log).
    pub fn subscription<D: Place>(self, log: &str, name: &str, router: Router<(), D>) -> Self {
        let store = self.store.clone();
        self.add(|| Relay::builder(store, Subscription::new(name.parse()?, log.parse()?)).router(router)?.build())
    }

    /// Adds a relay you have built, on the same store: with other [settings](crate::RelaySettings),
    /// another [filter or number of lanes](Subscription), or a [sink](crate::contract::Sink).
    pub fn relay(self, relay: Relay) -> Self {
        self.add(|| Ok(relay))
    }

    fn add(mut self, relay: impl FnOnce() -> Result<Relay>) -> Self {
        self.relays = self.relays.and_then(|mut relays| {
            relays.push(relay()?);
            Ok(relays)
        });
        self
    }

    /// Adds a sender of webhooks; see [`Service::ingress`].
    #[cfg(feature = "http")]
    pub fn source(mut self, source: WebhookSource) -> Self {
        self.received.insert(source.log.clone());
        self.sources.push(source);
        self
    }

    /// Sets how long events are kept after every subscription has passed them. Default: 7 days.
    pub fn keep_events(mut self, age: Duration) -> Self {
        self.events_age = age;
        self
    }

    /// Sets how long dead events wait for a person before they are given up (discarded), at least a
    /// day. An event that halts its key waits for ever; without this setting, all dead events do.
    pub fn keep_dead(mut self, age: Duration) -> Self {
        self.dead_age = Some(age);
        self
    }

    /// Sets how long ids of messages from outside are remembered. Choose it as long as your senders
    /// keep repeating a message, at least 7 days. Default: 30 days.
    pub fn remember_ids(mut self, age: Duration) -> Self {
        self.message_ids_age = age;
        self
    }

    /// Checks everything and builds. Does not access the store.
    ///
    /// Errors (`Invalid`): those of names, routers and sources, `subscription_twice`,
    /// `message_ids_age_too_short`, `dead_age_too_short`.
    pub fn build(self) -> Result<Service> {
        let (store, relays) = (self.store, self.relays?);
        let mut names = BTreeSet::new();
        if let Some(twice) = relays.iter().map(|relay| &relay.subscription().name).find(|name| !names.insert(*name)) {
            let text = format!("two subscriptions are named {twice}; name each by what its handlers do");
            return Err(Error::invalid("build service", "subscription_twice", text));
        }
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        let mut logs = self.received.clone();
        logs.extend([LogName::outbox(), LogName::inbox()]);
        logs.extend(relays.iter().map(|relay| relay.subscription().log.clone()));
        let logs: Vec<_> = logs.into_iter().collect();
        let sweeper = Sweeper::new(store.clone(), logs.clone(), clock.clone())
            .events_older_than(self.events_age)
            .message_ids_older_than(self.message_ids_age)?
            .dead_older_than(self.dead_age)?;
        Ok(Service(Arc::new(Inner {
            relays: relays.into_iter().map(|relay| SupervisedRelay::new(relay, None)).collect(),
            #[cfg(feature = "http")]
            ingress: Ingress::new(self.sources, store.clone(), clock.clone())?,
            received: self.received,
            sweeper: Arc::new(sweeper),
            finder: Arc::new(UnroutedFinder::new(store.clone(), logs, clock.clone())),
            store,
            clock,
            ran: AtomicBool::new(false),
            started: watch::Sender::new(false),
            stop: CancellationToken::new(),
            not_started: OnceLock::new(),
        })))
    }
}
