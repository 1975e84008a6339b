//! What is told once in a while, however often it happens: a source that repeats itself, a storm of conflicts.

use std::time::Duration;

/// What is looked back on, in slices.
const SLICE: Duration = Duration::from_secs(10);
const SLICES: usize = 6;
/// Fewer repetitions in a minute than this are a sender's ordinary retries.
const REPEATS_MIN: u64 = 100;
/// At most one warning in this time, for as long as the storm is on.
const QUIET: Duration = Duration::from_secs(600);

/// A slice of the last minute.
#[derive(Debug, Clone, Copy, Default)]
struct Slice {
    /// Which one since the start of the clock; a slot is used again for every sixth.
    number: u128,
    arrivals: u64,
    repeats: u64,
}

/// Genuine arrivals of one source in the last minute. What is not verified does not count: nobody else can hide a storm, or feign one.
#[derive(Debug, Default)]
pub(crate) struct Storm {
    slices: [Slice; SLICES],
    warned_at: Option<Duration>,
    stale_at: Option<Duration>,
    conflicts: Told,
    pushed_out: Told,
}

/// Something of which each may matter, and a thousand are noise: the first is told, the second, fourth, eighth …, and one in ten minutes; after as long a
/// silence it begins anew. Counters are exact all the same.
#[derive(Debug, Default)]
pub(crate) struct Told {
    count: u64,
    happened_at: Duration,
    told_at: Duration,
}

impl Told {
    /// It happened; how often lately, if that is to be told.
    pub(crate) fn observe(&mut self, now: Duration) -> Option<u64> {
        if now.saturating_sub(self.happened_at) >= QUIET {
            self.count = 0;
        }
        self.happened_at = now;
        self.count += 1;
        let tells = self.count.is_power_of_two() || now.saturating_sub(self.told_at) >= QUIET;
        if tells {
            self.told_at = now;
        }
        tells.then_some(self.count)
    }
}

/// What there was within a minute when a warning was due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Warning {
    pub(crate) arrivals: u64,
    pub(crate) repeats: u64,
}

impl Storm {
    /// Whether a genuine message with a wrong time is to be told of: the first of ten minutes. It may be our clock that is off.
    pub(crate) fn tells_of_stale(&mut self, now: Duration) -> bool {
        let tells = self.stale_at.is_none_or(|at| now.saturating_sub(at) >= QUIET);
        if tells {
            self.stale_at = Some(now);
        }
        tells
    }

    /// A known id came with another body; how many did lately, if that is to be told.
    pub(crate) fn tells_of_conflict(&mut self, now: Duration) -> Option<u64> {
        self.conflicts.observe(now)
    }

    /// A body made room for others; how many did lately, if that is to be told.
    pub(crate) fn tells_of_pushed_out(&mut self, now: Duration) -> Option<u64> {
        self.pushed_out.observe(now)
    }

    /// Counts a genuine arrival; gives a warning if there is a storm and nobody was warned lately.
    pub(crate) fn observe(&mut self, now: Duration, repeat: bool) -> Option<Warning> {
        let number = now.as_nanos() / SLICE.as_nanos();
        let slot = &mut self.slices[(number % SLICES as u128) as usize];
        if slot.number != number {
            *slot = Slice { number, ..Slice::default() };
        }
        slot.arrivals += 1;
        slot.repeats += u64::from(repeat);
        let lately = self.slices.iter().filter(|slice| number - slice.number.min(number) < SLICES as u128);
        let (arrivals, repeats) =
            lately.fold((0, 0), |(arrivals, repeats), slice| (arrivals + slice.arrivals, repeats + slice.repeats));
        let storm = repeats >= REPEATS_MIN && repeats * 2 > arrivals;
        if !storm || self.warned_at.is_some_and(|at| now.saturating_sub(at) < QUIET) {
            return None;
        }
        self.warned_at = Some(now);
        Some(Warning { arrivals, repeats })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(1_000);

    /// So many arrivals from `at` on, evenly over a time; how many warnings.
    fn arrive(storm: &mut Storm, at: Duration, over: Duration, count: u32, repeat: impl Fn(u32) -> bool) -> usize {
        (0..count).filter(|n| storm.observe(at + over * *n / count, repeat(*n)).is_some()).count()
    }

    #[test]
    fn a_storm_is_told_once_and_again_after_ten_minutes() {
        let mut storm = Storm::default();
        assert_eq!(arrive(&mut storm, START, Duration::from_secs(590), 5_900, |_| true), 1);
        assert_eq!(arrive(&mut storm, START + Duration::from_secs(605), Duration::from_secs(60), 600, |_| true), 1);
    }

    #[test]
    fn stale_messages_are_told_of_once_in_ten_minutes() {
        let mut storm = Storm::default();
        let told = (0..1_800).filter(|n| storm.tells_of_stale(START + Duration::from_secs(*n))).count();
        assert_eq!(told, 3);
    }

    #[test]
    fn of_many_conflicts_few_are_told_and_of_few_all() {
        let mut storm = Storm::default();
        let at = |n: u64| START + Duration::from_millis(100) * u32::try_from(n).expect("few");
        let told: Vec<u64> = (1..=18_000).filter_map(|n| storm.tells_of_conflict(at(n))).collect();
        // Half an hour: powers of two, and between the last ones what was due after ten minutes.
        assert_eq!(told, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 14_192, 16_384]);
        let later = at(18_000) + QUIET;
        assert!((0..24).all(|n| storm.tells_of_conflict(later + QUIET * n) == Some(1)), "one in ten minutes is one");
    }

    #[test]
    fn it_needs_a_hundred_repetitions_within_a_minute() {
        let minute = Duration::from_secs(59);
        assert_eq!(arrive(&mut Storm::default(), START, minute, 99, |_| true), 0);
        assert_eq!(arrive(&mut Storm::default(), START, minute, 100, |_| true), 1);
        assert_eq!(arrive(&mut Storm::default(), START, minute * 10, 900, |_| true), 0, "the same, but slowly");
    }

    #[test]
    fn it_needs_more_than_half_of_what_arrives() {
        let less = |n: u32| matches!(n % 5, 1 | 3);
        assert_eq!(arrive(&mut Storm::default(), START, Duration::from_secs(300), 100_000, less), 0);
        let most = |n: u32| !n.is_multiple_of(3);
        assert_eq!(arrive(&mut Storm::default(), START, Duration::from_secs(300), 100_000, most), 1);
    }

    #[test]
    fn what_was_before_the_last_minute_is_forgotten() {
        let mut storm = Storm::default();
        assert_eq!(arrive(&mut storm, START, SLICE, 1_000, |_| false), 0);
        assert_eq!(arrive(&mut storm, START + Duration::from_secs(30), SLICE, 500, |_| true), 0, "a third");
        assert_eq!(arrive(&mut storm, START + Duration::from_secs(75), SLICE, 1, |_| true), 1, "the 1,000 are too old");
    }
}
