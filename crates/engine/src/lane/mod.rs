//! One lane: read, plan, dispatch, settle, as long as the lease holds.
//!
//! ```text
//!            ┌────────── stream: read ahead ─┐
//!  lease ──▶ │  read ──▶ plan ──▶ dispatch ──▶ settle     both end together: a round
//!            └  due rows ──────▶ dispatch ──▶ settle      (breaker opened, stop, lease lost)
//!               dead letters ──▶ dead-letter sink          beside them, as long as the lane is ours
//! ```
//!
//! Stream and due rows run side by side. They never carry the same event. An event whose key has a
//! row is never sent from the stream: the store marks its key as held
//! ([`Batch::held`](postbox_core::Batch::held)), or the previous batch did if this one was read
//! ahead.

mod alone;
mod apply;
mod batch;
mod call;
mod dead_letters;
mod detached;
mod dispatch;
mod due;
mod expiry;
mod judge;
mod lease;
mod limit;
mod queue;
mod read_ahead;
mod settle;
mod stream;
mod verdicts;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join;
use postbox_core::{BatchLimit, Destination, Lease, Result};
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument as _, info};

use self::alone::Careful;
pub use self::alone::Turns;
use self::detached::DetachedCalls;
use self::due::DueTimer;
pub(crate) use self::lease::LeaseGuard;
pub(crate) use self::limit::ReadLimit;
use self::limit::Until;
use self::settle::PROBES_MAX;
use crate::breaker::{Admission, BreakerState};
use crate::context::RelayContext;
use crate::metrics::Gauge;

/// How often the destination of a bounded run may be found down before the run ends.
const RUN_FAILURES_MAX: u32 = 3;
/// Longest difference between the waits of two lanes for their turn to probe.
const LANES_APART: Duration = Duration::from_millis(50);
/// After how many failed probes one looks at more than a batch, which may hold nothing but events
/// that look like an outage; and at how many times as much.
const WIDE_FROM: u32 = 2 * PROBES_MAX;
const WIDE: usize = 8;

/// How long a relay waits for its lanes after calls in flight were dropped: time for one settlement
/// and one release.
pub(crate) const SETTLE_GRACE: Duration = Duration::from_secs(5);

/// A leased lane and its state.
pub(crate) struct Lane {
    context: Arc<RelayContext>,
    lease: Arc<LeaseGuard>,
    due_timer: DueTimer,
    /// Maximum number of due rows in one read.
    due_events: AtomicUsize,
    detached: DetachedCalls,
    careful: Careful,
    /// A read failed, so the store may have moved its read position. The next read rewinds first.
    read_failed: AtomicBool,
    /// It works for a bounded run, which ends with an error when the store keeps failing.
    is_bounded: bool,
    /// The bounded run has delivered what the stream had at its start.
    caught_up: AtomicBool,
    /// Since when each store call has failed without a success.
    failing: Mutex<HashMap<&'static str, Duration>>,
}

impl Lane {
    pub(crate) fn new(context: Arc<RelayContext>, lease: LeaseGuard) -> Self {
        let careful = Careful::new(lease.lease.crashes, context.settings.batch.events);
        Self {
            context,
            lease: Arc::new(lease),
            due_timer: DueTimer::new(),
            due_events: AtomicUsize::new(usize::MAX),
            detached: DetachedCalls::default(),
            careful,
            read_failed: AtomicBool::new(false),
            is_bounded: false,
            caught_up: AtomicBool::new(false),
            failing: Mutex::default(),
        }
    }

    /// Works until halted or the lease is lost, then gives the lane back. An error is permanent: a
    /// person must act.
    pub(crate) async fn run(self) -> Result<()> {
        match self.hold(Until::Stopped).await {
            // Lost, or the store is down: the next owner reads the lane again.
            Err(error) if error.is_stale() || !error.is_permanent() => Ok(()),
            ended => ended,
        }
    }

    /// Works until what was there at its start is delivered, the limit is reached, the destination
    /// is down, or halted. An error says why it ended early: `Stale` for a lost lane, otherwise the
    /// store's error.
    pub(crate) async fn drain(mut self, limit: &ReadLimit) -> Result<()> {
        self.is_bounded = true;
        self.hold(Until::Drained(limit)).await?;
        self.lease.take_loss().map_or(Ok(()), Err)
    }

    /// Works under the lease, and gives the lane back if it is still ours. A lost lane is not an
    /// error here; see [`LeaseGuard::take_loss`].
    async fn hold(&self, until: Until<'_>) -> Result<()> {
        let (context, lease) = (&self.context, &self.lease.lease);
        info!(subscription = context.name(), lane = lease.lane, epoch = lease.epoch, "lane taken");
        self.log_careful();
        let gauge = Gauge::up(&context.metrics.lanes_held, 1);
        let keeping = lease::keep(context.clone(), self.lease.clone());
        let ending = lease::end_drain(context.clone(), self.lease.clone());
        let keeper = AbortOnDropHandle::new(tokio::spawn(join(keeping, ending).in_current_span()));
        // Once halted, no new letter is sent either.
        let worked = self.lease.halt.child_token();
        let working = async {
            let ended = match self.work(until).await {
                Ok(()) => self.finish_detached().await,
                Err(error) => Err(error),
            };
            worked.cancel();
            ended
        };
        let ended = if until.is_stopped() {
            join(working, self.hand_over_until(&worked)).await.0
        } else {
            let ended = working.await;
            self.hand_over_all().await;
            ended
        };
        drop(keeper);
        drop(gauge);
        context.health.breaker.forget(lease.lane);
        match ended {
            // Any other stale error concerns only what was read. The lane itself is still ours.
            Err(error) if error.is_lease_lost() => {
                self.lease.lose(context, error);
                Ok(())
            }
            // Any other call was repeated until the lane was lost or the drain time was over.
            ended => {
                if let Err(error) = &ended
                    && error.is_stale()
                {
                    info!(subscription = context.name(), lane = lease.lane, why = error.message(), "lane reread");
                }
                self.release().await;
                ended
            }
        }
    }

    async fn release(&self) {
        if self.lease.is_lost() {
            return;
        }
        let (context, lease) = (&self.context, &self.lease.lease);
        // While the destination is down, what vanished holders had in flight does not go out. Only
        // once it has, the next to vanish begins a new row.
        let crashes = if self.careful.is_over() { 0 } else { lease.crashes };
        match context.log.release(&Lease { crashes, ..lease.clone() }).await {
            Ok(()) => {
                context.metrics.lane_released(lease.lane, crashes);
                info!(subscription = context.name(), lane = lease.lane, epoch = lease.epoch, "lane released");
            }
            // The lease runs out by itself.
            Err(error) => _ = context.store_failed(&error),
        }
    }

    /// Runs rounds while the breaker is closed, and single probes while it is not.
    async fn work(&self, until: Until<'_>) -> Result<()> {
        let (context, halt) = (&self.context, &self.lease.halt);
        while !halt.is_cancelled() && !context.health.is_gone() {
            if !context.health.breaker.is_closed() && until.is_used_up().await {
                return Ok(());
            }
            let wait = match context.health.breaker.admit(context.clock.monotonic()) {
                Admission::Closed => {
                    let read = self.round(until).await?;
                    if read == 0 && !until.is_stopped() {
                        // A call that comes back now may release the next event of its key.
                        let returned = self.lease.abandon.run_until_cancelled(self.detached.next_in_flight()).await;
                        let Some(returned) = returned.flatten() else { return Ok(()) };
                        self.settle_detached(returned).await?;
                    }
                    continue;
                }
                Admission::Probe if self.probe(until).await? => continue,
                Admission::Probe => context.settings.poll_max,
                Admission::Wait(wait) => wait,
            };
            if !until.is_stopped() && !self.probes_at_once(wait) {
                return Ok(());
            }
            // A random part, so that no lane is the first to probe each time: it may have nothing
            // but an event that looks like an outage.
            let wait = if until.is_stopped() { wait } else { Duration::ZERO };
            self.wait(wait + LANES_APART.mul_f64(context.random.unit())).await?;
        }
        Ok(())
    }

    /// Whether a bounded run goes on although its destination looks down. It does not wait for the
    /// destination, but makes a few probes at once, unless that named a wait: one event that looks
    /// like an outage would otherwise keep the others from being sent, in each run. While another
    /// lane probes it goes on, because that one may have nothing to probe with.
    fn probes_at_once(&self, wait: Duration) -> bool {
        let (breaker, policy) = (&self.context.health.breaker, &self.context.settings.breaker);
        if breaker.state() == BreakerState::HalfOpen {
            return true;
        }
        let failures = breaker.failures();
        let goes_on = failures < RUN_FAILURES_MAX && wait <= policy.wait_max(failures.saturating_sub(1));
        if goes_on {
            breaker.probe_from(self.context.clock.monotonic());
        }
        goes_on
    }

    /// Waits while nothing may be sent. Meanwhile it writes the outcomes of detached calls, because
    /// their keys are held until these are written.
    async fn wait(&self, wait: Duration) -> Result<()> {
        tokio::select! {
            biased;
            () = self.pause(wait, &self.lease.halt) => Ok(()),
            returned = self.detached.next() => self.settle_detached(returned).await,
        }
    }

    /// Runs stream and due rows side by side. Returns how many events were read. When one of them
    /// ends, so does the other; but after the stream is drained, due rows go on while there are
    /// any.
    async fn round(&self, until: Until<'_>) -> Result<usize> {
        let round = self.lease.halt.child_token();
        let drained = if until.is_stopped() { round.clone() } else { round.child_token() };
        if !until.is_stopped() {
            // Look at once for rows that are due by now, whenever the last look was.
            self.due_timer.schedule(self.context.clock.monotonic(), Duration::ZERO);
        }
        let due = async {
            let ended = self.due(until, &round, &drained).await;
            if ended.is_err() || until.is_stopped() {
                round.cancel();
            }
            ended
        };
        let stream = async {
            let ended = self.stream(until, &round).await;
            if ended.is_err() {
                round.cancel();
            }
            drained.cancel();
            ended
        };
        // Due rows first: they have waited longer, and a limit may not be enough for both.
        let (due, stream) = join(due, stream).await;
        Ok(stream? + due?)
    }

    /// Sends one event to a destination that was down. Returns whether there was one.
    ///
    /// The event itself, or many events around it, may be the reason that the destination looks
    /// down. So the choice varies. Half of the time a due row is tried first, otherwise one of the
    /// stream. Of the stream it is the next event half of the time, otherwise a random one from a
    /// range that grows with each failed probe. If that one is accepted, those before it leave the
    /// stream as due rows.
    async fn probe(&self, until: Until<'_>) -> Result<bool> {
        let context = &*self.context;
        context.metrics.set_breaker(context.health.breaker.state());
        let _turn = ProbeTurn(context);
        let round = self.lease.halt.child_token();
        let failures = context.health.breaker.failures();
        let reach = if context.random.unit() < 0.5 { 1 } else { self.probe_reach(failures) };
        let limit = BatchLimit { events: reach, ..context.settings.batch };
        let stream_first = context.random.unit() < 0.5;
        let found = stream_first && self.probe_stream(until, limit, &round).await?
            || self.due_once(until, true, &round).await? > 0
            || !stream_first && self.probe_stream(until, limit, &round).await?;
        match found {
            true => context.health.breaker.found_some(),
            false => context.found_nothing(self.lease.lease.lane),
        }
        Ok(found)
    }

    /// Returns the number of stream events among which a probe is chosen: four times as many after
    /// each failed probe, up to a batch and at last several. An apply transaction takes everything
    /// it is given, so it gets one.
    fn probe_reach(&self, failures: u32) -> usize {
        let batch = self.context.settings.batch.events;
        match self.context.destination {
            Destination::Sink(_) if failures >= WIDE_FROM => batch.saturating_mul(WIDE),
            Destination::Sink(_) => 4_usize.saturating_pow(failures).min(batch),
            Destination::Apply(_) => 1,
        }
    }
}

/// The one probe that a half-open breaker allows. Dropping it ends the probe, even on a panic:
/// otherwise no lane of the relay would ever probe again.
struct ProbeTurn<'a>(&'a RelayContext);

impl Drop for ProbeTurn<'_> {
    fn drop(&mut self) {
        let breaker = &self.0.health.breaker;
        breaker.probe_ended(self.0.clock.monotonic());
        self.0.metrics.set_breaker(breaker.state());
    }
}
