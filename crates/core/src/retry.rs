//! When to try again: exponential backoff with equal jitter, or a list of delays.

use std::time::Duration;

use crate::clock::Random;

/// The retry policy of a subscription.
///
/// Equal jitter is half of the capped exponential delay plus a uniform random part of the other
/// half. It spreads retries and still bounds how long they last:
/// <https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/>. By default they
/// last 24.8 to 49.6 hours: a bad deploy of the receiver on a Friday evening costs no event before
/// Saturday evening ([Svix](https://docs.svix.com/retries) retries for 27.6 hours).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Attempts before an event is dead; at least 1. Default 30.
    pub attempts_max: u32,
    /// Upper bound of the first delay. Default 1 s.
    pub base: Duration,
    /// Cap of every delay, `Retry-After` included. Default 3 h.
    pub delay_max: Duration,
    /// Fixed delays instead of the exponential ones: retry number n waits `delays[n-1]`, and the
    /// last delay repeats. No jitter.
    pub delays: Vec<Duration>,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts_max: 30,
            base: Duration::from_secs(1),
            delay_max: Duration::from_secs(3 * 3600),
            delays: Vec::new(),
        }
    }
}

impl RetryPolicy {
    /// Returns the wait after attempt number `attempt` (from 1) failed; `None` if that was the last
    /// one.
    ///
    /// A wait named by the destination, up to `delay_max`, makes it longer and never shorter:
    /// otherwise a destination could use up all attempts within seconds.
    pub fn next_delay(&self, attempt: u32, after: Option<Duration>, random: &dyn Random) -> Option<Duration> {
        if attempt >= self.attempts_max.max(1) {
            return None;
        }
        let own = match self.delays.last() {
            Some(last) => *self.delays.get(attempt.saturating_sub(1) as usize).unwrap_or(last),
            None => {
                let ceiling = self.base.saturating_mul(1_u32 << attempt.saturating_sub(1).min(30)).min(self.delay_max);
                ceiling.mul_f64(0.5 + random.unit() / 2.0)
            }
        };
        Some(own.max(after.unwrap_or_default().min(self.delay_max)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(f64);

    impl Random for Fixed {
        fn unit(&self) -> f64 {
            self.0
        }
    }

    const MAX: Fixed = Fixed(1.0);

    #[test]
    fn delays_double_up_to_the_cap() {
        let policy = RetryPolicy { delay_max: Duration::from_secs(5), ..RetryPolicy::default() };
        let delays: Vec<u64> =
            (1..6).map(|attempt| policy.next_delay(attempt, None, &MAX).expect("a retry").as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 5, 5]);
    }

    #[test]
    fn half_of_a_delay_is_jitter() {
        let policy = RetryPolicy::default();
        assert_eq!(policy.next_delay(3, None, &Fixed(0.0)), Some(Duration::from_secs(2)));
        assert_eq!(policy.next_delay(3, None, &Fixed(0.5)), Some(Duration::from_secs(3)));
    }

    #[test]
    fn the_default_lasts_a_day_whatever_the_jitter() {
        let policy = RetryPolicy::default();
        let span = |unit| -> Duration { (1..).map_while(|n| policy.next_delay(n, None, &Fixed(unit))).sum() };
        let hours = |unit| span(unit).as_secs_f64() / 3600.0;
        assert!((24.0..25.0).contains(&hours(0.0)), "{}", hours(0.0));
        assert!((49.0..50.0).contains(&hours(1.0)), "{}", hours(1.0));
    }

    #[test]
    fn the_last_attempt_has_no_next() {
        let policy = RetryPolicy { attempts_max: 3, ..RetryPolicy::default() };
        assert!(policy.next_delay(2, None, &MAX).is_some());
        assert!(policy.next_delay(3, None, &MAX).is_none());
        assert!(policy.next_delay(4, Some(Duration::ZERO), &MAX).is_none());
    }

    #[test]
    fn a_named_wait_makes_the_delay_longer_up_to_the_cap() {
        let policy = RetryPolicy::default();
        let wait = |seconds| policy.next_delay(1, Some(Duration::from_secs(seconds)), &MAX);
        assert_eq!(wait(7), Some(Duration::from_secs(7)));
        assert_eq!(wait(100_000), Some(policy.delay_max));
        let span = |after| -> Duration { (1..).map_while(|n| policy.next_delay(n, after, &Fixed(0.0))).sum() };
        assert_eq!(span(Some(Duration::ZERO)), span(None), "never shorter: the attempts would be used up at once");
    }

    #[test]
    fn a_list_of_delays_repeats_its_last() {
        let policy =
            RetryPolicy { delays: vec![Duration::from_secs(1), Duration::from_secs(9)], ..RetryPolicy::default() };
        let delay = |attempt| policy.next_delay(attempt, None, &Fixed(0.1)).expect("a retry").as_secs();
        assert_eq!([delay(1), delay(2), delay(3)], [1, 9, 9]);
    }

    #[test]
    fn huge_attempt_numbers_do_not_overflow() {
        let policy = RetryPolicy { attempts_max: u32::MAX, ..RetryPolicy::default() };
        assert_eq!(policy.next_delay(u32::MAX - 1, None, &MAX), Some(policy.delay_max));
    }
}
