//! How deep a subscription is. A look costs the same however many events the log keeps.

use std::collections::HashMap;

use postbox_core::kit::{LOOK_EVENTS_MAX, StatsCounter};
use postbox_core::{Count, State, Stats};
use rusqlite::{Row, Transaction, params};

use crate::classify::Work;
use crate::clock::until;
use crate::decode::{Head, LOOK_COLUMNS, LOOK_COLUMNS_COUNT, LOOK_DELIVER_AT, integer, seq};
use crate::inspect::{Reader, count};
use crate::window::log_end;

/// So many rows of each kind are looked at: where there is one more than is counted, there may be
/// others.
const ROWS_MAX: i64 = LOOK_EVENTS_MAX as i64 + 1;
/// Blocks of places that a sample is made of, one from each equal part of the log, and the places
/// of each.
const BLOCKS: i64 = 64;
const BLOCK_ROWS: i64 = 32;

/// How many events were delivered, by primary key; no lock.
const LANES_DELIVERED: &str = "SELECT coalesce(sum(delivered), 0) FROM postbox_lane WHERE subscription = ?1";
/// How many rows are in a state, by `postbox_delivery_state`; no lock.
const DELIVERY_COUNT: &str =
    "SELECT count(*) FROM (SELECT 1 FROM postbox_delivery WHERE subscription = ?1 AND state = ?2 LIMIT ?3)";
/// Whether a row waits, by `postbox_delivery_state`; no lock.
const DELIVERY_WAITS: &str = "SELECT EXISTS (SELECT 1 FROM postbox_delivery WHERE subscription = ?1 \
AND state IN ('retrying', 'blocked', 'scheduled'))";

pub(crate) fn stats(tx: &Transaction<'_>, reader: &Reader, now: i64) -> Work<Stats> {
    let name = reader.name.as_str();
    let mut counter = StatsCounter::default();
    let delivered = tx.prepare_cached(LANES_DELIVERED)?.query_row([name], |row| count(row, 0))?;
    counter.add(State::Dispatched, "", delivered, None);
    for state in [State::Dead, State::Discarded] {
        let rows = params![name, state.as_str(), ROWS_MAX];
        let rows = tx.prepare_cached(DELIVERY_COUNT)?.query_row(rows, |row| count(row, 0))?;
        counter.add(state, "", rows, None);
    }
    for state in [State::Retrying, State::Blocked, State::Scheduled] {
        waiting(tx, reader, state, &mut counter, now)?;
    }
    counter.note_limit();
    unread(tx, reader, &mut counter, now)?;
    Ok(counter.finish())
}

/// How many events a log has.
pub(crate) fn count_events(tx: &Transaction<'_>, table: &str) -> Work<Count> {
    // Walks the primary key up to the limit; no lock.
    let log_count =
        format!("SELECT (SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT ?1)), coalesce(min(seq), 1) FROM {table}");
    let (events, first): (i64, i64) = tx.query_row(&log_count, [ROWS_MAX], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let is_estimate = events == ROWS_MAX;
    let events = if is_estimate { events.max(log_end(tx, table)? - first + 1) } else { events };
    Ok(Count { events: events.unsigned_abs(), is_estimate })
}

/// Whether anything is still to be delivered. May walk the log.
pub(crate) fn is_undelivered(tx: &Transaction<'_>, reader: &Reader) -> Work<bool> {
    let waits: bool = tx.prepare_cached(DELIVERY_WAITS)?.query_row([reader.name.as_str()], |row| row.get(0))?;
    let mut unread = Unread::default();
    if !waits {
        unread.look(tx, reader, reader.position_min(), i64::MAX, i64::MAX)?;
    }
    Ok(waits || !unread.topics.is_empty())
}

/// Adds the waiting rows of a state.
fn waiting(tx: &Transaction<'_>, reader: &Reader, state: State, counter: &mut StatsCounter, now: i64) -> Work<()> {
    // By `postbox_delivery_state`, then the log's primary key; no lock.
    let delivery_waiting = format!(
        "SELECT {LOOK_COLUMNS}, d.topic, d.created_at, d.due_at FROM postbox_delivery d LEFT JOIN {} l ON l.seq = d.seq \
         WHERE d.subscription = ?1 AND d.state = ?2 ORDER BY d.seq LIMIT ?3",
        reader.table
    );
    let mut statement = tx.prepare_cached(&delivery_waiting)?;
    let mut rows = statement.query(params![reader.name.as_str(), state.as_str(), ROWS_MAX])?;
    while let Some(row) = rows.next()? {
        let due_at = integer(row, LOOK_COLUMNS_COUNT + 2)?.filter(|_| state == State::Scheduled).unwrap_or(i64::MIN);
        let since = since(row)?.unwrap_or(row.get(LOOK_COLUMNS_COUNT + 1)?).max(due_at);
        counter.add(state, &row.get::<_, String>(LOOK_COLUMNS_COUNT)?, 1, Some(until(since, now)));
    }
    Ok(())
}

/// From when the event of a row of [`LOOK_COLUMNS`] waits.
fn since(row: &Row<'_>) -> rusqlite::Result<Option<i64>> {
    let (created_at, deliver_at) = (integer(row, 5)?, integer(row, LOOK_DELIVER_AT)?);
    Ok(created_at.map(|at| at.max(deliver_at.unwrap_or(i64::MIN))))
}

/// Adds what no lane has read yet: row by row, or from samples where there are too many.
fn unread(tx: &Transaction<'_>, reader: &Reader, counter: &mut StatsCounter, now: i64) -> Work<()> {
    let mut unread = Unread::default();
    let from = reader.position_min();
    unread.look(tx, reader, from, i64::MAX, ROWS_MAX)?;
    let mut sampled = Unread::default();
    if unread.rows >= ROWS_MAX {
        counter.note_estimate();
        let (first, last) = (unread.first.unwrap_or(from), log_end(tx, &reader.table)?);
        let part = (last - first + 1) as f64 / BLOCKS as f64;
        for block in 0..BLOCKS {
            // Spread as evenly as chance would, and the same for the same log.
            let within = (block as f64 * 0.618_034).fract();
            let place = first + ((block as f64 + within) * part) as i64;
            sampled.look(tx, reader, place - 1, last.min(place + BLOCK_ROWS - 1), BLOCK_ROWS)?;
        }
        // By places and not by rows, so that gaps count.
        let weight = part / BLOCK_ROWS as f64;
        for (topic, (events, _)) in sampled.topics {
            let estimate = (events as f64 * weight).round() as u64;
            let known = unread.topics.entry(topic).or_default();
            known.0 = known.0.max(estimate);
        }
    }
    for (topic, (events, since)) in unread.topics {
        counter.add(State::Pending, &topic, events, since.map(|since| until(since, now)));
    }
    Ok(())
}

/// Unread events as they are looked at.
#[derive(Default)]
struct Unread {
    rows: i64,
    /// The first row that was looked at.
    first: Option<i64>,
    /// How many by topic, and from when the oldest waits.
    topics: HashMap<String, (u64, Option<i64>)>,
}

impl Unread {
    /// Looks at rows after a place, up to another one, and at most so many.
    fn look(&mut self, tx: &Transaction<'_>, reader: &Reader, after: i64, up_to: i64, rows_max: i64) -> Work<()> {
        // Walks the primary key; no lock. A row that has left the stream is counted by its state.
        let log_look = format!(
            "SELECT {LOOK_COLUMNS}, EXISTS (SELECT 1 FROM postbox_delivery d WHERE d.subscription = ?1 AND d.seq = l.seq) \
             FROM {} l WHERE l.seq > ?2 AND l.seq <= ?3 ORDER BY l.seq LIMIT ?4",
            reader.table
        );
        let mut statement = tx.prepare_cached(&log_look)?;
        let mut rows = statement.query(params![reader.name.as_str(), after, up_to, rows_max])?;
        while let Some(row) = rows.next()? {
            let (head, seq) = (Head::read(row)?, seq(row)?);
            self.rows += 1;
            self.first.get_or_insert(seq);
            if reader.wants(&head)
                && reader.state(&head, seq) == State::Pending
                && !row.get::<_, bool>(LOOK_COLUMNS_COUNT)?
            {
                let since = since(row)?;
                let known = self.topics.entry(head.topic.into_owned()).or_insert((0, since));
                *known = (known.0 + 1, known.1.min(since));
            }
        }
        Ok(())
    }
}
