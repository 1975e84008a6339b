//! The due rows of a lane: events that left the stream and whose time has come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use postbox_core::{BatchLimit, Result};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Lane;
use super::limit::Until;

/// Longest time between two looks for due rows while events flow. Rows that other relays or
/// operators made due are found within this time.
const LOOK_BUSY: Duration = Duration::from_millis(200);
/// The same for an idle lane. A retry by a person starts within half a second, at the cost of two
/// cheap reads a second.
const LOOK_IDLE: Duration = Duration::from_millis(500);
/// How long one batch of due rows sends. Rows that become due meanwhile wait for it to end.
const BATCH_TIME: Duration = Duration::from_secs(1);

impl Lane {
    /// Delivers due rows until `round` ends, or until none is due after the stream is `drained`.
    /// Runs beside the stream, so that a slow due row does not hold up other keys.
    pub(super) async fn due(
        &self,
        until: Until<'_>,
        round: &CancellationToken,
        drained: &CancellationToken,
    ) -> Result<usize> {
        let clock = &self.context.clock;
        let mut count = 0;
        while !round.is_cancelled() {
            // Done first, however many rows are due: a finished call holds its key until it is
            // written.
            if let Some(returned) = self.detached.returned().next() {
                self.settle_detached(returned).await?;
            }
            let left = self.due_timer.left(clock.monotonic());
            if left.is_zero() {
                let read = self.due_once(until, false, round).await?;
                if read > 0 {
                    // A delivery may have released the next event of its key.
                    self.due_timer.schedule(clock.monotonic(), Duration::ZERO);
                }
                count += read;
                continue;
            }
            tokio::select! {
                biased;
                () = round.cancelled() => break,
                returned = self.detached.next() => self.settle_detached(returned).await?,
                () = self.due_timer.earlier() => {}
                () = drained.cancelled() => break,
                () = clock.sleep(left) => {}
            }
            if !self.context.health.is_good() {
                break;
            }
        }
        Ok(count)
    }

    /// Reads one batch of due rows and delivers it. Returns how many there were. A `probe` reads
    /// one.
    ///
    /// Reads at most twice what the previous batch could send in its time. More rows would only
    /// stand behind slow calls and be read again and again.
    pub(super) async fn due_once(&self, until: Until<'_>, probe: bool, round: &CancellationToken) -> Result<usize> {
        self.due_timer.reset(self.context.clock.monotonic());
        let most = self.context.read;
        let (careful, sees_all) = (self.careful.has_rows(), !self.careful.has_stream());
        let events = if probe || careful { 1 } else { self.due_events.load(Ordering::Relaxed).min(most.events) };
        let limit = BatchLimit { events, ..most };
        let Some(reservation) = until.reserve(limit).await else { return Ok(0) };
        let (log, lease) = (&self.context.log, &self.lease.lease);
        let Some(mut batch) = self.repeat("due", round, || log.due(lease, reservation.limit)).await? else {
            return Ok(0);
        };
        let count = batch.deliveries.len();
        reservation.used(count);
        self.note_read(&mut batch);
        if count == 0 && sees_all {
            self.careful.no_rows();
        }
        let (batch, alone) = self.set_apart(batch);
        let count_together = batch.deliveries.len();
        if count_together > 0 {
            // At most half of the calls: many slow rows must leave room for the stream.
            let mut limits = self.limits(probe);
            limits.calls_max = limits.calls_max.div_ceil(2);
            limits.detach_after = limits.detach_after.map(|_| BATCH_TIME);
            limits.send_until = Some(self.context.clock.monotonic() + BATCH_TIME);
            let sent = self.deliver_due(&Arc::new(batch), limits, round).await?;
            if events > 1 && (sent < count_together || count >= events) {
                let at_once = limits.calls_max.saturating_mul(self.context.capabilities.batch_max);
                // More than one, so that it can grow again.
                self.due_events.store(at_once.max(2 * sent).max(2), Ordering::Relaxed);
            }
        }
        if let Some(alone) = alone {
            self.deliver_alone(alone, probe, round).await?;
        }
        Ok(count)
    }
}

/// When the lane looks for due rows. Only a hint: looking too early costs a read.
#[derive(Debug)]
pub(super) struct DueTimer {
    /// Nanoseconds on the monotonic clock.
    at: AtomicU64,
    earlier: Notify,
    busy: AtomicBool,
}

impl DueTimer {
    /// Due at once, because a former owner of the lane may have left rows.
    pub(super) fn new() -> Self {
        Self { at: AtomicU64::new(0), earlier: Notify::new(), busy: AtomicBool::new(false) }
    }

    /// Makes it due at most `wait` after `now`.
    pub(super) fn schedule(&self, now: Duration, wait: Duration) {
        let at = nanos(now.saturating_add(wait));
        if self.at.fetch_min(at, Ordering::AcqRel) > at {
            self.earlier.notify_one();
        }
    }

    /// Notes that a look begins at `now`. The next one comes at its regular time.
    fn reset(&self, now: Duration) {
        let regular = if self.busy.load(Ordering::Relaxed) { LOOK_BUSY } else { LOOK_IDLE };
        self.at.store(nanos(now + regular), Ordering::Release);
    }

    /// Returns how long until it is due.
    fn left(&self, now: Duration) -> Duration {
        Duration::from_nanos(self.at.load(Ordering::Acquire)).saturating_sub(now)
    }

    /// Resolves when an earlier time was scheduled.
    async fn earlier(&self) {
        self.earlier.notified().await;
    }

    /// Sets whether events flow.
    pub(super) fn set_busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::Relaxed);
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_scheduled_during_a_look_is_kept() {
        let timer = DueTimer::new();
        let now = Duration::from_secs(5);
        assert!(timer.left(now).is_zero());
        timer.reset(now);
        timer.schedule(now, Duration::from_millis(30));
        timer.schedule(now, Duration::from_secs(9));
        assert_eq!(timer.left(now), Duration::from_millis(30));
    }
}
