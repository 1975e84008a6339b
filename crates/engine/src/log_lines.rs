//! The log lines of a relay: of each cause one a second at most. An outage, or a bad deploy of a
//! receiver, fails thousands of events a second for one reason; the metrics count each of them.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use crate::lock::lock;

/// What a person can read, and no disk fills up with.
const LINE_EVERY: Duration = Duration::from_secs(1);
/// Causes that are kept apart: more than any destination has codes. A handler may make up codes
/// without end; then the cause that was silent for longest is forgotten.
const CAUSES_MAX: usize = 64;

/// Causes of lines: what happened, and its code.
#[derive(Debug, Default)]
pub(crate) struct LogLines(Mutex<HashMap<(&'static str, String), Cause>>);

#[derive(Debug)]
struct Cause {
    logged_at: Duration,
    left_out: u64,
}

impl LogLines {
    /// It happened; whether to log it, and how often it was left out since the line before. `now`
    /// is monotonic.
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

    /// What was left out and no line has reported yet.
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

/// A wait as a log line has it: nobody reads nanoseconds.
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
