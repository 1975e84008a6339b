//! Handles messages that the client cannot read, e.g. because their id is not UTF-8.
//!
//! When one arrives, the client ends the connection, with everything that was out of the queue
//! together with it, and again at each redelivery. That goes on until an operator removes the
//! message, or a quorum queue reaches its delivery limit for it. So for a while messages are taken
//! one at a time. Then no other message is redelivered with it, and none is counted towards that
//! limit.

use std::time::Duration;

/// The first and the longest wait before the queue is consumed again. The longest wait bounds the
/// cost of a queue that delivers nothing else.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// How carefully a queue is consumed.
#[derive(Debug, Default)]
pub(crate) struct Caution {
    /// How often such a message arrived.
    times: u32,
    not_before: Duration,
    /// How many other messages have arrived since.
    passed: usize,
}

impl Caution {
    /// Notes that such a message arrived.
    pub(crate) fn raise(&mut self, now: Duration) {
        let pause = PAUSE_MIN.saturating_mul(2_u32.saturating_pow(self.times)).min(PAUSE_MAX);
        *self = Self { times: self.times.saturating_add(1), not_before: now + pause, passed: 0 };
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.times > 0
    }

    /// How long to wait from now on before consuming.
    pub(crate) fn pause(&self, now: Duration) -> Duration {
        self.not_before.saturating_sub(now)
    }

    pub(crate) fn pass(&mut self, count: usize) {
        self.passed += count;
    }

    /// Whether as many messages have passed as may have been delivered together with it.
    pub(crate) fn is_over(&self, in_flight_max: usize) -> bool {
        self.is_raised() && self.passed >= in_flight_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_longer_each_time_and_ends_once_others_have_passed() {
        let (mut caution, now) = (Caution::default(), Duration::from_secs(9));
        assert!(!caution.is_raised() && !caution.is_over(0) && caution.pause(now).is_zero());
        let mut pauses = Vec::new();
        for _ in 0..40 {
            caution.raise(now);
            pauses.push(caution.pause(now).as_millis());
        }
        assert_eq!(pauses[..8], [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]);
        assert_eq!(pauses[39], 5_000);
        caution.pass(2);
        assert!(caution.is_raised() && !caution.is_over(3));
        caution.pass(1);
        assert!(caution.is_over(3));
        caution.raise(now);
        assert!(!caution.is_over(3), "it came again");
    }
}
