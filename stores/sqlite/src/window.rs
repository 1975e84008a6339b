//! Reading a lane's stream.
//!
//! SQLite has one writer at a time, and AUTOINCREMENT numbers rows inside its transaction. So `seq`
//! order *is* commit order: whatever a snapshot shows beyond the cursor is new, and nothing can
//! appear behind it. The cursor is an integer.
//!
//! **Visible is not durable.** Another process may commit with `synchronous = NORMAL`. Its rows can
//! be read before they are flushed, and a power cut can undo them. So a batch contains only rows
//! that a flushed commit has seen: the lane row's `window_end` says how far. Reading beyond it
//! opens the next window. That is one write to the lane row, committed with a flush of the
//! write-ahead log, and so of everything before it, *before* the batch is handed out. `settle`
//! moves the window along in its own commit, so that a busy lane pays for one flush per batch.

use std::collections::HashMap;

use postbox_core::kit::{BatchLimiter, window_undone};
use postbox_core::{Batch, BatchLimit, Delivery, Error, Filter, Key, Lease, Seq, SubscriptionName};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};

use crate::classify::Work;
use crate::clock::{timestamp, until};
use crate::decode::{Decoded, Head, LOG_COLUMNS, WALK_COLUMNS, payload_len, read_whole, row_lane, seq};
use crate::lease::{self, LOG_LAST, LaneRow, SubscriptionRow, held};
use crate::schema::log_table;
use crate::thread::Session;

/// How many rows one read looks at if the lane wants few of them: bounds the time of a call, not
/// its result.
const SCAN_ROWS_MAX: usize = 50_000;

/// The most events in one read. A read costs nothing beyond its rows here, and more rows than fit
/// into the processor's cache take a third longer (measured).
const PAGE_EVENTS_MAX: usize = 1_000;

/// After how many unwanted rows a busy lane writes its position, so that retention can follow.
const PASS_ROWS: i64 = 1_000;

/// The last row of a log, by primary key; no lock.
const LOG_END: &str = "SELECT coalesce(max(seq), 0) FROM ";
/// Opens a window or passes unwanted rows. Lane by primary key; takes the write lock; changes
/// nothing for a stale epoch.
const LANE_OPEN_WINDOW: &str = "UPDATE postbox_lane SET window_end = max(window_end, ?6), position = max(position, ?7) \
WHERE subscription = ?1 AND lane = ?2 AND epoch = ?3 AND owner = ?4 AND lease_until > ?5";
/// Delivery rows of events that were just read, by primary key; no lock.
const DELIVERY_IN_RANGE: &str =
    "SELECT seq, state FROM postbox_delivery WHERE subscription = ?1 AND seq > ?2 AND seq <= ?3";
/// Whether any key of the subscription is held, by `postbox_delivery_key`; no lock.
const DELIVERY_ANY_HELD: &str =
    "SELECT 1 FROM postbox_delivery INDEXED BY postbox_delivery_key WHERE subscription = ?1 AND holds = 1 LIMIT 1";
/// Whether an earlier event holds a key, by `postbox_delivery_key`; no lock.
pub(crate) const DELIVERY_KEY_HELD: &str = "SELECT 1 FROM postbox_delivery INDEXED BY postbox_delivery_key WHERE subscription = ?1 AND key = ?2 AND holds = 1 AND seq < ?3 LIMIT 1";
/// When the lane's first row is due, by `postbox_delivery_due`. Skips rows behind the head of their
/// key (`postbox_delivery_key`); no lock.
const DELIVERY_NEXT_DUE: &str = "SELECT d.due_at FROM postbox_delivery d WHERE d.subscription = ?1 AND d.lane = ?2 \
AND d.state IN ('retrying', 'scheduled') AND (d.holds = 0 OR NOT EXISTS (SELECT 1 FROM postbox_delivery h INDEXED BY postbox_delivery_key \
WHERE h.subscription = d.subscription AND h.key = d.key AND h.holds = 1 AND h.seq < d.seq)) ORDER BY d.due_at LIMIT 1";

/// How far a lease has read.
#[derive(Debug, Clone)]
pub(crate) struct Cursor {
    pub(crate) epoch: i64,
    /// The last row of the log at the first read under the lease, or after a rewind.
    began: i64,
    /// The last row that was read.
    pub(crate) read: i64,
    /// The last row of the last batch that was handed out. It is unsettled while it is beyond the
    /// lane's position.
    given: i64,
    /// The lane's position that was last read or written.
    position: i64,
    /// The `seq` of the events that were handed out and not settled at the time of this read, in
    /// order.
    pub(crate) unsettled: Vec<i64>,
    /// The store's wakeup count when the read began. A higher count is a reason to read again.
    pub(crate) wakeups: u64,
    idle: Option<Idle>,
}

/// The result of an empty read, so that the next one can be skipped: while nobody writes to the
/// file, it stays the same.
#[derive(Debug, Clone)]
struct Idle {
    data_version: i64,
    lease_until: i64,
    due_at: Option<i64>,
}

/// The result of a read, and what must be written before it may be handed out.
pub(crate) struct Read {
    pub(crate) batch: Batch,
    pub(crate) cursor: Cursor,
    pub(crate) update: Option<Update>,
}

/// What `next_batch` writes.
pub(crate) enum Update {
    Window(WindowUpdate),
    /// Switch to the present filter at this position.
    Filter(i64),
}

/// The end of a window, and the position of passed rows.
pub(crate) struct WindowUpdate {
    /// The end of the new window: the last row that the read's snapshot shows. Zero opens none.
    window_end: i64,
    /// Rows up to here are done: nobody wanted them, and nothing before them is unsettled.
    position: i64,
}

/// Reads on from the cursor, or from the settled position if this lease has not read yet.
pub(crate) fn read(
    session: &mut Session,
    lease: &Lease,
    limit: BatchLimit,
    cursor: Option<Cursor>,
    wakeups: u64,
) -> Work<Read> {
    let now = session.settings.now();
    let connection = session.connection()?;
    // Read before the snapshot: if someone commits in between, the next call only reads once more
    // than necessary.
    let data_version: i64 = connection.prepare_cached("PRAGMA data_version")?.query_row([], |row| row.get(0))?;
    if let Some(cursor) = &cursor
        && let Some(idle) = cursor.idle.as_ref().filter(|idle| idle.data_version == data_version)
    {
        if idle.lease_until <= now {
            return Err(Error::stale("next_batch").into());
        }
        let batch = Batch { due_in: idle.due_at.map(|at| until(now, at)), ..Batch::default() };
        return Ok(Read { batch, cursor: Cursor { wakeups, ..cursor.clone() }, update: None });
    }
    let tx = session.read()?;
    let lane = held("next_batch", &tx, lease, now)?;
    let stored = lease::find(&tx, &lease.subscription)?.ok_or_else(|| Error::stale("next_batch"))?;
    if let Some(cursor) = &cursor
        && is_undone(&tx, &stored, lane, cursor)?
    {
        return Err(window_undone("next_batch").into());
    }
    let began = match &cursor {
        Some(cursor) => cursor.began,
        None => log_end(&tx, &log_table(&stored.log))?,
    };
    if lane.revision != stored.revision {
        // Everything that was read with the former filter is settled first, so that each event is
        // judged by one filter only. Events that it rejected may be wanted now, and are read again.
        let is_settled = cursor.as_ref().is_none_or(|cursor| cursor.given <= lane.position);
        let (epoch, read) = (lease.epoch, lane.position);
        return Ok(match cursor {
            Some(cursor) if !is_settled => {
                Read { batch: Batch::default(), cursor: Cursor { wakeups, ..cursor }, update: None }
            }
            _ => Read {
                batch: Batch { more: true, ..Batch::default() },
                cursor: Cursor { epoch, began, read, given: 0, position: read, unsettled: vec![], wakeups, idle: None },
                update: Some(Update::Filter(lane.position)),
            },
        });
    }
    let from = cursor.as_ref().map_or(lane.position, |cursor| cursor.read.max(lane.position));
    let given = cursor.as_ref().map_or(0, |cursor| cursor.given);
    let page = Page::read(&tx, &stored, lease.lane, from, limit, now)?;
    let due_at: Option<i64> = tx
        .prepare_cached(DELIVERY_NEXT_DUE)?
        .query_row(params![lease.subscription.as_str(), lease.lane], |row| row.get(0))
        .optional()?;
    let idle = (page.last == from).then_some(Idle { data_version, lease_until: lane.lease_until, due_at });
    let more = page.last < page.end;
    let Page { batch, last, end } = page;
    let (due_in, caught_up) = (due_at.map(|at| until(now, at)), last >= began);
    let mut batch = Batch { due_in, more, caught_up, ..batch };
    leave_out(&tx, lease, from, last, &mut batch)?;
    hold(&tx, lease, &mut batch)?;
    batch.end = (!batch.deliveries.is_empty()).then_some(Seq(last));
    // Rows that nobody wanted need no settlement. The position follows when everything before them
    // is settled, and the lane is idle or far behind.
    let passed = last - lane.position;
    let passes = batch.end.is_none() && given <= lane.position && passed > 0 && (last == from || passed >= PASS_ROWS);
    let opens = last > lane.window_end && batch.end.is_some();
    let update = (passes || opens)
        .then_some(WindowUpdate { window_end: if opens { end } else { 0 }, position: if passes { last } else { 0 } })
        .map(Update::Window);
    let given = batch.end.map_or(given, |end| end.0);
    let unsettled = cursor.into_iter().flat_map(|cursor| cursor.unsettled).filter(|seq| *seq > lane.position);
    let unsettled = unsettled.chain(batch.deliveries.iter().map(|delivery| delivery.seq.0)).collect();
    let position = if passes { last } else { lane.position };
    let cursor = Cursor { epoch: lease.epoch, began, read: last, given, position, unsettled, wakeups, idle };
    Ok(Read { batch, cursor, update })
}

/// Whether the file was set back to an older copy while it was open. Then the places beyond that
/// copy are given to other events, which a cursor from before would skip.
///
/// Nothing is handed out beyond a window. Neither its end nor the position, which unwanted rows
/// move alone, goes back under a lease.
fn is_undone(tx: &Transaction<'_>, stored: &SubscriptionRow, lane: LaneRow, cursor: &Cursor) -> Work<bool> {
    let last: i64 = tx.prepare_cached(LOG_LAST)?.query_row([log_table(&stored.log)], |row| row.get(0))?;
    Ok(cursor.given > lane.window_end || cursor.position > lane.position || cursor.read > last)
}

/// Writes the update of a read.
pub(crate) fn open(session: &mut Session, lease: &Lease, update: &Update) -> Work<()> {
    let update = match update {
        Update::Window(update) => update,
        Update::Filter(position) => return lease::take_filter(session, lease, *position),
    };
    let now = session.settings.now();
    session.transact(|tx| {
        let (name, owner) = (lease.subscription.as_str(), lease.owner.as_str());
        let row = params![name, lease.lane, lease.epoch, owner, now, update.window_end, update.position];
        match tx.prepare_cached(LANE_OPEN_WINDOW)?.execute(row)? {
            0 => Err(Error::stale("next_batch").into()),
            _ => Ok(()),
        }
    })
}

/// The last row of a log.
pub(crate) fn log_end(tx: &Transaction<'_>, table: &str) -> Work<i64> {
    Ok(tx.prepare_cached(&format!("{LOG_END}{table}"))?.query_row([], |row| row.get(0))?)
}

/// A part of the log that was read.
struct Page {
    batch: Batch,
    /// The last row that was read.
    last: i64,
    /// The last row that the snapshot shows.
    end: i64,
}

impl Page {
    fn read(
        tx: &Transaction<'_>,
        stored: &SubscriptionRow,
        lane: u16,
        from: i64,
        limit: BatchLimit,
        now: i64,
    ) -> Work<Self> {
        let table = log_table(&stored.log);
        let end = log_end(tx, &table)?;
        let mut page = Self { batch: Batch::default(), last: from, end: end.max(from) };
        if end <= from {
            return Ok(page);
        }
        // A lane that wants every row reads whole ones.
        let takes_all = stored.lanes == 1 && stored.filter == Filter::default();
        let columns = if takes_all { LOG_COLUMNS } else { WALK_COLUMNS };
        // Walks the primary key; no lock, and in WAL mode no wait.
        let log_read = format!("SELECT {columns} FROM {table} l WHERE l.seq > ?1 ORDER BY l.seq");
        let mut statement = tx.prepare_cached(&log_read)?;
        let mut rows = statement.query([from])?;
        let mut limiter = BatchLimiter::new(BatchLimit { events: limit.events.min(PAGE_EVENTS_MAX), ..limit });
        let mut scanned = 0;
        while scanned < SCAN_ROWS_MAX
            && !limiter.is_full()
            && let Some(row) = rows.next()?
        {
            scanned += 1;
            // First the lane alone: half of the rows belong to the other one of two.
            let is_ours = stored.lanes == 1 || row_lane(row, stored.lanes)? == lane;
            if is_ours && Head::read(row)?.is_wanted_by(&stored.filter) {
                let fits = read_whole(tx, &table, row, |row| page.take(row, stored, &mut limiter, now))?;
                if !fits {
                    break;
                }
            }
            page.last = seq(row)?;
        }
        Ok(page)
    }

    /// Takes an event of [`LOG_COLUMNS`], if it fits.
    fn take(
        &mut self,
        row: &Row<'_>,
        stored: &SubscriptionRow,
        limiter: &mut BatchLimiter,
        now: i64,
    ) -> rusqlite::Result<bool> {
        let fits = limiter.take(payload_len(row)?);
        if fits {
            let decoded = Decoded::read(row)?;
            let replay = stored.replay_of(decoded.seq);
            push(&mut self.batch, decoded, (1, replay), now);
        }
        Ok(fits)
    }
}

/// Appends an event to a batch.
pub(crate) fn push(batch: &mut Batch, decoded: Decoded, (attempt, replay): (u32, u32), now: i64) {
    let Decoded { seq, event, unreadable } = decoded;
    let delivery = Delivery { event, seq: Seq(seq), attempt, replay, trace: None };
    batch.push(delivery, unreadable, Some(timestamp(now)));
}

/// Marks events that an operator discarded before they were read, and drops events with another
/// delivery row.
fn leave_out(tx: &Transaction<'_>, lease: &Lease, from: i64, last: i64, batch: &mut Batch) -> Work<()> {
    if batch.deliveries.is_empty() {
        return Ok(());
    }
    let mut statement = tx.prepare_cached(DELIVERY_IN_RANGE)?;
    let rows: HashMap<i64, String> = statement
        .query_map(params![lease.subscription.as_str(), from, last], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_, _>>()?;
    if rows.is_empty() {
        return Ok(());
    }
    batch.deliveries.retain(|delivery| rows.get(&delivery.seq.0).is_none_or(|state| state == "discarded"));
    batch.unreadable.retain(|seq, _| rows.get(&seq.0).is_none_or(|state| state == "discarded"));
    batch.discarded =
        batch.deliveries.iter().map(|delivery| delivery.seq).filter(|seq| rows.contains_key(&seq.0)).collect();
    Ok(())
}

/// Whether any row of a subscription holds its key.
pub(crate) fn holds_any(connection: &Connection, name: &SubscriptionName) -> Work<bool> {
    Ok(connection.prepare_cached(DELIVERY_ANY_HELD)?.exists([name.as_str()])?)
}

/// Records the keys that an earlier unfinished event holds.
fn hold(tx: &Transaction<'_>, lease: &Lease, batch: &mut Batch) -> Work<()> {
    if batch.deliveries.is_empty() || !holds_any(tx, &lease.subscription)? {
        return Ok(());
    }
    let name = lease.subscription.as_str();
    // Before the last event of each key: the row may be of an event between them, which was marked
    // dead before it was read.
    let mut last: HashMap<&Key, Seq> = HashMap::new();
    for delivery in &batch.deliveries {
        if let Some(key) = &delivery.event.key {
            last.insert(key, delivery.seq);
        }
    }
    let mut statement = tx.prepare_cached(DELIVERY_KEY_HELD)?;
    for (key, seq) in last {
        if statement.exists(params![name, key.as_str(), seq.0])? {
            batch.held.insert(key.clone());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plans::{ROWS, database, instructions, judge};

    #[test]
    fn what_a_read_looks_for_is_found_by_an_index() {
        let by_key = "postbox_delivery_key (subscription=? AND key=? AND seq<?)";
        judge(&[
            ("LANE_OPEN_WINDOW", LANE_OPEN_WINDOW, &["PRIMARY KEY (subscription=? AND lane=?)"]),
            ("DELIVERY_IN_RANGE", DELIVERY_IN_RANGE, &["PRIMARY KEY (subscription=? AND seq>? AND seq<?)"]),
            ("DELIVERY_ANY_HELD", DELIVERY_ANY_HELD, &["postbox_delivery_key (subscription=?)"]),
            ("DELIVERY_KEY_HELD", DELIVERY_KEY_HELD, &[by_key]),
            ("DELIVERY_NEXT_DUE", DELIVERY_NEXT_DUE, &["postbox_delivery_due (subscription=? AND lane=?)", by_key]),
        ]);
    }

    #[test]
    fn a_page_reads_no_more_of_the_log_than_it_gives() {
        let mut database = database();
        let fill = format!(
            "INSERT INTO postbox_subscription (name, log, topics, ordering, lanes, generation, created_at) \
             VALUES ('s', 'outbox', '[]', 'key', 1, 0, 0); \
             INSERT INTO postbox_outbox (topic, payload) \
             WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {ROWS}) SELECT 't', '' FROM n"
        );
        database.execute_batch(&fill).expect("filled");
        let tx = database.transaction().expect("begun");
        let stored = lease::find(&tx, &"s".parse().expect("a name")).expect("read").expect("there");
        let limit = BatchLimit { events: 3, ..BatchLimit::default() };
        let (page, steps) = instructions(&tx, || Page::read(&tx, &stored, 0, 10, limit, 0).expect("read"));
        assert_eq!((page.batch.deliveries.len(), page.last), (3, 13));
        assert!(steps < ROWS, "{steps} instructions");
    }
}
