//! How long to wait after an empty read: from half a millisecond up to the idle interval.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Longest wait while hints are ignored. If a store hints without reason, an idle relay reads at
/// most about 400 times a second, and a true hint after false ones is still followed soon.
const HINTLESS_MAX: Duration = Duration::from_millis(10);
/// Number of consecutive hints that may lead to an empty read. One or two are common: a
/// notification may come after the read that saw its event.
const HINTS_FALSE_MAX: u32 = 3;

/// What the lanes of one relay share, because an event may go to any of them.
#[derive(Debug, Default)]
pub(crate) struct Siblings {
    /// Number of reads that returned something.
    reads: AtomicU64,
    lanes: AtomicU32,
}

impl Siblings {
    /// Sets the number of lanes held.
    pub(crate) fn set_lanes(&self, held: usize) {
        self.lanes.store(u32::try_from(held).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Notes that a read returned something.
    pub(crate) fn note_read(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }
}

/// Adaptive polling of one lane.
///
/// Growing by half instead of doubling keeps the wait after a gap of `g` below `g / 2`: at 500
/// events/s the tail stays under 10 ms, and an idle lane still reaches its idle interval within a
/// third of a second. While another lane of the relay reads something, the wait stays short too, so
/// an event waits no longer than it would if a single lane had them all. With more lanes polling
/// this way, each waits longer.
#[derive(Debug)]
pub(crate) struct Poll {
    min: Duration,
    max: Duration,
    next: Duration,
    /// Value of `Siblings::reads` at the last wait.
    reads: u64,
    /// Number of consecutive hints that led to an empty read.
    false_hints: u32,
}

impl Poll {
    pub(crate) fn new(min: Duration, max: Duration) -> Self {
        Self { min, max: max.max(min), next: min, reads: 0, false_hints: 0 }
    }

    /// Makes the next wait short again, because something was read.
    pub(crate) fn reset(&mut self) {
        self.next = self.min;
        self.false_hints = 0;
    }

    /// Returns the wait after another empty read.
    pub(crate) fn pause(&mut self, siblings: &Siblings) -> Duration {
        let reads = siblings.reads.load(Ordering::Relaxed);
        if reads != self.reads {
            self.reads = reads;
            let lanes = siblings.lanes.load(Ordering::Relaxed);
            self.next = self.next.min(self.min * lanes.div_ceil(2).max(1));
        }
        let pause = self.next;
        self.next = self.next.mul_f64(1.5).clamp(self.min, self.max);
        if self.ignores_hints() { pause.min(HINTLESS_MAX) } else { pause }
    }

    /// Returns whether the next wait ignores hints and is short instead. That is so after several
    /// hints led to empty reads: a store whose hint resolves without reason must not make an idle
    /// relay spin.
    pub(crate) fn ignores_hints(&self) -> bool {
        self.false_hints >= HINTS_FALSE_MAX
    }

    /// Notes whether a hint ended the last wait.
    pub(crate) fn woken_by_hint(&mut self, hinted: bool) {
        self.false_hints = if hinted { self.false_hints + 1 } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_lane_slows_down_to_its_idle_interval_and_wakes_up_at_once() {
        let mut poll = Poll::new(Duration::from_millis(1), Duration::from_millis(100));
        let alone = Siblings::default();
        let waits: Vec<Duration> = (0..20).map(|_| poll.pause(&alone)).collect();
        assert_eq!(waits[0], Duration::from_millis(1));
        assert!(waits.windows(2).all(|pair| pair[0] <= pair[1]));
        assert_eq!(waits[19], Duration::from_millis(100));
        let until_idle: Duration = waits.iter().take_while(|wait| wait.as_millis() < 100).sum();
        assert!(until_idle < Duration::from_millis(350), "{until_idle:?}");
        poll.reset();
        assert_eq!(poll.pause(&alone), Duration::from_millis(1));
    }

    #[test]
    fn a_lane_asks_more_often_while_another_reads_something() {
        let siblings = Siblings::default();
        siblings.set_lanes(8);
        let mut poll = Poll::new(Duration::from_millis(1), Duration::from_millis(100));
        let mut wait = || poll.pause(&siblings);
        while wait() < Duration::from_millis(100) {}
        siblings.note_read();
        assert_eq!([wait(), wait()], [4, 6].map(Duration::from_millis), "eight lanes ask no more than two would");
        siblings.set_lanes(2);
        siblings.note_read();
        assert_eq!(wait(), Duration::from_millis(1));
    }

    #[test]
    fn false_hints_are_ignored_for_a_while() {
        let mut poll = Poll::new(Duration::from_millis(1), Duration::from_millis(100));
        for _ in 0..HINTS_FALSE_MAX {
            assert!(!poll.ignores_hints());
            poll.woken_by_hint(true);
        }
        assert!(poll.ignores_hints());
        let alone = Siblings::default();
        assert!((0..20).map(|_| poll.pause(&alone)).all(|pause| pause <= HINTLESS_MAX));
        poll.woken_by_hint(false);
        assert!(!poll.ignores_hints(), "after one wait without it, a hint counts again");
    }
}
