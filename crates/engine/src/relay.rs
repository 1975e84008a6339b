//! The relay: one subscription driven by this process, until stopped, once, or on a schedule.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postbox_core::{Admin, Apply, Clock, Error, ErrorKind, Log, OwnerId, Pause, Random, Result, Sink, Subscription};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::breaker::Breaker;
use crate::clock::{SystemRandom, TokioClock};
use crate::drained::Drained;
use crate::fleet::Fleet;
use crate::lane::{Budget, Held, Lane};
use crate::metrics::{FailingLane, Metrics};
use crate::schedule::{Schedule, until};
use crate::settings::RelaySettings;
use crate::shared::{Destination, Shared};

/// How long a stop waits for the answer to a request for a lane.
const ASK_GRACE: Duration = Duration::from_secs(1);

/// Builds a [`Relay`].
#[must_use = "a builder that is not built relays nothing"]
pub struct RelayBuilder {
    log: Arc<dyn Log>,
    subscription: Subscription,
    destination: Option<Destination>,
    inspect: Option<Arc<dyn Admin>>,
    settings: RelaySettings,
    clock: Option<Arc<dyn Clock>>,
    random: Option<Arc<dyn Random>>,
    owner: Option<OwnerId>,
}

impl RelayBuilder {
    /// Events go to this sink. Replaces [`Self::apply`].
    pub fn sink(mut self, sink: Arc<dyn Sink>) -> Self {
        self.destination = Some(Destination::Sink(sink));
        self
    }

    /// Events go to a handler inside the store's transaction (exactly-once effect). Replaces [`Self::sink`].
    pub fn apply(mut self, apply: Arc<dyn Apply>) -> Self {
        self.destination = Some(Destination::Apply(apply));
        self
    }

    /// Where a subscription is paused when its destination asks never to be called again (HTTP 410). Without it, only
    /// this relay stops sending, until it is started again.
    pub fn inspect(mut self, inspect: Arc<dyn Admin>) -> Self {
        self.inspect = Some(inspect);
        self
    }

    /// How it works; the defaults are right for most.
    pub fn settings(mut self, settings: RelaySettings) -> Self {
        self.settings = settings;
        self
    }

    /// Where time comes from. Default: tokio's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// Where chance comes from. Default: the operating system's seed.
    pub fn random(mut self, random: Arc<dyn Random>) -> Self {
        self.random = Some(random);
        self
    }

    /// The name this relay holds its lanes under; never to be reused by another. Default: a fresh random one.
    pub fn owner(mut self, owner: OwnerId) -> Self {
        self.owner = Some(owner);
        self
    }

    /// Checks everything and builds. Touches no store.
    pub fn build(self) -> Result<Relay> {
        self.subscription.validate()?;
        self.settings.validate()?;
        let random = self.random.unwrap_or_else(|| Arc::new(SystemRandom));
        let owner = match self.owner {
            Some(owner) => owner,
            None => fresh_owner(&*random)?,
        };
        let metrics = Arc::new(Metrics::default());
        let breaker = Breaker::new(self.settings.breaker.clone());
        let clock = self.clock.unwrap_or_else(|| Arc::new(TokioClock::new()));
        let shared = self.destination.map(|destination| {
            Arc::new(Shared::new(
                self.log.clone(),
                destination,
                self.subscription.clone(),
                self.settings.clone(),
                clock.clone(),
                random.clone(),
                metrics.clone(),
                breaker,
            ))
        });
        Ok(Relay {
            log: self.log,
            subscription: self.subscription,
            shared,
            inspect: self.inspect,
            clock,
            owner,
            metrics,
            running: AtomicBool::new(false),
        })
    }
}

/// 64 random bits: two relays of any number of processes do not meet in the same name.
fn fresh_owner(random: &dyn Random) -> Result<OwnerId> {
    let half = || (random.unit() * f64::from(u32::MAX)) as u32;
    OwnerId::new(format!("relay-{:08x}{:08x}", half(), half()))
}

/// One subscription driven by this process.
///
/// Relays of the same subscription in other processes share its lanes without configuration; a crashed one's lanes are
/// taken over after the lease.
///
/// Without a destination it idles, and events stay pending: nothing is lost.
pub struct Relay {
    log: Arc<dyn Log>,
    subscription: Subscription,
    /// `None` without a destination.
    shared: Option<Arc<Shared>>,
    inspect: Option<Arc<dyn Admin>>,
    clock: Arc<dyn Clock>,
    owner: OwnerId,
    metrics: Arc<Metrics>,
    running: AtomicBool,
}

/// Frees the relay for the next run, however this one ends.
struct Running<'a>(&'a AtomicBool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Relay {
    /// Begins to build a relay of `subscription` on `log`.
    pub fn builder(log: Arc<dyn Log>, subscription: Subscription) -> RelayBuilder {
        RelayBuilder {
            log,
            subscription,
            destination: None,
            inspect: None,
            settings: RelaySettings::default(),
            clock: None,
            random: None,
            owner: None,
        }
    }

    /// What it counts.
    pub fn metrics(&self) -> Arc<Metrics> {
        self.metrics.clone()
    }

    /// The lanes whose reads or settlements keep failing now, though the store can be reached.
    pub fn failing_lanes(&self) -> Vec<FailingLane> {
        self.metrics.failing_lanes(self.clock.now())
    }

    /// The name it holds its lanes under.
    pub fn owner(&self) -> &OwnerId {
        &self.owner
    }

    /// The subscription it drives.
    pub fn subscription(&self) -> &Subscription {
        &self.subscription
    }

    /// Relays until `stop`, then finishes what is in flight, settles, gives its lanes back, closes the sink and returns.
    ///
    /// A store that is down is waited for. An error is permanent (schema, unknown log, other number of lanes): a person
    /// must act. `stop` may be cancelled before the start, and any number of times.
    ///
    /// Dropping this future stops without settling: what was in flight may arrive again, nothing is lost.
    pub async fn run(&self, stop: CancellationToken) -> Result<()> {
        let _running = self.start()?;
        if !self.subscribe(&stop).await? {
            return Ok(());
        }
        let Some(shared) = &self.shared else {
            info!(subscription = self.name(), "no destination configured; events stay pending");
            stop.cancelled().await;
            return Ok(());
        };
        info!(subscription = self.name(), owner = %self.owner, "relay started");
        let mut fleet = Fleet::new(shared.clone(), self.owner.clone());
        let ended = self.lead(&mut fleet, &stop).await;
        fleet.stop().await;
        if let Destination::Sink(sink) = &shared.destination {
            sink.close().await;
        }
        match &ended {
            Ok(()) => info!(subscription = self.name(), "relay stopped"),
            Err(error) => error!(subscription = self.name(), code = error.code(), error = %error, "relay failed"),
        }
        ended
    }

    /// Drains each time the schedule says so, until `stop`. A run still going at its next time is not doubled.
    ///
    /// Cancel-safety: as [`Self::run`].
    pub async fn run_on(&self, schedule: &dyn Schedule, stop: CancellationToken) -> Result<()> {
        while !stop.is_cancelled() {
            let now = self.clock.now();
            let Some(next) = schedule.next_after(now) else { break };
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = self.clock.sleep(until(now, next)) => {}
            }
            let drained = self.drain_until(None, stop.clone()).await;
            match drained {
                Ok(drained) => info!(subscription = self.name(), ?drained, "scheduled run"),
                Err(error) if error.is_permanent() => return Err(error),
                Err(error) => warn!(subscription = self.name(), error = %error, "scheduled run failed"),
            }
        }
        Ok(())
    }

    /// Delivers what is pending now, and returns. Retrying events that are not due are left.
    ///
    /// At most `limit` deliveries are tried, and no fewer while there are events that may go. One that has to wait, behind an earlier event of its
    /// key or for its time, or that was taken out, does not count; one that is due again within the same run counts again. With a limit, one lane goes after the other.
    ///
    /// Takes every lane nobody else holds. A destination that is down ends it early; a store that is down, or goes down midway, is an error,
    /// and what was delivered until then is in [`Self::metrics`]. A lane lost midway is counted in [`Drained::lanes_lost`].
    ///
    /// Cancel-safety: as [`Self::run`].
    pub async fn drain(&self, limit: Option<usize>) -> Result<Drained> {
        self.drain_until(limit, CancellationToken::new()).await
    }

    /// As [`Self::drain`], but stops gracefully when `stop` is cancelled.
    pub async fn drain_until(&self, limit: Option<usize>, stop: CancellationToken) -> Result<Drained> {
        let _running = self.start()?;
        self.log.subscribe(&self.subscription).await?;
        let Some(shared) = &self.shared else { return Ok(Drained::default()) };
        let before = self.metrics.snapshot();
        let budget = Budget::new(limit);
        let ttl = shared.settings.lease_ttl;
        let (mut lanes, mut known) = (Vec::new(), Vec::new());
        while lanes.len() < usize::from(self.subscription.lanes) && !stop.is_cancelled() {
            let asked_at = self.clock.monotonic();
            let acquired = self.log.acquire(&self.subscription.name, &self.owner, &known, ttl).await?;
            if let Some(pause) = &acquired.paused {
                info!(subscription = self.name(), by = pause.by, why = pause.why, "subscription is paused");
            }
            let Some(lease) = acquired.lease else { break };
            self.metrics.lanes_acquired.fetch_add(1, Ordering::Relaxed);
            known.push(lease.lane);
            let held = Held::new(lease, asked_at, ttl, stop.child_token(), CancellationToken::new());
            lanes.push(Lane::new(shared.clone(), Arc::new(held)));
        }
        if lanes.is_empty() {
            info!(subscription = self.name(), "no lane is free: other relays hold them, or the subscription is paused");
        }
        let ended = futures::future::join_all(lanes.into_iter().map(|lane| lane.drain(&budget))).await;
        if shared.is_gone() {
            self.pause(shared).await;
        }
        let mut lanes_lost = 0;
        for error in ended.into_iter().filter_map(Result::err) {
            if !error.is_stale() {
                return Err(error);
            }
            lanes_lost += 1;
        }
        Ok(Drained { lanes_lost, ..Drained::between(&before, &self.metrics.snapshot()) })
    }

    fn name(&self) -> &str {
        self.subscription.name.as_str()
    }

    fn start(&self) -> Result<Running<'_>> {
        if self.running.swap(true, Ordering::AcqRel) {
            let text = format!("the relay of {} runs already; build a second one to share its work", self.name());
            return Err(Error::new(ErrorKind::Conflict, "run relay", "relay_running", text));
        }
        Ok(Running(&self.running))
    }

    /// False if stopped before the store answered.
    async fn subscribe(&self, stop: &CancellationToken) -> Result<bool> {
        let mut wait = Duration::from_millis(20);
        while !stop.is_cancelled() {
            match self.log.subscribe(&self.subscription).await {
                Ok(()) => return Ok(true),
                Err(error) if error.is_permanent() => return Err(error),
                Err(error) => {
                    warn!(subscription = self.name(), code = error.code(), error = %error, "store is not there yet");
                }
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = self.clock.sleep(wait) => wait = (wait * 2).min(Duration::from_millis(500)),
            }
        }
        Ok(false)
    }

    /// Takes and shares lanes until `stop`; an error is permanent.
    async fn lead(&self, fleet: &mut Fleet, stop: &CancellationToken) -> Result<()> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let mut wait = Duration::ZERO;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                ended = fleet.next_ended() => {
                    ended?;
                    // Somebody else may be faster; asking at once in a loop would only burn both.
                    wait = fleet.ask_again_soon();
                }
                () = self.clock.sleep(wait) => match self.ask(fleet, stop).await {
                    Some(next) => wait = next?,
                    None => return Ok(()),
                },
            }
            if shared.is_gone() && fleet.is_empty() && !self.pause(shared).await {
                warn!(subscription = self.name(), "sending nothing until this relay is started again");
                stop.cancelled().await;
                return Ok(());
            }
        }
    }

    /// `None` if stopped before the store answered. A lane that is just being granted gets a moment to arrive, or nobody
    /// could have it until its lease runs out.
    async fn ask(&self, fleet: &mut Fleet, stop: &CancellationToken) -> Option<Result<Duration>> {
        let stopped = async {
            stop.cancelled().await;
            self.clock.sleep(ASK_GRACE).await;
        };
        tokio::select! {
            biased;
            next = fleet.ask() => Some(next),
            () = stopped => None,
        }
    }

    /// Pauses the subscription because its destination asked never to be called again; false if nobody can.
    async fn pause(&self, shared: &Shared) -> bool {
        let Some(why) = shared.take_gone() else { return true };
        error!(subscription = self.name(), why, "destination is gone, subscription paused");
        let Some(inspect) = &self.inspect else { return false };
        let pause = Pause { until: None, by: "postbox".to_owned(), why };
        if let Err(error) = inspect.pause(&self.subscription.name, Some(&pause)).await {
            shared.store_failed(&error);
            // Nothing is sent before it worked: the mark stays, and the next turn tries again.
            shared.set_gone(pause.why);
            self.clock.sleep(shared.store_backoff(3)).await;
        }
        true
    }
}
