//! Writing down what became of a batch, and repeating what the store could not take.

use std::time::Duration;

use postbox_core::{Batch, Disposition, Error, Result, Settlement};
use tokio_util::sync::CancellationToken;

use super::Lane;
use super::call::Call;
use super::dispatch::Pace;
use super::verdicts::{Verdicts, count, earliest_retry};

impl Lane {
    /// Settles, and repeats the same settlement while the store is down and the lane is still ours.
    ///
    /// Repeating is safe when the first try did commit: the store knows the settlement by its position, and due rows by
    /// what was read of them, and writes nothing twice. Giving up instead would send a whole batch again after each hiccup of the database.
    pub(super) async fn settle(&self, settlement: Settlement<'_>) -> Result<()> {
        let shared = &*self.shared;
        let mut failures = 0;
        loop {
            let error = match shared.log.settle(&self.held.lease, settlement.clone()).await {
                Ok(()) => break self.works("settle"),
                Err(error) => error,
            };
            if error.is_stale() {
                shared.metrics.add(&shared.metrics.stale_writes, 1);
                return Err(error);
            }
            if !self.failed("settle", &error) {
                return Err(error);
            }
            failures += 1;
            tokio::select! {
                biased;
                () = self.held.abandon.cancelled() => return Err(error),
                () = shared.clock.sleep(shared.store_backoff(failures)) => {}
            }
        }
        self.settled(&settlement);
        Ok(())
    }

    /// Counts a settlement and sets the alarm for what it left behind.
    pub(super) fn settled(&self, settlement: &Settlement<'_>) {
        let metrics = &self.shared.metrics;
        metrics.add(&metrics.batches, 1);
        if settlement.entries.is_empty() {
            return;
        }
        metrics.add(&metrics.blocked, count(settlement, |it| matches!(it, Disposition::Block)));
        metrics.add(&metrics.scheduled, count(settlement, |it| matches!(it, Disposition::Schedule { .. })));
        if let Some(wait) = earliest_retry(settlement) {
            self.alarm.ring_in(self.shared.clock.monotonic(), wait);
        }
    }

    /// Settles a stream batch that was cut short; what was not answered for is read again.
    ///
    /// One row tells of an outage. A probe leaves none: there would be another for each of an outage's probes.
    pub(super) async fn settle_short(
        &self,
        batch: &Batch,
        verdicts: &Verdicts,
        late: Vec<Call>,
        pace: Pace,
    ) -> Result<()> {
        if self.held.is_lost() {
            return Ok(());
        }
        self.settle(verdicts.settle_stream(batch, self.shared.holds_keys(), !pace.probe)).await?;
        self.adopt(batch, verdicts, late);
        Ok(())
    }

    /// Throws away what was read ahead: the next read starts after the last settled position.
    pub(super) async fn rewind(&self) -> Result<()> {
        if self.held.is_lost() {
            return Ok(());
        }
        let hold_keys = self.shared.holds_keys();
        self.settle(Settlement { position: None, entries: Vec::new(), rewind: true, hold_keys }).await
    }

    /// Takes note of a failed call; whether it is worth repeating.
    pub(super) fn failed(&self, operation: &'static str, error: &Error) -> bool {
        self.shared.lane_failed(self.held.lease.lane, operation, error)
    }

    /// Takes note of a call that succeeded.
    pub(super) fn works(&self, operation: &'static str) {
        self.shared.metrics.lane_works(self.held.lease.lane, operation);
    }

    /// Repeats a read while the store is down; `None` when `round` ended first.
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
                    self.pause(self.shared.store_backoff(failures), round).await;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Waits, or until `round` ends.
    pub(super) async fn pause(&self, wait: Duration, round: &CancellationToken) {
        tokio::select! {
            biased;
            () = round.cancelled() => {}
            () = self.shared.clock.sleep(wait) => {}
        }
    }
}
