//! The share of arrivals that are repetitions.

use std::time::Duration;

/// The rate covers the last minute, in slices.
const SLICE: Duration = Duration::from_secs(10);
const SLICES: usize = 6;
/// Fewer repetitions per minute than this are a sender's ordinary retries.
const REPEATS_MIN: u64 = 100;
/// Least time between two warnings while the storm lasts.
const QUIET: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Copy, Default)]
struct Slice {
    /// Number of the slice since the start of the clock. Each slot is reused every six slices.
    number: u128,
    arrivals: u64,
    repeats: u64,
}

/// Arrivals of one source in the last minute. Only verified messages count, so that outsiders can
/// neither hide a replay storm nor fake one.
#[derive(Debug, Default)]
pub(crate) struct DuplicateRate {
    slices: [Slice; SLICES],
    warned_at: Option<Duration>,
}

/// A sender that mostly repeats itself, with its counts of the last minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Storm {
    /// All messages.
    pub arrivals: u64,
    /// Those that had arrived before.
    pub repeats: u64,
}

impl DuplicateRate {
    /// Counts an arrival. Returns a warning if there is a storm and none was given recently.
    pub(crate) fn observe(&mut self, now: Duration, repeat: bool) -> Option<Storm> {
        let number = now.as_nanos() / SLICE.as_nanos();
        let slot = &mut self.slices[(number % SLICES as u128) as usize];
        if slot.number != number {
            *slot = Slice { number, ..Slice::default() };
        }
        slot.arrivals += 1;
        slot.repeats += u64::from(repeat);
        let storm = self.storm(now)?;
        if self.warned_at.is_some_and(|at| now.saturating_sub(at) < QUIET) {
            return None;
        }
        self.warned_at = Some(now);
        Some(storm)
    }

    /// Returns the storm under way, if there is one.
    pub(crate) fn storm(&self, now: Duration) -> Option<Storm> {
        let number = now.as_nanos() / SLICE.as_nanos();
        let lately = self.slices.iter().filter(|slice| number - slice.number.min(number) < SLICES as u128);
        let (arrivals, repeats) =
            lately.fold((0, 0), |(arrivals, repeats), slice| (arrivals + slice.arrivals, repeats + slice.repeats));
        (repeats >= REPEATS_MIN && repeats * 2 > arrivals).then_some(Storm { arrivals, repeats })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(1_000);

    /// Feeds this many arrivals from `at` on, spread evenly. Returns the number of warnings.
    fn arrive(
        rate: &mut DuplicateRate,
        at: Duration,
        over: Duration,
        count: u32,
        repeat: impl Fn(u32) -> bool,
    ) -> usize {
        (0..count).filter(|n| rate.observe(at + over * *n / count, repeat(*n)).is_some()).count()
    }

    #[test]
    fn a_storm_is_logged_once_and_again_after_ten_minutes() {
        let mut rate = DuplicateRate::default();
        assert_eq!(arrive(&mut rate, START, Duration::from_secs(590), 5_900, |_| true), 1);
        assert_eq!(arrive(&mut rate, START + Duration::from_secs(605), Duration::from_secs(60), 600, |_| true), 1);
    }

    #[test]
    fn it_needs_a_hundred_repetitions_within_a_minute() {
        let minute = Duration::from_secs(59);
        assert_eq!(arrive(&mut DuplicateRate::default(), START, minute, 99, |_| true), 0);
        assert_eq!(arrive(&mut DuplicateRate::default(), START, minute, 100, |_| true), 1);
        assert_eq!(arrive(&mut DuplicateRate::default(), START, minute * 10, 900, |_| true), 0, "the same, but slowly");
    }

    #[test]
    fn it_needs_more_than_half_of_what_arrives() {
        let less = |n: u32| matches!(n % 5, 1 | 3);
        assert_eq!(arrive(&mut DuplicateRate::default(), START, Duration::from_secs(300), 100_000, less), 0);
        let most = |n: u32| !n.is_multiple_of(3);
        assert_eq!(arrive(&mut DuplicateRate::default(), START, Duration::from_secs(300), 100_000, most), 1);
    }

    #[test]
    fn what_was_before_the_last_minute_is_forgotten() {
        let mut rate = DuplicateRate::default();
        assert_eq!(arrive(&mut rate, START, SLICE, 1_000, |_| false), 0);
        assert_eq!(arrive(&mut rate, START + Duration::from_secs(30), SLICE, 500, |_| true), 0, "a third");
        assert_eq!(arrive(&mut rate, START + Duration::from_secs(75), SLICE, 1, |_| true), 1, "the 1,000 are too old");
    }
}
