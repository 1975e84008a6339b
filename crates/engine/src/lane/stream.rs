//! The stream of a lane: read, and read ahead while the sink works.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::future::join;
use postbox_core::{Batch, BatchLimit, Key, Result};
use tokio_util::sync::CancellationToken;

use super::Lane;
use super::batch::Progress;
use super::limit::Until;
use crate::poll::Poll;

impl Lane {
    /// Reads and delivers the stream until `round` ends, or as `until` says; how many events there
    /// were. At most two batches are in memory: the one going out and the one read meanwhile.
    pub(super) async fn stream(&self, until: Until<'_>, round: &CancellationToken) -> Result<usize> {
        let settings = &self.context.settings;
        let mut poll = Poll::new(settings.poll_min, settings.poll_max);
        let mut ahead: Option<Arc<Batch>> = None;
        // Keys held by the batch that was settled after `ahead` was read, unknown to the store
        // then.
        let mut carried: HashSet<Key> = HashSet::new();
        let mut count = 0;
        while !round.is_cancelled() {
            let batch = match ahead.take() {
                Some(batch) => batch,
                None => {
                    carried.clear();
                    let Some(batch) = self.read(until, settings.batch, round).await? else { break };
                    batch
                }
            };
            if batch.is_empty() {
                if !until.is_stopped() {
                    break;
                }
                self.idle(&mut poll, round).await;
                continue;
            }
            poll.reset();
            self.due_timer.set_busy(true);
            count += batch.deliveries.len();
            let limits = self.limits(false);
            let (next, progress) =
                join(self.read_ahead(&batch, until), self.deliver(&batch, &carried, limits, round)).await;
            match progress? {
                Progress::Settled(holding) => carried = holding,
                // Only now that no read is in flight: a rewind beside a read could be overtaken by
                // it.
                Progress::Short(verdicts, calls) => {
                    self.settle_short(&batch, &verdicts, calls, limits).await?;
                    next?;
                    return Ok(count);
                }
            }
            ahead = next?;
        }
        if ahead.is_some() {
            // Without a rewind the next read would skip it.
            self.rewind().await?;
        }
        Ok(count)
    }

    /// Reads one batch of the stream and delivers it as a probe; whether there was anything.
    pub(super) async fn probe_stream(
        &self,
        until: Until<'_>,
        limit: BatchLimit,
        round: &CancellationToken,
    ) -> Result<bool> {
        let Some(batch) = self.read(until, limit, round).await?.filter(|batch| !batch.is_empty()) else {
            return Ok(false);
        };
        let limits = self.limits(true);
        if let Progress::Short(verdicts, calls) = self.deliver(&batch, &HashSet::new(), limits, round).await? {
            self.settle_short(&batch, &verdicts, calls, limits).await?;
        }
        Ok(true)
    }

    /// One read; `None` when the round ended first, or the limit is reached.
    ///
    /// A read that failed may have moved the store's mark of what was given. So the next one begins
    /// with a rewind, which in turn must wait until everything given is settled.
    async fn read(&self, until: Until<'_>, limit: BatchLimit, round: &CancellationToken) -> Result<Option<Arc<Batch>>> {
        let Some(reservation) = until.reserve(limit).await else { return Ok(None) };
        let mut failures = 0;
        while !round.is_cancelled() {
            if self.read_failed.load(Ordering::Acquire) {
                self.rewind().await?;
                self.read_failed.store(false, Ordering::Release);
            }
            if let Some(batch) = self.read_once(reservation.limit).await? {
                reservation.used(batch.deliveries.len());
                return Ok(Some(batch));
            }
            failures += 1;
            self.pause(self.context.store_backoff(failures), round).await;
        }
        Ok(None)
    }

    /// The next batch, while one goes out; `None` where there is none, the limit is reached, or the
    /// store failed.
    async fn read_ahead(&self, batch: &Batch, until: Until<'_>) -> Result<Option<Arc<Batch>>> {
        if !batch.more {
            return Ok(None);
        }
        let Some(reservation) = until.reserve(self.context.settings.batch).await else { return Ok(None) };
        let next = self.read_once(reservation.limit).await?;
        reservation.used(next.as_ref().map_or(0, |batch| batch.deliveries.len()));
        Ok(next)
    }

    /// One try of a read, which is never dropped half-way; `None` when the store failed.
    async fn read_once(&self, limit: BatchLimit) -> Result<Option<Arc<Batch>>> {
        match self.context.log.next_batch(&self.lease.lease, limit).await {
            Ok(batch) => {
                self.works("next_batch");
                self.note_read(&batch);
                Ok(Some(Arc::new(batch)))
            }
            Err(error) if self.failed("next_batch", &error) => {
                self.read_failed.store(true, Ordering::Release);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Counts what was read, and schedules due rows by what the store said of them.
    pub(super) fn note_read(&self, batch: &Batch) {
        if let Some(wait) = batch.due_in {
            self.due_timer.schedule(self.context.clock.monotonic(), wait);
        }
        self.context.metrics.add(&self.context.metrics.fetched, batch.deliveries.len());
    }

    /// Waits after an empty read: for a hint, the poll interval or the end of the round.
    async fn idle(&self, poll: &mut Poll, round: &CancellationToken) {
        self.context.metrics.add(&self.context.metrics.polls_empty, 1);
        self.due_timer.set_busy(false);
        let ignores_hints = poll.ignores_hints();
        let wait = poll.pause();
        let hinted = tokio::select! {
            biased;
            () = round.cancelled() => false,
            () = self.context.log.hint(&self.lease.lease), if !ignores_hints => true,
            () = self.context.clock.sleep(wait) => false,
        };
        poll.woken_by_hint(hinted);
    }
}
