//! Limits how many calls of the sink are in flight, and how often they are made, over all lanes.

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
    pub(crate) fn wait(&self, now: Duration) -> Option<Duration> {
        let wait = lock(&self.rate.as_ref()?.1).wait(now)?;
        *lock(&self.waited_at) = Some(now + wait);
        Some(wait)
    }

    /// Returns whether something waits for the rate, or did a moment ago.
    pub(crate) fn holds(&self, now: Duration) -> bool {
        lock(&self.waited_at).is_some_and(|at| now < at + HOLDS_FOR)
    }

    /// Spends the rate for `count` events. A call of several may exceed it; the next waits longer.
    pub(crate) fn spend(&self, count: usize, now: Duration) {
        if let Some((_, bucket)) = &self.rate {
            lock(bucket).spend(u32::try_from(count).unwrap_or(u32::MAX), now);
        }
    }
}
