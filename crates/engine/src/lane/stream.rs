//! The stream of a lane: reads it, and reads ahead while the sink works.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use postbox_core::limits::BATCH_EVENTS_MAX;
use postbox_core::{Batch, BatchLimit, Key, Result};
use tokio_util::sync::CancellationToken;

use super::Lane;
use super::batch::Progress;
use super::limit::Until;
use super::read_ahead::ReadAhead;
use super::settle::settle_behind;
use crate::poll::Poll;

/// Number of batches in one read, while the destination is faster than reads. A read has a fixed
/// cost besides its rows. Four batches spread most of it; more would only cost memory.
const READ_BATCHES: usize = 4;

/// How long a batch that was delivered whole may wait for the next events, to be settled together
/// with reading them. A relay that is killed meanwhile sends it again.
const SETTLE_WITHIN: Duration = Duration::from_millis(20);

impl Lane {
    /// Reads and delivers the stream until `round` ends or `until` is reached. Returns how many
    /// events there were. At most two reads are in memory: the one being sent and the one read
    /// meanwhile. A batch that was delivered whole is settled while the next one is sent, or, if
    /// nothing is left to send, with the next read.
    pub(super) async fn stream(&self, until: Until<'_>, round: &CancellationToken) -> Result<usize> {
        let settings = &self.context.settings;
        let mut poll = Poll::new(settings.poll_min, settings.poll_max);
        let one = self.context.read;
        let batches = if settings.rate.is_some() { 1 } else { READ_BATCHES };
        let several = BatchLimit { events: (one.events * batches).min(BATCH_EVENTS_MAX), ..one };
        let mut limit = several;
        let mut ready: VecDeque<Arc<Batch>> = VecDeque::new();
        let mut ahead = ReadAhead::default();
        // Sent batches, freed only while no read is under way: freeing memory in one thread while
        // another allocates beside it doubled the processor time of a drain (SQLite, measured).
        let mut gone_out: Vec<Arc<Batch>> = Vec::new();
        // Keys held by batches that were settled since the ready ones were read (`carried`), and
        // since the read ahead began (`carried_on`). The store may not have known of them.
        let (mut carried, mut carried_on) = (HashSet::<Key>::new(), HashSet::<Key>::new());
        let mut settling = None;
        // A batch that was delivered whole, to be settled with a later read, and since when.
        let mut delivered: Option<(Arc<Batch>, Duration)> = None;
        let mut count = 0;
        while !round.is_cancelled() && !self.caught_up.load(Ordering::Acquire) {
            if ready.is_empty() {
                carried = std::mem::take(&mut carried_on);
                let is_late = ahead.is_reading();
                let next = ahead.finish_beside(&mut settling).await?;
                gone_out.clear();
                let next = match next {
                    Some(next) => {
                        limit = if is_late { several } else { one };
                        next
                    }
                    None => {
                        carried.clear();
                        // The next window opens only after this.
                        settle_behind(&mut settling).await?;
                        let next = match delivered.take() {
                            Some((batch, since)) => {
                                let (next, is_settled) = self.settle_and_read(&batch, one, round).await?;
                                delivered = (!is_settled).then_some((batch, since));
                                next
                            }
                            None => self.read(until, one, round).await?,
                        };
                        let Some(next) = next else { break };
                        next
                    }
                };
                ready.extend(next.pieces(one.events).map(Arc::new));
            }
            let Some(batch) = ready.pop_front() else { break };
            let ends = until.ends_with(&batch);
            if batch.is_empty() {
                settle_behind(&mut settling).await?;
                if batch.more && !ends {
                    continue;
                }
                // Nothing can have been in flight from here.
                self.careful.stream_done();
                if !until.is_stopped() {
                    self.caught_up.store(ends, Ordering::Release);
                    break;
                }
                let wait = poll.pause(&self.context.siblings);
                if let Some((batch, since)) = &delivered
                    && self.context.clock.monotonic() + wait > *since + SETTLE_WITHIN
                {
                    self.settle_delivered(batch).await?;
                    delivered = None;
                }
                self.idle(&mut poll, wait, round).await;
                continue;
            }
            poll.reset();
            self.context.siblings.note_read();
            self.due_timer.set_busy(true);
            count += batch.deliveries.len();
            let last = ready.back().unwrap_or(&batch);
            if ahead.is_free() && last.more && !until.ends_with(last) {
                carried_on.clear();
                ahead.begin(self.read_ahead(until, limit));
            }
            let limits = self.limits(false);
            let progress = ahead.beside(self.deliver(&batch, &carried, limits, settling.take(), round)).await;
            match progress {
                Ok(Progress::Delivered) => {
                    self.careful.sent_stream(&batch);
                    if until.is_stopped() && ready.is_empty() && ahead.is_free() {
                        delivered = Some((batch, self.context.clock.monotonic()));
                    } else {
                        settling = Some(self.settle_delivered(&batch));
                        gone_out.push(batch);
                    }
                }
                Ok(Progress::Settled(holding)) => {
                    self.careful.sent_stream(&batch);
                    carried.extend(holding.iter().cloned());
                    carried_on.extend(holding);
                    gone_out.push(batch);
                }
                progress => {
                    // Only now, when no read is in flight: a read running beside a rewind could
                    // overtake it.
                    let next = ahead.finish().await;
                    if let Progress::Short(verdicts, calls) = progress? {
                        self.settle_short(&batch, &verdicts, calls, limits).await?;
                    }
                    next?;
                    return Ok(count);
                }
            }
            self.caught_up.store(ends, Ordering::Release);
        }
        let next = ahead.finish_beside(&mut settling).await?;
        settle_behind(&mut settling).await?;
        if let Some((batch, _)) = delivered {
            self.settle_delivered(&batch).await?;
        }
        if !ready.is_empty() || next.is_some() {
            // Without a rewind the next read would skip what was read but not sent.
            self.rewind().await?;
        }
        Ok(count)
    }

    /// Reads one batch of the stream and delivers it as a probe. Returns whether there was
    /// anything.
    pub(super) async fn probe_stream(
        &self,
        until: Until<'_>,
        limit: BatchLimit,
        round: &CancellationToken,
    ) -> Result<bool> {
        let batch = loop {
            if self.caught_up.load(Ordering::Acquire) {
                return Ok(false);
            }
            let Some(batch) = self.read(until, limit, round).await? else { return Ok(false) };
            let batch = Arc::new(batch);
            if !batch.deliveries.is_empty() {
                break batch;
            }
            if batch.is_empty() && !batch.more {
                return Ok(false);
            }
            if batch.end.is_some() {
                self.settle_delivered(&batch).await?;
            }
            self.caught_up.store(until.ends_with(&batch), Ordering::Release);
        };
        let limits = self.limits(true);
        match self.deliver(&batch, &HashSet::new(), limits, None, round).await? {
            Progress::Delivered => _ = self.settle_delivered(&batch).await?,
            Progress::Settled(_) => {}
            Progress::Short(verdicts, calls) => {
                self.settle_short(&batch, &verdicts, calls, limits).await?;
                return Ok(true);
            }
        }
        self.caught_up.store(until.ends_with(&batch), Ordering::Release);
        Ok(true)
    }

    /// Reads once; `None` if the round ended first or the limit is reached. While the store is down
    /// it repeats the read. A bounded run gives up after a while, see [`Self::failed`].
    ///
    /// A failed read may have moved the store's read position. So the next read begins with a
    /// rewind, and a rewind must wait until everything read so far is settled.
    pub(super) async fn read(
        &self,
        until: Until<'_>,
        limit: BatchLimit,
        round: &CancellationToken,
    ) -> Result<Option<Batch>> {
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

    /// Reads the next batches while others are sent; `None` if the limit is reached or the store
    /// failed.
    async fn read_ahead(&self, until: Until<'_>, limit: BatchLimit) -> Result<Option<Batch>> {
        let Some(reservation) = until.reserve(limit).await else { return Ok(None) };
        let next = self.read_once(reservation.limit).await?;
        reservation.used(next.as_ref().map_or(0, |batch| batch.deliveries.len()));
        Ok(next)
    }

    /// Tries one read, which is never dropped midway; `None` if the store failed.
    async fn read_once(&self, limit: BatchLimit) -> Result<Option<Batch>> {
        match self.context.log.next_batch(&self.lease.lease, limit).await {
            Ok(mut batch) => {
                self.works("next_batch");
                self.note_read(&mut batch);
                Ok(Some(batch))
            }
            Err(error) if self.failed("next_batch", &error) => {
                self.read_failed.store(true, Ordering::Release);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Counts what was read, and schedules due rows by what the store said about them.
    pub(super) fn note_read(&self, batch: &mut Batch) {
        if let Some(wait) = batch.due_in {
            self.due_timer.schedule(self.context.clock.monotonic(), wait);
        }
        self.note_expiry(batch);
        self.context.metrics.add(&self.context.metrics.fetched, batch.deliveries.len());
    }

    /// Waits after an empty read for a hint, the poll interval or the end of the round.
    async fn idle(&self, poll: &mut Poll, wait: Duration, round: &CancellationToken) {
        self.context.metrics.add(&self.context.metrics.polls_empty, 1);
        self.due_timer.set_busy(false);
        let ignores_hints = poll.ignores_hints();
        let hinted = tokio::select! {
            biased;
            () = round.cancelled() => false,
            () = self.context.log.hint(&self.lease.lease), if !ignores_hints => true,
            () = self.context.clock.sleep(wait) => false,
        };
        poll.woken_by_hint(hinted);
    }
}
