//! Limits how many calls of the sink are in flight, and how often they are made, over all lanes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postbox_core::{Bucket, Capabilities, Rate, lock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::settings::RelaySettings;

/// How much of an unused rate is kept for a burst. Enough that short gaps between calls cost no
/// throughput, too little for the destination to notice.
const RATE_BURST: Duration = Duration::from_millis(100);

/// How long after a wait for the rate the rate still counts as the bottleneck. If it is, another
/// wait follows within this time.
const HOLDS_FOR: Duration = Duration::from_secs(2);

/// How long a relay that may send is given precedence over the others of its [`SharedRate`]. It
/// asks again within one burst; after two it no longer wants to send.
const PRECEDENCE: Duration = Duration::from_millis(200);

/// How much of a [`SharedRate`] one relay may be ahead of another that waits. Who gives way asks
/// again after a millisecond at the earliest, so turns of one event would leave most of a high rate
/// unused.
const TURN: Duration = Duration::from_millis(2);

/// A rate that several relays of one process share, for one destination of several subscriptions or
/// stores. They need the same clock.
///
/// A relay with nothing to send leaves everything to the others; those that wait take turns. Each
/// process has its own, and gets the share that the lanes of all its relays are of all lanes.
pub struct SharedRate {
    rate: Rate,
    state: Mutex<Shared>,
}

struct Shared {
    bucket: Bucket,
    members: HashMap<u64, Member>,
    joined: u64,
    /// The highest [`Member::turn`] with which one has sent.
    turn: u64,
}

/// A relay that shares the rate.
#[derive(Default)]
struct Member {
    held: u32,
    lanes: u32,
    /// How many events it has sent, or left to others. The one with the fewest is the next.
    turn: u64,
    /// From when on it may send, if it waits.
    waits_until: Option<Duration>,
}

impl SharedRate {
    /// Creates a rate that no relay shares yet.
    pub fn new(rate: Rate) -> Self {
        let bucket = Bucket::new(rate, RATE_BURST);
        let state = Mutex::new(Shared { bucket, members: HashMap::new(), joined: 0, turn: 0 });
        Self { rate, state }
    }

    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    fn join(&self) -> u64 {
        let mut state = lock(&self.state);
        state.joined += 1;
        let member = state.joined;
        state.members.insert(member, Member::default());
        member
    }

    fn leave(&self, member: u64) {
        let mut state = lock(&self.state);
        state.members.remove(&member);
        self.divide(&mut state);
    }

    fn share(&self, member: u64, held: usize, lanes: Option<usize>) {
        let mut state = lock(&self.state);
        if let Some(it) = state.members.get_mut(&member) {
            it.held = u32::try_from(held).unwrap_or(u32::MAX);
            it.lanes = lanes.map_or(it.lanes, |lanes| u32::try_from(lanes).unwrap_or(u32::MAX)).max(it.held);
        }
        self.divide(&mut state);
    }

    /// Sets this process's share of the rate.
    fn divide(&self, state: &mut Shared) {
        let sum = |count: fn(&Member) -> u32| state.members.values().map(count).fold(0, u32::saturating_add).max(1);
        let (held, lanes) = (sum(|it| it.held), sum(|it| it.lanes));
        state.bucket.set_interval(self.rate.interval() * lanes / held);
    }

    /// Returns how many events one relay may be ahead of another that waits.
    fn ahead_max(&self) -> u64 {
        self.rate.within(TURN) as u64
    }

    fn wait(&self, member: u64, now: Duration) -> Option<Duration> {
        let mut state = lock(&self.state);
        let (turn, ahead_max) = (state.members.get(&member)?.turn, self.ahead_max());
        // Timers that end together fire in the order in which they were set. Without turns, the
        // same relay would always be the first.
        let waits = |it: &Member| it.waits_until.is_some_and(|at| at <= now && now < at + PRECEDENCE);
        let is_first = |it: &Member| it.turn + ahead_max <= turn && waits(it);
        let full = state.bucket.wait(now);
        // Half a burst is enough for all. It is left where the first one does not send after all.
        let is_short = state.bucket.wait(now.saturating_sub(RATE_BURST / 2)).is_some();
        let gives_way = full.is_none() && is_short && state.members.values().any(is_first);
        if let Some(it) = state.members.get_mut(&member) {
            it.waits_until = (full.is_some() || gives_way).then(|| now + full.unwrap_or_default());
        }
        full.or_else(|| gives_way.then(|| self.rate.interval().min(RATE_BURST)))
    }

    fn spend(&self, member: u64, count: u32, now: Duration) {
        let mut state = lock(&self.state);
        // Who did not want to send is not owed what the others sent meanwhile.
        let turn_min = state.turn.saturating_sub(self.ahead_max());
        if let Some(it) = state.members.get_mut(&member) {
            let turn = it.turn.max(turn_min);
            it.turn = turn + u64::from(count);
            state.turn = turn.max(state.turn);
        }
        state.bucket.spend(count, now);
    }
}

pub(crate) struct Limiter {
    permits: Arc<Semaphore>,
    /// The rate, and which of its relays this one is.
    rate: Option<(Arc<SharedRate>, u64)>,
    /// When something last waited for the rate.
    waited_at: Mutex<Option<Duration>>,
    /// Number of stream batches that wait for the rate.
    streams: AtomicUsize,
    /// How many more events of the rate were spent on due rows than on streams, within a burst.
    rows_ahead: Mutex<i64>,
}

/// A stream batch that waits for the rate, until dropped.
pub(crate) struct StreamWaits<'a>(&'a AtomicUsize);

impl Drop for StreamWaits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Limiter {
    /// Creates the limiter. Also returns the sink's capabilities, cut to the limits of the
    /// settings.
    pub(crate) fn new(
        declared: Capabilities,
        settings: &RelaySettings,
        shared: Option<Arc<SharedRate>>,
    ) -> (Self, Capabilities) {
        let rate = shared.or_else(|| settings.rate.map(|rate| Arc::new(SharedRate::new(rate))));
        let mut batch_max = declared.batch_max.max(1);
        if let Some(shared) = &rate {
            // A larger call would spend the rate of a long time at once.
            batch_max = batch_max.min(shared.rate.within(RATE_BURST));
        }
        let concurrency = declared.concurrency.max(1).min(settings.concurrency.unwrap_or(usize::MAX));
        let limiter = Self {
            permits: Arc::new(Semaphore::new(concurrency.min(Semaphore::MAX_PERMITS))),
            rate: rate.map(|rate| {
                let member = rate.join();
                (rate, member)
            }),
            waited_at: Mutex::new(None),
            streams: AtomicUsize::new(0),
            rows_ahead: Mutex::new(0),
        };
        (limiter, Capabilities { batch_max, concurrency, ..declared })
    }

    /// Returns a permit for one call, if one is free.
    pub(crate) fn try_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.permits.clone().try_acquire_owned().ok()
    }

    /// Waits for a permit for one call. Cancel-safe.
    pub(crate) async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        self.permits.clone().acquire_owned().await.ok()
    }

    /// Sets this relay's share of the rate. The rate applies to all replicas together, and a
    /// replica that drives `held` of `lanes` lanes gets that fraction. Where several subscriptions
    /// share it, both counts are sums; `lanes` is 0 if no replica drives any, and `None` if there
    /// are as many as before.
    pub(crate) fn share(&self, held: usize, lanes: Option<usize>) {
        if let Some((rate, member)) = &self.rate {
            rate.share(*member, held, lanes);
        }
    }

    /// Returns how long to wait for the rate; `None`: send now.
    ///
    /// While a stream waits, due rows get at most half of the rate. Otherwise the retries of many
    /// keys could take all of it, and nothing else would go out.
    pub(crate) fn wait(&self, now: Duration, are_rows: bool) -> Option<Duration> {
        let (rate, member) = self.rate.as_ref()?;
        let full = rate.wait(*member, now);
        let gives_way = || are_rows && self.streams.load(Ordering::Acquire) > 0 && *lock(&self.rows_ahead) > 0;
        let wait = full.or_else(|| gives_way().then(|| rate.rate.interval().min(RATE_BURST)))?;
        *lock(&self.waited_at) = Some(now + wait);
        Some(wait)
    }

    /// Notes that a stream batch waits for the rate, until the answer is dropped.
    pub(crate) fn stream_waits(&self) -> StreamWaits<'_> {
        self.streams.fetch_add(1, Ordering::AcqRel);
        StreamWaits(&self.streams)
    }

    /// Returns whether something waits for the rate, or did a moment ago.
    pub(crate) fn holds(&self, now: Duration) -> bool {
        lock(&self.waited_at).is_some_and(|at| now < at + HOLDS_FOR)
    }

    /// Returns whether other relays of the process share the rate.
    pub(crate) fn is_shared(&self) -> bool {
        self.rate.as_ref().is_some_and(|(rate, _)| lock(&rate.state).members.len() > 1)
    }

    /// Spends the rate for `count` events. A call of several may exceed it; the next waits longer.
    pub(crate) fn spend(&self, count: usize, now: Duration, are_rows: bool) {
        if let Some((rate, member)) = &self.rate {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            rate.spend(*member, count, now);
            let burst = i64::try_from(rate.rate.within(RATE_BURST)).unwrap_or(i64::MAX);
            let mut ahead = lock(&self.rows_ahead);
            let more = if are_rows { i64::from(count) } else { -i64::from(count) };
            *ahead = ahead.saturating_add(more).clamp(-burst, burst);
        }
    }
}

impl Drop for Limiter {
    fn drop(&mut self) {
        if let Some((rate, member)) = &self.rate {
            rate.leave(*member);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_that_share(rate: &str) -> [Limiter; 2] {
        let shared = Arc::new(SharedRate::new(rate.parse().expect("a rate")));
        [(); 2].map(|()| Limiter::new(Capabilities::default(), &RelaySettings::default(), Some(shared.clone())).0)
    }

    #[test]
    fn a_shared_rate_is_divided_by_the_lanes_of_all_who_are_there() {
        let [one, two] = two_that_share("10/s");
        let sent_from = |from: u64| {
            let mut sent = 0;
            for now in (from..from + 10_000).map(Duration::from_millis) {
                if one.wait(now, false).is_none() {
                    one.spend(1, now, false);
                    sent += 1;
                }
            }
            sent
        };
        one.share(1, Some(2));
        two.share(1, Some(4));
        assert!((31..36).contains(&sent_from(0)), "two of six lanes");
        assert!(one.is_shared());
        drop(two);
        assert!(!one.is_shared());
        assert!((48..53).contains(&sent_from(10_000)), "one of two lanes");
    }

    #[test]
    fn turns_are_fair_and_leave_nothing_of_a_shared_rate_unused() {
        for (rate, all) in [("50/s", 500), ("5000/s", 50_000)] {
            let (two, mut sent) = (two_that_share(rate), [0; 2]);
            for now in (0..10_000).map(Duration::from_millis) {
                for (one, sent) in two.iter().zip(&mut sent) {
                    while one.wait(now, false).is_none() {
                        one.spend(1, now, false);
                        *sent += 1;
                    }
                }
            }
            assert!(sent.iter().all(|sent| (all * 45 / 100..all * 55 / 100).contains(sent)), "{sent:?} at {rate}");
        }
    }

    #[test]
    fn due_rows_leave_half_of_the_rate_to_a_stream_that_waits() {
        for (rate, stream, percent) in [("5/s", true, 45..56), ("500/s", true, 45..56), ("5/s", false, 100..101)] {
            let settings = RelaySettings { rate: rate.parse().ok(), ..RelaySettings::default() };
            let (limiter, _) = Limiter::new(Capabilities::default(), &settings, None);
            let _waits = stream.then(|| limiter.stream_waits());
            let (mut rows, mut all) = (0, 0);
            for now in (0..20_000).map(Duration::from_millis) {
                // Due rows always come first.
                for are_rows in [true, false].into_iter().filter(|are_rows| *are_rows || stream) {
                    while limiter.wait(now, are_rows).is_none() {
                        limiter.spend(1, now, are_rows);
                        rows += usize::from(are_rows);
                        all += 1;
                    }
                }
            }
            assert!(all >= 100 && percent.contains(&(rows * 100 / all)), "{rows} of {all} at {rate}, stream {stream}");
        }
    }
}
