//! Settling: writes the position and every delivery row in one commit, under the lease's epoch.

use std::collections::{BTreeSet, HashSet};

use postbox_core::kit::{
    Due, RowAfter, attempts_from_json, attempts_to_json, note_attempt, settled_already, window_undone,
};
use postbox_core::{Delivery, Disposition, Entry, Key, Lease, Result, Settlement, State, SubscriptionName};
use rusqlite::{OptionalExtension, Transaction, named_params, params};

use crate::classify::Work;
use crate::clock::{micros, timestamp};
use crate::lease::{LaneRow, held};
use crate::schema::log_table;
use crate::thread::Session;
use crate::window::{Cursor, log_end};

/// Lane by primary key; takes the write lock. The epoch was checked in this transaction.
const LANE_SETTLE: &str = "UPDATE postbox_lane SET position = ?3, window_end = max(window_end, ?4), delivered = delivered + ?5 WHERE subscription = ?1 AND lane = ?2";
/// A row by primary key; no lock of its own.
const DELIVERY_FIND: &str =
    "SELECT state, attempts, replays, last_attempts, holds FROM postbox_delivery WHERE subscription = ?1 AND seq = ?2";
/// A row by primary key; takes the write lock. Code and error are kept if the new disposition has
/// none.
const DELIVERY_PUT: &str = "INSERT INTO postbox_delivery \
(subscription, seq, lane, id, topic, key, created_at, state, holds, attempts, replays, due_at, code, error, updated_at, last_attempts) \
VALUES (:subscription, :seq, :lane, :id, :topic, :key, :created_at, :state, :holds, :attempts, :replays, :due_at, :code, :error, :now, :last_attempts) \
ON CONFLICT (subscription, seq) DO UPDATE SET state = excluded.state, holds = excluded.holds, attempts = excluded.attempts, \
due_at = excluded.due_at, code = coalesce(excluded.code, code), error = coalesce(excluded.error, error), updated_at = excluded.updated_at, \
last_attempts = excluded.last_attempts";
/// A row by primary key; takes the write lock.
const DELIVERY_DELETE: &str = "DELETE FROM postbox_delivery WHERE subscription = ?1 AND seq = ?2";
macro_rules! head_of_key {
    () => {
        "SELECT min(seq) FROM postbox_delivery INDEXED BY postbox_delivery_key \
WHERE subscription = ?1 AND key = ?2 AND holds = 1"
    };
}

/// The head of a key; no lock of its own.
const DELIVERY_HEAD: &str = head_of_key!();
/// The head of a key, if it is blocked, becomes due now: what it waited for is gone. By
/// `postbox_delivery_key`; takes the write lock.
const DELIVERY_RELEASE_HEAD: &str = concat!(
    "UPDATE postbox_delivery SET state = 'retrying', due_at = ?3, updated_at = ?3 \
WHERE subscription = ?1 AND state = 'blocked' AND seq = (",
    head_of_key!(),
    ")"
);

/// A settlement that owns what another thread needs of it, without the payloads.
pub(crate) struct Owned {
    pub(crate) position: Option<i64>,
    pub(crate) hold_keys: bool,
    pub(crate) entries: Vec<OwnedEntry>,
    /// The `seq` of the events that were handed out, in order.
    given: Vec<i64>,
}

/// One event and its disposition.
pub(crate) struct OwnedEntry {
    seq: i64,
    id: String,
    topic: String,
    key: Option<Key>,
    created_at: i64,
    /// The attempts that its row was read with.
    before: u32,
    replays: u32,
    disposition: Disposition,
}

impl Owned {
    /// Takes ownership of a settlement. Limits the position to what `cursor` says was handed out
    /// under this lease. If the lease has not read yet, nothing was.
    pub(crate) fn new(operation: &'static str, settlement: Settlement<'_>, cursor: Option<Cursor>) -> Result<Self> {
        let position = match (settlement.position, &cursor) {
            (Some(position), Some(cursor)) => Some(position.0.min(cursor.read)),
            (None, _) => None,
            (Some(_), None) => return Err(window_undone(operation)),
        };
        let entries = settlement.entries.into_iter().map(OwnedEntry::from).collect();
        let given = cursor.map_or_else(Vec::new, |cursor| cursor.unsettled);
        Ok(Self { position, hold_keys: settlement.hold_keys, entries, given })
    }
}

impl From<Entry<'_>> for OwnedEntry {
    fn from(Entry { delivery, disposition }: Entry<'_>) -> Self {
        let event = &delivery.event;
        Self {
            seq: delivery.seq.0,
            id: event.id.to_string(),
            topic: event.topic.as_str().to_owned(),
            key: event.key.clone(),
            created_at: event.created_at.as_microsecond(),
            before: delivery.attempt.saturating_sub(1),
            replays: delivery.replay,
            disposition,
        }
    }
}

/// Settles in its own transaction.
pub(crate) fn settle(session: &mut Session, lease: &Lease, settlement: &Owned) -> Work<()> {
    let now = session.settings.now();
    session.transact(|tx| {
        let lane = held("settle", tx, lease, now)?;
        write(tx, lease, lane, settlement, now)
    })
}

/// Writes a settlement in a transaction that has already checked the lease.
pub(crate) fn write(tx: &Transaction<'_>, lease: &Lease, lane: LaneRow, settlement: &Owned, now: i64) -> Work<()> {
    // The position never moves back, nor beyond the window: if the file was set back to an older
    // copy while it was open, the places beyond it belong to other events.
    let position = settlement.position.unwrap_or(lane.position).min(lane.window_end).max(lane.position);
    let in_stream = |seq: i64| lane.position < seq && seq <= position;
    let mut delivered = settlement.given.iter().filter(|seq| in_stream(**seq)).count();
    for entry in &settlement.entries {
        let streaming = in_stream(entry.seq);
        let arrived = write_entry(tx, lease, entry, settlement.hold_keys, streaming, now)?;
        if !streaming {
            delivered += usize::from(arrived);
        } else if entry.disposition != Disposition::Delivered {
            delivered = delivered.saturating_sub(1);
        }
    }
    if position > lane.position || delivered > 0 {
        // This commit flushes all that is visible, so it can open the next window as well.
        let window_end = log_end(tx, &log_table(&lease.log))?;
        let row = params![lease.subscription.as_str(), lease.lane, position, window_end, delivered as i64];
        tx.prepare_cached(LANE_SETTLE)?.execute(row)?;
    }
    // Only now is it known which events are still ahead of others.
    let keys: BTreeSet<&Key> = settlement.entries.iter().filter_map(|entry| entry.key.as_ref()).collect();
    keys.into_iter().try_for_each(|key| release_head(tx, &lease.subscription, key.as_str(), now))
}

/// Makes the next row of a key due if nothing is ahead of it any more.
pub(crate) fn release_head(tx: &Transaction<'_>, subscription: &SubscriptionName, key: &str, now: i64) -> Work<()> {
    tx.prepare_cached(DELIVERY_RELEASE_HEAD)?.execute(params![subscription.as_str(), key, now])?;
    Ok(())
}

/// Refuses to apply events that an earlier call settled, whose answer was lost, and due rows that
/// are no longer as they were read or next of their key. So the work of handlers counts once, and
/// in order.
pub(crate) fn refuse_settled(
    tx: &Transaction<'_>,
    lease: &Lease,
    lane: LaneRow,
    settlement: &Owned,
    deliveries: &[Delivery],
) -> Work<()> {
    let mut settled = settlement.position.is_some_and(|position| position <= lane.position);
    if settlement.position.is_none() {
        let name = lease.subscription.as_str();
        let (mut find, mut head) = (tx.prepare_cached(DELIVERY_FIND)?, tx.prepare_cached(DELIVERY_HEAD)?);
        let run = deliveries.iter().map(|delivery| delivery.seq.0);
        let seqs: HashSet<i64> = settlement.entries.iter().map(|entry| entry.seq).chain(run).collect();
        for delivery in deliveries {
            let row = find.query_row(params![name, delivery.seq.0], found).optional()?;
            let entry = OwnedEntry::from(Entry { delivery, disposition: Disposition::Delivered });
            settled |= !row.as_ref().is_some_and(|row| row.is_as_read(&entry));
            if let Some(key) = entry.key.filter(|_| row.is_some_and(|row| row.holds)) {
                let first: Option<i64> = head.query_row(params![name, key.as_str()], |row| row.get(0))?;
                settled |= !first.is_some_and(|first| seqs.contains(&first));
            }
        }
    }
    if settled {
        return Err(settled_already().into());
    }
    Ok(())
}

/// A row as it was found.
struct Found {
    state: String,
    attempts: u32,
    replays: u32,
    last_attempts: String,
    holds: bool,
}

fn found(row: &rusqlite::Row<'_>) -> rusqlite::Result<Found> {
    Ok(Found {
        state: row.get(0)?,
        attempts: row.get(1)?,
        replays: row.get(2)?,
        last_attempts: row.get(3)?,
        holds: row.get(4)?,
    })
}

impl Found {
    /// Whether the row is as it was read: every relevant change raises one of the two numbers or
    /// ends the row. An operator's change stands: a discarded row stays discarded, and a dead one
    /// is only revived by a retry.
    fn is_as_read(&self, entry: &OwnedEntry) -> bool {
        let ended = self.state == State::Dead.as_str() || self.state == State::Discarded.as_str();
        !ended && self.attempts == entry.before && self.replays == entry.replays
    }
}

/// Writes the disposition of one event. Returns whether it deleted the row of a delivered event.
fn write_entry(
    tx: &Transaction<'_>,
    lease: &Lease,
    entry: &OwnedEntry,
    hold_keys: bool,
    streaming: bool,
    now: i64,
) -> Work<bool> {
    let name = lease.subscription.as_str();
    let row = tx.prepare_cached(DELIVERY_FIND)?.query_row(params![name, entry.seq], found).optional()?;
    let (attempts, last_attempts) = match row {
        Some(row) if !streaming && row.is_as_read(entry) => (row.attempts, row.last_attempts),
        None if streaming => (0, "[]".to_owned()),
        // The row is not the one that was read, or an operator discarded this event of the stream
        // before it was read.
        _ => return Ok(false),
    };
    let holds_key = hold_keys && entry.key.is_some();
    let Some(row) = RowAfter::of(&entry.disposition, attempts, holds_key) else {
        return Ok(tx.prepare_cached(DELIVERY_DELETE)?.execute(params![name, entry.seq])? > 0);
    };
    let holds = match row.state {
        State::Scheduled => false,
        State::Dead => row.halt,
        _ => true,
    };
    let due_at = match row.due {
        Due::Never => None,
        Due::After(wait) => Some(now.saturating_add(micros(wait))),
        Due::At(at) => Some(at.as_microsecond()),
    };
    let last_attempts = match row.took {
        None => last_attempts,
        Some(_) => {
            let mut last = attempts_from_json(&last_attempts);
            note_attempt(&mut last, &row, timestamp(now), due_at.map(timestamp));
            attempts_to_json(&last)
        }
    };
    tx.prepare_cached(DELIVERY_PUT)?.execute(named_params! {
        ":subscription": lease.subscription.as_str(),
        ":seq": entry.seq,
        ":lane": lease.lane,
        ":id": entry.id,
        ":topic": entry.topic,
        ":key": entry.key.as_ref().map(Key::as_str),
        ":created_at": entry.created_at,
        ":state": row.state.as_str(),
        ":holds": holds_key && holds,
        ":attempts": row.attempts,
        ":replays": entry.replays,
        ":due_at": due_at,
        ":code": row.code,
        ":error": row.error.as_deref(),
        ":now": now,
        ":last_attempts": last_attempts,
    })?;
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plans::judge;

    #[test]
    fn rows_and_heads_of_keys_are_found_by_an_index() {
        let (by_place, by_key) =
            ("PRIMARY KEY (subscription=? AND seq=?)", "postbox_delivery_key (subscription=? AND key=?)");
        judge(&[
            ("DELIVERY_FIND", DELIVERY_FIND, &[by_place]),
            ("DELIVERY_HEAD", DELIVERY_HEAD, &[by_key]),
            ("DELIVERY_RELEASE_HEAD", DELIVERY_RELEASE_HEAD, &[by_place, by_key]),
        ]);
    }
}
