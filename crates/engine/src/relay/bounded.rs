//! A bounded run: delivers what is pending now, over every lane that nobody else holds.

use std::pin::pin;
use std::sync::atomic::Ordering;

use futures::future::{Either, join_all, select};
use postbox_core::Result;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::Relay;
use crate::drained::Drained;
use crate::lane::{Lane, LeaseGuard, ReadLimit, SETTLE_GRACE};

impl Relay {
    /// Delivers what is pending now, and returns. Retrying events that are not due are left, and
    /// events that are committed meanwhile may be left, so that it ends however many arrive.
    ///
    /// Reads at most `limit` deliveries over all lanes, so it delivers no more than that. A
    /// delivery that then has to wait, behind an earlier event of its key or for its time, counts
    /// too. If it is read again in the same run, it counts again.
    ///
    /// Takes every lane that nobody else holds. A destination that is down ends the run, after two
    /// more tries. A store that is down is an error: at once when a lane is asked for, otherwise
    /// once a call has failed for as long as a lease lasts. What was delivered until then is in
    /// [`Self::metrics`]. A lane lost midway is counted in [`Drained::lanes_lost`].
    ///
    /// Cancel-safety: as [`Self::run`].
    pub async fn drain(&self, limit: Option<usize>) -> Result<Drained> {
        self.drain_until(limit, CancellationToken::new()).await
    }

    /// Like [`Self::drain`], but stops gracefully when `stop` is cancelled. Lanes of a store that
    /// then does not answer are counted as lost.
    pub async fn drain_until(&self, limit: Option<usize>, stop: CancellationToken) -> Result<Drained> {
        let drained = self.drain_once(limit, false, stop).await?;
        if drained.lanes_elsewhere > 0 {
            info!(subscription = self.name(), lanes = drained.lanes_elsewhere, "lanes held by another relay");
        }
        Ok(drained)
    }

    pub(super) async fn drain_once(
        &self,
        limit: Option<usize>,
        only_crashed: bool,
        stop: CancellationToken,
    ) -> Result<Drained> {
        let mut running = self.start()?;
        let drained = self.drain_lanes(limit, only_crashed, stop).await;
        match &drained {
            Ok(drained) => running.lanes_elsewhere = Some(drained.lanes_elsewhere as usize),
            Err(error) => running.failed(error),
        }
        self.context.iter().for_each(|context| context.log_left_out());
        drained
    }

    async fn drain_lanes(&self, limit: Option<usize>, only_crashed: bool, stop: CancellationToken) -> Result<Drained> {
        if !self.subscribed.load(Ordering::Acquire) {
            let subscribing = self.log.subscribe(&self.subscription);
            let Some(subscribed) = stop.run_until_cancelled(subscribing).await else { return Ok(Drained::default()) };
            subscribed?;
            self.subscribed.store(true, Ordering::Release);
        }
        let Some(context) = &self.context else { return Ok(Drained::default()) };
        let before = self.metrics.snapshot();
        let limit = ReadLimit::new(limit);
        let ttl = context.settings.lease_ttl;
        let (mut lanes, mut known) = (Vec::new(), Vec::new());
        let (mut lanes_max, mut lanes_elsewhere) = (None::<usize>, 0);
        let halt = stop.child_token();
        let mut failed = None;
        let mut not_wanted = Vec::new();
        while lanes_max.is_none_or(|max| known.len() < max) && !halt.is_cancelled() {
            let asked_at = self.clock.monotonic();
            let acquired = match self.answered(context.acquire(&self.owner, &known), &stop).await {
                Some(Ok(acquired)) => acquired,
                None => break,
                Some(Err(error)) => {
                    // The lanes taken so far must be given back: a lease that just runs out counts
                    // as a crash of its holder.
                    halt.cancel();
                    failed = Some(error);
                    break;
                }
            };
            let max = usize::from(acquired.lanes);
            lanes_max = Some(max);
            if let Some(pause) = &acquired.paused {
                info!(subscription = self.name(), by = pause.by, why = pause.why, "subscription paused");
            }
            let Some(lease) = acquired.lease else {
                lanes_elsewhere = if acquired.paused.is_some() { 0 } else { max.saturating_sub(known.len()) };
                break;
            };
            known.push(lease.lane);
            if only_crashed && lease.crashes == 0 {
                // Its holder was done with it, and what came since waits for its time. It is held
                // until all were asked for: the store would grant the same free lane again.
                not_wanted.push(lease);
                continue;
            }
            self.metrics.lane_taken(&lease);
            let guard = LeaseGuard::new(lease, asked_at, ttl, halt.child_token());
            lanes.push(Lane::new(context.clone(), guard));
        }
        let giving_back = join_all(not_wanted.iter().map(|lease| context.release(lease)));
        _ = self.answered(giving_back, &stop).await;
        context.limiter.share(lanes.len(), lanes_max);
        // The first lane is the first to use the limit, and to probe a destination that looks down.
        // It must not be the same one in each run.
        let first = (context.random.unit() * lanes.len() as f64) as usize;
        lanes.rotate_left(first);
        let taken = lanes.len() as u64;
        let drained = join_all(lanes.into_iter().map(|lane| lane.drain(&limit)));
        let given_up = async {
            stop.cancelled().await;
            self.clock.sleep(context.settings.drain_timeout.saturating_add(SETTLE_GRACE)).await;
        };
        let (ended, mut lanes_lost) = match select(pin!(drained), pin!(given_up)).await {
            Either::Left((ended, _)) => (ended, 0),
            // The store does not answer. Nobody knows which lanes have ended.
            Either::Right(_) => (Vec::new(), taken),
        };
        let paused = if context.health.is_gone() { self.pause(context, &stop).await } else { Ok(true) };
        context.leave(&self.owner).await;
        if let Some(error) = failed.or(paused.err()) {
            return Err(error);
        }
        for error in ended.into_iter().filter_map(Result::err) {
            if !error.is_stale() {
                return Err(error);
            }
            lanes_lost += 1;
        }
        let lanes_elsewhere = lanes_elsewhere as u64;
        Ok(Drained { lanes_lost, lanes_elsewhere, ..Drained::between(&before, &self.metrics.snapshot()) })
    }
}
