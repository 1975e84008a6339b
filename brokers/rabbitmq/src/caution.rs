//! What is done about a message that the client cannot read, e.g. whose id is no UTF-8.
//!
//! The client ends the connection when one comes, with all that was out of the queue together with
//! it, and so each time it comes again: until a person takes it out, or a quorum queue has counted
//! as many deliveries as its limit allows. So messages are taken one at a time for a while: then no
//! other comes again with it, and none is counted towards that limit.

use std::time::Duration;

/// First and longest wait before the queue is consumed again. The cap bounds what a queue that
/// gives out nothing else costs.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// How carefully a queue is consumed.
#[derive(Debug, Default)]
pub(crate) struct Caution {
    /// How often such a message came.
    times: u32,
    not_before: Duration,
    /// How many others have come since.
    passed: usize,
}

impl Caution {
    /// Such a message came.
    pub(crate) fn raise(&mut self, now: Duration) {
        let pause = PAUSE_MIN.saturating_mul(2_u32.saturating_pow(self.times)).min(PAUSE_MAX);
        *self = Self { times: self.times.saturating_add(1), not_before: now + pause, passed: 0 };
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.times > 0
    }

    /// How long nothing is consumed from now on.
    pub(crate) fn pause(&self, now: Duration) -> Duration {
        self.not_before.saturating_sub(now)
    }

    pub(crate) fn pass(&mut self, count: usize) {
        self.passed += count;
    }

    /// As many have passed as may have been with it in one portion.
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
