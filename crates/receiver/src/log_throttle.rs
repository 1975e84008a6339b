//! Throttles log lines that matter one by one but are noise by the thousand.

use std::time::Duration;

/// After the first few, at most one line in this time. A silence of this length resets the
/// throttle.
const QUIET: Duration = Duration::from_secs(600);
/// Maximum characters of a sender's text in a log line.
const EXCERPT_CHARS_MAX: usize = 200;

/// Lets the first, second, fourth, eighth … occurrence through, and at least one every ten minutes.
/// Counters stay exact.
#[derive(Debug, Default)]
pub struct LogThrottle {
    count: u64,
    happened_at: Duration,
    logged_at: Duration,
}

impl LogThrottle {
    /// Notes an occurrence. If it should be logged, returns how many there were recently. `now` is
    /// monotonic.
    pub fn observe(&mut self, now: Duration) -> Option<u64> {
        if now.saturating_sub(self.happened_at) >= QUIET {
            self.count = 0;
        }
        self.happened_at = now;
        self.count += 1;
        let logs = self.count.is_power_of_two() || now.saturating_sub(self.logged_at) >= QUIET;
        if logs {
            self.logged_at = now;
        }
        logs.then_some(self.count)
    }
}

/// Prepares a sender's text for the log: escaped, so that it cannot control a terminal, and cut.
pub fn log_excerpt(text: &str) -> String {
    let mut excerpt: String = text.escape_debug().take(EXCERPT_CHARS_MAX).collect();
    if text.escape_debug().nth(EXCERPT_CHARS_MAX).is_some() {
        excerpt.push('…');
    }
    excerpt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_few_are_logged_and_of_few_all() {
        let mut throttle = LogThrottle::default();
        let at = |n: u64| Duration::from_secs(1_000) + Duration::from_millis(100) * u32::try_from(n).unwrap();
        let logged: Vec<u64> = (1..=18_000).filter_map(|n| throttle.observe(at(n))).collect();
        // Half an hour: powers of two, and after these also whatever came due after ten minutes.
        assert_eq!(logged, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 14_192, 16_384]);
        let later = at(18_000) + QUIET;
        assert!((0..24).all(|n| throttle.observe(later + QUIET * n) == Some(1)), "one in ten minutes is one");
    }
}
