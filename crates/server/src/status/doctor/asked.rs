//! What the doctor asks the store and the service. Each query is bounded in rows, and all of them
//! together in time.

use std::borrow::Cow;
use std::time::Duration;

use postbox_core::{
    Arrival, Criteria, Error, ErrorKind, Filter, Headers, Inspect, LaneInfo, ListQuery, Record, Result, State, Stats,
    Store, SubscriptionInfo, SubscriptionName,
};
use tokio::time::{Instant, timeout_at};

use crate::config::SubscriptionConfig;
use crate::status::stats::{STATS_WAIT, StatsJson};
use crate::status::{Fault, ServiceStatus, WorkJson};

/// Most events read per question. What blocks a queue is at its head, so the first few are enough.
pub(super) const LOOK: usize = 20;
/// Number of newest events read to estimate the arrival rate and the most frequent key.
const ARRIVALS_LOOK: usize = 1_000;
/// Older arrivals do not count: they say nothing about the current rate.
const ARRIVALS_WITHIN: Duration = Duration::from_secs(60);
/// After so long without an event, and this many mean intervals, arrivals have stopped: a burst is
/// not a rate.
const STOPPED: Duration = Duration::from_secs(15);
const STOPPED_INTERVALS: f64 = 10.0;

/// What is known about one subscription.
pub(super) struct Known<'a> {
    pub(super) info: &'a SubscriptionInfo,
    pub(super) stats: &'a StatsJson,
    /// Its configuration, if the doctor has it.
    pub(super) config: Option<&'a SubscriptionConfig>,
    /// What the running service reports about its work.
    pub(super) work: Option<&'a WorkJson>,
    pub(super) fault: Option<&'a Fault>,
    pub(super) retrying: Vec<Record>,
    pub(super) blocked: Vec<Record>,
    pub(super) scheduled: Vec<Record>,
    pub(super) dead: Vec<Record>,
    /// `None`: not asked, or unknown.
    pub(super) arrivals: Option<Arrivals>,
}

/// Recent arrivals that match the subscription's filter.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Arrivals {
    pub(super) per_second: f64,
    /// The most frequent key, and how many of the `of` events have it.
    pub(super) key: Option<(String, usize)>,
    pub(super) of: usize,
}

impl<'a> Known<'a> {
    /// Asks until the deadline. What was not read by then is missing, and the error says why.
    pub(super) async fn ask(
        store: &dyn Store,
        (info, stats): (&'a SubscriptionInfo, &'a StatsJson),
        config: Option<&'a SubscriptionConfig>,
        service: Option<&'a ServiceStatus>,
        deadline: Instant,
    ) -> (Self, Option<Error>) {
        let name = &info.name;
        let mut known = Self {
            info,
            stats,
            config,
            work: service.and_then(|it| it.work.iter().find(|work| work.subscription == *name)),
            fault: service.and_then(|it| it.faults.iter().find(|fault| fault.subscription.as_ref() == Some(name))),
            retrying: Vec::new(),
            blocked: Vec::new(),
            scheduled: Vec::new(),
            dead: Vec::new(),
            arrivals: None,
        };
        let asking = async {
            if stats.pending > 0 {
                known.arrivals = arrivals(&store.arrivals(&info.log, ARRIVALS_LOOK).await?, &info.filter);
            }
            known.retrying = list(store, name, State::Retrying, stats.retrying).await?;
            known.blocked = list(store, name, State::Blocked, stats.blocked).await?;
            known.scheduled = list(store, name, State::Scheduled, stats.scheduled).await?;
            known.dead = list(store, name, State::Dead, stats.dead).await?;
            Ok(())
        };
        let failed = timeout_at(deadline, asking).await.unwrap_or_else(|_| Err(unread())).err();
        (known, failed)
    }

    /// Whether every lane has a relay.
    pub(super) fn is_driven(&self) -> bool {
        self.info.lanes.iter().all(is_driven)
    }

    /// Whether events are pending, as far as is known: an estimate of zero is no proof.
    pub(super) fn may_be_pending(&self) -> bool {
        self.stats.pending > 0 || self.stats.is_estimate
    }

    /// Number of unread events: pending, but neither retrying, blocked nor scheduled.
    pub(super) fn unread(&self) -> u64 {
        let Stats { pending, retrying, blocked, scheduled, .. } = self.stats.stats;
        pending.saturating_sub(retrying + blocked + scheduled)
    }
}

fn unread() -> Error {
    let text = format!(
        "some of its events could not be read within {STATS_WAIT:?}, so a cause may be missing here; events of \
         megabytes take long, and so does a busy database: run it again, or look at them with `postbox list`"
    );
    Error::new(ErrorKind::Unavailable, "list", "events_unread", text)
}

/// Whether a relay drives the lane. After a rename or a change of lanes the former lease still
/// runs, but nobody owns it.
pub(super) fn is_driven(lane: &LaneInfo) -> bool {
    lane.lease_left.is_some() && lane.owner.is_some()
}

async fn list(store: &dyn Inspect, name: &SubscriptionName, state: State, count: u64) -> Result<Vec<Record>> {
    let which = Criteria::default();
    let query = ListQuery {
        subscription: name.clone(),
        state: Some(state),
        which,
        code: None,
        headers: Headers::new(),
        after: None,
        limit: LOOK,
    };
    if count > 0 { store.list(&query).await } else { Ok(Vec::new()) }
}

/// `None`: the newest events span less than a minute and all belong to others, which says nothing
/// about these.
fn arrivals(newest: &[Arrival], filter: &Filter) -> Option<Arrivals> {
    let is_meant =
        |it: &&Arrival| it.age <= ARRIVALS_WITHIN && filter.matches(it.traits(), || Cow::Borrowed(&it.headers));
    let meant: Vec<&Arrival> = newest.iter().filter(is_meant).collect();
    // If every event that was read is younger than a minute, they span less than a minute.
    let within = match newest.last() {
        Some(first) if newest.len() == ARRIVALS_LOOK => first.age.min(ARRIVALS_WITHIN),
        _ => ARRIVALS_WITHIN,
    };
    if meant.is_empty() && within < ARRIVALS_WITHIN {
        return None;
    }
    let mut keys: Vec<&str> = meant.iter().filter_map(|it| it.key.as_deref()).collect();
    keys.sort_unstable();
    let most = keys.chunk_by(|a, b| a == b).max_by_key(|same| same.len());
    let mean = meant.len() as f64 / within.as_secs_f64().max(1.0);
    let silence = meant.first().map_or(Duration::ZERO, |newest| newest.age);
    let has_stopped = silence >= STOPPED && silence.as_secs_f64() * mean > STOPPED_INTERVALS;
    Some(Arrivals {
        per_second: if has_stopped { 1.0 / silence.as_secs_f64() } else { mean },
        key: most.map(|same| (same[0].to_owned(), same.len())),
        of: meant.len(),
    })
}

#[cfg(test)]
mod tests {
    use postbox_core::Headers;

    use super::*;

    fn arrival(topic: &str, key: &str, seconds: u64) -> Arrival {
        Arrival {
            topic: topic.into(),
            tenant: None,
            key: Some(key.into()),
            kind: None,
            aggregate: Some("order".into()),
            headers: Headers::from([("region".into(), "eu".into())]),
            age: Duration::from_secs(seconds),
        }
    }

    #[test]
    fn what_comes_is_counted_over_the_last_minute_or_less() {
        let filter = Filter { topics: vec!["order.*".parse().expect("a pattern")], ..Filter::default() };
        let few = [arrival("order.paid", "a", 1), arrival("order.paid", "b", 30), arrival("other", "a", 2)];
        let few =
            arrivals(&[&few[..], &[arrival("order.paid", "a", 50), arrival("order.paid", "a", 61)]].concat(), &filter);
        assert_eq!(few, Some(Arrivals { per_second: 0.05, key: Some(("a".into(), 2)), of: 3 }));
        let many: Vec<Arrival> = (0..1_000).map(|n| arrival("order.paid", "a", n / 100)).collect();
        assert_eq!(arrivals(&many, &filter).map(|it| it.per_second.round()), Some(111.0));
        let none = Some(Arrivals { per_second: 0.0, key: None, of: 0 });
        assert_eq!(arrivals(&[arrival("order.paid", "a", 61)], &filter), none);
        let burst: Vec<Arrival> = (0..1_000).map(|_| arrival("order.paid", "a", 20)).collect();
        assert_eq!(arrivals(&burst, &filter).map(|it| it.per_second), Some(0.05), "a burst that has ended");
        let others: Vec<Arrival> = (0..1_000).map(|n| arrival("other", "a", n / 100)).collect();
        assert_eq!(arrivals(&others, &filter), None, "a burst of others hides these");
        let of = |kind: &str, aggregate: &str, region: &str| {
            let filter = Filter {
                kinds: vec![kind.into()],
                aggregates: vec![aggregate.into()],
                headers: Headers::from([("region".into(), region.into())]),
                ..Filter::default()
            };
            arrivals(&[arrival("order.paid", "a", 1)], &filter).expect("known").of
        };
        assert_eq!(of("domain", "order", "eu"), 1);
        assert_eq!((of("x", "order", "eu"), of("domain", "x", "eu"), of("domain", "order", "x")), (0, 0, 0));
    }
}
