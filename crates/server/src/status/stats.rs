//! Counts: `stats --json`, and the depth and lag of `/metrics`.

use std::ops::Deref;
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
    /// What the store counted.
    #[serde(flatten)]
    pub stats: Stats,
    /// Events of the log that no subscription wants, counted up to a limit; the same for all
    /// subscriptions of the log. `None`: not counted.
    pub unrouted: Option<u64>,
    /// Whether a person or a `410 Gone` paused the subscription.
    pub paused: bool,
    /// The high-water marks reported by the running service; empty without one.
    pub high_water_marks: Vec<HighWaterMark>,
}

impl Deref for StatsJson {
    type Target = Stats;

    fn deref(&self) -> &Stats {
        &self.stats
    }
}

impl StatsJson {
    /// The counts of a subscription.
    pub fn of(info: &SubscriptionInfo, stats: Stats) -> Self {
        Self {
            subscription: Some(info.name.clone()),
            log: info.log.clone(),
            stats,
            unrouted: None,
            paused: info.paused.is_some(),
            high_water_marks: Vec::new(),
        }
    }

    /// The age to show of the oldest pending event; `None` also if nothing is due yet.
    pub fn oldest(&self) -> Option<Duration> {
        self.oldest_pending.filter(|age| !age.is_zero())
    }

    /// Formats a count of delivery rows; `~` marks a lower bound.
    pub fn of_rows(&self, count: u64) -> String {
        estimated(count, count > self.share)
    }

    /// The counts of a log that no subscription reads.
    pub fn unread(log: LogName, count: Count) -> Self {
        let Count { events, is_estimate } = count;
        let stats = Stats { pending: events, total: events, is_estimate, ..Stats::default() };
        Self { subscription: None, log, stats, unrouted: Some(0), paused: false, high_water_marks: Vec::new() }
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

    #[test]
    fn what_is_not_due_yet_has_no_age() {
        let mut counted = StatsJson::unread(LogName::outbox(), Count { events: 1, is_estimate: false });
        for (age, seconds) in [(0, None), (2, Some(2.0))] {
            counted.stats.oldest_pending = Some(Duration::from_secs(age));
            assert_eq!(counted.oldest(), (age > 0).then(|| Duration::from_secs(age)));
            let json = serde_json::to_value(&counted).expect("JSON");
            assert_eq!(json["oldest_pending_seconds"].as_f64(), seconds, "{json}");
        }
    }

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
