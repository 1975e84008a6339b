//! Counts by state and topic.

use std::collections::HashMap;
use std::time::Duration;

use crate::inspect::{Stats, TopicStats, Unrouted, UnroutedTopic};
use crate::state::State;

/// Topics listed in [`Stats`], as its contract says.
const STATS_TOPICS_MAX: usize = 100;

/// Events of each kind that a look counts one by one, of all subscriptions together. Ten thousand
/// take some milliseconds (measured), and nobody decides by a difference beyond them.
pub const LOOK_EVENTS_MAX: u64 = 10_000;

/// The least share of a subscription in [`LOOK_EVENTS_MAX`]: with it twenty take less than five
/// times as long as one (measured).
pub const LOOK_EVENTS_MIN: u64 = 500;

/// Blocks of places that are drawn where a share of [`LOOK_EVENTS_MAX`] is not enough; fewer of a
/// smaller share.
const LOOK_BLOCKS_MAX: u64 = 64;

/// The least of them: with fewer, a topic of one event in a hundred is missed too often.
const LOOK_BLOCKS_MIN: u64 = 16;

/// How much of each kind is looked at for one of so many subscriptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Events that are counted one by one.
    pub events: u64,
}

impl Share {
    /// Of one of so many.
    pub fn of_one_of(subscriptions: usize) -> Self {
        let events = LOOK_EVENTS_MAX / u64::try_from(subscriptions.max(1)).unwrap_or(u64::MAX);
        Self { events: events.max(LOOK_EVENTS_MIN) }
    }

    /// Rows to look at: where there is one more than is counted, there may be others.
    pub fn rows_max(self) -> i64 {
        i64::try_from(self.events).unwrap_or(i64::MAX - 1) + 1
    }

    /// Blocks to draw.
    pub fn blocks(self) -> u64 {
        (self.events * LOOK_BLOCKS_MAX / LOOK_EVENTS_MAX).clamp(LOOK_BLOCKS_MIN, LOOK_BLOCKS_MAX)
    }
}

/// Events as they are counted.
#[derive(Debug)]
pub struct StatsCounter {
    stats: Stats,
    topics: HashMap<String, (u64, Option<Duration>)>,
}

impl StatsCounter {
    /// Nothing yet, counted within a share.
    pub fn within(share: Share) -> Self {
        Self { stats: Stats { share: share.events, ..Stats::default() }, topics: HashMap::new() }
    }

    /// Adds events of a state and topic, and the age of the oldest of them, if it is known.
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

    /// What was added of a state is not exact.
    pub fn note_estimate(&mut self, state: State) {
        match state {
            State::Skipped => self.stats.skipped_is_estimate = true,
            _ => self.stats.is_estimate = true,
        }
    }

    /// The rows of each state were counted up to the share and one more: where all are there, there
    /// may be more.
    pub fn note_limit(&mut self) {
        let Stats { retrying, blocked, scheduled, dead, discarded, share, .. } = self.stats;
        self.stats.is_estimate |= [retrying, blocked, scheduled, dead, discarded].iter().any(|it| *it > share);
    }

    /// The counts, the deepest topics first.
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

/// Unrouted events, from their topics, how many there are and the age of the oldest.
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
