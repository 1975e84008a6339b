//! When periodic work runs: at an interval, or by a cron expression that the server brings.

use std::time::Duration;

use jiff::Timestamp;

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
