//! Reading: the lane's window, and the delivery rows whose time has come.

use std::ops::Bound::{Excluded, Included};
use std::time::Duration;

use jiff::Timestamp;

use super::state::{LogState, Reader};
use crate::batch::{Batch, BatchLimit, Delivery, Unreadable};
use crate::event::{Event, Seq};
use crate::kit::{BatchLimiter, DueOrder};
use crate::state::State as EventState;

/// What one read of a window gave.
pub(super) struct Page {
    pub(super) batch: Batch,
    /// How far it read, if it gave anything.
    pub(super) end: Option<i64>,
    /// The last commit of the window it read.
    pub(super) window: u64,
    /// Which changes it has seen.
    pub(super) wakeups: u64,
}

impl Reader {
    /// Reads on in the lane's window, the rows with `from < commit <= to`. Empty when nothing
    /// wanted is left in it.
    pub(super) fn page(
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
            if self.delivery(*seq).is_some_and(|row| row.state == EventState::Discarded) {
                batch.discarded.insert(Seq(*seq));
            }
            let replay = self.replay_of(*seq);
            batch.push(Delivery { event: event.clone(), seq: Seq(*seq), attempt: 1, replay }, None);
            batch.end = Some(Seq(*seq));
        }
        // The last batch of a window also covers what nobody wants behind it.
        if batch.end.is_some() && !batch.more {
            batch.end = Some(Seq(high));
        }
        batch
    }

    /// Rows whose time has come, in `seq` order; of each key the head and the events behind it,
    /// never with a gap.
    pub(super) fn due(&self, log: &LogState, lane: u16, limit: BatchLimit, now: Timestamp) -> Batch {
        let mut batch = Batch { due_in: self.due_in(lane, now), ..Batch::default() };
        let mut limiter = BatchLimiter::new(limit);
        let mut order = DueOrder::default();
        for (seq, row) in self.deliveries().filter(|(_, row)| row.lane == lane) {
            let waits = matches!(row.state, EventState::Scheduled | EventState::Retrying);
            let is_first = row.held_key().is_none_or(|key| self.head(key) == Some(seq));
            let goes_first = waits && is_first && row.is_due(now);
            let may_follow = row.state == EventState::Blocked || (waits && row.is_due(now));
            if !order.admits(row.held_key(), goes_first, may_follow) {
                continue;
            }
            let (attempt, replay) = (row.attempts + 1, row.replays);
            let placeholder = Delivery::placeholder(Seq(seq));
            let (event, unreadable) = match log.rows.get(&seq) {
                Some(found) => (found.event.clone(), None),
                None => (Event { key: row.key.clone(), ..placeholder.event }, Some(Unreadable::missing())),
            };
            if !limiter.take(event.payload.len()) {
                break;
            }
            batch.push(Delivery { event, seq: Seq(seq), attempt, replay }, unreadable);
        }
        batch
    }

    /// How long until the first row of the lane is due.
    pub(super) fn due_in(&self, lane: u16, now: Timestamp) -> Option<Duration> {
        self.deliveries()
            .filter(|(_, row)| row.lane == lane && matches!(row.state, EventState::Retrying | EventState::Scheduled))
            .filter(|(seq, row)| row.held_key().is_none_or(|key| self.head(key) == Some(*seq)))
            .filter_map(|(_, row)| row.due_at)
            .min()
            .map(|at| Duration::try_from(at.duration_since(now)).unwrap_or_default())
    }
}
