//! The life of a subscription: rename, reset, change of lanes, removal.

use jiff::Timestamp;
use postbox_core::kit::{
    LOOK_EVENTS_MAX, lane_of, lanes_apart, lanes_held, subscription_changed, subscription_exists, subscription_unknown,
};
use postbox_core::limits::LANES_APART_MAX;
use postbox_core::{Event, Filter, Ordering, ResetPlan, ResetTo, Result, State as EventState, SubscriptionName};

use crate::Server;
use crate::state::{Data, DeliveryRow, Lane, LogState, Passage, Reader, State, lane_of_event};

impl Server {
    pub(crate) fn rename(&self, name: &SubscriptionName, generation: i64, to: &SubscriptionName) -> Result<()> {
        let mut state = self.state("rename")?;
        match state.data.readers.get(to) {
            Some(known) if known.generation == generation && name != to => return Ok(()),
            Some(_) => return Err(subscription_exists(to)),
            None => {}
        }
        let mut reader = state.data.take_reader("rename", name, generation)?;
        reader.subscription.name = to.clone();
        reader.alive_until.clear();
        reader.lanes.iter_mut().for_each(Lane::fence);
        state.data.readers.insert(to.clone(), reader);
        State::flush_and_wake(state);
        Ok(())
    }

    pub(crate) fn remove(&self, name: &SubscriptionName, generation: i64) -> Result<()> {
        let mut state = self.state("remove")?;
        let reader = state.data.take_reader("remove", name, generation)?;
        let log = state.data.logs.get_mut(&reader.subscription.log).expect("a subscription's log is never removed");
        // Events it wanted were not unrouted, though nobody takes them now.
        if reader.takes_everything(log.routed) {
            log.routed = log.commit_last;
        }
        State::flush_and_wake(state);
        Ok(())
    }

    pub(crate) fn reset(&self, name: &SubscriptionName, to: ResetTo, stamp: Option<&str>) -> Result<ResetPlan> {
        let monotonic = self.clock.monotonic();
        let mut state = self.state("reset")?;
        let (reader, log) = state.data.reader_mut("reset", name)?;
        let place = place_of(log, to);
        let plan = reader.plan(log, place);
        let Some(stamp) = stamp else { return Ok(plan) };
        if reader.lanes.iter().any(|lane| !lane.is_free(monotonic)) {
            return Err(lanes_held(name));
        }
        if stamp != plan.stamp {
            return Err(subscription_changed("reset", name));
        }
        reader.reset(log, place);
        State::flush_and_wake(state);
        Ok(plan)
    }

    pub(crate) fn set_lanes(&self, name: &SubscriptionName, lanes: u16) -> Result<()> {
        let now = self.clock.now();
        let mut state = self.state("set_lanes")?;
        let (reader, log) = state.data.reader_mut("set_lanes", name)?;
        if reader.lane_count() != lanes {
            reader.set_lanes(log, lanes, now)?;
            State::flush_and_wake(state);
        }
        Ok(())
    }
}

/// Returns the last position that counts as passed after a reset.
fn place_of(log: &LogState, to: ResetTo) -> i64 {
    match to {
        ResetTo::Beginning => 0,
        ResetTo::Now => i64::MAX,
        ResetTo::Seq(seq) => seq.0.saturating_sub(1).max(0),
        ResetTo::Time(time) => {
            let mut later = log.committed().filter(|(_, _, event)| event.created_at >= time);
            later.next().map_or(i64::MAX, |(seq, _, _)| seq - 1)
        }
    }
}

impl Data {
    /// Removes a subscription if it is the one that was looked at. None of its leases counts again.
    fn take_reader(&mut self, operation: &'static str, name: &SubscriptionName, generation: i64) -> Result<Reader> {
        let known = self.readers.get(name).ok_or_else(|| {
            let names: Vec<String> = self.readers.keys().map(SubscriptionName::to_string).collect();
            subscription_unknown(operation, name, &names)
        })?;
        if known.generation != generation {
            return Err(subscription_changed(operation, name));
        }
        let epoch = known.lanes.iter().map(|lane| lane.epoch + 1).max().unwrap_or_default();
        self.epoch_next = self.epoch_next.max(epoch);
        Ok(self.readers.remove(name).expect("looked up above"))
    }
}

impl Lane {
    /// Invalidates every lease of the lane. Nobody gets it before the last one would have ended,
    /// because its holder does not know.
    fn fence(&mut self) {
        self.epoch += 1;
        self.owner = None;
    }
}

impl Reader {
    fn takes_everything(&self, beyond: u64) -> bool {
        let is_behind = |lane: &Lane| lane.revision != self.revision() && lane.to > beyond;
        self.subscription.filter == Filter::default()
            && self.passages.iter().all(|it| it.to <= beyond)
            && !self.lanes.iter().any(is_behind)
    }

    /// Returns the effect of a reset to after `place`.
    fn plan(&self, log: &LogState, place: i64) -> ResetPlan {
        let is_meant = |(seq, _, event): &(i64, u64, &Event)| {
            self.wants(event) && self.delivery(*seq).is_none_or(|row| row.state != EventState::Discarded)
        };
        let (again, skipped): (Vec<_>, Vec<_>) = log
            .committed()
            .filter(is_meant)
            .filter(|(seq, commit, event)| (*seq > place) == self.has_passed(*seq, *commit, event))
            .partition(|(seq, _, _)| *seq > place);
        let epochs: Vec<String> = self.lanes.iter().map(|lane| lane.epoch.to_string()).collect();
        let (again, skipped) = (again.len() as u64, skipped.len() as u64);
        let most = LOOK_EVENTS_MAX + 1;
        ResetPlan {
            again: again.min(most),
            skipped: skipped.min(most),
            is_estimate: again.max(skipped) >= most,
            stamp: epochs.join(","),
        }
    }

    /// Resets to after `place`. Events that thereby become passed are passed by an extra filter
    /// that wants nothing. Events no longer passed count as never passed.
    fn reset(&mut self, log: &LogState, place: i64) {
        let (lanes, commit_last) = (self.lane_count(), log.commit_last);
        // A person marked them dead, and may retry what is skipped here.
        let marked: Vec<i64> = log
            .committed()
            .filter(|(seq, commit, event)| *seq <= place && !self.has_passed(*seq, *commit, event))
            .map(|(seq, _, _)| seq)
            .filter(|seq| self.delivery(*seq).is_some_and(|row| row.state != EventState::Discarded))
            .collect();
        self.sent.extend(marked);
        let before: Vec<Passage> = self.lanes.iter().zip(0..).map(|(lane, nth)| lane.passage(lanes, nth)).collect();
        self.passages.extend(before);
        for passage in &mut self.passages {
            passage.seq_max = passage.seq_max.min(place);
        }
        let (from, settled) = if place == i64::MAX { (commit_last, 0) } else { (0, place) };
        self.filters.extend([None, Some(self.subscription.filter.clone())]);
        let revision = self.revision();
        for (lane, nth) in self.lanes.iter_mut().zip(0..) {
            *lane = Lane {
                epoch: lane.epoch + 1,
                from,
                to: commit_last,
                settled,
                revision: revision - 1,
                ..Lane::default()
            };
            self.passages.push(lane.passage(lanes, nth));
            lane.revision = revision;
        }
        let read_again: Vec<i64> = self
            .deliveries()
            .filter(|(seq, row)| *seq > place && row.state != EventState::Discarded && log.rows.contains_key(seq))
            .map(|(seq, _)| seq)
            .collect();
        read_again.into_iter().for_each(|seq| _ = self.take(seq));
        self.sent.retain(|seq| *seq <= place);
        if let Some((last, _, _)) = log.committed().last().filter(|(last, _, _)| *last > place) {
            self.replays += 1;
            self.again = (last, self.replays);
        }
    }

    /// Changes the number of lanes. All new lanes begin where the furthest of the former ones is,
    /// or beyond. Events up to there that another lane had still to read leave the stream.
    fn set_lanes(&mut self, log: &LogState, lanes: u16, now: Timestamp) -> Result<()> {
        let of = |value: fn(&Lane) -> i64| self.lanes.iter().map(value).max().unwrap_or_default();
        let commit = |value: fn(&Lane) -> u64| self.lanes.iter().map(value).max().unwrap_or_default();
        let begin = Lane {
            epoch: of(|lane| lane.epoch) + 1,
            lease_until: self.lanes.iter().filter_map(|lane| lane.lease_until).max(),
            from: commit(|lane| lane.from),
            to: commit(|lane| lane.to),
            settled: of(|lane| lane.settled),
            revision: self.revision(),
            ..Lane::default()
        };
        let is_left = |(seq, commit, event): &(i64, u64, &Event)| {
            begin.has_passed(*seq, *commit)
                && !self.has_passed(*seq, *commit, event)
                && self.wants(event)
                && self.delivery(*seq).is_none()
        };
        let left: Vec<(i64, DeliveryRow)> = log
            .committed()
            .filter(is_left)
            .take(LANES_APART_MAX + 1)
            .map(|(seq, _, event)| (seq, self.row_left(seq, event, now)))
            .collect();
        if left.len() > LANES_APART_MAX {
            return Err(lanes_apart(&self.subscription.name));
        }
        (0..self.lane_count()).for_each(|lane| self.take_filter(lane));
        left.into_iter().for_each(|(seq, row)| self.put(seq, row));
        self.subscription.lanes = Some(lanes);
        self.lanes = vec![begin; usize::from(lanes)];
        let rows: Vec<(i64, DeliveryRow)> = self.deliveries().map(|(seq, row)| (seq, row.clone())).collect();
        for (seq, row) in rows {
            let lane = match (log.rows.get(&seq), &row.key) {
                (Some(found), _) => lane_of_event(&found.event, lanes),
                (None, Some(key)) => lane_of(key.as_str().as_bytes(), lanes),
                (None, None) => row.lane % lanes,
            };
            self.put(seq, DeliveryRow { lane, ..row });
        }
        Ok(())
    }

    /// Returns the row of an event that leaves the stream without a failure: due now, or at its
    /// delivery time.
    pub(crate) fn row_left(&self, seq: i64, event: &Event, now: Timestamp) -> DeliveryRow {
        let (state, due_at) = match event.deliver_at {
            Some(at) if at > now => (EventState::Scheduled, at),
            _ => (EventState::Retrying, now),
        };
        let ordered = self.subscription.ordering == Ordering::Key;
        let replays = self.replay_of(seq);
        let row = DeliveryRow::new(self.lane_of(event), event.key.clone(), now);
        DeliveryRow { state, due_at: Some(due_at), ordered, replays, ..row }
    }
}
