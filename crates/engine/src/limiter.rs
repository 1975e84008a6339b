//! Limits how many calls of the sink are in flight, and how often they are made, over all lanes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postbox_core::{Bucket, Capabilities, Rate, lock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::settings::RelaySettings;

/// How much of an unused rate is kept for a burst. Enough that short gaps between calls cost no
/// throughput, too little for the destination to notice.
const RATE_BURST: Duration = Duration::from_millis(100);

/// How long after a wait for the rate the rate still counts as the bottleneck. If it is, another
/// wait follows within this time.
const HOLDS_FOR: Duration = Duration::from_secs(2);

pub(crate) struct Limiter {
    permits: Arc<Semaphore>,
    rate: Option<(Rate, Mutex<Bucket>)>,
    /// When something last waited for the rate.
    waited_at: Mutex<Option<Duration>>,
    /// Number of stream batches that wait for the rate.
    streams: AtomicUsize,
    /// How many more events of the rate were spent on due rows than on streams, within a burst.
    rows_ahead: Mutex<i64>,
}

/// A stream batch that waits for the rate, until dropped.
pub(crate) struct StreamWaits<'a>(&'a AtomicUsize);

impl Drop for StreamWaits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Limiter {
    /// Creates the limiter. Also returns the sink's capabilities, cut to the limits of the
    /// settings.
    pub(crate) fn new(declared: Capabilities, settings: &RelaySettings) -> (Self, Capabilities) {
        let mut batch_max = declared.batch_max.max(1);
        if let Some(rate) = settings.rate {
            // A larger call would spend the rate of a long time at once.
            batch_max = batch_max.min(rate.within(RATE_BURST));
        }
        let concurrency = declared.concurrency.max(1).min(settings.concurrency.unwrap_or(usize::MAX));
        let limiter = Self {
            permits: Arc::new(Semaphore::new(concurrency.min(Semaphore::MAX_PERMITS))),
            rate: settings.rate.map(|rate| (rate, Mutex::new(Bucket::new(rate, RATE_BURST)))),
            waited_at: Mutex::new(None),
            streams: AtomicUsize::new(0),
            rows_ahead: Mutex::new(0),
        };
        (limiter, Capabilities { batch_max, concurrency, ..declared })
    }

    /// Returns a permit for one call, if one is free.
    pub(crate) fn try_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.permits.clone().try_acquire_owned().ok()
    }

    /// Waits for a permit for one call. Cancel-safe.
    pub(crate) async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        self.permits.clone().acquire_owned().await.ok()
    }

    /// Sets this relay's share of the rate. The rate applies to all replicas together, and a
    /// replica that drives `held` of `lanes` lanes gets that fraction.
    pub(crate) fn share(&self, held: usize, lanes: u16) {
        if let Some((rate, bucket)) = &self.rate {
            let (held, lanes) = (u32::try_from(held).unwrap_or(u32::MAX).max(1), u32::from(lanes.max(1)));
            lock(bucket).set_interval(rate.interval() * lanes.max(held) / held);
        }
    }

    /// Returns how long to wait for the rate; `None`: send now.
    ///
    /// While a stream waits, due rows get at most half of the rate. Otherwise the retries of many
    /// keys could take all of it, and nothing else would go out.
    pub(crate) fn wait(&self, now: Duration, are_rows: bool) -> Option<Duration> {
        let (rate, bucket) = self.rate.as_ref()?;
        let full = lock(bucket).wait(now);
        let gives_way = || are_rows && self.streams.load(Ordering::Acquire) > 0 && *lock(&self.rows_ahead) > 0;
        let wait = full.or_else(|| gives_way().then(|| rate.interval().min(RATE_BURST)))?;
        *lock(&self.waited_at) = Some(now + wait);
        Some(wait)
    }

    /// Notes that a stream batch waits for the rate, until the answer is dropped.
    pub(crate) fn stream_waits(&self) -> StreamWaits<'_> {
        self.streams.fetch_add(1, Ordering::AcqRel);
        StreamWaits(&self.streams)
    }

    /// Returns whether something waits for the rate, or did a moment ago.
    pub(crate) fn holds(&self, now: Duration) -> bool {
        lock(&self.waited_at).is_some_and(|at| now < at + HOLDS_FOR)
    }

    /// Spends the rate for `count` events. A call of several may exceed it; the next waits longer.
    pub(crate) fn spend(&self, count: usize, now: Duration, are_rows: bool) {
        if let Some((rate, bucket)) = &self.rate {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            lock(bucket).spend(count, now);
            let burst = i64::try_from(rate.within(RATE_BURST)).unwrap_or(i64::MAX);
            let mut ahead = lock(&self.rows_ahead);
            let more = if are_rows { i64::from(count) } else { -i64::from(count) };
            *ahead = ahead.saturating_add(more).clamp(-burst, burst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_rows_leave_half_of_the_rate_to_a_stream_that_waits() {
        for (rate, stream, percent) in [("5/s", true, 45..56), ("500/s", true, 45..56), ("5/s", false, 100..101)] {
            let settings = RelaySettings { rate: rate.parse().ok(), ..RelaySettings::default() };
            let (limiter, _) = Limiter::new(Capabilities::default(), &settings);
            let _waits = stream.then(|| limiter.stream_waits());
            let (mut rows, mut all) = (0, 0);
            for now in (0..20_000).map(Duration::from_millis) {
                // Due rows always come first.
                for are_rows in [true, false].into_iter().filter(|are_rows| *are_rows || stream) {
                    while limiter.wait(now, are_rows).is_none() {
                        limiter.spend(1, now, are_rows);
                        rows += usize::from(are_rows);
                        all += 1;
                    }
                }
            }
            assert!(all >= 100 && percent.contains(&(rows * 100 / all)), "{rows} of {all} at {rate}, stream {stream}");
        }
    }
}
