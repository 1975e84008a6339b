//! What the doctor asks the store and the service. Each query returns a bounded number of rows, and
//! all of them together are bounded in time.

use std::borrow::Cow;
use std::time::Duration;

use postbox_core::{
    Arrival, Criteria, Error, ErrorKind, Filter, Headers, Inspect, Key, LaneInfo, ListQuery, Record, Result, Seq,
    State, Stats, Store, SubscriptionInfo, SubscriptionName,
};
use tokio::time::{Instant, timeout_at};

use crate::config::SubscriptionConfig;
use crate::status::stats::{STATS_WAIT, StatsJson};
use crate::status::{Fault, ServiceStatus, WorkJson};

/// Most events read per question. What blocks a queue is at its head. If there are more, some of
/// the last are read as well: the first may all have failed for a reason that is over.
pub(super) const LOOK: usize = 20;
/// Most rows among which the event that holds a key is looked for, because their events are read
/// one by one.
const SEARCH_MAX: u64 = 10_000;
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
        if failed.is_none() {
            // A failure here is not reported: each finding says how many rows were looked at.
            _ = timeout_at(deadline, known.look_further(store)).await;
        }
        (known, failed)
    }

    /// Looks beyond the first few rows: near the end of the log, where the present cause is, and
    /// for the event that the first blocked ones wait for.
    async fn look_further(&mut self, store: &dyn Store) -> Result<()> {
        let (name, stats) = (&self.info.name, self.stats);
        let states = [
            (State::Retrying, stats.retrying, &mut self.retrying),
            (State::Scheduled, stats.scheduled, &mut self.scheduled),
            (State::Dead, stats.dead, &mut self.dead),
        ];
        for (state, count, rows) in states {
            let Some(seen) = rows.last().map(|row| row.seq).filter(|_| count > rows.len() as u64) else { continue };
            let newest = ListQuery { state: None, limit: 1, ..first(name, state) };
            let Some(newest) = store.list(&newest).await?.pop() else { continue };
            let page = |after| {
                let query = ListQuery { after: Some(after), ..first(name, state) };
                async move { store.list(&query).await }
            };
            rows.extend(last(seen, newest.seq, page).await?);
        }
        let is_known =
            |key: &&Key| self.dead.iter().chain(&self.retrying).any(|it| it.event.key.as_ref() == Some(*key));
        let mut keys = self.blocked.iter().filter_map(|it| it.event.key.as_ref());
        let key = keys.find(|key| !is_known(key)).cloned();
        let states = [(State::Dead, stats.dead, &mut self.dead), (State::Retrying, stats.retrying, &mut self.retrying)];
        for (state, count, rows) in states {
            if key.is_some() && count > rows.len() as u64 && count <= SEARCH_MAX {
                let which = Criteria { key: key.clone(), ..Criteria::default() };
                rows.extend(store.list(&ListQuery { which, limit: 1, ..first(name, state) }).await?);
            }
        }
        Ok(())
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
        "some of its events could not be read within {STATS_WAIT:?}, so a cause may be missing here; a busy database \
         takes long: run it again, or look at them with `postbox list`"
    );
    Error::new(ErrorKind::Unavailable, "list", "events_unread", text)
}

/// Whether a relay drives the lane. After a rename or a change of lanes the former lease still
/// runs, but nobody owns it.
pub(super) fn is_driven(lane: &LaneInfo) -> bool {
    lane.lease_left.is_some() && lane.owner.is_some()
}

async fn list(store: &dyn Inspect, name: &SubscriptionName, state: State, count: u64) -> Result<Vec<Record>> {
    if count > 0 { store.list(&first(name, state)).await } else { Ok(Vec::new()) }
}

/// The first rows of a state, without payloads: no finding shows one, and to read large ones takes
/// longer than the doctor waits.
fn first(name: &SubscriptionName, state: State) -> ListQuery {
    ListQuery {
        subscription: name.clone(),
        state: Some(state),
        which: Criteria::default(),
        code: None,
        headers: Headers::new(),
        after: None,
        limit: LOOK,
        payloads: false,
    }
}

/// Returns the last page of rows after `seen`, by halving what is left up to `end`, the newest
/// event of the log. So the number of pages grows with the logarithm of that. Each is read by an
/// index.
async fn last<F: Future<Output = Result<Vec<Record>>>>(
    mut seen: Seq,
    mut end: Seq,
    page: impl Fn(Seq) -> F,
) -> Result<Vec<Record>> {
    let mut last = Vec::new();
    while seen < end {
        let middle = Seq(seen.0 + (end.0 - seen.0) / 2);
        let rows = page(middle).await?;
        match rows.last() {
            None => end = middle,
            Some(row) => {
                // A page that is not full has the last row.
                seen = if rows.len() < LOOK { end } else { row.seq };
                last = rows;
            }
        }
    }
    Ok(last)
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
    use std::cell::Cell;
    use std::future::ready;

    use jiff::Timestamp;
    use postbox_core::{Headers, NewEvent};

    use super::*;

    fn row(seq: i64) -> Record {
        let id = "01a1fe73-bd35-7fca-ae4b-4c8c83280000".parse().expect("an id");
        Record {
            event: NewEvent::json("order.placed", "{}").into_event(id, Timestamp::UNIX_EPOCH),
            seq: Seq(seq),
            state: State::Dead,
            attempts: 1,
            replays: 0,
            due_at: None,
            code: None,
            error: None,
            updated_at: None,
            last_attempts: Vec::new(),
        }
    }

    /// What is found of these rows after the first, if the log ends at `end`.
    async fn last_of(rows: Vec<i64>, end: i64) -> Vec<i64> {
        let asked = Cell::new(0);
        let page = |after: Seq| {
            asked.set(asked.get() + 1);
            let later = rows.iter().filter(|seq| **seq > after.0).take(LOOK);
            ready(Ok(later.map(|seq| row(*seq)).collect()))
        };
        let found = last(Seq(rows[LOOK - 1]), Seq(end), page).await.expect("read");
        assert!(asked.get() <= 64, "{} pages", asked.get());
        found.iter().map(|row| row.seq.0).collect()
    }

    #[tokio::test]
    async fn the_last_row_is_found_wherever_it_is_in_the_log() {
        for (rows, end) in [(21, 21), (22, 1_000_000), (80, 80), (80, 81), (5_000, 5_000), (5_000, i64::MAX)] {
            let found = last_of((1..=rows).collect(), end).await;
            assert_eq!(found.last(), Some(&rows), "{rows} rows of {end}: {found:?}");
            assert!(found.len() <= LOOK && found[0] > LOOK as i64, "{found:?}");
        }
        let alone = (1..=25).chain([1_000_000]).collect();
        assert_eq!(last_of(alone, 2_000_000).await, [1_000_000]);
        assert!(last_of((1..=20).collect(), 1_000).await.is_empty(), "retried meanwhile");
    }

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
