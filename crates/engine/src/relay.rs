//! The relay: one subscription driven by this process, until stopped, once, or on a schedule.

mod bounded;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postbox_core::{
    Admin, Apply, Clock, DeadLetters, Destination, Error, ErrorKind, Log, Outage, OwnerId, Pause, Random, Result, Sink,
    Subscription, lock,
};
use postbox_router::{Place, Router};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::breaker::Breaker;
use crate::clock::{SystemRandom, TokioClock};
use crate::context::{DeadLetterSink, RelayContext, SUBSCRIPTION_REMOVED, removed};
use crate::drained::Drained;
use crate::lane::Turns;
use crate::lanes::Lanes;
use crate::limiter::SharedRate;
use crate::metrics::{FailingLane, Metrics};
use crate::pace::Pace;
use crate::schedule::{Schedule, sleep_until, until};
use crate::settings::RelaySettings;

/// How long a stopping relay waits for an answer of the store, e.g. to a lane request, so that a
/// lane granted at that moment is released instead of held until its lease ends.
const ASK_GRACE: Duration = Duration::from_secs(1);

/// Wait before a scheduled run that the store cut short goes on.
const CUT_SHORT_BY_STORE: Duration = Duration::from_secs(5);

/// Builds a [`Relay`].
#[must_use = "a builder that is not built relays nothing"]
pub struct RelayBuilder {
    log: Arc<dyn Log>,
    subscription: Subscription,
    destination: Option<Destination>,
    dead_letters: Option<DeadLetterSink>,
    admin: Option<Arc<dyn Admin>>,
    settings: RelaySettings,
    shared_rate: Option<Arc<SharedRate>>,
    clock: Option<Arc<dyn Clock>>,
    random: Option<Arc<dyn Random>>,
    owner: Option<OwnerId>,
    turns: Option<Turns>,
}

impl RelayBuilder {
    /// Delivers events to this sink. Replaces [`Self::apply`].
    pub fn sink(mut self, sink: Arc<dyn Sink>) -> Self {
        self.destination = Some(Destination::Sink(sink));
        self
    }

    /// Delivers events to the handlers of this router. The subscription's topic filter is replaced
    /// by the topics of these handlers. Replaces [`Self::sink`] and [`Self::apply`].
    ///
    /// Fails (`Invalid`, code `router_empty`) if it has no handler.
    pub fn router<D: Place>(mut self, router: Router<(), D>) -> Result<Self> {
        self.subscription.filter.topics = router.wanted()?;
        self.destination = Some(D::place(router));
        Ok(self)
    }

    /// Delivers events to a handler inside the store's transaction (exactly-once effect). Replaces
    /// [`Self::sink`].
    pub fn apply(mut self, apply: Arc<dyn Apply>) -> Self {
        self.destination = Some(Destination::Apply(apply));
        self
    }

    /// Also sends dead events to this sink, each at least once, with the reason in headers
    /// ([`postbox_core::dead_header`]). `store` knows which ones it has not received yet, including
    /// events that died before the sink was configured.
    pub fn dead_to(mut self, sink: Arc<dyn Sink>, store: Arc<dyn DeadLetters>) -> Self {
        self.dead_letters = Some(DeadLetterSink { sink, store });
        self
    }

    /// Sets how to pause the subscription when its destination asks never to be called again (HTTP
    /// 410). Without it, only this relay stops sending, and its later runs send nothing either.
    pub fn admin(mut self, admin: Arc<dyn Admin>) -> Self {
        self.admin = Some(admin);
        self
    }

    /// Sets how it works. The defaults are right for most.
    pub fn settings(mut self, settings: RelaySettings) -> Self {
        self.settings = settings;
        self
    }

    /// Shares a rate with other relays of this process. Replaces [`RelaySettings::rate`].
    pub fn shared_rate(mut self, rate: Arc<SharedRate>) -> Self {
        self.shared_rate = Some(rate);
        self
    }

    /// Sets the clock. Default: tokio's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Sets the random number generator. Default: seeded by the operating system.
    pub fn random(mut self, random: Arc<dyn Random>) -> Self {
        self.random = Some(random);
        self
    }

    /// Sets the name under which this relay holds its lanes. No other relay may ever use it.
    /// Default: a fresh random name.
    pub fn owner(mut self, owner: OwnerId) -> Self {
        self.owner = Some(owner);
        self
    }

    /// Sets with which relays it takes turns in the search for an event that ends the process.
    /// Default: all relays of this process. For simulated processes.
    pub fn turns(mut self, turns: Turns) -> Self {
        self.turns = Some(turns);
        self
    }

    /// Checks everything and builds. Does not access the store.
    pub fn build(self) -> Result<Relay> {
        self.subscription.validate()?;
        self.settings.validate()?;
        let random = self.random.unwrap_or_else(|| Arc::new(SystemRandom));
        let owner = match self.owner {
            Some(owner) => owner,
            None => fresh_owner("relay", &*random)?,
        };
        let metrics = Arc::new(Metrics::default());
        let clock = self.clock.unwrap_or_else(|| Arc::new(TokioClock::new()));
        let context = self.destination.map(|destination| {
            let chance = (clock.clone(), random);
            let (log, subscription) = (self.log.clone(), self.subscription.clone());
            let (destinations, settings) = ((destination, self.dead_letters), (self.settings, self.shared_rate));
            let counted = (metrics.clone(), self.turns.unwrap_or_else(Turns::of_process));
            Arc::new(RelayContext::new(log, destinations, subscription, settings, chance, counted))
        });
        Ok(Relay {
            log: self.log,
            subscription: self.subscription,
            context,
            admin: self.admin,
            clock,
            owner,
            metrics,
            running: AtomicBool::new(false),
            removed: AtomicBool::new(false),
            subscribed: AtomicBool::new(false),
            unfinished: Mutex::new(None),
        })
    }
}

/// Returns a name with 64 random bits, so that no two relays ever get the same one. It has 17 bytes
/// more than what it begins with.
pub fn fresh_owner(begins_with: &str, random: &dyn Random) -> Result<OwnerId> {
    let half = || (random.unit() * f64::from(u32::MAX)) as u32;
    OwnerId::new(format!("{begins_with}-{:08x}{:08x}", half(), half()))
}

/// A relay: drives one subscription in this process.
///
/// Relays of the same subscription in other processes share its lanes without configuration. The
/// lanes of a crashed relay are taken over when its lease ends.
///
/// Without a destination it idles, and events stay pending. Nothing is lost.
pub struct Relay {
    log: Arc<dyn Log>,
    subscription: Subscription,
    /// `None` without a destination.
    context: Option<Arc<RelayContext>>,
    admin: Option<Arc<dyn Admin>>,
    clock: Arc<dyn Clock>,
    owner: OwnerId,
    metrics: Arc<Metrics>,
    running: AtomicBool,
    /// The subscription was removed or renamed while this ran, so it is not created again.
    removed: AtomicBool,
    /// The subscription was created or found, and no call has failed permanently since.
    subscribed: AtomicBool,
    /// A scheduled run that has not ended: whether it was only for lanes that a crash left. An
    /// error or a panic ends [`Self::run_on`], and its next call goes on with that run.
    unfinished: Mutex<Option<bool>>,
}

/// Allows the next run of the relay, however this one ends.
struct Running<'a> {
    relay: &'a Relay,
    /// The lanes that still need their part of a shared rate then: those of other replicas; `None`:
    /// as many as were known last.
    lanes_elsewhere: Option<usize>,
}

impl Running<'_> {
    /// Notes what this error means for the next run.
    fn failed(&mut self, error: &Error) {
        // Another replica may reach the store, and drive the lanes.
        self.lanes_elsewhere = None;
        if error.is_permanent() {
            self.relay.subscribed.store(false, Ordering::Release);
        }
        if error.code() == SUBSCRIPTION_REMOVED {
            self.lanes_elsewhere = Some(0);
            self.relay.removed.store(true, Ordering::Release);
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // After a panic the relay soon starts again, and needs its part.
        let lanes = self.lanes_elsewhere.filter(|_| !std::thread::panicking());
        self.relay.context.iter().for_each(|context| context.limiter.share(0, lanes));
        self.relay.running.store(false, Ordering::Release);
    }
}

impl Relay {
    /// Starts building a relay of `subscription` on `log`.
    pub fn builder(log: Arc<dyn Log>, subscription: Subscription) -> RelayBuilder {
        RelayBuilder {
            log,
            subscription,
            destination: None,
            dead_letters: None,
            admin: None,
            settings: RelaySettings::default(),
            shared_rate: None,
            clock: None,
            random: None,
            owner: None,
            turns: None,
        }
    }

    /// Returns the counters.
    pub fn metrics(&self) -> Arc<Metrics> {
        self.metrics.clone()
    }

    /// Returns the lanes whose reads or settlements keep failing now.
    pub fn failing_lanes(&self) -> Vec<FailingLane> {
        self.metrics.failing_lanes(self.clock.now())
    }

    /// Returns since when and why store calls fail because the store is away, full or busy, if they
    /// do.
    pub fn store_outage(&self) -> Option<Outage> {
        self.metrics.store_outage(self.clock.now())
    }

    /// Returns since when and why it can neither take a lane nor keep one, once that has lasted for
    /// longer than a lease.
    pub fn lease_outage(&self) -> Option<Outage> {
        let (ttl, now) = (self.context.as_ref()?.settings.lease_ttl, self.clock.now());
        self.metrics.lease_outage().filter(|outage| now.duration_since(outage.since).unsigned_abs() > ttl)
    }

    /// Returns how fast the destination takes events; `None` without a destination, or if handlers
    /// apply in a transaction.
    pub fn pace(&self) -> Option<Pace> {
        let context = self.context.as_ref().filter(|context| matches!(context.destination, Destination::Sink(_)))?;
        let (now, settings) = (self.clock.monotonic(), &context.settings);
        let flags = (context.limiter.holds(now), context.limiter.is_shared());
        Some(self.metrics.pace.read(now, context.capabilities.concurrency, settings.rate, flags))
    }

    /// Returns the wait until a destination that is down is tried again; `None` while it answers.
    pub fn probe_in(&self) -> Option<Duration> {
        self.context.as_ref()?.health.breaker.wait(self.clock.monotonic())
    }

    /// Returns the name under which it holds its lanes.
    pub fn owner(&self) -> &OwnerId {
        &self.owner
    }

    /// Returns the subscription it drives.
    pub fn subscription(&self) -> &Subscription {
        &self.subscription
    }

    /// Returns whether events go anywhere: to a sink, or to handlers.
    pub fn has_destination(&self) -> bool {
        self.context.is_some()
    }

    /// Returns the sink that events go to, if there is one.
    pub fn sink(&self) -> Option<&Arc<dyn Sink>> {
        match &self.context.as_ref()?.destination {
            Destination::Sink(sink) => Some(sink),
            Destination::Apply(_) => None,
        }
    }

    /// Creates the subscription if it does not exist. [`Self::run`] begins with this. Returns
    /// `false` if stopped before the store answered.
    ///
    /// Waits while the store is down. An error is permanent. Cancel-safe.
    pub async fn subscribe(&self, stop: &CancellationToken) -> Result<bool> {
        let mut wait = Duration::from_millis(20);
        while !stop.is_cancelled() {
            if self.subscribed.load(Ordering::Acquire) {
                return Ok(true);
            }
            let subscribing = self.log.subscribe(&self.subscription);
            let Some(subscribed) = stop.run_until_cancelled(subscribing).await else { break };
            match subscribed {
                Ok(()) => {
                    self.subscribed.store(true, Ordering::Release);
                    continue;
                }
                Err(error) if error.is_permanent() => return Err(error),
                Err(error) => {
                    let log_line = |context: &Arc<RelayContext>| context.log_line("store unavailable", error.code());
                    if let Some(left_out) = self.context.as_ref().map_or(Some(0), log_line) {
                        let code = error.code();
                        warn!(subscription = self.name(), code, error = %error, left_out, "store unavailable");
                    }
                }
            }
            _ = stop.run_until_cancelled(self.clock.sleep(wait)).await;
            wait = (wait * 2).min(Duration::from_millis(500));
        }
        Ok(false)
    }

    /// Relays until `stop`. Then finishes what is in flight, settles, releases its lanes, closes
    /// the sink and returns.
    ///
    /// Waits while the store is down. An error is permanent (schema, unknown log): a person must
    /// act. [`SUBSCRIPTION_REMOVED`] means that the subscription was removed or renamed meanwhile;
    /// this relay does not run again. `stop` may be cancelled before the start, and any number of
    /// times.
    ///
    /// Dropping this future stops without settling. What was in flight may arrive again, and
    /// nothing is lost.
    pub async fn run(&self, stop: CancellationToken) -> Result<()> {
        let mut running = self.start()?;
        let ended = self.run_until(stop).await;
        if let Err(error) = &ended {
            running.failed(error);
        }
        ended
    }

    async fn run_until(&self, stop: CancellationToken) -> Result<()> {
        if !self.subscribe(&stop).await? {
            return Ok(());
        }
        let Some(context) = &self.context else {
            info!(subscription = self.name(), "no destination configured");
            stop.cancelled().await;
            return Ok(());
        };
        info!(subscription = self.name(), owner = %self.owner, "relay started");
        let mut lanes = Lanes::new(context.clone(), self.owner.clone());
        let ended = self.share_lanes(&mut lanes, &stop).await;
        lanes.stop().await;
        // As whenever it has no lane.
        self.metrics.destination_unknown();
        context.log_left_out();
        if let Destination::Sink(sink) = &context.destination {
            sink.close().await;
        }
        if let Some(dead_letters) = &context.dead_letters {
            dead_letters.sink.close().await;
        }
        match &ended {
            Ok(()) => info!(subscription = self.name(), "relay stopped"),
            Err(error) => error!(subscription = self.name(), code = error.code(), error = %error, "relay failed"),
        }
        ended
    }

    /// Drains whenever the schedule says so, until `stop`. Runs never overlap: a time that comes
    /// while a run is still going, or waits for its destination, is skipped. A run that the
    /// destination or the store cut short goes on once that is back, and one that lost a lane after
    /// a lease. Lanes that another relay holds are drained if it crashes; the rest would wait for
    /// the next time. A permanent error ends this; the next call first finishes that run.
    ///
    /// Cancel-safety: as [`Self::run`].
    pub async fn run_on(&self, schedule: &dyn Schedule, stop: CancellationToken) -> Result<()> {
        let mut drained = Drained::default();
        let breaker = || self.context.as_ref().map(|context| &context.health.breaker);
        let probe_in = || breaker().and_then(|breaker| breaker.wait(self.clock.monotonic()));
        // When a run goes on before its next time, and whether only with lanes that a crash left.
        let mut again = lock(&self.unfinished).map(|only_crashed| (Duration::ZERO, only_crashed));
        while !stop.is_cancelled() {
            let now = self.clock.now();
            // Without a next time it waits for the stop: its end would be that of the service.
            let next = schedule.next_after(now);
            let goes_on = again.take().filter(|(wait, _)| next.is_none_or(|next| *wait < until(now, next)));
            let waited = async {
                match (goes_on, next) {
                    (Some((wait, _)), _) => self.clock.sleep(wait).await,
                    (None, Some(next)) => sleep_until(next, &*self.clock).await,
                    (None, None) => std::future::pending().await,
                }
                // A run that may not probe finds nothing, as if nothing were left.
                if let Some(wait) = probe_in() {
                    self.clock.sleep(wait).await;
                }
            };
            if stop.run_until_cancelled(waited).await.is_none() {
                break;
            }
            // A time that has come meanwhile is a run of its own.
            let is_before = next.is_none_or(|next| self.clock.now() < next);
            let only_crashed = is_before && goes_on.is_some_and(|(_, only_crashed)| only_crashed);
            let (was_closed, opened) = (breaker().is_none_or(Breaker::is_closed), self.metrics.breaker_opened());
            *lock(&self.unfinished) = Some(only_crashed);
            again = match self.drain_once(None, only_crashed, stop.clone()).await {
                Ok(part) => {
                    // A probe that found nothing to send says nothing about the destination.
                    let has_more = if probe_in().is_some() { part.fetched > 0 } else { !was_closed };
                    let is_cut_short = has_more || self.metrics.breaker_opened() > opened;
                    drained += part;
                    if is_cut_short {
                        Some((Duration::ZERO, false))
                    } else {
                        self.metrics.destination_unknown();
                        // Nothing is renewed until the next run.
                        self.metrics.lease_answered(None, self.clock.now());
                        let is_partial = part.lanes_lost + part.lanes_elsewhere > 0;
                        let context = self.context.as_ref().filter(|_| is_partial);
                        context.map(|context| (context.settings.lease_ttl, part.lanes_lost == 0))
                    }
                }
                Err(error) if error.is_permanent() => return Err(error),
                Err(error) => {
                    warn!(subscription = self.name(), error = %error, "scheduled run failed");
                    Some((CUT_SHORT_BY_STORE, only_crashed))
                }
            };
            *lock(&self.unfinished) = again.map(|(_, only_crashed)| only_crashed);
            if again.is_none() {
                info!(subscription = self.name(), drained = ?std::mem::take(&mut drained), "scheduled run");
            }
        }
        *lock(&self.unfinished) = None;
        Ok(())
    }

    fn name(&self) -> &str {
        self.subscription.name.as_str()
    }

    fn start(&self) -> Result<Running<'_>> {
        if self.removed.load(Ordering::Acquire) {
            return Err(removed(self.name()));
        }
        if self.running.swap(true, Ordering::AcqRel) {
            let text = format!("the relay of {} runs already; build a second one to share its work", self.name());
            return Err(Error::new(ErrorKind::Conflict, "run relay", "relay_running", text));
        }
        Ok(Running { relay: self, lanes_elsewhere: Some(0) })
    }

    /// Takes and shares lanes until `stop`. An error is permanent.
    async fn share_lanes(&self, lanes: &mut Lanes, stop: &CancellationToken) -> Result<()> {
        let Some(context) = &self.context else { return Ok(()) };
        let mut wait = Duration::ZERO;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                ended = lanes.next_ended() => {
                    ended?;
                    // Another relay may be faster. Asking at once in a loop would load the store.
                    wait = lanes.ask_again_soon();
                }
                () = self.clock.sleep(wait) => match self.answered(lanes.ask(), stop).await {
                    Some(next) => wait = next?,
                    None => return Ok(()),
                },
            }
            if context.health.is_gone() && lanes.is_empty() && !self.pause(context, stop).await? {
                warn!(subscription = self.name(), "relay idle until restart");
                stop.cancelled().await;
                return Ok(());
            }
        }
    }

    /// Returns what the store answers; `None` if stopped before. A lane that is being granted at
    /// that moment gets a little time to arrive. Otherwise nobody could have it until its lease
    /// ends.
    async fn answered<T>(&self, asked: impl Future<Output = T>, stop: &CancellationToken) -> Option<T> {
        let stopped = async {
            stop.cancelled().await;
            self.clock.sleep(ASK_GRACE).await;
        };
        tokio::select! {
            biased;
            answer = asked => Some(answer),
            () = stopped => None,
        }
    }

    /// Pauses the subscription because its destination asked never to be called again. Returns
    /// false if there is no [`RelayBuilder::admin`] to pause it. The error is permanent.
    async fn pause(&self, context: &RelayContext, stop: &CancellationToken) -> Result<bool> {
        let Some(why) = context.health.gone() else { return Ok(true) };
        error!(subscription = self.name(), why, "destination gone");
        let Some(admin) = &self.admin else { return Ok(false) };
        let pause = Pause { until: None, by: Pause::BY_RELAY.to_owned(), why };
        match self.answered(admin.pause(&self.subscription.name, Some(&pause)), stop).await {
            Some(Ok(())) => context.health.set_gone(None),
            // Nothing may be sent until this works, so the mark stays; the next turn retries.
            Some(Err(error)) if context.store_failed(&error) => self.clock.sleep(context.store_backoff(3)).await,
            Some(Err(error)) if error.code() == "subscription_unknown" => return Err(removed(self.name())),
            Some(Err(error)) => return Err(error),
            None => {}
        }
        Ok(true)
    }
}
