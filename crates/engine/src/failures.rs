//! Decides whether a failure belongs to the event or to the destination.
//!
//! An event that can never succeed and a destination that is down often look the same. The
//! difference is whether other events succeed in the meantime.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use postbox_core::{Seq, lock};

use crate::breaker::BreakerPolicy;

/// Number of breaker periods (closed spans) in which one event may find the destination down before
/// this counts as the event's own failure. A single outage never reaches it, because the breaker
/// does not close during one.
const PERIODS_MAX: u32 = 5;
/// Number of consecutive events the destination must fail at to count as down. Events that fail for
/// their own reasons are rarely neighbours: if one in twenty fails, five in a row occur once in
/// three million. Each event counts once. Events that failed earlier while others were accepted do
/// not count, because they come again and again.
const SERVER_ERRORS_MAX: usize = 5;
/// Maximum number of suspects remembered. When it is reached, all are forgotten.
const SUSPECTS_MAX: usize = 10_000;

/// Failure evidence about one destination, shared by all lanes of a relay.
#[derive(Debug)]
pub(crate) struct FailureTracker {
    policy: BreakerPolicy,
    evidence: Mutex<Evidence>,
}

#[derive(Debug, Default)]
struct Evidence {
    /// Number of ambiguous failures so far.
    ambiguous: u64,
    /// An event that was both sent and accepted after the last ambiguous failure.
    accepted: Option<Seq>,
    /// Whether an event was accepted since the last one was throttled.
    accepted_since_throttled: bool,
    /// Events the destination failed at since it last accepted or refused one, up to
    /// [`SERVER_ERRORS_MAX`].
    server_errors: Vec<Seq>,
    /// Number of events accepted or refused so far.
    answered: u64,
    /// Number of times the breaker closed.
    periods: u64,
    suspects: HashMap<Seq, Suspect>,
}

/// An event that found the destination down.
#[derive(Debug)]
struct Suspect {
    /// The last period in which it found the destination down.
    period: u64,
    /// Number of periods in which it found the destination down.
    count: u32,
    /// Number of times it was made to wait alone.
    throttled: u32,
    /// Value of `Evidence::answered` when this event became a suspect.
    answered: u64,
}

/// Marks when a call was sent. A call sent before the last ambiguous failure, or before the breaker
/// opened last, proves nothing when it is accepted: the destination may have gone down since.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    /// Number of ambiguous failures before it.
    ambiguous: u64,
    /// Number of openings of the breaker before it.
    pub(crate) openings: u64,
}

/// What a failure that looks like an outage turns out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The destination is down, for all events.
    Outage,
    /// A failed attempt of this event.
    OfEvent,
    /// Only this event waits, for this long. Others go on, and no attempt is counted.
    Throttled(Duration),
}

impl FailureTracker {
    pub(crate) fn new(policy: BreakerPolicy) -> Self {
        Self { policy, evidence: Mutex::default() }
    }

    /// Returns the mark for a call that is sent now, after so many openings of the breaker.
    pub(crate) fn sent(&self, openings: u64) -> Sent {
        Sent { ambiguous: self.evidence().ambiguous, openings }
    }

    /// Notes that an event of a call marked `sent` was accepted.
    pub(crate) fn accepted(&self, seq: Seq, sent: Sent) {
        let mut evidence = self.evidence();
        evidence.accepted_since_throttled = true;
        evidence.answered(seq);
        if sent.ambiguous == evidence.ambiguous {
            evidence.accepted = Some(seq);
        }
    }

    /// Notes that an event was refused for good, so the destination works.
    pub(crate) fn refused(&self, seq: Seq) {
        self.evidence().answered(seq);
    }

    /// Notes that the breaker closed.
    pub(crate) fn breaker_closed(&self) {
        self.evidence().periods += 1;
    }

    /// Classifies an ambiguous failure. It belongs to the event if another event was accepted since
    /// the last ambiguous failure. An outage therefore costs at most one attempt of one event.
    pub(crate) fn ambiguous(&self, seq: Seq, after: Option<Duration>) -> Failure {
        let mut evidence = self.evidence();
        evidence.ambiguous += 1;
        match evidence.accepted.take() {
            Some(other) if other != seq => Failure::OfEvent,
            _ => self.classify(&mut evidence, seq, after),
        }
    }

    /// Classifies a server error. It belongs to the event unless the destination fails at
    /// everything it gets. If the destination failed at this event before and accepted or refused
    /// another since, the event is no evidence of an outage: while the destination is down, it
    /// waits alone and costs no attempt.
    pub(crate) fn server_error(&self, seq: Seq) -> Failure {
        let mut evidence = self.evidence();
        let (answered, policy) = (evidence.answered, &self.policy);
        let is_down = evidence.server_errors.len() >= SERVER_ERRORS_MAX;
        let suspect = evidence.suspect(seq);
        if suspect.answered < answered {
            return if is_down { suspect.wait_alone(policy, Duration::ZERO) } else { Failure::OfEvent };
        }
        if !is_down && !evidence.server_errors.contains(&seq) {
            evidence.server_errors.push(seq);
        }
        match evidence.server_errors.len() < SERVER_ERRORS_MAX {
            true => Failure::OfEvent,
            false => self.classify(&mut evidence, seq, None),
        }
    }

    /// Classifies a failure to reach the destination.
    pub(crate) fn unavailable(&self, seq: Seq) -> Failure {
        self.classify(&mut self.evidence(), seq, None)
    }

    /// Classifies a request by the destination to slow down.
    pub(crate) fn throttled(&self, seq: Seq, after: Option<Duration>) -> Failure {
        self.classify(&mut self.evidence(), seq, Some(after.unwrap_or_default()))
    }

    /// Classifies by history. `after` is set for throttled calls and some ambiguous failures.
    ///
    /// Without `after`, an event that found the destination down in [`PERIODS_MAX`] periods is at
    /// fault itself. With it, the event is never charged. It waits alone, longer each time, if it
    /// found the destination down in that many periods or another event was accepted since the last
    /// throttling. Otherwise all events wait.
    fn classify(&self, evidence: &mut Evidence, seq: Seq, after: Option<Duration>) -> Failure {
        let alone = after.is_some() && std::mem::take(&mut evidence.accepted_since_throttled);
        let period = evidence.periods;
        let suspect = evidence.suspect(seq);
        if suspect.period != period {
            (suspect.period, suspect.count) = (period, suspect.count.saturating_add(1));
        }
        match after {
            Some(after) if alone || suspect.count >= PERIODS_MAX => suspect.wait_alone(&self.policy, after),
            None if suspect.count >= PERIODS_MAX => {
                evidence.suspects.remove(&seq);
                Failure::OfEvent
            }
            _ => Failure::Outage,
        }
    }

    fn evidence(&self) -> MutexGuard<'_, Evidence> {
        lock(&self.evidence)
    }
}

impl Evidence {
    /// Notes that the destination accepted this event or refused it for good.
    fn answered(&mut self, seq: Seq) {
        self.server_errors.clear();
        self.suspects.remove(&seq);
        self.answered += 1;
    }

    fn suspect(&mut self, seq: Seq) -> &mut Suspect {
        if self.suspects.len() >= SUSPECTS_MAX {
            self.suspects.clear();
        }
        let (period, answered) = (self.periods, self.answered);
        self.suspects.entry(seq).or_insert(Suspect { period, count: 1, throttled: 0, answered })
    }
}

impl Suspect {
    /// Makes only this event wait: longer each time, and at least as long as the destination said.
    fn wait_alone(&mut self, policy: &BreakerPolicy, after: Duration) -> Failure {
        let wait = policy.wait_max(self.throttled);
        self.throttled = self.throttled.saturating_add(1);
        Failure::Throttled(wait.max(BreakerPolicy::named_wait(after)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn tracker() -> FailureTracker {
        FailureTracker::new(BreakerPolicy { base: S, max: 8 * S })
    }

    impl FailureTracker {
        fn accept(&self, seq: i64) {
            self.accepted(Seq(seq), self.sent(0));
        }

        fn fail(&self, seq: i64) -> Failure {
            self.ambiguous(Seq(seq), None)
        }
    }

    #[test]
    fn an_ambiguous_failure_is_the_events_only_while_others_succeed() {
        let tracker = tracker();
        assert_eq!(tracker.fail(1), Failure::Outage, "nothing was ever accepted");
        assert_eq!(tracker.fail(1), Failure::Outage, "however often");
        tracker.accept(2);
        assert_eq!(tracker.fail(1), Failure::OfEvent, "others succeed");
        assert_eq!(tracker.fail(1), Failure::Outage, "and since then no other did");
        assert_eq!(tracker.fail(2), Failure::Outage);
        tracker.accept(1);
        assert_eq!(tracker.fail(1), Failure::Outage, "a replay of itself is no other");
        tracker.accept(1);
        assert_eq!(tracker.fail(2), Failure::OfEvent);
    }

    #[test]
    fn calls_from_before_an_outage_are_no_evidence() {
        let tracker = tracker();
        tracker.accept(1);
        let sent: Vec<Sent> = (0..16).map(|_| tracker.sent(0)).collect();
        let mut charged = 0;
        for (seq, sent) in (10..).zip(sent) {
            match seq % 2 {
                0 => charged += u32::from(tracker.fail(seq) == Failure::OfEvent),
                _ => tracker.accepted(Seq(seq), sent),
            }
        }
        assert_eq!(charged, 1, "one outage, one attempt");
        assert_eq!(tracker.fail(9), Failure::Outage);
    }

    #[test]
    fn an_outage_is_no_events_failure_but_a_repeated_one_is() {
        let tracker = tracker();
        for _ in 0..100 {
            assert_eq!(tracker.unavailable(Seq(1)), Failure::Outage, "the breaker never closed in between");
        }
        let of_event = (1..=PERIODS_MAX).filter(|_| {
            tracker.breaker_closed();
            tracker.unavailable(Seq(1)) == Failure::OfEvent
        });
        assert_eq!(of_event.count(), 1);
    }

    #[test]
    fn the_fifth_event_in_a_row_that_a_destination_fails_at_finds_it_down() {
        let tracker = tracker();
        for _ in 0..10 {
            for seq in 1..=4 {
                assert_eq!(tracker.server_error(Seq(seq)), Failure::OfEvent, "there may be four such events");
            }
        }
        assert_eq!(tracker.server_error(Seq(5)), Failure::Outage);
        assert_eq!(tracker.server_error(Seq(1)), Failure::Outage, "also those before");
        let before = tracker.sent(0);
        tracker.fail(9);
        tracker.accepted(Seq(6), before);
        assert_eq!(tracker.server_error(Seq(7)), Failure::OfEvent, "it took one");
        (11..=13).for_each(|seq| _ = tracker.server_error(Seq(seq)));
        assert_eq!(tracker.server_error(Seq(14)), Failure::Outage);
        tracker.refused(Seq(8));
        assert_eq!(tracker.server_error(Seq(15)), Failure::OfEvent, "it read one");
    }

    #[test]
    fn an_event_that_failed_while_others_went_says_nothing_of_the_destination() {
        let tracker = tracker();
        (1..=4).for_each(|seq| _ = tracker.server_error(Seq(seq)));
        tracker.accept(9);
        for seq in [1, 2, 3, 4, 1, 2, 3, 4] {
            assert_eq!(tracker.server_error(Seq(seq)), Failure::OfEvent, "however many of them come again");
        }
        let others = (11..=15).map(|seq| tracker.server_error(Seq(seq)));
        assert_eq!(others.filter(|failure| *failure == Failure::Outage).count(), 1, "of others, the fifth");
        for wait in [1, 2, 4] {
            assert_eq!(tracker.server_error(Seq(1)), Failure::Throttled(wait * S), "not charged while it is down");
        }
        tracker.accept(11);
        assert_eq!(tracker.server_error(Seq(1)), Failure::OfEvent);
        tracker.accept(1);
        assert_eq!(tracker.server_error(Seq(1)), Failure::OfEvent, "it went once, so it is like any other");
        (12..=15).for_each(|seq| assert_eq!(tracker.server_error(Seq(seq)), Failure::OfEvent, "known by now"));
    }

    #[test]
    fn a_throttled_event_waits_alone_without_costing_attempts() {
        let tracker = tracker();
        let throttle = || {
            tracker.breaker_closed();
            tracker.throttled(Seq(1), Some(3 * S))
        };
        let failures: Vec<Failure> = (1..=12).map(|_| throttle()).skip(PERIODS_MAX as usize - 1).collect();
        let expected = [3, 3, 4, 8, 8, 8, 8, 8].map(|seconds| Failure::Throttled(seconds * S));
        assert_eq!(failures, expected);
        assert_eq!(tracker.throttled(Seq(1), None), Failure::Throttled(8 * S), "also within a period");
    }

    #[test]
    fn of_two_throttled_in_a_row_the_second_makes_all_wait() {
        let tracker = tracker();
        assert_eq!(tracker.throttled(Seq(1), None), Failure::Outage, "nothing was ever accepted");
        for wait in [1, 2, 4, 8, 8] {
            tracker.accept(3);
            assert_eq!(tracker.throttled(Seq(1), None), Failure::Throttled(wait * S));
        }
        assert_eq!(tracker.throttled(Seq(2), None), Failure::Outage);
    }
}
