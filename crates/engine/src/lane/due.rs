//! When the lane looks for rows whose time has come.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// The longest time between two looks while events flow: what other relays and operators made due is found by then.
const LOOK_BUSY: Duration = Duration::from_millis(200);
/// The same for an idle lane: a person's retry starts within half a second, for two cheap reads a second.
const LOOK_IDLE: Duration = Duration::from_millis(500);

/// The alarm clock of the due track. Only a hint of its own: looking too early costs a read.
#[derive(Debug)]
pub(super) struct Alarm {
    /// Nanoseconds on the monotonic clock.
    at: AtomicU64,
    earlier: Notify,
    busy: AtomicBool,
}

impl Alarm {
    /// Rings at once: what a former owner of the lane left may be due.
    pub(super) fn new() -> Self {
        Self { at: AtomicU64::new(0), earlier: Notify::new(), busy: AtomicBool::new(false) }
    }

    /// Rings `wait` after `now` at the latest.
    pub(super) fn ring_in(&self, now: Duration, wait: Duration) {
        let at = nanos(now.saturating_add(wait));
        if self.at.fetch_min(at, Ordering::AcqRel) > at {
            self.earlier.notify_one();
        }
    }

    /// A look begins at `now`; without other news the next one comes at its regular time.
    pub(super) fn wind(&self, now: Duration) {
        let regular = if self.busy.load(Ordering::Relaxed) { LOOK_BUSY } else { LOOK_IDLE };
        self.at.store(nanos(now + regular), Ordering::Release);
    }

    /// How long until it rings.
    pub(super) fn left(&self, now: Duration) -> Duration {
        Duration::from_nanos(self.at.load(Ordering::Acquire)).saturating_sub(now)
    }

    /// Resolves when it was set to an earlier time.
    pub(super) async fn set_earlier(&self) {
        self.earlier.notified().await;
    }

    /// Whether events flow.
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
    fn news_during_a_look_are_not_forgotten() {
        let alarm = Alarm::new();
        let now = Duration::from_secs(5);
        assert!(alarm.left(now).is_zero());
        alarm.wind(now);
        alarm.ring_in(now, Duration::from_millis(30));
        alarm.ring_in(now, Duration::from_secs(9));
        assert_eq!(alarm.left(now), Duration::from_millis(30));
    }
}
