//! A histogram of durations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Upper bounds of all buckets except the last, which is unbounded. They range from a local broker
/// to a destination that was down overnight.
const BOUNDS: [Duration; 18] = [
    millis(1),
    millis(2),
    millis(5),
    millis(10),
    millis(25),
    millis(50),
    millis(100),
    millis(250),
    millis(500),
    millis(1_000),
    millis(2_500),
    millis(5_000),
    millis(10_000),
    millis(30_000),
    millis(60_000),
    millis(600_000),
    millis(3_600_000),
    millis(43_200_000),
];

/// Durations counted by size. Lock-free: lanes observe concurrently, and it can be read at any
/// time.
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; BOUNDS.len() + 1],
    sum_nanos: AtomicU64,
}

/// A histogram at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct HistogramSnapshot {
    /// The upper bound of each bucket in seconds, with the number of durations in that bucket alone
    /// (not cumulative). The last bound is infinite.
    pub buckets: Vec<(f64, u64)>,
    /// The sum of all durations in seconds. Wraps around after 584 years.
    pub sum: f64,
    /// The number of durations.
    pub count: u64,
}

impl Histogram {
    /// Counts one duration.
    pub(crate) fn observe(&self, duration: Duration) {
        let bucket = BOUNDS.partition_point(|bound| *bound < duration);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.sum_nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns the counts so far. `count` is the sum of the buckets. `sum` may be ahead of it by
    /// durations being observed right now.
    pub fn snapshot(&self) -> HistogramSnapshot {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let bounds = BOUNDS.iter().map(Duration::as_secs_f64).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        HistogramSnapshot {
            buckets,
            sum: Duration::from_nanos(self.sum_nanos.load(Ordering::Relaxed)).as_secs_f64(),
            count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_first_bucket_that_holds_it() {
        let histogram = Histogram::default();
        for duration in [Duration::ZERO, millis(1), millis(2), Duration::from_micros(2_001), millis(90_000_000)] {
            histogram.observe(duration);
        }
        let seen = histogram.snapshot();
        let filled: Vec<(f64, u64)> = seen.buckets.iter().copied().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(0.001, 2), (0.002, 1), (0.005, 1), (f64::INFINITY, 1)]);
        assert_eq!(seen.count, 5);
        assert!((seen.sum - 90_000.005_001).abs() < 1e-6, "{}", seen.sum);
    }
}
