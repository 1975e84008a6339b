//! The counters of a relay. Written per batch, read at any time.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use postbox_core::{Delivery, Error, ErrorKind, Event, Lease, Outage, Topic, lock};

use crate::breaker::BreakerState;
use crate::histogram::Histogram;
use crate::pace::PaceMeter;

/// Maximum number of (topic, code) pairs counted by name, each a time series. The rest is `other`,
/// so that no input grows the table without limit. The first ones keep their names, because a
/// counter must not fall.
const CAUSES_MAX: usize = 100;
/// Failed attempts beyond each of these numbers are counted, so that events that fail again and
/// again differ from many that fail once.
const OVER: [u32; 3] = [1, 5, 10];

/// The outage of something, while it fails, and when it failed last.
#[derive(Debug, Default)]
pub(crate) struct Fails(Mutex<Option<(Outage, Timestamp)>>);

impl Fails {
    pub(crate) fn failed(&self, now: Timestamp, code: &str) {
        let mut outage = lock(&self.0);
        let since = outage.as_ref().map_or(now, |(outage, _)| outage.since);
        *outage = Some((Outage { since, code: code.to_owned() }, now));
    }

    pub(crate) fn works(&self) {
        *lock(&self.0) = None;
    }

    /// Ends the outage if nothing has failed for this time.
    pub(crate) fn end_after(&self, quiet: Duration, now: Timestamp) {
        lock(&self.0).take_if(|(_, last)| now.duration_since(*last).unsigned_abs() > quiet);
    }

    fn get(&self) -> Option<Outage> {
        lock(&self.0).as_ref().map(|(outage, _)| outage.clone())
    }
}

/// A lane whose store calls fail again and again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailingLane {
    /// The lane.
    pub lane: u16,
    /// When the first of these calls failed.
    pub since: Timestamp,
    /// The code of the last failure, e.g. `store_error`.
    pub code: String,
}

/// Consecutive failures of one kind of call.
#[derive(Debug)]
struct Failures {
    lane: FailingLane,
    last: Timestamp,
    count: u32,
    /// The store is away, full or busy, which affects every caller.
    of_store: bool,
}

impl Failures {
    fn is_of_now(&self, now: Timestamp) -> bool {
        now.duration_since(self.last).unsigned_abs() <= FAILURES_KEPT
    }
}

/// Number of consecutive failures after which they are reported. A restart of the store causes one
/// or two.
const FAILURES_MIN: u32 = 3;
/// Failures are forgotten after this time without another one: the lane has a new owner by then.
const FAILURES_KEPT: Duration = Duration::from_secs(60);

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one relay since it was built, shared by all its lanes. Gauges are
        /// marked.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $(pub(crate) $name: AtomicU64,)*
            pub(crate) breaker: AtomicU64,
            pub(crate) calls: Histogram,
            delays: Histogram,
            pub(crate) pace: PaceMeter,
            outage: Fails,
            pub(crate) dead_letters_fail: Fails,
            leases_fail: Fails,
            failures: Mutex<BTreeMap<(u16, &'static str), Failures>>,
            causes: Mutex<BTreeMap<(String, String), u64>>,
            duplicates_from: Mutex<BTreeMap<Option<String>, u64>>,
            over: [AtomicU64; 3],
            /// [`Lease::crashes`] of each lane, as this relay took it or gave it back last.
            crashes: Mutex<BTreeMap<u16, u32>>,
        }

        /// All counters at one moment.
        #[derive(Debug, Clone, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct MetricsSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Metrics {
            $($(#[$doc])* pub fn $name(&self) -> u64 {
                self.$name.load(Ordering::Relaxed)
            })*

            /// Returns all counters. Each is exact; together they are as close to one moment as
            /// relaxed loads are.
            pub fn snapshot(&self) -> MetricsSnapshot {
                MetricsSnapshot { $($name: self.$name(),)* }
            }
        }
    };
}

counters! {
    /// Events read, from the stream and from due rows.
    fetched,
    /// Events delivered, including duplicates.
    delivered,
    /// Payload bytes of the delivered events.
    delivered_bytes,
    /// Part of `delivered`: the destination said it already had them.
    duplicates,
    /// Deliveries that failed: retried, dead, or because the destination was down.
    failed,
    /// Counted attempts that failed and will be repeated.
    retries,
    /// Events that became dead.
    dead,
    /// Dead events handed over to the dead-letter sink.
    dead_letters,
    /// Dead events that the dead-letter sink refused. They are tried again.
    dead_letters_failed,
    /// Deliveries that found the destination down. Not counted as attempts.
    unavailable,
    /// Events blocked behind an earlier one of their key.
    blocked,
    /// Events put aside until their delivery time.
    scheduled,
    /// Gauge: events in calls to the destination right now.
    in_flight,
    /// Batches settled.
    batches,
    /// Reads that found nothing.
    polls_empty,
    /// Lanes taken.
    lanes_acquired,
    /// Part of `lanes_acquired`: taken over from a relay that vanished without releasing them.
    lane_takeovers,
    /// Gauge: lanes held now.
    lanes_held,
    /// Leases renewed.
    renewals_ok,
    /// Renewals that the store did not answer.
    renewals_failed,
    /// Leases lost: taken over, expired or paused.
    leases_lost,
    /// Writes refused because the lane had another owner.
    stale_writes,
    /// Calls to the store that failed and were repeated.
    store_errors,
    /// Calls to the sink that exceeded the time limit.
    timeouts,
    /// Times the breaker opened.
    breaker_opened,
}

impl Metrics {
    /// Returns the state of the destination's breaker.
    pub fn breaker_state(&self) -> BreakerState {
        match self.breaker.load(Ordering::Relaxed) {
            0 => BreakerState::Closed,
            1 => BreakerState::HalfOpen,
            _ => BreakerState::Open,
        }
    }

    /// Returns the durations of calls to the destination, whatever their outcome. A call carries
    /// one event or many, as the sink takes them.
    pub fn call_durations(&self) -> &Histogram {
        &self.calls
    }

    /// Returns the delays of deliveries, from the append (on the database's clock) or from
    /// `deliver_at` to the delivery (on this machine's clock). Replayed events are left out.
    pub fn delivery_delays(&self) -> &Histogram {
        &self.delays
    }

    /// Returns since when and why the destination is down, if it is. This lasts from the opening of
    /// the breaker until it closes, including probes.
    pub fn outage(&self) -> Option<Outage> {
        self.outage.get()
    }

    /// Returns since when and why dead events do not reach the dead-letter sink, if they do not.
    pub fn dead_letters_outage(&self) -> Option<Outage> {
        self.dead_letters_fail.get()
    }

    /// Returns the lanes of this relay whose reads or settlements keep failing at `now`.
    pub(crate) fn failing_lanes(&self, now: Timestamp) -> Vec<FailingLane> {
        let failures = lock(&self.failures);
        let reported = |it: &&Failures| it.count >= FAILURES_MIN && it.is_of_now(now);
        let mut lanes: Vec<FailingLane> = failures.values().filter(reported).map(|it| it.lane.clone()).collect();
        // One entry per lane: the call that has failed for longest.
        lanes.sort_by_key(|it| (it.lane, it.since));
        lanes.dedup_by_key(|it| it.lane);
        lanes
    }

    /// Returns since when and why calls fail because the store is away, full or busy, if they do.
    /// Such a failure ends without a person.
    pub(crate) fn store_outage(&self, now: Timestamp) -> Option<Outage> {
        let failures = lock(&self.failures);
        let of_lanes = failures.values().filter(|it| it.of_store && it.is_of_now(now)).map(|it| &it.lane);
        let of_lanes = of_lanes.map(|it| Outage { since: it.since, code: it.code.clone() });
        of_lanes.chain(self.leases_fail.get()).min_by_key(|it| it.since)
    }

    /// Returns since when and why no lane is granted or renewed, if so.
    pub(crate) fn lease_outage(&self) -> Option<Outage> {
        self.leases_fail.get()
    }

    /// Notes the result of asking for a lane or renewing one. A relay with nothing to send makes no
    /// other store calls.
    pub(crate) fn lease_answered(&self, error: Option<&Error>, now: Timestamp) {
        match error {
            Some(error) if !error.is_permanent() => self.leases_fail.failed(now, error.code()),
            _ => self.leases_fail.works(),
        }
    }

    /// Notes that a store call of a lane failed. Failures because the store is down count too: a
    /// store may answer reads and still accept no writes (a full disk).
    pub(crate) fn lane_failed(&self, lane: u16, operation: &'static str, error: &Error, now: Timestamp) {
        let mut failures = lock(&self.failures);
        let fresh = || Failures {
            lane: FailingLane { lane, since: now, code: String::new() },
            last: now,
            count: 0,
            of_store: false,
        };
        let known = failures.entry((lane, operation)).or_insert_with(fresh);
        if now.duration_since(known.last).unsigned_abs() > FAILURES_KEPT {
            *known = fresh();
        }
        (known.last, known.count) = (now, known.count.saturating_add(1));
        known.of_store = error.kind() == ErrorKind::Unavailable;
        known.lane.code = error.code().to_owned();
    }

    /// Notes that a store call of a lane succeeded. If it was the last one that failed because the
    /// store was away, returns since when.
    pub(crate) fn lane_works(&self, lane: u16, operation: &'static str) -> Option<Timestamp> {
        let mut failures = lock(&self.failures);
        if failures.is_empty() {
            return None;
        }
        let failed = failures.remove(&(lane, operation)).filter(|it| it.of_store)?;
        failures.is_empty().then_some(failed.lane.since)
    }

    /// Returns failed deliveries by topic and code. At most 100 pairs are named; later ones count
    /// under `("other", "other")`.
    pub fn failures_by_cause(&self) -> BTreeMap<(String, String), u64> {
        lock(&self.causes).clone()
    }

    /// Counts duplicates of events of these sources by name, from zero. Whoever appends chooses the
    /// source of an event, so no other name is counted by itself.
    pub fn name_sources(&self, names: impl IntoIterator<Item = String>) {
        let mut sources = lock(&self.duplicates_from);
        for name in names {
            sources.entry(Some(name)).or_default();
        }
    }

    /// Returns duplicates by the source of their events. Those that [`Self::name_sources`] did not
    /// name count under `other`.
    pub fn duplicates_by_source(&self) -> BTreeMap<Option<String>, u64> {
        lock(&self.duplicates_from).clone()
    }

    /// Returns the failed attempts beyond the first, the fifth and the tenth of an event, each with
    /// that number.
    pub fn attempts_over(&self) -> [(u32, u64); 3] {
        std::array::from_fn(|n| (OVER[n], self.over[n].load(Ordering::Relaxed)))
    }

    /// Counts a failed attempt of an event by its number.
    pub(crate) fn attempt_failed(&self, attempt: u32) {
        let reached = OVER.iter().zip(&self.over).filter(|(over, _)| attempt > **over);
        reached.for_each(|(_, count)| self.add(count, 1));
    }

    pub(crate) fn add(&self, counter: &AtomicU64, count: usize) {
        if count > 0 {
            counter.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    /// Notes that a lane was taken. That is a write, so the store is back: earlier failures of the
    /// lane because it was away are over, even if their call is never made again.
    pub(crate) fn lane_taken(&self, lease: &Lease) {
        self.lanes_acquired.fetch_add(1, Ordering::Relaxed);
        lock(&self.failures).retain(|(lane, _), failures| *lane != lease.lane || !failures.of_store);
        let before = lock(&self.crashes).insert(lease.lane, lease.crashes);
        // A relay that takes its own lane again still finds the crash from when it first took it.
        // Epochs do not tell: a store may leave any gap between two of them.
        if lease.crashes > 0 && before != Some(lease.crashes) {
            self.lane_takeovers.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes that the store answered a request for a lane, beside those that are held. That is a
    /// write too: earlier failures of lanes that are another's by now, because the store was away,
    /// are over.
    pub(crate) fn lanes_kept(&self, held: &[u16]) {
        lock(&self.failures).retain(|(lane, _), failures| held.contains(lane) || !failures.of_store);
    }

    /// Notes that a lane was given back with this number of crashes.
    pub(crate) fn lane_released(&self, lane: u16, crashes: u32) {
        lock(&self.crashes).insert(lane, crashes);
    }

    pub(crate) fn destination_down(&self, now: Timestamp, code: &str) {
        self.outage.failed(now, code);
    }

    pub(crate) fn destination_up(&self) {
        self.outage.works();
    }

    /// Notes that this relay cannot find the destination up any more: another may hold the lanes,
    /// or nothing waits for it until the next run.
    pub(crate) fn destination_unknown(&self) {
        self.outage.works();
        self.set_breaker(BreakerState::Closed);
    }

    pub(crate) fn set_breaker(&self, state: BreakerState) {
        self.breaker.store(state as u64, Ordering::Relaxed);
    }

    /// Counts a delivered event.
    pub(crate) fn delivered_at(&self, now: Timestamp, delivery: &Delivery) {
        let event = &delivery.event;
        self.delivered.fetch_add(1, Ordering::Relaxed);
        self.delivered_bytes.fetch_add(event.payload.len() as u64, Ordering::Relaxed);
        if delivery.replay == 0 {
            let from = event.deliver_at.map_or(event.created_at, |at| at.max(event.created_at));
            self.delays.observe(now.duration_since(from).try_into().unwrap_or_default());
        }
    }

    /// Counts an event that the destination already had.
    pub(crate) fn duplicate(&self, event: &Event) {
        self.duplicates.fetch_add(1, Ordering::Relaxed);
        let mut sources = lock(&self.duplicates_from);
        let mut source = event.source.clone();
        if source.is_some() && !sources.contains_key(&source) {
            source = Some("other".to_owned());
        }
        *sources.entry(source).or_default() += 1;
    }

    pub(crate) fn failure(&self, topic: &Topic, code: &str) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        let mut causes = lock(&self.causes);
        let mut cause = (topic.as_str().to_owned(), code.to_owned());
        if causes.len() >= CAUSES_MAX && !causes.contains_key(&cause) {
            cause = ("other".to_owned(), "other".to_owned());
        }
        *causes.entry(cause).or_default() += 1;
    }
}

/// A count added to a gauge until it is dropped.
pub(crate) struct Gauge<'a> {
    gauge: &'a AtomicU64,
    count: u64,
}

impl<'a> Gauge<'a> {
    pub(crate) fn up(gauge: &'a AtomicU64, count: usize) -> Self {
        let count = count as u64;
        gauge.fetch_add(count, Ordering::Relaxed);
        Self { gauge, count }
    }
}

impl Drop for Gauge<'_> {
    fn drop(&mut self) {
        self.gauge.fetch_sub(self.count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use postbox_core::LogName;

    use super::*;

    /// The epochs of a store on Postgres are times.
    #[test]
    fn a_takeover_counts_once_whatever_the_epochs_are() {
        let metrics = Metrics::default();
        let take = |epoch, crashes| {
            let (subscription, owner) = ("s".parse().expect("a name"), "one".parse().expect("an owner"));
            metrics.lane_taken(&Lease { subscription, log: LogName::outbox(), lane: 0, epoch, owner, crashes });
            metrics.lane_takeovers()
        };
        assert_eq!([take(1_000, 1), take(2_000, 1), take(2_001, 1)], [1; 3], "its own lane again");
        assert_eq!(take(3_000, 2), 2, "another one vanished meanwhile");
        metrics.lane_released(0, 0);
        assert_eq!([take(4_000, 0), take(5_000, 1)], [2, 3], "the same after it was given back");
        assert_eq!(metrics.lanes_acquired(), 6);
    }

    #[test]
    fn a_lane_that_went_to_another_relay_keeps_no_outage_here() {
        let (metrics, now) = (Metrics::default(), Timestamp::UNIX_EPOCH);
        let failed =
            |lane, kind| metrics.lane_failed(lane, "settle", &Error::new(kind, "settle", "reason", "why"), now);
        failed(0, ErrorKind::Unavailable);
        metrics.lanes_kept(&[0, 1]);
        assert!(metrics.store_outage(now).is_some(), "it is held, and its next call says more");
        metrics.lanes_kept(&[1]);
        assert_eq!(metrics.store_outage(now), None);
        // The lane itself is at fault, whoever has it.
        (0..FAILURES_MIN).for_each(|_| failed(0, ErrorKind::Internal));
        metrics.lanes_kept(&[1]);
        assert_eq!(metrics.failing_lanes(now).len(), 1);
    }

    #[test]
    fn hostile_topics_and_sources_do_not_grow_the_tables() {
        let metrics = Metrics::default();
        for n in 0..10_000 {
            metrics.failure(&Topic::from_stored(format!("t{n}")), "http_500");
        }
        let causes = metrics.failures_by_cause();
        assert_eq!(causes.len(), CAUSES_MAX + 1);
        assert_eq!(causes.values().sum::<u64>(), 10_000);
        assert_eq!(metrics.failed(), 10_000);
        let id = "00000000-0000-7000-8000-000000000001".parse().expect("an id");
        for n in 0..10_000 {
            let event = postbox_core::NewEvent::json("t", "{}").source(format!("s{n}"));
            metrics.duplicate(&event.into_event(id, Timestamp::UNIX_EPOCH));
        }
        metrics.name_sources(["s7", "other"].map(String::from));
        let event = postbox_core::NewEvent::json("t", "{}").source("s7");
        metrics.duplicate(&event.into_event(id, Timestamp::UNIX_EPOCH));
        let counted = [("other", 10_000), ("s7", 1)].map(|(name, count)| (Some(name.to_owned()), count));
        assert_eq!(metrics.duplicates_by_source(), counted.into());
        assert_eq!(metrics.duplicates(), 10_001);
    }
}
