//! One lane: read, plan, dispatch, settle, as long as the lease holds.
//!
//! ```text
//!            ┌────────── stream: read ahead ─┐
//!  lease ──▶ │  read ──▶ plan ──▶ dispatch ──▶ settle     both end together: a round
//!            └  due rows ──────▶ dispatch ──▶ settle      (breaker opened, stop, lease lost)
//! ```
//!
//! Stream and due rows run side by side. They never carry the same event, and an event of a key with a row is never sent
//! from the stream: it is held by the store ([`Batch::held`](postbox_core::Batch::held)), or by the keys carried from the
//! batch before when it was read ahead.

mod apply;
mod call;
mod dispatch;
mod due;
mod feed;
mod late;
mod lease;
mod limit;
mod process;
mod read;
mod settle;
mod verdicts;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::future::join;
use postbox_core::{BatchLimit, Result};
use tokio_util::task::AbortOnDropHandle;
use tracing::info;

use self::dispatch::Pace;
use self::due::Alarm;
use self::late::Late;
pub(crate) use self::lease::Held;
pub(crate) use self::limit::ReadLimit;
use self::read::Until;
use crate::breaker::Admission;
use crate::shared::Shared;

/// Counts a lane as held, also when its task is aborted.
struct Gauge<'a>(&'a AtomicU64);

impl<'a> Gauge<'a> {
    fn up(gauge: &'a AtomicU64) -> Self {
        gauge.fetch_add(1, Ordering::Relaxed);
        Self(gauge)
    }
}

impl Drop for Gauge<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A leased lane at work.
pub(crate) struct Lane {
    shared: Arc<Shared>,
    held: Arc<Held>,
    alarm: Alarm,
    late: Late,
    /// A read failed: what the store believes to have given is not known.
    unsure: AtomicBool,
}

impl Lane {
    pub(crate) fn new(shared: Arc<Shared>, held: Arc<Held>) -> Self {
        Self { shared, held, alarm: Alarm::new(), late: Late::default(), unsure: AtomicBool::new(false) }
    }

    /// Works until halted or the lease is lost, then gives the lane back. An error is permanent: a person must act.
    pub(crate) async fn run(self) -> Result<()> {
        let work = self.rounds();
        match self.hold(work).await {
            // Lost, or the store is down: the next owner reads it again.
            Err(error) if error.is_stale() || !error.is_permanent() => Ok(()),
            ended => ended,
        }
    }

    /// Works until nothing is pending now, the limit is reached, the destination is down, or halted. An error says why it could not: `Stale` of a
    /// lost lane, otherwise the store's.
    pub(crate) async fn drain(self, limit: &ReadLimit) -> Result<()> {
        let work = self.once(limit);
        self.hold(work).await?;
        self.held.take_loss().map_or(Ok(()), Err)
    }

    /// Works under the lease; gives the lane back if it is still ours. A lane that was lost is told by [`Held::take_loss`].
    async fn hold(&self, work: impl Future<Output = Result<()>>) -> Result<()> {
        let (shared, lease) = (&self.shared, &self.held.lease);
        info!(subscription = shared.name(), lane = lease.lane, epoch = lease.epoch, "lane taken");
        let gauge = Gauge::up(&shared.metrics.lanes_held);
        let keeper = AbortOnDropHandle::new(tokio::spawn(lease::keep(shared.clone(), self.held.clone())));
        let ended = match work.await {
            Ok(()) => self.finish_late().await,
            Err(error) => Err(error),
        };
        drop(keeper);
        drop(gauge);
        match ended {
            // Any other stale error is of what was read; the lane itself is still ours.
            Err(error) if error.is_stale() && error.code() == "stale_lease" => {
                self.held.lose(shared, error);
                Ok(())
            }
            // Anything else was repeated until the lane was lost or the drain time was over.
            ended => {
                if let Err(error) = &ended
                    && error.is_stale()
                {
                    info!(subscription = shared.name(), lane = lease.lane, why = error.message(), "lane is read again");
                }
                self.give_back().await;
                ended
            }
        }
    }

    async fn give_back(&self) {
        if self.held.is_lost() {
            return;
        }
        let (shared, lease) = (&self.shared, &self.held.lease);
        match shared.log.release(lease).await {
            Ok(()) => info!(subscription = shared.name(), lane = lease.lane, epoch = lease.epoch, "lane released"),
            // It runs out by itself.
            Err(error) => _ = shared.store_failed(&error),
        }
    }

    async fn rounds(&self) -> Result<()> {
        let (shared, halt) = (&self.shared, &self.held.halt);
        while !halt.is_cancelled() && !shared.is_gone() {
            match shared.breaker.admit(shared.clock.monotonic()) {
                Admission::Closed => self.round().await?,
                Admission::Wait(wait) => self.wait(wait).await?,
                Admission::Probe => {
                    shared.metrics.set_breaker(shared.breaker.state());
                    let turn = ProbeTurn(shared);
                    let probed = self.probe().await;
                    drop(turn);
                    if !probed? {
                        self.wait(shared.settings.poll_max).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits while nothing may be sent, and writes down what comes back of calls that outlived their batch: their rows are put aside as long
    /// as nobody does.
    async fn wait(&self, wait: Duration) -> Result<()> {
        tokio::select! {
            biased;
            () = self.pause(wait, &self.held.halt) => Ok(()),
            returned = self.late.next() => self.settle_late(returned).await,
        }
    }

    /// Stream and due rows side by side, until one of them ends.
    async fn round(&self) -> Result<()> {
        let round = self.held.halt.child_token();
        let stream = async {
            let ended = self.stream(&round, Until::Stopped).await.map(drop);
            round.cancel();
            ended
        };
        let due = async {
            let ended = self.due(&round).await;
            round.cancel();
            ended
        };
        let (stream, due) = join(stream, due).await;
        stream.and(due)
    }

    /// One event to a destination that was down: a due one first, else the next of the stream; every other time the other
    /// way round, so that an event that itself brings the destination down does not keep all others from trying.
    /// Whether there was any event.
    async fn probe(&self) -> Result<bool> {
        let round = self.held.halt.child_token();
        let one = BatchLimit { events: 1, ..self.shared.settings.batch };
        let stream_first = self.shared.random.unit() < 0.5;
        if stream_first && self.stream_probe(one, &round).await? {
            return Ok(true);
        }
        if self.due_once(one, true, &round).await? > 0 {
            return Ok(true);
        }
        Ok(!stream_first && self.stream_probe(one, &round).await?)
    }

    async fn once(&self, limit: &ReadLimit) -> Result<()> {
        let (shared, halt) = (&self.shared, &self.held.halt);
        while !halt.is_cancelled() && !shared.is_gone() && shared.breaker.is_closed() {
            let round = halt.child_token();
            // Whatever is due by now, whenever the last look was.
            self.alarm.ring_in(shared.clock.monotonic(), Duration::ZERO);
            if self.stream(&round, Until::Empty(limit)).await? == 0 {
                match self.late.next_of_these().await {
                    Some(returned) => self.settle_late(returned).await?,
                    None => return Ok(()),
                }
            }
        }
        Ok(())
    }

    fn pace(&self, probe: bool) -> Pace {
        Pace { calls_max: self.shared.capabilities.concurrency, probe }
    }
}

/// The one probe a half-open breaker allows. Ends with its lane, even if that panics or is dropped in the middle: otherwise no lane of the relay
/// would ever probe again.
struct ProbeTurn<'a>(&'a Shared);

impl Drop for ProbeTurn<'_> {
    fn drop(&mut self) {
        self.0.breaker.probe_ended(self.0.clock.monotonic());
        self.0.metrics.set_breaker(self.0.breaker.state());
    }
}

/// Longest wait of a relay for its lanes after calls in flight were dropped: one settlement and one release.
pub(crate) const SETTLE_GRACE: Duration = Duration::from_secs(5);
