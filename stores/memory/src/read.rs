//! Reading: the lane's window, and the delivery rows that are due.

use std::ops::Bound::{Excluded, Included};
use std::time::Duration;

use jiff::Timestamp;
use postbox_core::kit::BatchLimiter;
use postbox_core::{Batch, BatchLimit, Delivery, Event, Seq, State as EventState, Unreadable};

use crate::state::{DeliveryRow, LogState, Reader};

/// The result of reading a window.
pub(crate) struct Page {
    pub(crate) batch: Batch,
    /// How far it read, if it returned anything.
    pub(crate) end: Option<i64>,
    /// The last commit of the window it read.
    pub(crate) window: u64,
    /// The revision of the filter by which it was read.
    pub(crate) revision: usize,
    /// The changes it has seen.
    pub(crate) wakeups: u64,
}

impl Reader {
    /// Continues reading in the lane's window, which is the rows with `from < commit <= to`. Empty
    /// if no wanted event is left in it.
    pub(crate) fn page(
        &self,
        log: &LogState,
        lane: u16,
        (from, to): (u64, u64),
        after: i64,
        limit: BatchLimit,
        now: Timestamp,
    ) -> Batch {
        let mut batch = Batch { due_in: self.due_in(lane, now), ..Batch::default() };
        let mut limiter = BatchLimiter::new(limit);
        let seqs = || log.commits.range((Excluded(from), Included(to))).flat_map(|(_, seqs)| seqs).copied();
        let (Some(low), Some(high)) = (seqs().min(), seqs().max()) else { return batch };
        for (seq, row) in log.rows.range(low.max(after.saturating_add(1))..).take_while(|(seq, _)| **seq <= high) {
            let event = &row.event;
            let in_window = row.commit.is_some_and(|commit| from < commit && commit <= to);
            if !in_window || self.lane_of(event) != lane || !self.wants(event) {
                continue;
            }
            if !limiter.take(event.payload.len()) {
                batch.more = true;
                break;
            }
            if let Some(key) = event.key.as_ref().filter(|key| self.is_held(key)) {
                batch.held.insert(key.clone());
            }
            if self.delivery(*seq).is_some_and(|row| matches!(row.state, EventState::Discarded | EventState::Dead)) {
                batch.discarded.insert(Seq(*seq));
            }
            let replay = self.replay_of(*seq);
            let delivery = Delivery { event: event.clone(), seq: Seq(*seq), attempt: 1, replay, trace: None };
            batch.push(delivery, None, Some(now));
            batch.end = Some(Seq(*seq));
        }
        // The last batch of a window also covers the unwanted events behind it.
        if batch.end.is_some() && !batch.more {
            batch.end = Some(Seq(high));
        }
        batch
    }

    /// Returns rows that are due, in `seq` order: of each key the head and the events behind it,
    /// never with a gap. The heads share the limit.
    pub(crate) fn due(&self, log: &LogState, lane: u16, limit: BatchLimit, now: Timestamp) -> Batch {
        let mut batch = Batch { due_in: self.due_in(lane, now), ..Batch::default() };
        let mut limiter = BatchLimiter::new(limit);
        let is_due =
            |row: &DeliveryRow| matches!(row.state, EventState::Scheduled | EventState::Retrying) && row.is_due(now);
        let is_first = |seq: i64, row: &DeliveryRow| row.held_key().is_none_or(|key| self.head(key) == Some(seq));
        let of_lane = self.deliveries().filter(|(_, row)| row.lane == lane);
        let mut heads: Vec<_> = of_lane.filter(|(seq, row)| is_due(row) && is_first(*seq, row)).collect();
        heads.sort_by_key(|(_, row)| row.due_at);
        heads.truncate(limit.events.max(1));
        let followers = (limit.events / heads.len().max(1)).saturating_sub(1);
        let mut rows = Vec::new();
        for (seq, head) in heads {
            let behind = head.held_key().into_iter().flat_map(|key| self.behind(key, seq));
            let may_follow = |row: &DeliveryRow| row.state == EventState::Blocked || is_due(row);
            rows.push((seq, head));
            rows.extend(behind.take_while(|(_, row)| may_follow(row)).take(followers));
        }
        // Those due for longest take the room first.
        let size = |seq: &i64| log.rows.get(seq).map_or(0, |found| found.event.payload.len());
        let fitting = rows.iter().take_while(|(seq, _)| limiter.take(size(seq))).count();
        rows.truncate(fitting);
        rows.sort_by_key(|(seq, _)| *seq);
        for (seq, row) in rows {
            let (attempt, replay) = (row.attempts + 1, row.replays);
            let placeholder = Delivery::placeholder(Seq(seq));
            let (event, unreadable) = match log.rows.get(&seq) {
                Some(found) => (found.event.clone(), None),
                None => (Event { key: row.key.clone(), ..placeholder.event }, Some(Unreadable::missing())),
            };
            if row.crashes > 0 {
                batch.crashes.insert(Seq(seq), row.crashes);
            }
            let delivery = Delivery { event, seq: Seq(seq), attempt, replay, trace: None };
            batch.push(delivery, unreadable, Some(now));
        }
        batch
    }

    /// Returns how long it is until the first row of the lane is due.
    pub(crate) fn due_in(&self, lane: u16, now: Timestamp) -> Option<Duration> {
        self.deliveries()
            .filter(|(_, row)| row.lane == lane && matches!(row.state, EventState::Retrying | EventState::Scheduled))
            .filter(|(seq, row)| row.held_key().is_none_or(|key| self.head(key) == Some(*seq)))
            .filter_map(|(_, row)| row.due_at)
            .min()
            .map(|at| Duration::try_from(at.duration_since(now)).unwrap_or_default())
    }
}
