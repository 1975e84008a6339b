//! Counts of what is pending, by topic.

use std::collections::HashMap;
use std::time::Duration;

use crate::inspect::{Stats, TopicStats};

/// Topics listed in [`Stats`], as its contract says.
const STATS_TOPICS_MAX: usize = 100;

/// Pending events as they are counted.
#[derive(Debug, Default)]
pub struct PendingTopics {
    topics: HashMap<String, (u64, Duration)>,
}

impl PendingTopics {
    /// Adds events of a topic, the oldest of them of that age.
    pub fn add(&mut self, topic: &str, count: u64, age: Duration) {
        match self.topics.get_mut(topic) {
            Some(known) => *known = (known.0 + count, known.1.max(age)),
            None => _ = self.topics.insert(topic.to_owned(), (count, age)),
        }
    }

    /// Writes the counts down, the deepest topics first.
    pub fn finish(self, stats: &mut Stats) {
        stats.pending = self.topics.values().map(|(count, _)| count).sum();
        stats.oldest_pending = self.topics.values().map(|(_, age)| *age).max();
        let listed = |(topic, (pending, oldest_pending))| TopicStats { topic, pending, oldest_pending };
        stats.topics = self.topics.into_iter().map(listed).collect();
        stats.topics.sort_by(|a, b| b.pending.cmp(&a.pending).then_with(|| a.topic.cmp(&b.topic)));
        stats.topics.truncate(STATS_TOPICS_MAX);
    }
}
