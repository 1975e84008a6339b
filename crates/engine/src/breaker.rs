//! The breaker of one destination: a dead destination is not a dead event.
//!
//! `Unavailable` opens it; while it is open nothing is sent and no attempt is counted; then one event goes out as a probe.
//! One that is accepted or refused for good closes it; one that is to be tried again proves nothing, and the next probe follows.
//! All lanes of a relay share one breaker, because they share the destination.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postbox_core::{Random, Seq};

/// A destination may name the least wait; beyond an hour we rather ask again.
const AFTER_MAX: Duration = Duration::from_secs(3_600);
/// How long another lane waits while one lane probes: the probe ends it, this only bounds a probe that found no event.
const PROBED_BY_ANOTHER: Duration = Duration::from_millis(50);
/// So often may one event find the destination down, with others delivered in between, before it is blamed itself.
/// An outage alone never reaches it, because nothing is delivered in between.
const BLAME_AFTER: u32 = 5;
/// Events under suspicion kept in memory; beyond it the suspicion starts anew.
const SUSPECTS_MAX: usize = 1_000;

/// When to ask a dead destination again.
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

/// How a destination stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    /// It answers; everything flows.
    Closed,
    /// One event is out to see whether it answers again.
    HalfOpen,
    /// It does not answer; nothing is sent.
    Open,
}

impl BreakerState {
    /// The stable word for logs and metrics.
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
    /// Send nothing for so long.
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
    /// Mirror of `inner` for the check before each send.
    state: AtomicU8,
    suspects: Mutex<Suspects>,
    /// An event was accepted since the destination asked one to come later.
    accepted: AtomicBool,
}

/// Events that found the destination down, to tell one that keeps bringing it down from an outage.
#[derive(Debug, Default)]
struct Suspects {
    /// Rises each time the breaker closes.
    generation: u64,
    seen: HashMap<Seq, Suspect>,
}

#[derive(Debug)]
struct Suspect {
    /// The generation in which it was last seen here.
    generation: u64,
    /// In how many it was.
    count: u32,
    /// How often it was made to wait alone.
    early: u32,
}

/// Who is to blame that an event found the destination down.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Culprit {
    /// The destination.
    Destination,
    /// The event: an attempt like any other.
    Event,
    /// The event, but the destination asks it to come later: no attempt, nor shall the others wait for it.
    Early(Duration),
}

impl Breaker {
    pub(crate) fn new(policy: BreakerPolicy) -> Self {
        Self {
            policy,
            inner: Mutex::new(Inner::Closed),
            state: AtomicU8::new(BreakerState::Closed as u8),
            suspects: Mutex::default(),
            accepted: AtomicBool::new(false),
        }
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.state.load(Ordering::Acquire) {
            0 => BreakerState::Closed,
            1 => BreakerState::HalfOpen,
            _ => BreakerState::Open,
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state() == BreakerState::Closed
    }

    /// What a lane may do at `now`. Taking a probe obliges to call [`Self::probe_ended`].
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

    /// The destination did not answer. Returns the wait if this opened the breaker.
    pub(crate) fn unavailable(&self, now: Duration, after: Option<Duration>, random: &dyn Random) -> Option<Duration> {
        let mut inner = lock(&self.inner);
        let failures = match *inner {
            Inner::Closed => 1,
            Inner::Probing { failures } => failures.saturating_add(1),
            // Calls that were in flight when it opened say nothing new, except for a longer wait.
            Inner::Open { until, failures } => {
                let until = until.max(now + after.unwrap_or_default().min(AFTER_MAX));
                *inner = Inner::Open { until, failures };
                return None;
            }
        };
        // Half of it is certain: with full jitter a probe could follow the failure at once.
        let backoff = self.ceiling(failures - 1).mul_f64(0.5 + random.unit() / 2.0);
        // Whoever obeyed the named wait and is sent away again comes back later than told.
        let wait = backoff.max(after.unwrap_or_default().min(AFTER_MAX));
        self.set(&mut inner, Inner::Open { until: now + wait, failures });
        Some(wait)
    }

    /// The destination accepted an event or refused it for good. Closes a breaker that was probing; returns whether it did.
    ///
    /// An answer while it is open belongs to a call sent before it opened, and proves nothing.
    pub(crate) fn answered(&self) -> bool {
        if self.is_closed() {
            return false;
        }
        let mut inner = lock(&self.inner);
        if !matches!(*inner, Inner::Probing { .. }) {
            return false;
        }
        self.set(&mut inner, Inner::Closed);
        lock(&self.suspects).generation += 1;
        true
    }

    /// The probe is over. If no event was there to send, another lane may probe.
    pub(crate) fn probe_ended(&self, now: Duration) {
        let mut inner = lock(&self.inner);
        if let Inner::Probing { failures } = *inner {
            self.set(&mut inner, Inner::Open { until: now, failures });
        }
    }

    /// The destination accepted an event: whatever it sends away next, it is not down.
    pub(crate) fn accepted(&self) {
        self.accepted.store(true, Ordering::Relaxed);
    }

    /// Notes that this event found the destination down. Once it has done so [`BLAME_AFTER`] times while others were delivered in
    /// between, the event, not the destination, is to blame.
    ///
    /// `after` says that the destination itself asked to come later. Then the event is never charged; it alone waits, longer each time, if it
    /// is a suspect by now or another was accepted since somebody was sent away last. So two in a row make all wait, one of many itself.
    pub(crate) fn blame(&self, seq: Seq, after: Option<Duration>) -> Culprit {
        let alone = after.is_some() && self.accepted.swap(false, Ordering::Relaxed);
        let mut suspects = lock(&self.suspects);
        let generation = suspects.generation;
        if suspects.seen.len() >= SUSPECTS_MAX {
            suspects.seen.clear();
        }
        let suspect = suspects.seen.entry(seq).or_insert(Suspect { generation, count: 1, early: 0 });
        if suspect.generation != generation {
            (suspect.generation, suspect.count) = (generation, suspect.count.saturating_add(1));
        }
        match after {
            Some(after) if alone || suspect.count >= BLAME_AFTER => {
                suspect.early = suspect.early.saturating_add(1);
                Culprit::Early(self.ceiling(suspect.early - 1).max(after.min(AFTER_MAX)))
            }
            None if suspect.count >= BLAME_AFTER => {
                suspects.seen.remove(&seq);
                Culprit::Event
            }
            _ => Culprit::Destination,
        }
    }

    /// The longest wait after so many doublings.
    fn ceiling(&self, doublings: u32) -> Duration {
        self.policy.base.saturating_mul(1 << doublings.min(20)).min(self.policy.max)
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here can panic half-way, so a poisoned lock holds a whole state.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        assert!(!breaker.answered(), "an answer from before it opened proves nothing");
        assert_eq!(breaker.admit(S), Admission::Probe);
        assert_eq!(breaker.admit(S), Admission::Wait(PROBED_BY_ANOTHER));
        assert!(breaker.answered());
        breaker.probe_ended(S);
        assert_eq!(breaker.admit(S), Admission::Closed);
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

    /// One event that finds the destination down, round after round, while another gets through in between.
    fn rounds(breaker: &Breaker, count: u32, after: Option<Duration>) -> Vec<Culprit> {
        let round = |round| {
            breaker.unavailable(round * 100 * S, None, &Fixed(0.0));
            breaker.admit((round * 100 + 50) * S);
            assert!(breaker.answered());
            breaker.blame(Seq(1), after)
        };
        (1..=count).map(round).collect()
    }

    #[test]
    fn an_outage_blames_no_event_but_a_repeated_culprit_is_found() {
        let breaker = breaker();
        for _ in 0..100 {
            assert_eq!(breaker.blame(Seq(1), None), Culprit::Destination, "nothing was delivered in between");
        }
        let blamed = rounds(&breaker, BLAME_AFTER, None).into_iter().filter(|it| *it == Culprit::Event).count();
        assert_eq!(blamed, 1);
    }

    #[test]
    fn whom_the_destination_asks_to_come_later_waits_alone_and_is_never_charged() {
        let breaker = breaker();
        let blamed: Vec<Culprit> =
            rounds(&breaker, 12, Some(3 * S)).into_iter().skip(BLAME_AFTER as usize - 1).collect();
        let early = [3, 3, 4, 8, 8, 8, 8, 8].map(|seconds| Culprit::Early(seconds * S));
        assert_eq!(blamed, early);
        let Culprit::Early(wait) = breaker.blame(Seq(1), Some(Duration::ZERO)) else { panic!("it is known") };
        assert_eq!(wait, 8 * S, "also when nothing was delivered in between");
    }

    #[test]
    fn of_two_in_a_row_that_are_to_come_later_the_second_makes_all_wait() {
        let breaker = breaker();
        let later = |seq| breaker.blame(Seq(seq), Some(Duration::ZERO));
        assert_eq!(later(1), Culprit::Destination, "nothing was ever accepted");
        for wait in [1, 2, 4, 8, 8] {
            breaker.accepted();
            assert_eq!(later(1), Culprit::Early(wait * S));
        }
        assert_eq!(later(2), Culprit::Destination);
    }
}
