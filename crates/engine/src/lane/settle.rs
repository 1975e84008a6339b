//! Writes the results of a batch, and repeats what the store could not take.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::BoxFuture;
use postbox_core::{Batch, BatchLimit, Disposition, Entry, Error, ReadOn, Result, Seq, Settlement, lock};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::Lane;
use super::call::Call;
use super::dispatch::DispatchLimits;
use super::limit::Until;
use super::verdicts::{Verdicts, count, earliest_retry, span};
use crate::log_lines::rounded;

/// Number of consecutive failed probes that leave no row behind. With default waits they take at
/// least 8 seconds, and by then a probe may be any event of a page.
pub(super) const PROBES_MAX: u32 = 6;

/// A settlement under way. Resolves to the number of deliveries, from the start of the batch being
/// sent, that are written by then.
pub(super) type Settling<'a> = BoxFuture<'a, Result<usize>>;

/// Waits for the settlement of the previous batch, if there is one.
pub(super) async fn settle_behind(settling: &mut Option<Settling<'_>>) -> Result<()> {
    match settling.take() {
        Some(settling) => settling.await.map(drop),
        None => Ok(()),
    }
}

impl Lane {
    /// Settles a stream batch that was delivered whole, while the next one is sent. Sending the
    /// next batch does not wait for this settlement, but nothing of it is settled before this is
    /// over.
    pub(super) fn settle_delivered<'a>(&'a self, batch: &Batch) -> Settling<'a> {
        let ((first, last), events) = (span(batch), batch.deliveries.len());
        let settlement = self.all_delivered(batch);
        Box::pin(async move {
            self.settle(settlement).await?;
            self.log_settled(first, last, events, 0);
            Ok(0)
        })
    }

    /// Settles a stream batch that was delivered whole, and reads on, in one call. If that fails,
    /// each follows alone. Returns the next batch, if the round did not end first, and whether the
    /// given one is settled.
    pub(super) async fn settle_and_read(
        &self,
        batch: &Batch,
        limit: BatchLimit,
        round: &CancellationToken,
    ) -> Result<(Option<Batch>, bool)> {
        let context = &*self.context;
        let settlement = self.all_delivered(batch);
        match context.log.settle_and_read(&self.lease.lease, settlement.clone(), limit).await {
            Ok(ReadOn { batch: mut next, is_settled }) => {
                self.works("next_batch");
                if is_settled {
                    self.works("settle");
                    self.settled(&settlement);
                    let (first, last) = span(batch);
                    self.log_settled(first, last, batch.deliveries.len(), 0);
                }
                self.note_read(&mut next);
                return Ok((Some(next), is_settled));
            }
            Err(error) if error.is_stale() => {
                context.metrics.add(&context.metrics.stale_writes, 1);
                return Err(error);
            }
            Err(error) => {
                _ = self.failed("settle", &error);
                self.read_failed.store(true, Ordering::Release);
            }
        }
        self.settle_delivered(batch).await?;
        Ok((self.read(Until::Stopped, limit, round).await?, true))
    }

    /// Returns the settlement of a stream batch that was delivered whole.
    fn all_delivered(&self, batch: &Batch) -> Settlement<'static> {
        let hold_keys = self.context.holds_keys();
        Settlement { position: batch.end, entries: Vec::new(), rewind: false, hold_keys }
    }

    pub(super) fn log_settled(&self, first: Seq, last: Seq, events: usize, exceptions: usize) {
        debug!(
            subscription = self.context.name(), lane = self.lease.lease.lane, events, exceptions, %first, %last,
            "batch settled"
        );
    }

    /// Settles. While the store is down and the lane is still ours, repeats the same settlement. A
    /// bounded run gives up after a while, see [`Self::failed`].
    ///
    /// Repeating is safe even if the first try did commit. The store recognises a settlement by its
    /// position, and due rows by the state they had when read, and writes nothing twice. Giving up
    /// instead would send a whole batch again after every short failure of the database.
    pub(super) async fn settle(&self, settlement: Settlement<'_>) -> Result<()> {
        let context = &*self.context;
        let mut failures = 0;
        loop {
            let error = match context.log.settle(&self.lease.lease, settlement.clone()).await {
                Ok(()) => break self.works("settle"),
                Err(error) => error,
            };
            if error.is_stale() {
                context.metrics.add(&context.metrics.stale_writes, 1);
                return Err(error);
            }
            if !self.failed("settle", &error) {
                return Err(error);
            }
            failures += 1;
            let backoff = context.clock.sleep(context.store_backoff(failures));
            if self.lease.abandon.run_until_cancelled(backoff).await.is_none() {
                return Err(error);
            }
        }
        self.settled(&settlement);
        Ok(())
    }

    /// Counts a settlement and what died in it without a call, and schedules a look for the rows
    /// that it wrote.
    pub(super) fn settled(&self, settlement: &Settlement<'_>) {
        let metrics = &self.context.metrics;
        metrics.add(&metrics.batches, 1);
        if settlement.entries.is_empty() {
            return;
        }
        for Entry { delivery, disposition } in &settlement.entries {
            // Deaths without a call were planned. Only now do they stand: what a batch that is cut
            // short does not settle is read and planned again.
            if matches!(disposition, Disposition::Expired { .. } | Disposition::Dead { took: None, .. }) {
                self.context.record_failure(delivery, disposition);
            }
        }
        metrics.add(&metrics.blocked, count(settlement, |it| matches!(it, Disposition::Block)));
        metrics.add(&metrics.scheduled, count(settlement, |it| matches!(it, Disposition::Schedule { .. })));
        if let Some(wait) = earliest_retry(settlement) {
            self.due_timer.schedule(self.context.clock.monotonic(), wait);
        }
    }

    /// Settles a stream batch that was cut short. Deliveries without an outcome are read again.
    ///
    /// An outage leaves one row, which shows readers of the store that it happened. A probe leaves
    /// none, because otherwise each probe of an outage would add one, unless it is
    /// [stuck](Self::is_stuck).
    pub(super) async fn settle_short(
        &self,
        batch: &Batch,
        verdicts: &Verdicts,
        calls: Vec<Call>,
        limits: DispatchLimits,
    ) -> Result<()> {
        if self.lease.is_lost() {
            return Ok(());
        }
        let leaves_row = !limits.probe || self.is_stuck(batch);
        let settlement = verdicts.settle_stream(batch, self.context.holds_keys(), leaves_row);
        self.settle_and_detach(settlement, batch, verdicts, calls).await
    }

    /// Returns whether the probed event must leave the stream so that later events can be tried. No
    /// window opens behind an unsettled one, and all that is left of this window may be events that
    /// the destination never accepts. If more than a batch is left, none leaves: otherwise all that
    /// arrives in a long outage would become rows.
    fn is_stuck(&self, batch: &Batch) -> bool {
        let is_rest = !batch.more && batch.deliveries.len() <= self.context.settings.batch.events;
        is_rest && self.context.health.breaker.failures() >= PROBES_MAX
    }

    /// Discards what was read ahead. The next read starts after the last settled position.
    pub(super) async fn rewind(&self) -> Result<()> {
        if self.lease.is_lost() {
            return Ok(());
        }
        let hold_keys = self.context.holds_keys();
        self.settle(Settlement { position: None, entries: Vec::new(), rewind: true, hold_keys }).await
    }

    /// Records a failed store call. Returns whether to repeat it. A bounded run gives up once this
    /// call has failed for as long as a lease lasts: renewals may go on, and it would never end.
    pub(super) fn failed(&self, operation: &'static str, error: &Error) -> bool {
        let now = self.context.clock.monotonic();
        let since = *lock(&self.failing).entry(operation).or_insert(now);
        let gives_up = self.is_bounded && now.saturating_sub(since) > self.context.settings.lease_ttl;
        self.context.lane_failed(self.lease.lease.lane, operation, error) && !gives_up
    }

    /// Records a store call that succeeded.
    pub(super) fn works(&self, operation: &'static str) {
        let context = &self.context;
        lock(&self.failing).remove(operation);
        if let Some(since) = context.metrics.lane_works(self.lease.lease.lane, operation) {
            let away = context.clock.now().duration_since(since).unsigned_abs();
            info!(subscription = context.name(), away = ?rounded(away), "store answers again");
        }
    }

    /// Repeats a read while the store is down; `None` if `round` ended first. A bounded run gives
    /// up after a while, see [`Self::failed`].
    pub(super) async fn repeat<T, F: Future<Output = Result<T>>>(
        &self,
        operation: &'static str,
        round: &CancellationToken,
        mut read: impl FnMut() -> F,
    ) -> Result<Option<T>> {
        let mut failures = 0;
        while !round.is_cancelled() {
            match read().await {
                Ok(answer) => {
                    self.works(operation);
                    return Ok(Some(answer));
                }
                Err(error) if self.failed(operation, &error) => {
                    failures += 1;
                    self.pause(self.context.store_backoff(failures), round).await;
                }
                Err(error) => return Err(error),
            }
        }
        lock(&self.failing).remove(operation);
        Ok(None)
    }

    /// Waits for `wait`, or until `round` ends.
    pub(super) async fn pause(&self, wait: Duration, round: &CancellationToken) {
        _ = round.run_until_cancelled(self.context.clock.sleep(wait)).await;
    }
}
