//! What an operator sees and steers.

use std::collections::{HashMap, HashSet};
use std::task::Waker;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use super::MemoryStore;
use super::state::{DeliveryRow, LogState, Reader, State};
use crate::error::Result;
use crate::event::{Event, EventId, Seq};
use crate::inspect::{
    Changed, Inspect, LaneInfo, ListQuery, Pause, Record, Selection, Stats, SubscriptionInfo, TopicStats,
};
use crate::names::{LogName, SubscriptionName};
use crate::receive::Conflict;
use crate::state::State as EventState;

/// Events deleted per call of `prune`: the bounded step the contract asks for.
const PRUNE_EVENTS_MAX: usize = 1_000;
/// Topics listed in [`Stats`], as its contract says.
const STATS_TOPICS_MAX: usize = 100;

#[async_trait]
impl Inspect for MemoryStore {
    async fn subscriptions(&self) -> Result<Vec<SubscriptionInfo>> {
        let (now, monotonic) = (self.clock().now(), self.clock().monotonic());
        let state = self.state("subscriptions")?;
        Ok(state.readers.values().map(|reader| reader.info(now, monotonic)).collect())
    }

    async fn stats(&self, subscription: &SubscriptionName) -> Result<Stats> {
        let now = self.clock().now();
        let mut state = self.state("stats")?;
        let (reader, log) = state.reader_mut("stats", subscription)?;
        Ok(reader.stats(log, now))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<Record>> {
        let mut state = self.state("list")?;
        let (reader, log) = state.reader_mut("list", &query.subscription)?;
        let after = query.after.map_or(0, |seq| seq.0);
        let records = log
            .committed()
            .filter(|(seq, _, _)| *seq > after)
            .filter(|(seq, _, event)| reader.wants(event) || reader.delivery(*seq).is_some())
            .filter(|(_, _, event)| query.topic.as_ref().is_none_or(|topic| topic.matches(event.topic.as_str())))
            .map(|(seq, commit, event)| reader.record(seq, commit, event))
            .filter(|record| record.state == query.state)
            .filter(|record| query.code.is_none() || record.code == query.code);
        Ok(records.take(query.limit.max(1)).collect())
    }

    async fn get(&self, subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>> {
        let mut state = self.state("get")?;
        let (reader, log) = state.reader_mut("get", subscription)?;
        let found = log.ids.get(&id).and_then(|seq| Some((*seq, log.rows.get(seq)?)));
        Ok(found.and_then(|(seq, row)| Some(reader.record(seq, row.commit?, &row.event))))
    }

    async fn conflicts(&self, limit: usize) -> Result<Vec<Conflict>> {
        Ok(self.state("conflicts")?.inbox.conflicts(limit))
    }

    async fn requeue(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        selection.validate("requeue")?;
        let now = self.clock().now();
        let mut state = self.state("requeue")?;
        let (reader, log) = state.reader_mut("requeue", subscription)?;
        let mut chosen = reader.select(log, selection, |row| match row.state {
            EventState::Dead => true,
            EventState::Retrying => !row.is_due(now),
            _ => false,
        });
        let changed = cut_to_step(&mut chosen, selection);
        for (seq, row) in &chosen {
            let due = DeliveryRow { due_at: Some(now), updated_at: now, ..row.clone() };
            let row = match row.state {
                EventState::Dead => DeliveryRow {
                    state: EventState::Retrying,
                    halt: false,
                    attempts: 0,
                    replays: row.replays + 1,
                    ..due
                },
                _ => due,
            };
            reader.put(*seq, row);
        }
        let wakers = state.stir();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        Ok(changed)
    }

    async fn discard(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        selection.validate("discard")?;
        let now = self.clock().now();
        let mut state = self.state("discard")?;
        let (reader, log) = state.reader_mut("discard", subscription)?;
        let mut chosen = reader.select(log, selection, |row| row.state.may_become(EventState::Discarded));
        chosen.extend(reader.select_pending(log, selection, now));
        chosen.sort_by_key(|(seq, _)| *seq);
        let changed = cut_to_step(&mut chosen, selection);
        for (seq, row) in &chosen {
            let row = DeliveryRow { state: EventState::Discarded, due_at: None, updated_at: now, ..row.clone() };
            let key = row.key.clone();
            reader.put(*seq, row);
            if let Some(key) = key {
                reader.release_head(&key, now);
            }
        }
        let wakers = state.stir();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        Ok(changed)
    }

    async fn prune(&self, log: &LogName, older_than: Duration) -> Result<u64> {
        let now = self.clock().now();
        let oldest_kept = now.checked_sub(older_than).unwrap_or(Timestamp::MIN);
        let mut state = self.state("prune")?;
        let of_log = state.log("prune", log)?;
        let readers: Vec<&Reader> = state.readers.values().filter(|reader| reader.subscription.log == *log).collect();
        if readers.is_empty() {
            return Ok(0);
        }
        let gone: Vec<i64> = of_log
            .committed()
            .filter(|(_, _, event)| event.created_at <= oldest_kept)
            .filter(|(seq, commit, event)| readers.iter().all(|reader| reader.is_done_with(*seq, *commit, event)))
            .map(|(seq, _, _)| seq)
            .take(PRUNE_EVENTS_MAX)
            .collect();
        for seq in &gone {
            for reader in state.readers.values_mut().filter(|reader| reader.subscription.log == *log) {
                reader.take(*seq);
            }
            state.logs.get_mut(log).expect("looked up above").remove(*seq);
        }
        Ok(gone.len() as u64)
    }

    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
        let mut state = self.state("pause")?;
        state.reader_mut("pause", subscription)?.0.pause = pause.cloned();
        Ok(())
    }
}

/// Cuts what was chosen, oldest first, to one step.
fn cut_to_step(chosen: &mut Vec<(i64, DeliveryRow)>, selection: &Selection) -> Changed {
    let all = chosen.len();
    chosen.truncate(selection.step_max());
    let next = chosen.last().filter(|_| chosen.len() < all).map(|(seq, _)| Seq(*seq));
    Changed { count: chosen.len() as u64, next }
}

impl State {
    /// A log with events that a subscription has still to deliver, or that nobody reads.
    pub(super) fn undelivered(&self, now: Timestamp) -> Option<&LogName> {
        let is_pending = |(name, log): &(&LogName, &LogState)| {
            let mut readers = self.readers.values().filter(|reader| reader.subscription.log == **name).peekable();
            match readers.peek() {
                Some(_) => readers.any(|reader| reader.stats(log, now).pending > 0),
                None => log.committed().next().is_some(),
            }
        };
        self.logs.iter().find(is_pending).map(|(name, _)| name)
    }
}

impl Reader {
    fn info(&self, now: Timestamp, monotonic: Duration) -> SubscriptionInfo {
        let lanes = self.lanes.iter().zip(0..).map(|(lane, number)| LaneInfo {
            lane: number,
            epoch: lane.epoch,
            owner: lane.owner.clone(),
            lease_left: lane.lease_until.and_then(|until| until.checked_sub(monotonic)).filter(|left| !left.is_zero()),
        });
        SubscriptionInfo {
            name: self.subscription.name.clone(),
            log: self.subscription.log.clone(),
            filter: self.subscription.filter.clone(),
            lanes: lanes.collect(),
            paused: self.paused(now).cloned(),
        }
    }

    fn record(&self, seq: i64, commit: u64, event: &Event) -> Record {
        let row = self.delivery(seq);
        Record {
            event: event.clone(),
            seq: Seq(seq),
            state: self.state_of(seq, commit, event),
            attempts: row.map_or(0, |row| row.attempts),
            replays: row.map_or(0, |row| row.replays),
            due_at: row.and_then(|row| row.due_at),
            code: row.and_then(|row| row.code.clone()),
            error: row.and_then(|row| row.error.clone()),
            updated_at: row.map(|row| row.updated_at),
        }
    }

    fn stats(&self, log: &LogState, now: Timestamp) -> Stats {
        let mut stats = Stats::default();
        let mut topics: HashMap<&str, TopicStats> = HashMap::new();
        for (seq, commit, event) in log.committed() {
            if !self.wants(event) && self.delivery(seq).is_none() {
                continue;
            }
            let state = self.state_of(seq, commit, event);
            stats.total += 1;
            match state {
                EventState::Retrying => stats.retrying += 1,
                EventState::Blocked => stats.blocked += 1,
                EventState::Scheduled => stats.scheduled += 1,
                EventState::Dead => stats.dead += 1,
                EventState::Discarded => stats.discarded += 1,
                EventState::Dispatched => stats.dispatched += 1,
                EventState::Pending => {}
            }
            if state.counts_as_pending() {
                let age = Duration::try_from(now.duration_since(event.created_at)).unwrap_or_default();
                stats.pending += 1;
                stats.oldest_pending = stats.oldest_pending.max(Some(age));
                let topic = event.topic.as_str();
                let of_topic = topics.entry(topic).or_insert_with(|| TopicStats {
                    topic: topic.to_owned(),
                    pending: 0,
                    oldest_pending: Duration::ZERO,
                });
                of_topic.pending += 1;
                of_topic.oldest_pending = of_topic.oldest_pending.max(age);
            }
        }
        stats.topics = topics.into_values().collect();
        stats.topics.sort_by(|a, b| b.pending.cmp(&a.pending).then_with(|| a.topic.cmp(&b.topic)));
        stats.topics.truncate(STATS_TOPICS_MAX);
        stats
    }

    /// The delivery rows a person means, oldest first.
    fn select(
        &self,
        log: &LogState,
        selection: &Selection,
        wanted: impl Fn(&DeliveryRow) -> bool,
    ) -> Vec<(i64, DeliveryRow)> {
        let ids: Option<HashSet<EventId>> = selection.ids.as_ref().map(|ids| ids.iter().copied().collect());
        self.deliveries()
            .filter(|(seq, _)| selection.after.is_none_or(|after| *seq > after.0))
            .filter(|(_, row)| wanted(row))
            .filter(|(_, row)| selection.code.is_none() || row.code == selection.code)
            .filter(|(seq, _)| {
                let event = log.rows.get(seq).map(|row| &row.event);
                ids.as_ref().is_none_or(|ids| event.is_some_and(|event| ids.contains(&event.id)))
                    && selection
                        .topic
                        .as_ref()
                        .is_none_or(|topic| event.is_some_and(|event| topic.matches(event.topic.as_str())))
            })
            .map(|(seq, row)| (seq, row.clone()))
            .collect()
    }

    /// Pending events named by id, as the rows they are about to get. A code never matches what has none.
    fn select_pending(&self, log: &LogState, selection: &Selection, now: Timestamp) -> Vec<(i64, DeliveryRow)> {
        let ids: HashSet<EventId> =
            selection.ids.iter().flatten().copied().filter(|_| selection.code.is_none()).collect();
        ids.iter()
            .filter_map(|id| log.ids.get(id))
            .filter_map(|seq| Some((*seq, log.rows[seq].commit?, &log.rows[seq].event)))
            .filter(|(_, _, event)| self.wants(event))
            .filter(|(_, _, event)| selection.topic.as_ref().is_none_or(|topic| topic.matches(event.topic.as_str())))
            .filter(|(seq, commit, event)| self.state_of(*seq, *commit, event) == EventState::Pending)
            .map(|(seq, _, event)| (seq, DeliveryRow::new(self.lane_of(event), event.key.clone(), now)))
            .collect()
    }

    /// Whether this subscription has passed an event and needs it no more.
    fn is_done_with(&self, seq: i64, commit: u64, event: &Event) -> bool {
        let passed = self.lanes[usize::from(self.lane_of(event))].has_passed(seq, commit);
        passed && self.delivery(seq).is_none_or(|row| row.state == EventState::Discarded)
    }
}
