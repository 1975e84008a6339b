//! The stream of a lane: read, and read ahead while the sink works. The due rows beside it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join;
use postbox_core::{Batch, BatchLimit, Key, Result};
use tokio_util::sync::CancellationToken;

use super::Lane;
use super::limit::{ReadLimit, Reservation};
use super::process::Progress;
use crate::poll::Poll;

/// How long a stream goes on.
#[derive(Clone, Copy)]
pub(super) enum Until<'a> {
    /// Until its round ends.
    Stopped,
    /// Until nothing is pending or the limit is reached.
    Empty(&'a ReadLimit),
}

impl Until<'_> {
    /// The right to one more read; `None` when the limit is reached.
    async fn reserve(&self, batch: BatchLimit) -> Option<Reservation<'_>> {
        match self {
            Self::Stopped => Some(Reservation::unbounded(batch)),
            Self::Empty(limit) => limit.reserve(batch).await,
        }
    }
}

impl Lane {
    /// Reads and delivers the stream until `round` ends, or as `until` says; how many events there were. At most two batches are in
    /// memory: the one going out and the one read meanwhile.
    pub(super) async fn stream(&self, round: &CancellationToken, until: Until<'_>) -> Result<usize> {
        let settings = &self.shared.settings;
        let mut poll = Poll::new(settings.poll_min, settings.poll_max);
        let mut ahead: Option<Arc<Batch>> = None;
        // Keys held by the batch that was settled after `ahead` was read: the store could not know of them then.
        let mut carried: HashSet<Key> = HashSet::new();
        let mut count = 0;
        while !round.is_cancelled() {
            if let Until::Empty(limit) = until {
                count += self.due_if_rung(limit, round).await?;
            }
            let batch = match ahead.take() {
                Some(batch) => batch,
                None => {
                    carried.clear();
                    let Some(reservation) = until.reserve(settings.batch).await else { break };
                    let Some(batch) = self.read(reservation.limit, round).await? else { break };
                    reservation.used(batch.deliveries.len());
                    batch
                }
            };
            if batch.is_empty() {
                match until {
                    Until::Stopped => self.idle(&mut poll, round).await,
                    Until::Empty(_) => break,
                }
                continue;
            }
            poll.reset();
            self.alarm.set_busy(true);
            count += batch.deliveries.len();
            let read_ahead = self.read_ahead(&batch, until);
            let (next, progress) = join(read_ahead, self.process(&batch, &carried, self.pace(false), round)).await;
            match progress? {
                Progress::Settled(holding) => carried = holding,
                // Only now that no read is in flight: a rewind beside a read could be overtaken by it.
                Progress::Short { verdicts, late } => {
                    self.settle_short(&batch, &verdicts, late, self.pace(false)).await?;
                    next?;
                    return Ok(count);
                }
            }
            ahead = next?;
        }
        if ahead.is_some() {
            // It was read but will not be processed; without a rewind the next read would skip it.
            self.rewind().await?;
        }
        Ok(count)
    }

    /// The next batch, while one goes out; `None` where there is none, the limit is reached, or the store failed.
    async fn read_ahead(&self, batch: &Batch, until: Until<'_>) -> Result<Option<Arc<Batch>>> {
        if !batch.more {
            return Ok(None);
        }
        let Some(reservation) = until.reserve(self.shared.settings.batch).await else { return Ok(None) };
        let next = self.read_once(reservation.limit).await?;
        reservation.used(next.as_ref().map_or(0, |batch| batch.deliveries.len()));
        Ok(next)
    }

    /// Reads one batch of the stream and delivers it as a probe; whether there was anything.
    pub(super) async fn stream_probe(&self, limit: BatchLimit, round: &CancellationToken) -> Result<bool> {
        let Some(batch) = self.read(limit, round).await? else { return Ok(false) };
        if batch.is_empty() {
            return Ok(false);
        }
        let progress = self.process(&batch, &HashSet::new(), self.pace(true), round).await?;
        if let Progress::Short { verdicts, late } = progress {
            self.settle_short(&batch, &verdicts, late, self.pace(true)).await?;
        }
        Ok(true)
    }

    /// Delivers rows whose time has come, until `round` ends. Runs beside the stream, so that a slow poison event in here
    /// does not hold up other keys.
    pub(super) async fn due(&self, round: &CancellationToken) -> Result<()> {
        let clock = &self.shared.clock;
        while !round.is_cancelled() {
            let left = self.alarm.left(clock.monotonic());
            if !left.is_zero() {
                tokio::select! {
                    biased;
                    () = round.cancelled() => break,
                    returned = self.late.next() => self.settle_late(returned).await?,
                    () = self.alarm.set_earlier() => {}
                    () = clock.sleep(left) => {}
                }
                if self.shared.is_gone() || !self.shared.breaker.is_closed() {
                    break;
                }
                continue;
            }
            if self.due_once(self.shared.settings.batch, false, round).await? > 0 {
                // What was delivered may have released the next of its key.
                self.alarm.ring_in(clock.monotonic(), Duration::ZERO);
            }
        }
        Ok(())
    }

    /// Delivers due rows if it is time to look for them; how many there were.
    pub(super) async fn due_if_rung(&self, limit: &ReadLimit, round: &CancellationToken) -> Result<usize> {
        let batch = self.shared.settings.batch;
        if !self.alarm.left(self.shared.clock.monotonic()).is_zero() {
            return Ok(0);
        }
        let Some(reservation) = limit.reserve(batch).await else { return Ok(0) };
        let count = self.due_once(reservation.limit, false, round).await?;
        reservation.used(count);
        if count > 0 {
            // What was delivered may have released the next of its key.
            self.alarm.ring_in(self.shared.clock.monotonic(), Duration::ZERO);
        }
        Ok(count)
    }

    /// Reads one batch of due rows and delivers it; how many there were.
    pub(super) async fn due_once(&self, limit: BatchLimit, probe: bool, round: &CancellationToken) -> Result<usize> {
        self.alarm.wind(self.shared.clock.monotonic());
        let lease = &self.held.lease;
        let Some(batch) = self.repeat("due", round, || self.shared.log.due(lease, limit)).await? else {
            return Ok(0);
        };
        self.note_due(&batch);
        if batch.deliveries.is_empty() {
            return Ok(0);
        }
        self.shared.metrics.add(&self.shared.metrics.fetched, batch.deliveries.len());
        // Half of the calls at most: many slow rows must leave room for the stream.
        let mut pace = self.pace(probe);
        pace.calls_max = pace.calls_max.div_ceil(2);
        let batch = Arc::new(batch);
        self.process_due(&batch, pace, round).await?;
        Ok(batch.deliveries.len())
    }

    /// One read of the stream; `None` when the round ended first.
    ///
    /// A read that failed may have moved the store's mark of what was given. So the next one begins with a rewind, which
    /// in turn must wait until everything given is settled.
    async fn read(&self, limit: BatchLimit, round: &CancellationToken) -> Result<Option<Arc<Batch>>> {
        let mut failures = 0;
        while !round.is_cancelled() {
            if self.unsure.load(Ordering::Acquire) {
                self.rewind().await?;
                self.unsure.store(false, Ordering::Release);
            }
            match self.read_once(limit).await? {
                Some(batch) => return Ok(Some(batch)),
                None => {
                    failures += 1;
                    self.pause(self.shared.store_backoff(failures), round).await;
                }
            }
        }
        Ok(None)
    }

    /// One read beside a batch that goes out; `None` when the store failed.
    async fn read_once(&self, limit: BatchLimit) -> Result<Option<Arc<Batch>>> {
        // Never dropped half-way, for the same reason.
        match self.shared.log.next_batch(&self.held.lease, limit).await {
            Ok(batch) => {
                self.works("next_batch");
                self.note_due(&batch);
                self.shared.metrics.add(&self.shared.metrics.fetched, batch.deliveries.len());
                Ok(Some(Arc::new(batch)))
            }
            Err(error) if self.failed("next_batch", &error) => {
                self.unsure.store(true, Ordering::Release);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn note_due(&self, batch: &Batch) {
        if let Some(wait) = batch.due_in {
            self.alarm.ring_in(self.shared.clock.monotonic(), wait);
        }
    }

    /// Waits after an empty read: for a hint, the poll interval or the end of the round.
    async fn idle(&self, poll: &mut Poll, round: &CancellationToken) {
        self.shared.metrics.add(&self.shared.metrics.polls_empty, 1);
        self.alarm.set_busy(false);
        let deaf = poll.is_deaf();
        let wait = poll.pause();
        let hinted = tokio::select! {
            biased;
            () = round.cancelled() => false,
            () = self.shared.log.hint(&self.held.lease), if !deaf => true,
            () = self.shared.clock.sleep(wait) => false,
        };
        poll.woken_by_hint(hinted);
    }
}
