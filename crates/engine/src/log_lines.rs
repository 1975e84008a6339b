//! The log lines of a relay, at most one per second for each cause. An outage or a bad deploy of a
//! receiver fails thousands of events a second for one reason; the metrics count each of them.

use postbox_core::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// Least time between two lines of one cause. A person can read that, and it fills no disk.
const LINE_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of separate causes. More than any destination has codes. A handler may invent
/// codes without end; then the cause that was silent for longest is forgotten.
const CAUSES_MAX: usize = 64;

/// What was logged and left out, by cause: what happened, and its code.
#[derive(Debug, Default)]
pub(crate) struct LogLines(Mutex<HashMap<(&'static str, String), Cause>>);

#[derive(Debug)]
struct Cause {
    logged_at: Duration,
    left_out: u64,
}

impl LogLines {
    /// Notes an occurrence. If it should be logged, returns how many were left out since the last
    /// line. `now` is monotonic.
    pub(crate) fn observe(&self, what: &'static str, code: &str, now: Duration) -> Option<u64> {
        let mut causes = lock(&self.0);
        let key = (what, code.to_owned());
        if let Some(cause) = causes.get_mut(&key) {
            if now.saturating_sub(cause.logged_at) < LINE_EVERY {
                cause.left_out += 1;
                return None;
            }
            cause.logged_at = now;
            return Some(std::mem::take(&mut cause.left_out));
        }
        if causes.len() >= CAUSES_MAX {
            let silent = causes.iter().min_by_key(|(_, cause)| cause.logged_at).map(|(key, _)| key.clone());
            silent.and_then(|key| causes.remove(&key));
        }
        causes.insert(key, Cause { logged_at: now, left_out: 0 });
        Some(0)
    }

    /// Removes and returns the counts that no line has reported yet.
    pub(crate) fn take_left_out(&self) -> Vec<(&'static str, String, u64)> {
        let causes = std::mem::take(&mut *lock(&self.0));
        let mut left_out: Vec<_> = causes
            .into_iter()
            .filter(|(_, cause)| cause.left_out > 0)
            .map(|((what, code), cause)| (what, code, cause.left_out))
            .collect();
        left_out.sort();
        left_out
    }
}

/// Rounds a wait to milliseconds for a log line: nobody reads nanoseconds.
pub(crate) fn rounded(wait: Duration) -> Duration {
    Duration::from_millis(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_a_line_a_second_that_counts_what_was_left_out() {
        let lines = LogLines::default();
        let at = |ms: u64| Duration::from_millis(ms);
        let logged: Vec<u64> = (0..2_500).filter_map(|ms| lines.observe("event dead", "http_422", at(ms))).collect();
        assert_eq!(logged, [0, 999, 999], "all are counted");
        assert_eq!(lines.observe("event dead", "http_410", at(2_500)), Some(0), "another code");
        assert_eq!(lines.observe("delivery failed", "http_422", at(2_500)), Some(0), "another thing");
        assert_eq!(lines.take_left_out(), [("event dead", "http_422".to_owned(), 499)]);
        assert_eq!(lines.observe("event dead", "http_422", at(2_600)), Some(0));
    }

    #[test]
    fn codes_without_end_are_not_kept_without_end() {
        let lines = LogLines::default();
        for code in 0..10 * CAUSES_MAX as u64 {
            assert_eq!(lines.observe("event dead", &code.to_string(), Duration::from_millis(code)), Some(0));
        }
        assert_eq!(lock(&lines.0).len(), CAUSES_MAX);
    }
}
