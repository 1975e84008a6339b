//! When periodic work runs: at an interval, or by a cron expression that the server brings.

use std::time::Duration;

use jiff::Timestamp;
use postbox_core::Clock;

/// How often a wait for a time of day looks at the clock. Sleeps do not notice that it was set, or
/// that the machine was suspended.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Says when to run next.
///
/// The engine knows no cron syntax; the server, which does, implements this. A closure works too:
///
/// ```
/// use jiff::{Timestamp, ToSpan};
/// use postbox_engine::Schedule;
///
/// let hourly = |now: Timestamp| Some(now + 1.hour());
/// assert!(hourly.next_after(Timestamp::UNIX_EPOCH).is_some());
/// ```
pub trait Schedule: Send + Sync + 'static {
    /// Returns the first time strictly after `now`; `None`: never again.
    fn next_after(&self, now: Timestamp) -> Option<Timestamp>;
}

/// Runs again this long after the last run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Every(pub Duration);

impl Schedule for Every {
    fn next_after(&self, now: Timestamp) -> Option<Timestamp> {
        // A wait of zero would spin.
        now.checked_add(self.0.max(Duration::from_millis(1))).ok()
    }
}

impl<F: Fn(Timestamp) -> Option<Timestamp> + Send + Sync + 'static> Schedule for F {
    fn next_after(&self, now: Timestamp) -> Option<Timestamp> {
        self(now)
    }
}

const _: Option<&dyn Schedule> = None;

/// Returns how long it is from `now` until `at`; zero if it has passed.
pub(crate) fn until(now: Timestamp, at: Timestamp) -> Duration {
    Duration::try_from(at.duration_since(now)).unwrap_or_default()
}

/// Waits until the clock shows `next`, but no longer than that takes by the monotonic clock: a
/// clock set back delays nothing. Cancel-safe.
pub(crate) async fn sleep_until(next: Timestamp, clock: &dyn Clock) {
    let deadline = clock.monotonic() + until(clock.now(), next);
    loop {
        let left = until(clock.now(), next).min(deadline.saturating_sub(clock.monotonic()));
        if left.is_zero() {
            return;
        }
        clock.sleep(left.min(LOOK_EVERY)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use jiff::{SignedDuration, ToSpan as _};
    use postbox_core::lock;

    use super::*;
    use crate::clock::TokioClock;

    /// A clock that was set, which its sleeps do not notice.
    struct Set(TokioClock, Mutex<SignedDuration>);

    #[async_trait::async_trait]
    impl Clock for Set {
        fn now(&self) -> Timestamp {
            self.0.now() + *lock(&self.1)
        }

        fn monotonic(&self) -> Duration {
            self.0.monotonic()
        }

        async fn sleep(&self, duration: Duration) {
            self.0.sleep(duration).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_is_set_is_noticed_within_a_minute() {
        let start = Timestamp::UNIX_EPOCH + 48.hours();
        for (minutes, expected) in [(0, 3_600..3_601), (30, 1_800..1_861), (120, 600..661), (-1_440, 3_600..3_601)] {
            let clock = Set(TokioClock::simulated(start), Mutex::default());
            let next = clock.now() + 1.hours();
            let setting = async {
                clock.sleep(Duration::from_secs(600)).await;
                *lock(&clock.1) = SignedDuration::from_mins(minutes);
            };
            tokio::join!(sleep_until(next, &clock), setting);
            let waited = clock.monotonic().as_secs();
            assert!(expected.contains(&waited), "{waited} s, set by {minutes} minutes");
        }
    }
}
