//! The breaker of one destination: while it is open, nothing is sent and no attempt is counted.
//!
//! After a wait, one event goes out as a probe. If it is accepted or refused for good, the breaker
//! closes. A retryable failure proves nothing, so another probe follows. All lanes of a relay share
//! one breaker because they share the destination.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use postbox_core::{Random, lock};

/// Longest wait that is honoured when a destination names one. Longer ones are cut to this.
const AFTER_MAX: Duration = Duration::from_secs(3_600);
/// How long another lane waits while one lane probes.
const PROBED_BY_ANOTHER: Duration = Duration::from_millis(50);

/// When a destination that is down is tried again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerPolicy {
    /// Upper bound of the first wait; doubles with every failed probe. Default 500 ms.
    pub base: Duration,
    /// Cap of the wait, unless the destination names a longer one. Default 30 s.
    pub max: Duration,
}

impl Default for BreakerPolicy {
    fn default() -> Self {
        Self { base: Duration::from_millis(500), max: Duration::from_secs(30) }
    }
}

impl BreakerPolicy {
    /// Returns the longest wait after this many doublings.
    pub(crate) fn wait_max(&self, doublings: u32) -> Duration {
        self.base.saturating_mul(1 << doublings.min(20)).min(self.max)
    }

    /// Cuts a wait named by the destination to the longest that is honoured.
    pub(crate) fn named_wait(after: Duration) -> Duration {
        after.min(AFTER_MAX)
    }
}

/// The state of a destination, as the breaker sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    /// The destination answers; events are sent freely.
    Closed,
    /// One event is out as a probe.
    HalfOpen,
    /// The destination does not answer; nothing is sent.
    Open,
}

impl BreakerState {
    /// Returns the stable word for logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half_open",
            Self::Open => "open",
        }
    }
}

/// What a lane may do now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Send freely.
    Closed,
    /// Send exactly one event, then [`Breaker::probe_ended`].
    Probe,
    /// Send nothing for this long.
    Wait(Duration),
}

#[derive(Debug)]
enum Inner {
    Closed,
    Open { until: Duration, failures: u32 },
    Probing { failures: u32 },
}

#[derive(Debug)]
pub(crate) struct Breaker {
    policy: BreakerPolicy,
    inner: Mutex<Inner>,
    /// A copy of the state in `inner`, so that the check before each send takes no lock.
    state: AtomicU8,
    /// Number of times it opened, also after a failed probe.
    openings: AtomicU64,
    /// For each lane, the number of its probes in a row that had nothing to send.
    empty: Mutex<BTreeMap<u16, u32>>,
}

impl Breaker {
    pub(crate) fn new(policy: BreakerPolicy) -> Self {
        Self {
            policy,
            inner: Mutex::new(Inner::Closed),
            state: AtomicU8::new(BreakerState::Closed as u8),
            openings: AtomicU64::new(0),
            empty: Mutex::default(),
        }
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.state.load(Ordering::Acquire) {
            0 => BreakerState::Closed,
            1 => BreakerState::HalfOpen,
            _ => BreakerState::Open,
        }
    }

    /// Returns the number of consecutive times the destination was found down.
    pub(crate) fn failures(&self) -> u32 {
        match *lock(&self.inner) {
            Inner::Closed => 0,
            Inner::Open { failures, .. } | Inner::Probing { failures } => failures,
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state() == BreakerState::Closed
    }

    /// Returns the number of times it opened. It distinguishes the calls sent since the last time
    /// from earlier ones.
    pub(crate) fn openings(&self) -> u64 {
        self.openings.load(Ordering::Acquire)
    }

    /// Returns the wait until the next probe; `None` while the destination answers.
    pub(crate) fn wait(&self, now: Duration) -> Option<Duration> {
        match *lock(&self.inner) {
            Inner::Closed => None,
            Inner::Open { until, .. } => Some(until.saturating_sub(now)),
            Inner::Probing { .. } => Some(PROBED_BY_ANOTHER),
        }
    }

    /// Returns what a lane may do at `now`. A caller that gets [`Admission::Probe`] must call
    /// [`Self::probe_ended`].
    pub(crate) fn admit(&self, now: Duration) -> Admission {
        let mut inner = lock(&self.inner);
        match *inner {
            Inner::Closed => Admission::Closed,
            Inner::Open { until, .. } if now < until => Admission::Wait(until - now),
            Inner::Open { failures, .. } => {
                self.set(&mut inner, Inner::Probing { failures });
                Admission::Probe
            }
            Inner::Probing { .. } => Admission::Wait(PROBED_BY_ANOTHER),
        }
    }

    /// Notes that the destination did not answer. Returns the wait if this opened the breaker.
    pub(crate) fn unavailable(&self, now: Duration, after: Option<Duration>, random: &dyn Random) -> Option<Duration> {
        let mut inner = lock(&self.inner);
        let failures = match *inner {
            Inner::Closed => 1,
            Inner::Probing { failures } => failures.saturating_add(1),
            // Calls in flight when the breaker opened add no information, except a longer named
            // wait.
            Inner::Open { until, failures } => {
                let until = until.max(now + BreakerPolicy::named_wait(after.unwrap_or_default()));
                *inner = Inner::Open { until, failures };
                return None;
            }
        };
        // Half of the wait is fixed: with full jitter a probe could follow the failure at once.
        let backoff = self.policy.wait_max(failures - 1).mul_f64(0.5 + random.unit() / 2.0);
        // The backoff still applies if it is longer: the wait that the destination named may not
        // have been enough.
        let wait = backoff.max(BreakerPolicy::named_wait(after.unwrap_or_default()));
        self.openings.fetch_add(1, Ordering::AcqRel);
        self.set(&mut inner, Inner::Open { until: now + wait, failures });
        Some(wait)
    }

    /// Notes that the destination accepted an event or refused it for good, in a call that was sent
    /// after so many openings. Closes a breaker that was probing, and returns whether it did.
    ///
    /// The answer to a call sent before the last opening proves nothing, although another lane may
    /// be probing when it comes.
    pub(crate) fn answered(&self, openings: u64) -> bool {
        if self.is_closed() {
            return false;
        }
        let mut inner = lock(&self.inner);
        if !matches!(*inner, Inner::Probing { .. }) || openings != self.openings() {
            return false;
        }
        self.set(&mut inner, Inner::Closed);
        true
    }

    /// Ends the probe. If there was no event to send, another lane may probe.
    pub(crate) fn probe_ended(&self, now: Duration) {
        let mut inner = lock(&self.inner);
        if let Inner::Probing { failures } = *inner {
            self.set(&mut inner, Inner::Open { until: now, failures });
        }
    }

    /// Notes that `lane` had nothing to probe with. If each of the `held` lanes has nothing twice
    /// in a row, closes the breaker and returns true: what found the destination down was
    /// discarded, has expired, or is another relay's, and nothing else may come for days.
    ///
    /// Counted for each lane, because an empty one asks again much sooner than one that waits for
    /// its turn with an event.
    pub(crate) fn found_nothing(&self, lane: u16, held: u64) -> bool {
        let mut inner = lock(&self.inner);
        let mut empty = lock(&self.empty);
        *empty.entry(lane).or_default() += 1;
        let lanes = empty.values().filter(|count| **count >= 2).count();
        let is_over = matches!(*inner, Inner::Probing { .. }) && lanes as u64 >= held.max(1);
        if is_over {
            empty.clear();
            self.set(&mut inner, Inner::Closed);
        }
        is_over
    }

    /// Forgets the probes of a lane that is no longer held.
    pub(crate) fn forget(&self, lane: u16) {
        lock(&self.empty).remove(&lane);
    }

    /// Notes that a lane had something to probe with.
    pub(crate) fn found_some(&self) {
        lock(&self.empty).clear();
    }

    /// Lets a lane probe from `now` on, whatever wait the destination named.
    pub(crate) fn probe_from(&self, now: Duration) {
        let mut inner = lock(&self.inner);
        if let Inner::Open { failures, .. } = *inner {
            *inner = Inner::Open { until: now, failures };
        }
    }

    fn set(&self, inner: &mut MutexGuard<'_, Inner>, next: Inner) {
        let state = match next {
            Inner::Closed => BreakerState::Closed,
            Inner::Probing { .. } => BreakerState::HalfOpen,
            Inner::Open { .. } => BreakerState::Open,
        };
        **inner = next;
        self.state.store(state as u8, Ordering::Release);
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

    const S: Duration = Duration::from_secs(1);

    fn breaker() -> Breaker {
        Breaker::new(BreakerPolicy { base: S, max: 8 * S })
    }

    #[test]
    fn each_outage_counts_its_empty_probes_anew() {
        let (breaker, mut now) = (breaker(), Duration::ZERO);
        for outage in 0..2 {
            now += breaker.unavailable(now, None, &Fixed(1.0)).expect("opens");
            for closes in [false, true] {
                assert_eq!(breaker.admit(now), Admission::Probe);
                assert_eq!(breaker.found_nothing(0, 1), closes, "outage {outage}");
                breaker.probe_ended(now);
            }
            assert!(breaker.is_closed());
        }
    }

    #[test]
    fn a_lane_that_waits_for_its_probe_keeps_the_breaker_open() {
        let (breaker, mut now) = (breaker(), Duration::ZERO);
        now += breaker.unavailable(now, None, &Fixed(1.0)).expect("opens");
        // Lane 3 has an event, and the others ask again and again before it gets its turn.
        for lane in [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3] {
            assert_eq!(breaker.admit(now), Admission::Probe);
            assert!(!breaker.found_nothing(lane, 4), "lane {lane}");
            breaker.probe_ended(now);
        }
        breaker.forget(2);
        assert_eq!(breaker.admit(now), Admission::Probe);
        assert!(!breaker.found_nothing(3, 4), "lane 2 is another's");
        assert!(breaker.found_nothing(3, 3), "each that is held, twice");
        assert!(breaker.is_closed());
    }

    #[test]
    fn failed_probes_double_the_wait_up_to_the_cap() {
        let breaker = breaker();
        let mut now = Duration::ZERO;
        let mut waits = Vec::new();
        for _ in 0..6 {
            let wait = breaker.unavailable(now, None, &Fixed(1.0)).expect("opens");
            assert_eq!(breaker.admit(now), Admission::Wait(wait));
            now += wait;
            assert_eq!(breaker.admit(now), Admission::Probe);
            waits.push(wait.as_secs());
        }
        assert_eq!(waits, [1, 2, 4, 8, 8, 8]);
    }

    #[test]
    fn one_probe_at_a_time_and_an_answer_closes() {
        let breaker = breaker();
        breaker.unavailable(Duration::ZERO, None, &Fixed(0.0));
        assert!(!breaker.answered(breaker.openings()), "nothing was sent");
        assert_eq!(breaker.admit(S), Admission::Probe);
        assert_eq!(breaker.admit(S), Admission::Wait(PROBED_BY_ANOTHER));
        assert!(breaker.answered(breaker.openings()));
        breaker.probe_ended(S);
        assert_eq!(breaker.admit(S), Admission::Closed);
    }

    #[test]
    fn an_answer_to_a_call_from_before_the_last_opening_does_not_end_a_probe() {
        let (breaker, mut now) = (breaker(), Duration::ZERO);
        for outage in 0..2 {
            for probe in 0..3 {
                let sent = breaker.openings();
                now += breaker.unavailable(now, None, &Fixed(1.0)).expect("opens");
                assert_eq!(breaker.admit(now), Admission::Probe);
                assert!(!breaker.answered(sent), "outage {outage}, probe {probe}");
                assert_eq!(breaker.state(), BreakerState::HalfOpen);
            }
            assert!(breaker.answered(breaker.openings()), "the probe itself");
        }
    }

    #[test]
    fn a_probe_without_an_event_is_given_to_the_next() {
        let breaker = breaker();
        breaker.unavailable(Duration::ZERO, None, &Fixed(0.0));
        assert_eq!(breaker.admit(S), Admission::Probe);
        breaker.probe_ended(S);
        assert_eq!(breaker.admit(S), Admission::Probe);
    }

    #[test]
    fn a_named_wait_is_honoured_and_late_failures_do_not_escalate() {
        let breaker = breaker();
        assert_eq!(breaker.unavailable(Duration::ZERO, Some(90 * S), &Fixed(0.0)), Some(90 * S));
        assert_eq!(breaker.unavailable(S, None, &Fixed(0.0)), None);
        assert_eq!(breaker.admit(S), Admission::Wait(89 * S));
        breaker.probe_from(2 * S);
        assert_eq!(breaker.admit(2 * S), Admission::Probe, "a person asked for it");
    }

    #[test]
    fn a_named_wait_is_the_least() {
        let breaker = breaker();
        let mut now = Duration::ZERO;
        let mut waits = Vec::new();
        for _ in 0..5 {
            let wait = breaker.unavailable(now, Some(3 * S), &Fixed(1.0)).expect("opens");
            now += wait;
            assert_eq!(breaker.admit(now), Admission::Probe);
            waits.push(wait.as_secs());
        }
        assert_eq!(waits, [3, 3, 4, 8, 8]);
    }
}
