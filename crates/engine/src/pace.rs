//! How fast a destination takes events: how long its calls take, and how many run at once.

use std::sync::Mutex;
use std::time::Duration;

use postbox_core::{Rate, lock};

/// The measurement covers the last one to two of these spans. Long enough for calls of several
/// seconds, short enough to be current.
const SPAN: Duration = Duration::from_secs(30);

/// The calls of a relay to its sink in the last minute or less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Calls that ended.
    pub calls: u64,
    /// Events in these calls, whatever their outcome.
    pub events: u64,
    /// Total duration of these calls.
    pub busy: Duration,
    /// How long at least one call was under way.
    pub active: Duration,
    /// Calls under way.
    pub in_flight: u32,
    /// Total time that the calls under way have lasted so far.
    pub in_flight_for: Duration,
    /// Maximum calls at once.
    pub concurrency: usize,
    /// Maximum rate of events.
    pub rate: Option<Rate>,
    /// Whether events wait for the rate, or did a moment ago.
    pub held_by_rate: bool,
    /// Whether other relays of the process share the rate.
    pub rate_shared: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    calls: u64,
    events: u64,
    busy: Duration,
    active: Duration,
}

/// Counts calls. Each call takes a lock for nanoseconds at its start and its end.
#[derive(Debug, Default)]
pub(crate) struct PaceMeter(Mutex<Spans>);

#[derive(Debug, Default)]
struct Spans {
    since: Duration,
    now: Sums,
    before: Sums,
    in_flight: u32,
    /// Sum of the start times of the calls in flight.
    begun: Duration,
    /// The time up to which `now.active` has been updated.
    active_until: Duration,
}

impl PaceMeter {
    pub(crate) fn begin(&self, now: Duration) {
        let mut spans = lock(&self.0);
        spans.turn(now);
        spans.in_flight += 1;
        spans.begun += now;
    }

    pub(crate) fn end(&self, begun: Duration, now: Duration, events: usize) {
        let mut spans = lock(&self.0);
        spans.turn(now);
        spans.in_flight -= 1;
        spans.begun -= begun;
        spans.now.calls += 1;
        spans.now.events += events as u64;
        spans.now.busy += now.saturating_sub(begun);
    }

    pub(crate) fn read(
        &self,
        now: Duration,
        concurrency: usize,
        rate: Option<Rate>,
        (held_by_rate, rate_shared): (bool, bool),
    ) -> Pace {
        let mut spans = lock(&self.0);
        spans.turn(now);
        let Spans { now: last, before, in_flight, begun, .. } = &*spans;
        Pace {
            calls: before.calls + last.calls,
            events: before.events + last.events,
            busy: before.busy + last.busy,
            active: before.active + last.active,
            in_flight: *in_flight,
            in_flight_for: (now * *in_flight).saturating_sub(*begun),
            concurrency,
            rate,
            held_by_rate,
            rate_shared,
        }
    }
}

impl Spans {
    /// Brings the sums up to `now`, and starts a new span when the last one is full.
    fn turn(&mut self, now: Duration) {
        if self.in_flight > 0 {
            self.now.active += now.saturating_sub(self.active_until);
        }
        self.active_until = now;
        let age = now.saturating_sub(self.since);
        if age >= SPAN {
            let last = std::mem::take(&mut self.now);
            self.before = if age < SPAN * 2 { last } else { Sums::default() };
            self.since = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn read(meter: &PaceMeter, now: Duration) -> Pace {
        meter.read(now, 16, None, (false, false))
    }

    /// Two calls at a time, of three seconds each.
    #[test]
    fn calls_and_how_many_went_on_at_once_are_known() {
        let meter = PaceMeter::default();
        for start in [100, 103, 106] {
            let start = SECOND * start;
            (0..2).for_each(|_| meter.begin(start));
            (0..2).for_each(|_| meter.end(start, start + SECOND * 3, 5));
        }
        let pace = read(&meter, SECOND * 110);
        assert_eq!((pace.calls, pace.events, pace.busy, pace.active), (6, 30, SECOND * 18, SECOND * 9));
        assert_eq!((pace.in_flight, pace.in_flight_for), (0, Duration::ZERO));
    }

    #[test]
    fn calls_that_do_not_end_are_seen() {
        let meter = PaceMeter::default();
        meter.begin(SECOND * 1_000);
        meter.begin(SECOND * 1_002);
        let pace = read(&meter, SECOND * 1_012);
        assert_eq!((pace.in_flight, pace.in_flight_for, pace.active), (2, SECOND * 22, SECOND * 12));
        assert_eq!(pace.calls, 0);
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let meter = PaceMeter::default();
        meter.begin(SECOND * 100);
        meter.end(SECOND * 100, SECOND * 101, 1);
        assert_eq!(read(&meter, SECOND * 131).calls, 1);
        assert_eq!(read(&meter, SECOND * 162).calls, 0);
    }
}
