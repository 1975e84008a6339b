//! Settling: the position and every delivery row in one step.

use std::borrow::Cow;
use std::collections::HashSet;

use jiff::Timestamp;
use postbox_core::kit::{Due, RowAfter, note_attempt, window_undone};
use postbox_core::{Disposition, Key, Result, Settlement, State as EventState};

use crate::client::Position;
use crate::state::{DeliveryRow, LogState, Reader, wants};

/// A settlement on its way to the server.
pub(crate) struct Write {
    pub(crate) place: Option<Place>,
    pub(crate) entries: Vec<EntryWrite>,
    hold_keys: bool,
}

/// The move of the position by a settlement.
pub(crate) struct Place {
    /// The window, the settled position and the filter's revision that the client knows. `None` if
    /// it knows no window, so the store must have undone it.
    known: Option<(u64, i64, usize)>,
    pub(crate) position: i64,
}

pub(crate) struct EntryWrite {
    seq: i64,
    key: Option<Key>,
    attempts: u32,
    replays: u32,
    disposition: Disposition,
}

impl Write {
    pub(crate) fn of(settlement: &Settlement<'_>, at: Option<&Position>) -> Self {
        let place = settlement.position.map(|position| Place {
            known: at.map(|at| (at.window, at.settled, at.revision)),
            // Never past what was returned.
            position: at.map_or(position.0, |at| position.0.min(at.read)),
        });
        let entries = settlement.entries.iter().map(|entry| EntryWrite {
            seq: entry.delivery.seq.0,
            key: entry.delivery.event.key.clone(),
            attempts: entry.delivery.attempt - 1,
            replays: entry.delivery.replay,
            disposition: entry.disposition.clone(),
        });
        Self { place, entries: entries.collect(), hold_keys: settlement.hold_keys }
    }
}

impl EntryWrite {
    /// Returns whether this entry belongs to the row in its present state. A person's decision
    /// stands: discarded stays discarded, dead is left only by a replay. Another attempt or replay
    /// makes it a different row.
    fn is_of(&self, row: &DeliveryRow) -> bool {
        row.state.may_become(EventState::Dispatched) && (row.attempts, row.replays) == (self.attempts, self.replays)
    }
}

impl Reader {
    /// Returns whether an earlier call whose answer was lost did this, or one of the due rows in
    /// `handled`, or what comes first of its key, has changed since it was read. The handlers'
    /// effects must then not count.
    pub(crate) fn was_settled(&self, lane: u16, write: &Write, handled: &HashSet<i64>) -> bool {
        let seqs: HashSet<i64> = write.entries.iter().map(|entry| entry.seq).collect();
        let in_turn =
            |row: &DeliveryRow| row.held_key().is_none_or(|key| self.head(key).is_some_and(|it| seqs.contains(&it)));
        let as_read = |entry: &EntryWrite| self.delivery(entry.seq).is_some_and(|row| entry.is_of(row) && in_turn(row));
        match &write.place {
            Some(place) => place.position <= self.lanes[usize::from(lane)].settled,
            None => !write.entries.iter().filter(|entry| handled.contains(&entry.seq)).all(as_read),
        }
    }

    /// Writes a settlement under a lease that was checked, wholly or not at all.
    pub(crate) fn settle(&mut self, log: &LogState, lane: u16, write: &Write, now: Timestamp) -> Result<()> {
        let of_lane = &mut self.lanes[usize::from(lane)];
        let before = of_lane.settled;
        if let Some(Place { known, position }) = &write.place {
            // After the store went back to an earlier state, the same number could pass events of
            // another window, rows that are gone, or events that only its present filter wants.
            let Some((_, settled, revision)) = known.filter(|(to, ..)| *to == of_lane.to) else {
                return Err(window_undone("settle"));
            };
            if *position <= before {
                // This very settlement was written, and its answer was lost. Its rows may have been
                // dealt with since.
                return Ok(());
            }
            if (settled, revision) != (before, of_lane.revision) {
                return Err(window_undone("settle"));
            }
            of_lane.settled = *position;
        }
        let (end, window) = (of_lane.settled, of_lane.from + 1..=of_lane.to);
        // The filter that they were read by; the subscription's may have changed since.
        let filter = self.filters[of_lane.revision].as_ref();
        let in_stream = |seq: i64| before < seq && seq <= end;
        let passed = log.rows.range(before + 1..end + 1).filter(|(_, row)| {
            let event = &row.event;
            row.commit.is_some_and(|commit| window.contains(&commit))
                && self.lane_of(event) == lane
                && filter.is_some_and(|filter| wants(filter, event))
        });
        let excepted = write.entries.iter().filter(|it| in_stream(it.seq) && it.disposition != Disposition::Delivered);
        self.delivered += passed.count().saturating_sub(excepted.count()) as u64;
        for entry in &write.entries {
            self.settle_entry(lane, entry, in_stream(entry.seq), write.hold_keys, now);
        }
        // Only now is it known which events are still ahead of others.
        for key in write.entries.iter().filter_map(|entry| entry.key.as_ref()) {
            self.release_head(key, now);
        }
        Ok(())
    }

    /// `streams`: the event comes from the part of the stream that this settlement passes.
    fn settle_entry(&mut self, lane: u16, entry: &EntryWrite, streams: bool, ordered: bool, now: Timestamp) {
        let row = match self.delivery(entry.seq) {
            Some(row) if !entry.is_of(row) => return,
            Some(row) => row.clone(),
            // No row: either fresh from the stream, or a due row that vanished meanwhile.
            None if streams => DeliveryRow { replays: entry.replays, ..DeliveryRow::new(lane, entry.key.clone(), now) },
            None => return,
        };
        let row = DeliveryRow { ordered, updated_at: now, ..row };
        match RowAfter::of(&entry.disposition, row.attempts, ordered && row.key.is_some()) {
            Some(after) => self.put(entry.seq, written(row, after, now)),
            None => self.delivered += u64::from(self.take(entry.seq).is_some()),
        }
    }
}

/// Returns the row after a disposition.
fn written(mut row: DeliveryRow, after: RowAfter<'_>, now: Timestamp) -> DeliveryRow {
    let due_at = match after.due {
        Due::Never => None,
        Due::After(wait) => Some(now.checked_add(wait).unwrap_or(Timestamp::MAX)),
        Due::At(at) => Some(at),
    };
    note_attempt(&mut row.last_attempts, &after, now, due_at);
    DeliveryRow {
        state: after.state,
        attempts: after.attempts,
        halt: after.halt,
        due_at,
        code: after.code.map(str::to_owned).or(row.code),
        error: after.error.map(Cow::into_owned).or(row.error),
        ..row
    }
}
