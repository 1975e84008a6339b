//! Counts: `stats --json`, and the depth and lag of `/metrics`.

use postbox_core::{Inspect, LogName, Result, Stats, SubscriptionInfo, SubscriptionName};
use serde::Serialize;

/// The counts of one subscription, or of a log that nobody reads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatsJson {
    /// `None` for a log that nobody reads: all of its events are pending.
    pub subscription: Option<SubscriptionName>,
    /// The log.
    pub log: LogName,
    /// Everything still to be delivered: unread + retrying + blocked + scheduled.
    pub pending: u64,
    /// Part of `pending`: failed, to be tried again.
    pub retrying: u64,
    /// Part of `pending`: behind their key.
    pub blocked: u64,
    /// Part of `pending`: waiting for their time.
    pub scheduled: u64,
    /// Waiting for a person.
    pub dead: u64,
    /// Taken out by a person.
    pub discarded: u64,
    /// Delivered, of the events still in the log.
    pub dispatched: u64,
    /// Events in the log that the subscription wants.
    pub total: u64,
    /// Events of the log that no subscription wants, as far as they were counted.
    pub unrouted: u64,
    /// Age of the oldest pending event.
    pub oldest_pending_seconds: Option<f64>,
    /// Whether a person paused the subscription.
    pub paused: bool,
    /// The deepest topics.
    pub topics: Vec<TopicJson>,
}

/// Pending events of one topic.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TopicJson {
    /// The topic.
    pub topic: String,
    /// How many are pending.
    pub pending: u64,
    /// Age of the oldest.
    pub oldest_pending_seconds: f64,
}

impl StatsJson {
    fn new(subscription: Option<SubscriptionName>, log: LogName, paused: bool, stats: Stats) -> Self {
        let topics = stats.topics.into_iter().map(|topic| TopicJson {
            topic: topic.topic,
            pending: topic.pending,
            oldest_pending_seconds: topic.oldest_pending.as_secs_f64(),
        });
        Self {
            subscription,
            log,
            pending: stats.pending,
            retrying: stats.retrying,
            blocked: stats.blocked,
            scheduled: stats.scheduled,
            dead: stats.dead,
            discarded: stats.discarded,
            dispatched: stats.dispatched,
            total: stats.total,
            unrouted: 0,
            oldest_pending_seconds: stats.oldest_pending.map(|age| age.as_secs_f64()),
            paused,
            topics: topics.collect(),
        }
    }

    /// The counts of a log that nobody reads.
    pub fn unread(log: LogName, count: u64) -> Self {
        Self::new(None, log, false, Stats { pending: count, total: count, ..Stats::default() })
    }
}

/// The counts of these subscriptions. Each is a scan of its log.
pub async fn stats(store: &dyn Inspect, infos: &[SubscriptionInfo]) -> Result<Vec<StatsJson>> {
    let mut counted = Vec::with_capacity(infos.len());
    for info in infos {
        let stats = store.stats(&info.name).await?;
        counted.push(StatsJson::new(Some(info.name.clone()), info.log.clone(), info.paused.is_some(), stats));
    }
    Ok(counted)
}
