//! The depth of a subscription. Counting costs the same however many events the log holds.

use std::collections::HashMap;

use postbox_core::kit::{Share, StatsCounter};
use postbox_core::{Count, State, Stats};
use rusqlite::{Row, Transaction, params};

use crate::classify::Work;
use crate::clock::until;
use crate::decode::{HEAD_COLUMNS, Head, LOOK_COLUMNS, LOOK_COLUMNS_COUNT, LOOK_DELIVER_AT, integer, seq};
use crate::inspect::{Reader, count};
use crate::window::log_end;

/// How many consecutive places a sampled block has.
const BLOCK_ROWS: i64 = 32;

/// How many events were delivered, by primary key; no lock.
const LANES_DELIVERED: &str = "SELECT coalesce(sum(delivered), 0) FROM postbox_lane WHERE subscription = ?1";
/// How many rows are in a state, by `postbox_delivery_state`; no lock.
const DELIVERY_COUNT: &str =
    "SELECT count(*) FROM (SELECT 1 FROM postbox_delivery WHERE subscription = ?1 AND state = ?2 LIMIT ?3)";
/// Whether a row waits or is dead, by `postbox_delivery_state`; no lock.
const DELIVERY_WAITS: &str = "SELECT EXISTS (SELECT 1 FROM postbox_delivery WHERE subscription = ?1 \
AND state IN ('retrying', 'blocked', 'scheduled', 'dead'))";

pub(crate) fn stats(tx: &Transaction<'_>, reader: &Reader, share: Share, now: i64) -> Work<Stats> {
    let name = reader.name.as_str();
    let mut counter = StatsCounter::within(share);
    let delivered = tx.prepare_cached(LANES_DELIVERED)?.query_row([name], |row| count(row, 0))?;
    counter.add(State::Dispatched, "", delivered, None);
    for state in [State::Dead, State::Discarded] {
        let rows = params![name, state.as_str(), share.rows_max()];
        let rows = tx.prepare_cached(DELIVERY_COUNT)?.query_row(rows, |row| count(row, 0))?;
        counter.add(state, "", rows, None);
    }
    for state in [State::Retrying, State::Blocked, State::Scheduled] {
        waiting(tx, reader, (state, share), &mut counter, now)?;
    }
    counter.note_limit();
    unread(tx, reader, share, &mut counter, now)?;
    skipped(tx, reader, share, &mut counter)?;
    Ok(counter.finish())
}

/// Returns the number of events in a log.
pub(crate) fn count_events(tx: &Transaction<'_>, table: &str) -> Work<Count> {
    // Walks the primary key up to the limit; no lock.
    let log_count =
        format!("SELECT (SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT ?1)), coalesce(min(seq), 1) FROM {table}");
    let rows_max = Share::of_one_of(1).rows_max();
    let (events, first): (i64, i64) = tx.query_row(&log_count, [rows_max], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let is_estimate = events == rows_max;
    let events = if is_estimate { events.max(log_end(tx, table)? - first + 1) } else { events };
    Ok(Count { events: events.unsigned_abs(), is_estimate })
}

/// Whether any event has still to be delivered, is dead, or was found unrouted. Stops at the first
/// one; without one, it walks the log from the slowest lane on.
pub(crate) fn is_undelivered(tx: &Transaction<'_>, reader: &Reader) -> Work<bool> {
    let name = reader.name.as_str();
    if tx.prepare_cached(DELIVERY_WAITS)?.query_row([name], |row| row.get(0))? {
        return Ok(true);
    }
    // By primary keys up to the first event that is still in the log; no lock.
    let unrouted_any =
        format!("SELECT 1 FROM postbox_unrouted u CROSS JOIN {} l ON l.seq = u.seq WHERE u.log = ?1", reader.table);
    if tx.prepare(&unrouted_any)?.exists([reader.stored.log.as_str()])? {
        return Ok(true);
    }
    // Walks the primary key; no lock. What has a delivery row does not wait, as was just seen.
    let log_walk = format!(
        "SELECT {HEAD_COLUMNS} FROM {} l WHERE l.seq > ?2 \
         AND NOT EXISTS (SELECT 1 FROM postbox_delivery d WHERE d.subscription = ?1 AND d.seq = l.seq) ORDER BY l.seq",
        reader.table
    );
    let mut statement = tx.prepare(&log_walk)?;
    let mut rows = statement.query(params![name, reader.position_min()])?;
    while let Some(row) = rows.next()? {
        if reader.state(&Head::read(row)?, seq(row)?) == State::Pending {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Adds the waiting rows of one state.
fn waiting(
    tx: &Transaction<'_>,
    reader: &Reader,
    (state, share): (State, Share),
    counter: &mut StatsCounter,
    now: i64,
) -> Work<()> {
    // By `postbox_delivery_state`, then the log's primary key; no lock.
    let delivery_waiting = format!(
        "SELECT {LOOK_COLUMNS}, d.topic, d.created_at, d.due_at FROM postbox_delivery d INDEXED BY postbox_delivery_state LEFT JOIN {} l ON l.seq = d.seq \
         WHERE d.subscription = ?1 AND d.state = ?2 ORDER BY d.seq LIMIT ?3",
        reader.table
    );
    let mut statement = tx.prepare_cached(&delivery_waiting)?;
    let mut rows = statement.query(params![reader.name.as_str(), state.as_str(), share.rows_max()])?;
    while let Some(row) = rows.next()? {
        let due_at = integer(row, LOOK_COLUMNS_COUNT + 2)?.filter(|_| state == State::Scheduled).unwrap_or(i64::MIN);
        let since = since(row)?.unwrap_or(row.get(LOOK_COLUMNS_COUNT + 1)?).max(due_at);
        counter.add(state, &row.get::<_, String>(LOOK_COLUMNS_COUNT)?, 1, Some(until(since, now)));
    }
    Ok(())
}

/// The time since when the event of a row of [`LOOK_COLUMNS`] waits.
fn since(row: &Row<'_>) -> rusqlite::Result<Option<i64>> {
    let (created_at, deliver_at) = (integer(row, 5)?, integer(row, LOOK_DELIVER_AT)?);
    Ok(created_at.map(|at| at.max(deliver_at.unwrap_or(i64::MIN))))
}

/// Adds unread events: counted row by row, or estimated from samples if there are too many.
fn unread(tx: &Transaction<'_>, reader: &Reader, share: Share, counter: &mut StatsCounter, now: i64) -> Work<()> {
    let from = reader.position_min();
    let mut unread = Look::default();
    unread.look(tx, reader, Part { after: from, up_to: i64::MAX, rows_max: share.rows_max() })?;
    let mut pending = unread.pending;
    if unread.rows >= share.rows_max() {
        counter.note_estimate(State::Pending);
        let (sampled, weight) = sample(tx, reader, share, (unread.first.unwrap_or(from), log_end(tx, &reader.table)?))?;
        for (topic, (events, _)) in sampled.pending {
            let estimate = (events as f64 * weight).round() as u64;
            let known = pending.entry(topic).or_default();
            known.0 = known.0.max(estimate);
        }
    }
    for (topic, (events, since)) in pending {
        counter.add(State::Pending, &topic, events, since.map(|since| until(since, now)));
    }
    Ok(())
}

/// Adds events that were passed and not wanted, in the same two ways.
fn skipped(tx: &Transaction<'_>, reader: &Reader, share: Share, counter: &mut StatsCounter) -> Work<()> {
    if reader.skips_nothing() {
        return Ok(());
    }
    let up_to = reader.position_max();
    let mut passed = Look::default();
    passed.look(tx, reader, Part { after: 0, up_to, rows_max: share.rows_max() })?;
    let mut events = passed.skipped;
    if passed.rows >= share.rows_max() {
        counter.note_estimate(State::Skipped);
        let (sampled, weight) = sample(tx, reader, share, (passed.first.unwrap_or(1), up_to))?;
        events = (sampled.skipped as f64 * weight).round() as u64;
    }
    counter.add(State::Skipped, "", events, None);
    Ok(())
}

/// Reads blocks of places, one from each equal part of a range. Also returns how many events each
/// one found stands for: computed from places rather than rows, so that gaps are accounted for.
fn sample(tx: &Transaction<'_>, reader: &Reader, share: Share, (first, last): (i64, i64)) -> Work<(Look, f64)> {
    let mut sampled = Look::default();
    let part = (last - first + 1) as f64 / share.blocks() as f64;
    for block in 0..share.blocks() {
        // Spread as evenly as random places, and the same for the same log.
        let within = (block as f64 * 0.618_034).fract();
        let place = first + ((block as f64 + within) * part) as i64;
        let up_to = last.min(place + BLOCK_ROWS - 1);
        sampled.look(tx, reader, Part { after: place - 1, up_to, rows_max: BLOCK_ROWS })?;
    }
    Ok((sampled, part / BLOCK_ROWS as f64))
}

/// A part of the log: after one place, up to another, and at most a number of rows.
struct Part {
    after: i64,
    up_to: i64,
    rows_max: i64,
}

/// Counts of the rows that were read.
#[derive(Default)]
struct Look {
    rows: i64,
    /// The first row that was read.
    first: Option<i64>,
    /// The number of unread events by topic, and since when the oldest waits.
    pending: HashMap<String, (u64, Option<i64>)>,
    /// The number of events that were passed and not wanted.
    skipped: u64,
}

impl Look {
    fn look(&mut self, tx: &Transaction<'_>, reader: &Reader, part: Part) -> Work<()> {
        // Walks the primary key; no lock. Events with a delivery row are counted by their state.
        let log_look = format!(
            "SELECT {LOOK_COLUMNS}, EXISTS (SELECT 1 FROM postbox_delivery d WHERE d.subscription = ?1 AND d.seq = l.seq) \
             FROM {} l WHERE l.seq > ?2 AND l.seq <= ?3 ORDER BY l.seq LIMIT ?4",
            reader.table
        );
        let mut statement = tx.prepare_cached(&log_look)?;
        let mut rows = statement.query(params![reader.name.as_str(), part.after, part.up_to, part.rows_max])?;
        while let Some(row) = rows.next()? {
            let (head, seq) = (Head::read(row)?, seq(row)?);
            self.rows += 1;
            self.first.get_or_insert(seq);
            let state = reader.state(&head, seq);
            if !matches!(state, State::Pending | State::Skipped) || row.get::<_, bool>(LOOK_COLUMNS_COUNT)? {
                continue;
            }
            if state == State::Pending {
                let since = since(row)?;
                let known = self.pending.entry(head.topic.into_owned()).or_insert((0, since));
                *known = (known.0 + 1, known.1.min(since));
            } else if reader.has_passed(&head, seq) && reader.state_found(tx, &head, seq)? == State::Skipped {
                self.skipped += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::FILTER_KEEP;
    use crate::plans::{ROWS, database, instructions, judge};

    #[test]
    fn rows_of_a_state_are_found_by_an_index() {
        let by_state = "postbox_delivery_state (subscription=? AND state=?)";
        judge(&[("DELIVERY_COUNT", DELIVERY_COUNT, &[by_state]), ("DELIVERY_WAITS", DELIVERY_WAITS, &[by_state])]);
    }

    #[test]
    fn the_first_event_to_deliver_ends_the_look() {
        let mut database = database();
        let fill = format!(
            "INSERT INTO postbox_subscription (name, log, topics, ordering, lanes, generation, created_at) \
             VALUES ('s', 'outbox', '[]', 'key', 1, 0, 0); \
             INSERT INTO postbox_lane (subscription, lane, position, window_end, revision) \
             SELECT name, 0, 0, 0, revision FROM postbox_subscription; \
             INSERT INTO postbox_outbox (topic, payload) \
             WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {ROWS}) SELECT 't', '' FROM n"
        );
        database.execute_batch(&fill).expect("filled");
        database.execute(FILTER_KEEP, ["s"]).expect("kept");
        let tx = database.transaction().expect("begun");
        let reader = Reader::find("migrate", &tx, &"s".parse().expect("a name")).expect("found");
        let (waits, steps) = instructions(&tx, || is_undelivered(&tx, &reader).expect("read"));
        assert!(waits && steps < ROWS, "{steps} instructions");
    }
}
