//! When something runs that does not run all the time: an interval, or a cron expression the server
//! brings.

use std::time::Duration;

use jiff::Timestamp;

/// Says when to run next.
///
/// The engine knows no cron syntax; whoever does (the server) implements this. A closure will do:
///
/// ```
/// use jiff::{Timestamp, ToSpan};
/// use postbox_engine::Schedule;
///
/// let hourly = |now: Timestamp| Some(now + 1.hour());
/// assert!(hourly.next_after(Timestamp::UNIX_EPOCH).is_some());
/// ```
pub trait Schedule: Send + Sync + 'static {
    /// The first time strictly after `now`; `None`: never again.
    fn next_after(&self, now: Timestamp) -> Option<Timestamp>;
}

/// Runs again so long after the last run began.
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

/// How long from `now` until `at`; zero when it has passed.
pub(crate) fn until(now: Timestamp, at: Timestamp) -> Duration {
    Duration::try_from(at.duration_since(now)).unwrap_or_default()
}
