//! Settling: the position and every delivery row in one step.

use jiff::Timestamp;

use super::state::{DeliveryRow, Reader};
use crate::batch::{Disposition, Entry, Settlement};
use crate::limits::ERROR_BYTES_MAX;
use crate::state::State as EventState;

impl Reader {
    /// Writes a settlement under a lease that was checked. Nothing in here can fail half-way.
    pub(super) fn settle(&mut self, lane: u16, settlement: &Settlement<'_>, now: Timestamp) {
        for entry in &settlement.entries {
            self.settle_entry(lane, entry, settlement, now);
        }
        let of_lane = &mut self.lanes[usize::from(lane)];
        if let Some(position) = settlement.position {
            // Never back, and never over what was not given.
            of_lane.settled = of_lane.settled.max(position.0.min(of_lane.read));
        }
        if settlement.rewind {
            of_lane.read = of_lane.settled;
        }
        // Only now is it known who is still ahead of whom.
        for key in settlement.entries.iter().filter_map(|entry| entry.delivery.event.key.as_ref()) {
            self.release_head(key, now);
        }
    }

    fn settle_entry(&mut self, lane: u16, entry: &Entry<'_>, settlement: &Settlement<'_>, now: Timestamp) {
        let seq = entry.delivery.seq.0;
        let row = match self.delivery(seq) {
            // A person's word stands: discarded stays discarded, dead is left only by a replay.
            Some(row) if !row.state.may_become(EventState::Dispatched) => return,
            Some(row) => row.clone(),
            // No row: either fresh from the stream, or a due row that vanished meanwhile.
            None if self.is_streaming(lane, seq, settlement) => {
                DeliveryRow::new(lane, entry.delivery.event.key.clone(), now)
            }
            None => return,
        };
        let row = DeliveryRow { ordered: settlement.hold_keys, updated_at: now, ..row };
        match written(row, &entry.disposition, now) {
            Some(row) => self.put(seq, row),
            None => _ = self.take(seq),
        }
    }

    /// Whether an event comes from the piece of the stream that this settlement moves over.
    fn is_streaming(&self, lane: u16, seq: i64, settlement: &Settlement<'_>) -> bool {
        let of_lane = &self.lanes[usize::from(lane)];
        let end = settlement.position.map_or(0, |position| position.0).min(of_lane.read);
        of_lane.settled < seq && seq <= end && of_lane.window.binary_search(&seq).is_ok()
    }
}

/// The row after its disposition; `None` when the event is done with.
fn written(row: DeliveryRow, disposition: &Disposition, now: Timestamp) -> Option<DeliveryRow> {
    match disposition {
        Disposition::Delivered | Disposition::Discarded => None,
        Disposition::Retry { after, counted, code, error } => Some(DeliveryRow {
            state: EventState::Retrying,
            attempts: row.attempts + u32::from(*counted),
            due_at: Some(now.checked_add(*after).unwrap_or(Timestamp::MAX)),
            code: Some(code.to_string()),
            error: Some(cut(error)),
            ..row
        }),
        // Without order there is nothing to wait for. With it, `release_head` decides once all entries are written.
        Disposition::Block if row.key.is_none() || !row.ordered => {
            Some(DeliveryRow { state: EventState::Retrying, due_at: Some(now), ..row })
        }
        Disposition::Block => Some(DeliveryRow { state: EventState::Blocked, due_at: None, ..row }),
        Disposition::Schedule { at } => Some(DeliveryRow { state: EventState::Scheduled, due_at: Some(*at), ..row }),
        Disposition::Dead { code, error, halt } => Some(DeliveryRow {
            state: EventState::Dead,
            halt: *halt,
            attempts: row.attempts + 1,
            due_at: None,
            code: Some(code.to_string()),
            error: Some(cut(error)),
            ..row
        }),
    }
}

/// An error text within its limit, cut between characters.
fn cut(error: &str) -> String {
    error[..error.floor_char_boundary(ERROR_BYTES_MAX)].to_owned()
}
