//! Counts: `stats --json`, and the depth and lag of `/metrics`.

use std::time::Duration;

use postbox_core::{
    Count, Error, ErrorKind, HighWaterMark, Inspect, LogName, Result, Stats, SubscriptionInfo, SubscriptionName,
};
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use crate::text::estimated;

/// Time limit for counting all subscriptions. A count takes milliseconds. If it takes longer, the
/// cause is a lock or an overloaded database, and people who diagnose that must not wait for it.
pub const STATS_WAIT: Duration = Duration::from_secs(2);

/// How many subscriptions are counted together: a tenth of that time.
const GROUP_MAX: usize = 50;

/// The counts of one subscription, or of a log that no subscription reads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StatsJson {
    /// `None` for a log that no subscription reads: all its events are pending.
    pub subscription: Option<SubscriptionName>,
    /// The log.
    pub log: LogName,
    /// Everything still to be delivered: unread + retrying + blocked + scheduled.
    pub pending: u64,
    /// Part of `pending`: failed, and will be retried.
    pub retrying: u64,
    /// Part of `pending`: behind an earlier event of their key.
    pub blocked: u64,
    /// Part of `pending`: waiting for their time.
    pub scheduled: u64,
    /// Waiting for a person.
    pub dead: u64,
    /// Discarded by a person.
    pub discarded: u64,
    /// Delivered since the subscription began.
    pub dispatched: u64,
    /// Passed without being sent, because the filter did not want them. Counts only events that the
    /// log still has; not part of `total`.
    pub skipped: u64,
    /// `dispatched + pending + dead + discarded`.
    pub total: u64,
    /// Events of the log that no subscription wants, counted up to a limit; `None`: not counted.
    pub unrouted: Option<u64>,
    /// Whether there was too much to count. Then unread events are estimated from samples, and the
    /// counts of states kept as delivery rows are lower bounds.
    pub estimated: bool,
    /// Whether `skipped` is estimated from samples.
    pub skipped_estimated: bool,
    /// The limit up to which each kind was counted one by one.
    #[serde(skip)]
    pub share: u64,
    /// Age of the oldest pending event, from when it may be delivered; `None` if none is pending or
    /// the age is unknown.
    pub oldest_pending_seconds: Option<f64>,
    /// Whether a person or a `410 Gone` paused the subscription.
    pub paused: bool,
    /// The deepest topics.
    pub topics: Vec<TopicJson>,
    /// The high-water marks reported by the running service; empty without one.
    pub high_water_marks: Vec<HighWaterMark>,
}

/// Pending events of one topic.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TopicJson {
    /// The topic.
    pub topic: String,
    /// How many are pending.
    pub pending: u64,
    /// Age of the oldest, if known.
    pub oldest_pending_seconds: Option<f64>,
}

impl StatsJson {
    /// The counts of a subscription.
    pub fn of(info: &SubscriptionInfo, stats: Stats) -> Self {
        Self::new(Some(info.name.clone()), info.log.clone(), info.paused.is_some(), stats)
    }

    fn new(subscription: Option<SubscriptionName>, log: LogName, paused: bool, stats: Stats) -> Self {
        let topics = stats.topics.into_iter().map(|topic| TopicJson {
            topic: topic.topic,
            pending: topic.pending,
            oldest_pending_seconds: topic.oldest_pending.map(|age| age.as_secs_f64()),
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
            skipped: stats.skipped,
            total: stats.total,
            unrouted: None,
            estimated: stats.is_estimate,
            skipped_estimated: stats.skipped_is_estimate,
            share: stats.share,
            oldest_pending_seconds: stats.oldest_pending.map(|age| age.as_secs_f64()),
            paused,
            topics: topics.collect(),
            high_water_marks: Vec::new(),
        }
    }

    /// Formats a count of delivery rows; `~` marks a lower bound.
    pub fn of_rows(&self, count: u64) -> String {
        estimated(count, count > self.share)
    }

    /// The counts of a log that no subscription reads.
    pub fn unread(log: LogName, count: Count) -> Self {
        let Count { events, is_estimate } = count;
        let stats = Stats { pending: events, total: events, is_estimate, ..Stats::default() };
        Self { unrouted: Some(0), ..Self::new(None, log, false, stats) }
    }
}

/// Counts each of these subscriptions; an error is one that could not be counted in time.
pub async fn stats(store: &dyn Inspect, infos: &[SubscriptionInfo], deadline: Instant) -> Vec<Result<StatsJson>> {
    let names: Vec<SubscriptionName> = infos.iter().map(|info| info.name.clone()).collect();
    let counted = in_groups(&names, deadline, |group| store.stats_of(group)).await;
    infos.iter().zip(counted).map(|(info, stats)| stats.map(|stats| StatsJson::of(info, stats))).collect()
}

/// Counts group by group, so that what was counted in time is kept.
async fn in_groups<'a, F: Future<Output = Vec<Result<Stats>>>>(
    names: &'a [SubscriptionName],
    deadline: Instant,
    count: impl Fn(&'a [SubscriptionName]) -> F,
) -> Vec<Result<Stats>> {
    let mut counted = Vec::with_capacity(names.len());
    for group in names.chunks(GROUP_MAX) {
        let Ok(answer) = timeout_at(deadline, count(group)).await else { break };
        counted.extend(answer);
    }
    counted.resize_with(names.len(), || Err(too_slow()));
    counted
}

/// The error for counts that did not arrive within [`STATS_WAIT`].
pub fn too_slow() -> Error {
    let text = format!(
        "the counts did not arrive within {STATS_WAIT:?}; is the database overloaded, a table locked, or are there \
         hundreds of subscriptions?"
    );
    Error::new(ErrorKind::Unavailable, "stats", "stats_timeout", text)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_was_counted_in_time_is_kept() {
        let names = vec![SubscriptionName::new("s").expect("a name"); 2 * GROUP_MAX + 1];
        let asked = Cell::new(0);
        let count = |group| {
            asked.set(asked.get() + 1);
            let hangs = asked.get() > 1;
            async move {
                if hangs {
                    pending::<()>().await;
                }
                <[SubscriptionName]>::iter(group).map(|_| Ok(Stats::default())).collect::<Vec<_>>()
            }
        };
        let counted = in_groups(&names, Instant::now() + STATS_WAIT, count).await;
        let (in_time, late) = counted.split_at(GROUP_MAX);
        assert!(in_time.iter().all(Result::is_ok) && late.iter().all(Result::is_err));
        assert_eq!((late.len(), asked.get()), (GROUP_MAX + 1, 2), "after the deadline nothing is asked");
    }
}
