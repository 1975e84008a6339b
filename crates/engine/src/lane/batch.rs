//! One batch, from planning to settlement.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Batch, Destination, Disposition, Key, Result};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::Lane;
use super::call::Call;
use super::dispatch::DispatchLimits;
use super::settle::Settling;
use super::verdicts::{Verdicts, holds, span};

/// The state of a stream batch after it was sent.
pub(super) enum Progress {
    /// All of it is delivered, and nothing of it is written yet.
    Delivered,
    /// All of it is written. Later events must wait for these keys.
    Settled(HashSet<Key>),
    /// It was cut short. The caller settles it once no read is in flight, then detaches the calls.
    Short(Verdicts, Vec<Call>),
}

impl Lane {
    /// Plans, sends and settles a stream batch, while the previous one is being settled.
    pub(super) async fn deliver<'a>(
        &'a self,
        batch: &'a Arc<Batch>,
        carried: &HashSet<Key>,
        limits: DispatchLimits,
        settling: Option<Settling<'a>>,
        round: &CancellationToken,
    ) -> Result<Progress> {
        let mut verdicts = self.plan(batch, carried);
        let sets_aside = !batch.deliveries.is_empty() && self.careful.has_stream();
        if sets_aside {
            verdicts.set_aside(&batch.deliveries, self.context.holds_keys());
        }
        match &self.context.destination {
            Destination::Sink(sink) => {
                let calls = self.dispatch(sink, batch, &mut verdicts, limits, settling, round).await?;
                // If the lane is lost, the store would refuse any settlement.
                if self.lease.is_lost() || !verdicts.is_complete() {
                    return Ok(Progress::Short(verdicts, calls));
                }
                if calls.is_empty() && verdicts.exceptions().next().is_none() {
                    return Ok(Progress::Delivered);
                }
                let settlement = verdicts.settle_stream(batch, self.context.holds_keys(), false);
                self.settle_and_detach(settlement, batch, &verdicts, calls).await?;
            }
            Destination::Apply(apply) => {
                if !self.apply_batch(&**apply, batch, &mut verdicts, round).await? {
                    return Ok(Progress::Short(Verdicts::new(batch.deliveries.len()), Vec::new()));
                }
            }
        }
        if sets_aside {
            self.careful.stream_done();
        }
        let (first, last) = span(batch);
        self.log_settled(first, last, batch.deliveries.len(), verdicts.exceptions().count());
        Ok(Progress::Settled(verdicts.holding_keys(&batch.deliveries)))
    }

    /// Sends and settles due rows. Returns how many were sent.
    pub(super) async fn deliver_due(
        &self,
        batch: &Arc<Batch>,
        limits: DispatchLimits,
        round: &CancellationToken,
    ) -> Result<usize> {
        let mut verdicts = self.plan_due(batch);
        match &self.context.destination {
            Destination::Sink(sink) => {
                let calls = self.dispatch(sink, batch, &mut verdicts, limits, None, round).await?;
                if self.lease.is_lost() {
                    return Ok(0);
                }
                if limits.alone {
                    verdicts.set_aside(&batch.deliveries, self.context.holds_keys());
                }
                let settlement = verdicts.settle_due(batch, self.context.holds_keys());
                self.settle_and_detach(settlement, batch, &verdicts, calls).await?;
                if !verdicts.is_complete() {
                    self.due_timer.schedule(self.context.clock.monotonic(), Duration::ZERO);
                }
            }
            Destination::Apply(apply) => {
                if !self.apply_batch(&**apply, batch, &mut verdicts, round).await? && limits.alone {
                    verdicts.set_aside(&batch.deliveries, self.context.holds_keys());
                    self.settle(verdicts.settle_due(batch, self.context.holds_keys())).await?;
                }
            }
        }
        let (lane, events) = (self.lease.lease.lane, batch.deliveries.len());
        debug!(subscription = self.context.name(), lane, events, "due rows settled");
        Ok(verdicts.sent())
    }

    /// Marks what does not go out with its batch: discarded and unreadable events, later delivery
    /// times, held keys.
    ///
    /// Does not read the clock. An event whose delivery time is later than its append goes to the
    /// store, whose clock decides. A wrong clock here can neither hurry nor delay it.
    fn plan(&self, batch: &Batch, carried: &HashSet<Key>) -> Verdicts {
        let mut verdicts = Verdicts::new(batch.deliveries.len());
        let anything_held = self.context.holds_keys() && !(batch.held.is_empty() && carried.is_empty());
        let is_held = |key: &Key| anything_held && (batch.held.contains(key) || carried.contains(key));
        for (index, delivery) in batch.deliveries.iter().enumerate() {
            let event = &delivery.event;
            if batch.discarded.contains(&delivery.seq) {
                verdicts.defer(index, Disposition::Discarded);
            } else if let Some(why) = batch.unreadable.get(&delivery.seq) {
                verdicts.defer(index, why.disposition());
            } else if self.is_expired(batch, delivery) {
                self.give_up_expired(&mut verdicts, index, delivery);
            } else if let Some(at) = event.deliver_at.filter(|at| *at > event.created_at) {
                verdicts.defer(index, Disposition::Schedule { at });
            } else if event.key.as_ref().is_some_and(is_held) {
                verdicts.defer(index, Disposition::Block);
            }
        }
        verdicts
    }

    /// Plans a batch of due rows. If a person made a row due while its call is still in flight, it
    /// is not sent a second time at once.
    fn plan_due(&self, batch: &Batch) -> Verdicts {
        let mut verdicts = Verdicts::new(batch.deliveries.len());
        let mut waiting: HashSet<&Key> = HashSet::new();
        for (index, delivery) in batch.deliveries.iter().enumerate() {
            let key = delivery.event.key.as_ref().filter(|_| self.context.holds_keys());
            if self.detached.contains(delivery.seq) {
                waiting.extend(key);
                verdicts.defer(index, self.in_flight());
            } else if let Some(why) = batch.unreadable.get(&delivery.seq) {
                verdicts.defer(index, why.disposition());
            } else if self.is_expired(batch, delivery) {
                self.give_up_expired(&mut verdicts, index, delivery);
            } else if let Some(dead) = self.dead_of_crashes(batch, delivery) {
                if holds(&dead) {
                    waiting.extend(key);
                }
                verdicts.defer(index, dead);
            } else if key.is_some_and(|key| waiting.contains(key)) {
                verdicts.defer(index, Disposition::Block);
            }
        }
        verdicts
    }
}
