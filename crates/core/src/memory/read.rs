//! Reading: the lane's window, and the delivery rows whose time has come.

use std::collections::HashSet;
use std::time::Duration;

use jiff::Timestamp;

use super::state::{LogState, Reader};
use crate::batch::{Batch, BatchLimit, Delivery, Unreadable};
use crate::event::{Event, Seq};
use crate::names::Key;
use crate::state::State as EventState;

impl Reader {
    /// The next events of the lane's window; a window that is dealt with makes room for the next one.
    pub(super) fn next_batch(&mut self, log: &LogState, lane: u16, limit: BatchLimit, now: Timestamp) -> Batch {
        let due_in = self.due_in(lane, now);
        loop {
            let batch = self.read_window(log, lane, limit);
            let of_lane = &self.lanes[usize::from(lane)];
            let unsettled = of_lane.read > of_lane.settled;
            if !batch.is_empty() || unsettled || !self.open_window(log, lane) {
                return Batch { due_in, ..batch };
            }
        }
    }

    /// Reads on in the open window. Empty when nothing wanted is left in it.
    fn read_window(&mut self, log: &LogState, lane: u16, limit: BatchLimit) -> Batch {
        let of_lane = &self.lanes[usize::from(lane)];
        let start = of_lane.window.partition_point(|seq| *seq <= of_lane.read);
        let mut batch = Batch::default();
        let mut room = Room::new(limit);
        for seq in &of_lane.window[start..] {
            let event = &log.rows[seq].event;
            if !self.wants(event) {
                continue;
            }
            if !room.take(event) {
                batch.more = true;
                break;
            }
            if let Some(key) = event.key.as_ref().filter(|key| self.is_held(key)) {
                batch.held.insert(key.clone());
            }
            if self.delivery(*seq).is_some_and(|row| row.state == EventState::Discarded) {
                batch.discarded.insert(Seq(*seq));
            }
            batch.deliveries.push(Delivery { event: event.clone(), seq: Seq(*seq), attempt: 1, replay: 0 });
            batch.end = Some(Seq(*seq));
        }
        // The last batch of a window also covers what nobody wants behind it.
        if let (Some(_), false, Some(last)) = (batch.end, batch.more, of_lane.window.last()) {
            batch.end = Some(Seq(*last));
        }
        if let Some(Seq(end)) = batch.end {
            self.lanes[usize::from(lane)].read = end;
        }
        batch
    }

    /// Opens the window of everything committed since the last one; `false` if nothing was.
    fn open_window(&mut self, log: &LogState, lane: u16) -> bool {
        let from = self.lanes[usize::from(lane)].to;
        let to = log.commit_last;
        if from == to {
            return false;
        }
        let mut window: Vec<i64> = log.commits.range(from + 1..=to).flat_map(|(_, seqs)| seqs).copied().collect();
        window.retain(|seq| self.lane_of(&log.rows[seq].event) == lane);
        window.sort_unstable();
        let of_lane = &mut self.lanes[usize::from(lane)];
        (of_lane.from, of_lane.to, of_lane.window) = (from, to, window);
        (of_lane.settled, of_lane.read) = (0, 0);
        true
    }

    /// Rows whose time has come, in `seq` order; of each key the head and the events behind it, never with a gap.
    pub(super) fn due(&self, log: &LogState, lane: u16, limit: BatchLimit, now: Timestamp) -> Batch {
        let mut batch = Batch { due_in: self.due_in(lane, now), ..Batch::default() };
        let mut room = Room::new(limit);
        // Keys of which everything so far may go.
        let mut open: HashSet<&Key> = HashSet::new();
        for (seq, row) in self.deliveries().filter(|(_, row)| row.lane == lane) {
            let ready = match (row.state, row.held_key()) {
                (EventState::Scheduled | EventState::Retrying, None) => row.is_due(now),
                (EventState::Retrying, Some(key)) if self.head(key) == Some(seq) => row.is_due(now),
                (EventState::Retrying, Some(key)) => row.is_due(now) && open.contains(key),
                (EventState::Blocked, Some(key)) => open.contains(key),
                _ => false,
            };
            match row.held_key() {
                Some(key) if ready => _ = open.insert(key),
                Some(key) => _ = open.remove(key),
                None => {}
            }
            if !ready {
                continue;
            }
            let (attempt, replay) = (row.attempts + 1, row.replays);
            let placeholder = Delivery::placeholder(Seq(seq));
            let (event, unreadable) = match log.rows.get(&seq) {
                Some(found) => (found.event.clone(), None),
                None => (Event { key: row.key.clone(), ..placeholder.event }, Some(Unreadable::missing())),
            };
            if !room.take(&event) {
                break;
            }
            batch.push(Delivery { event, seq: Seq(seq), attempt, replay }, unreadable);
        }
        batch
    }

    /// How long until the first row of the lane is due.
    fn due_in(&self, lane: u16, now: Timestamp) -> Option<Duration> {
        self.deliveries()
            .filter(|(_, row)| row.lane == lane && matches!(row.state, EventState::Retrying | EventState::Scheduled))
            .filter(|(seq, row)| row.held_key().is_none_or(|key| self.head(key) == Some(*seq)))
            .filter_map(|(_, row)| row.due_at)
            .min()
            .map(|at| Duration::try_from(at.duration_since(now)).unwrap_or_default())
    }
}

/// What still fits into a batch.
struct Room {
    events: usize,
    payload_bytes: usize,
    is_empty: bool,
}

impl Room {
    fn new(limit: BatchLimit) -> Self {
        Self { events: limit.events.max(1), payload_bytes: limit.payload_bytes, is_empty: true }
    }

    /// Takes an event if it fits; the first one always does.
    fn take(&mut self, event: &Event) -> bool {
        let fits = self.events > 0 && event.payload.len() <= self.payload_bytes;
        if !fits && !self.is_empty {
            return false;
        }
        self.events -= 1;
        self.payload_bytes = self.payload_bytes.saturating_sub(event.payload.len());
        self.is_empty = false;
        true
    }
}
