//! Counts by state and topic.

use std::collections::HashMap;
use std::time::Duration;

use crate::inspect::{Stats, TopicStats, Unrouted, UnroutedTopic};
use crate::state::State;

/// Maximum topics listed in [`Stats`], as its contract says.
const STATS_TOPICS_MAX: usize = 100;

/// Number of events of each kind that one call counts one by one, over all its subscriptions. Ten
/// thousand take a few milliseconds (measured), and larger differences decide nothing.
pub const LOOK_EVENTS_MAX: u64 = 10_000;

/// Minimum share of one subscription in [`LOOK_EVENTS_MAX`]. With it, twenty subscriptions take
/// less than five times as long as one (measured).
pub const LOOK_EVENTS_MIN: u64 = 500;

/// Number of sample blocks that are drawn if a share of [`LOOK_EVENTS_MAX`] is not enough. A
/// smaller share draws fewer.
const LOOK_BLOCKS_MAX: u64 = 64;

/// Minimum sample blocks. With fewer, a topic with one event in a hundred is missed too often.
const LOOK_BLOCKS_MIN: u64 = 16;

/// How much of each kind is looked at for one subscription, when several share a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Number of events that are counted one by one.
    pub events: u64,
}

impl Share {
    /// Returns the share of one among this many subscriptions.
    pub fn of_one_of(subscriptions: usize) -> Self {
        let events = LOOK_EVENTS_MAX / u64::try_from(subscriptions.max(1)).unwrap_or(u64::MAX);
        Self { events: events.max(LOOK_EVENTS_MIN) }
    }

    /// Returns the number of rows to look at: one more than is counted shows that there are others.
    pub fn rows_max(self) -> i64 {
        i64::try_from(self.events).unwrap_or(i64::MAX - 1) + 1
    }

    /// Returns the number of sample blocks to draw.
    pub fn blocks(self) -> u64 {
        (self.events * LOOK_BLOCKS_MAX / LOOK_EVENTS_MAX).clamp(LOOK_BLOCKS_MIN, LOOK_BLOCKS_MAX)
    }
}

/// Adds up the counts of one subscription.
#[derive(Debug)]
pub struct StatsCounter {
    stats: Stats,
    topics: HashMap<String, (u64, Option<Duration>)>,
}

impl StatsCounter {
    /// Creates empty counts within a share.
    pub fn within(share: Share) -> Self {
        Self { stats: Stats { share: share.events, ..Stats::default() }, topics: HashMap::new() }
    }

    /// Adds events of a state and topic, with the age of the oldest of them, if known.
    pub fn add(&mut self, state: State, topic: &str, count: u64, age: Option<Duration>) {
        match state {
            State::Retrying => self.stats.retrying += count,
            State::Blocked => self.stats.blocked += count,
            State::Scheduled => self.stats.scheduled += count,
            State::Dead => self.stats.dead += count,
            State::Discarded => self.stats.discarded += count,
            State::Dispatched => self.stats.dispatched += count,
            State::Skipped => self.stats.skipped += count,
            State::Pending | State::Unrouted => {}
        }
        if !state.counts_as_pending() || count == 0 {
            return;
        }
        match self.topics.get_mut(topic) {
            Some(known) => *known = (known.0 + count, known.1.max(age)),
            None => _ = self.topics.insert(topic.to_owned(), (count, age)),
        }
    }

    /// Notes that the count added for a state is not exact.
    pub fn note_estimate(&mut self, state: State) {
        match state {
            State::Skipped => self.stats.skipped_is_estimate = true,
            _ => self.stats.is_estimate = true,
        }
    }

    /// Call this after counting the rows of each state up to the share plus one. If a state reached
    /// that, there may be more rows, and the counts become estimates.
    pub fn note_limit(&mut self) {
        let Stats { retrying, blocked, scheduled, dead, discarded, share, .. } = self.stats;
        self.stats.is_estimate |= [retrying, blocked, scheduled, dead, discarded].iter().any(|it| *it > share);
    }

    /// Returns the counts, with the topics of most pending events first.
    pub fn finish(self) -> Stats {
        let pending = self.topics.values().map(|(count, _)| count).sum();
        let oldest_pending = self.topics.values().filter_map(|(_, age)| *age).max();
        let listed = |(topic, (pending, oldest_pending))| TopicStats { topic, pending, oldest_pending };
        let mut topics: Vec<TopicStats> = self.topics.into_iter().map(listed).collect();
        topics.sort_by(|a, b| b.pending.cmp(&a.pending).then_with(|| a.topic.cmp(&b.topic)));
        topics.truncate(STATS_TOPICS_MAX);
        let total = self.stats.dispatched + pending + self.stats.dead + self.stats.discarded;
        Stats { total, pending, oldest_pending, topics, ..self.stats }
    }
}

/// Builds [`Unrouted`] from topics with their counts and the ages of their oldest events.
pub fn unrouted<T: Into<String>>(counted: impl IntoIterator<Item = (T, u64, Duration)>) -> Unrouted {
    let mut topics: HashMap<String, (u64, Duration)> = HashMap::new();
    for (topic, count, age) in counted {
        let known = topics.entry(topic.into()).or_default();
        *known = (known.0 + count, known.1.max(age));
    }
    let of_topic = |(topic, (count, oldest))| UnroutedTopic { topic, count, oldest };
    let mut topics: Vec<UnroutedTopic> = topics.into_iter().map(of_topic).collect();
    topics.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.topic.cmp(&b.topic)));
    Unrouted { count: topics.iter().map(|topic| topic.count).sum(), topics }
}
