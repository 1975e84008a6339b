//! What an operator can see.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::kit::{BatchLimiter, Share, StatsCounter, unrouted};
use postbox_core::limits::UNROUTED_COUNT_MAX;
use postbox_core::{
    Conflict, Count, Event, EventId, Inspect, LaneInfo, ListQuery, LogName, Record, Result, Seq, State as EventState,
    Stats, SubscriptionInfo, SubscriptionName, Unrouted,
};

use crate::MemoryStore;
use crate::state::{Data, LogState, Reader};

#[async_trait]
impl Inspect for MemoryStore {
    async fn subscriptions(&self) -> Result<Vec<SubscriptionInfo>> {
        let (now, monotonic) = (self.server.clock.now(), self.server.clock.monotonic());
        let state = self.server.state("subscriptions")?;
        Ok(state.data.readers.values().map(|reader| reader.info(now, monotonic)).collect())
    }

    async fn stats_of(&self, subscriptions: &[SubscriptionName]) -> Vec<Result<Stats>> {
        let (now, share) = (self.server.clock.now(), Share::of_one_of(subscriptions.len()));
        let counted = |name| {
            let mut state = self.server.state("stats")?;
            let (reader, log) = state.data.reader_mut("stats", name)?;
            Ok(reader.stats(log, now, share))
        };
        subscriptions.iter().map(counted).collect()
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<Record>> {
        let mut state = self.server.state("list")?;
        let (reader, log) = state.data.reader_mut("list", &query.subscription)?;
        let mut committed: Vec<_> = log.committed().collect();
        if query.state.is_none() {
            committed.reverse();
        }
        let is_next = |seq: i64| match query.state {
            Some(_) => query.after.is_none_or(|after| seq > after.0),
            None => query.after.is_none_or(|before| seq < before.0),
        };
        let records = committed
            .into_iter()
            .filter(|(seq, _, _)| is_next(*seq))
            .filter(|(_, _, event)| query.which.mean_event(Some(event)))
            .filter(|(_, _, event)| query.has_headers(event))
            .map(|(seq, commit, event)| reader.record(log, seq, commit, event))
            .filter(|record| query.state.is_none_or(|state| record.state == state))
            .filter(|record| query.code.is_none() || record.code == query.code);
        let records = records.map(|mut record| {
            if !query.payloads {
                record.event.payload.clear();
            }
            record
        });
        let mut limiter = BatchLimiter::new(query.page());
        Ok(records.take_while(|record| limiter.take(record.event.payload.len())).collect())
    }

    async fn get(&self, subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>> {
        let mut state = self.server.state("get")?;
        let (reader, log) = state.data.reader_mut("get", subscription)?;
        let found = log.ids.get(&id).and_then(|seq| Some((*seq, log.rows.get(seq)?)));
        Ok(found.and_then(|(seq, row)| Some(reader.record(log, seq, row.commit?, &row.event))))
    }

    async fn conflicts(&self, limit: usize) -> Result<Vec<Conflict>> {
        Ok(self.server.state("conflicts")?.data.inbox.conflicts(limit))
    }

    async fn logs(&self) -> Result<Vec<LogName>> {
        Ok(self.server.state("logs")?.data.logs.keys().cloned().collect())
    }

    async fn unrouted(&self, log: &LogName) -> Result<Unrouted> {
        let now = self.server.clock.now();
        let state = self.server.state("unrouted")?;
        let log = state.data.log("unrouted", log)?;
        let events = log.unrouted.iter().filter_map(|seq| log.rows.get(seq)).map(|row| &row.event);
        let age = |event: &Event| Duration::try_from(now.duration_since(event.created_at)).unwrap_or_default();
        Ok(unrouted(events.take(UNROUTED_COUNT_MAX).map(|event| (event.topic.as_str(), 1, age(event)))))
    }

    async fn count(&self, log: &LogName) -> Result<Count> {
        let events = self.server.state("count")?.data.log("count", log)?.committed().count() as u64;
        Ok(Count { events, is_estimate: false })
    }
}

impl Data {
    /// Returns a log with undelivered, dead or unrouted events or with events that nobody reads, if
    /// there is one.
    pub(crate) fn undelivered(&self, now: Timestamp) -> Option<&LogName> {
        let is_pending = |(name, log): &(&LogName, &LogState)| {
            let mut readers = self.readers.values().filter(|reader| reader.subscription.log == **name).peekable();
            match readers.peek() {
                Some(_) => {
                    let is_left = |stats: Stats| stats.pending > 0 || stats.dead > 0;
                    !log.unrouted.is_empty()
                        || readers.any(|reader| is_left(reader.stats(log, now, Share::of_one_of(1))))
                }
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
            crashes: lane.crashes_in_a_row(),
        });
        SubscriptionInfo {
            name: self.subscription.name.clone(),
            log: self.subscription.log.clone(),
            filter: self.subscription.filter.clone(),
            ordering: self.subscription.ordering,
            generation: self.generation,
            lanes: lanes.collect(),
            paused: self.paused(now).cloned(),
        }
    }

    fn record(&self, log: &LogState, seq: i64, commit: u64, event: &Event) -> Record {
        let row = self.delivery(seq);
        Record {
            event: event.clone(),
            seq: Seq(seq),
            state: self.state_of(log, seq, commit, event),
            attempts: row.map_or(0, |row| row.attempts),
            replays: row.map_or(0, |row| row.replays),
            due_at: row.and_then(|row| row.due_at),
            code: row.and_then(|row| row.code.clone()),
            error: row.and_then(|row| row.error.clone()),
            updated_at: row.map(|row| row.updated_at),
            last_attempts: row.map_or_else(Vec::new, |row| row.last_attempts.clone()),
        }
    }

    fn stats(&self, log: &LogState, now: Timestamp, share: Share) -> Stats {
        let mut counter = StatsCounter::within(share);
        counter.add(EventState::Dispatched, "", self.delivered, None);
        let waits = |since: Timestamp| Some(Duration::try_from(now.duration_since(since)).unwrap_or_default());
        for (seq, commit, event) in log.committed() {
            let state = self.state_of(log, seq, commit, event);
            let is_skipped = state == EventState::Skipped && self.has_passed(seq, commit, event);
            let is_counted = state.has_row() || state == EventState::Pending || is_skipped;
            if is_counted {
                let due = self.delivery(seq).filter(|_| state == EventState::Scheduled).and_then(|row| row.due_at);
                let since =
                    event.created_at.max(event.deliver_at.unwrap_or(Timestamp::MIN)).max(due.unwrap_or(Timestamp::MIN));
                counter.add(state, event.topic.as_str(), 1, waits(since));
            }
        }
        for (_, row) in self.deliveries().filter(|(seq, _)| !log.rows.contains_key(seq)) {
            counter.add(row.state, "", 1, waits(row.updated_at));
        }
        counter.finish()
    }
}
