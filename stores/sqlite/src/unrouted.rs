//! Unrouted events: those that no subscription of their log wants. They are found in the order of
//! the log, kept, and handed to the first subscription whose filter begins to want them.
//!
//! What decides is the filter that a lane passed an event with, or will read it with. So nothing is
//! decided while a leased lane has yet to take over a new filter; a lane without a lease passes
//! nothing more with the former one. Decisions are made again when a filter changes.

use postbox_core::kit::unrouted;
use postbox_core::limits::UNROUTED_COUNT_MAX;
use postbox_core::{LogName, Routed, State, SubscriptionName, Unrouted};
use rusqlite::{OptionalExtension as _, Transaction, params};

use crate::classify::Work;
use crate::clock::until;
use crate::decode::{HEAD_COLUMNS, Head, LOOK_COLUMNS, LOOK_DELIVER_AT, integer, lossy, seq};
use crate::inspect::Reader;
use crate::maintain::{DELIVERY_STATE, readers_of};
use crate::migrate::require_log;
use crate::replay::SendAgain;
use crate::schema::log_table;
use crate::thread::Session;

/// How many rows one step reads.
const STEP_LOOK_MAX: i64 = 10_000;

/// By primary key; no lock of its own.
const LOG_ROUTED: &str = "SELECT routed FROM postbox_log WHERE name = ?1";
/// By primary key; takes the write lock.
const LOG_MOVE: &str = "UPDATE postbox_log SET routed = ?2 WHERE name = ?1";
/// By primary key; takes the write lock.
const UNROUTED_KEEP: &str = "INSERT OR IGNORE INTO postbox_unrouted (log, seq) VALUES (?1, ?2)";
/// By primary key; takes the write lock.
pub(crate) const UNROUTED_FORGET: &str = "DELETE FROM postbox_unrouted WHERE log = ?1 AND seq = ?2";
/// By primary key; no lock.
const UNROUTED_HAS: &str = "SELECT 1 FROM postbox_unrouted WHERE log = ?1 AND seq = ?2";
/// The first subscription of a log whose filter was not compared with all unrouted events yet.
/// Walks a small table; no lock of its own.
const SUBSCRIPTION_TO_REROUTE: &str =
    "SELECT name, rerouted_seq FROM postbox_subscription WHERE log = ?1 AND rerouted <> revision ORDER BY name LIMIT 1";
/// By primary key; takes the write lock.
const SUBSCRIPTION_REROUTED: &str = "UPDATE postbox_subscription SET rerouted_seq = ?2, \
rerouted = CASE WHEN ?2 = 0 THEN revision ELSE rerouted END WHERE name = ?1";

/// Has it compared again with unrouted events beyond a place. By primary key; takes the write lock.
const SUBSCRIPTION_ASK: &str = "UPDATE postbox_subscription SET rerouted = 0, \
rerouted_seq = min(?2, CASE WHEN rerouted = revision THEN ?2 ELSE rerouted_seq END) WHERE name = ?1";

/// Whether an event is unrouted.
pub(crate) fn is_unrouted(tx: &Transaction<'_>, log: &LogName, seq: i64) -> Work<bool> {
    let row = params![log.as_str(), seq];
    Ok(tx.prepare_cached(UNROUTED_HAS)?.query_row(row, |_| Ok(())).optional()?.is_some())
}

/// How far the log was checked for routing.
pub(crate) fn routed(tx: &Transaction<'_>, log: &LogName) -> Work<i64> {
    Ok(tx.prepare_cached(LOG_ROUTED)?.query_row([log.as_str()], |row| row.get(0))?)
}

/// Runs one step.
pub(crate) fn note_unrouted(tx: &Transaction<'_>, log: &LogName, now: i64) -> Work<Routed> {
    let log = require_log("note_unrouted", tx, log)?;
    let readers = readers_of("note_unrouted", tx, &log)?;
    let routed = routed(tx, &log)?;
    for reader in &readers {
        if reader.changes_filter(tx, now)? {
            return Ok(Routed::default());
        }
    }
    let next: Option<(String, i64)> = tx
        .prepare_cached(SUBSCRIPTION_TO_REROUTE)?
        .query_row([log.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    match next {
        None if readers.is_empty() || readers.iter().any(|reader| reader.takes_everything(routed)) => {
            Ok(Routed::default())
        }
        Some((name, after)) => {
            reroute(tx, &log, &SubscriptionName::from_stored(name), after, now)?;
            Ok(Routed { unrouted: 0, more: true })
        }
        None => route(tx, &log, &readers, routed),
    }
}

/// Hands unrouted events to a subscription that wants them now. Events that its lanes have passed
/// with a former filter are sent; the others they have read with this one, or are about to read.
/// Events before its start stay unrouted.
fn reroute(tx: &Transaction<'_>, log: &LogName, name: &SubscriptionName, after: i64, now: i64) -> Work<()> {
    let reader = Reader::find("note_unrouted", tx, name)?;
    let again = SendAgain::new(tx, &reader, now)?;
    // By primary keys; no lock of its own.
    let unrouted_walk = format!(
        "SELECT {LOOK_COLUMNS} FROM postbox_unrouted u JOIN {} l ON l.seq = u.seq \
         WHERE u.log = ?1 AND u.seq > ?2 ORDER BY u.seq LIMIT {STEP_LOOK_MAX}",
        reader.table
    );
    let mut statement = tx.prepare_cached(&unrouted_walk)?;
    let mut rows = statement.query(params![log.as_str(), after])?;
    let (mut looked, mut last) = (0, 0);
    while let Some(row) = rows.next()? {
        let (head, seq) = (Head::read(row)?, seq(row)?);
        (looked, last) = (looked + 1, seq);
        if !reader.is_given(&head, seq) {
            continue;
        }
        match reader.state(&head, seq) {
            State::Skipped => again.send(row, integer(row, LOOK_DELIVER_AT)?)?,
            // If it was read, it has its row already, which stays.
            State::Dispatched if head.is_unparsable() => again.send(row, integer(row, LOOK_DELIVER_AT)?)?,
            _ => _ = tx.prepare_cached(UNROUTED_FORGET)?.execute(params![log.as_str(), seq])?,
        }
    }
    let progress = if looked < STEP_LOOK_MAX { 0 } else { last };
    tx.prepare_cached(SUBSCRIPTION_REROUTED)?.execute(params![name.as_str(), progress])?;
    Ok(())
}

/// Checks the next rows, and keeps those that no subscription wants.
fn route(tx: &Transaction<'_>, log: &LogName, readers: &[Reader], routed: i64) -> Work<Routed> {
    // Walks the log's primary key; no lock of its own.
    let log_walk = format!(
        "SELECT {HEAD_COLUMNS} FROM {} l WHERE l.seq > ?1 ORDER BY l.seq LIMIT {STEP_LOOK_MAX}",
        log_table(log)
    );
    let mut statement = tx.prepare_cached(&log_walk)?;
    let mut rows = statement.query([routed])?;
    let mut has_row = tx.prepare_cached(DELIVERY_STATE)?;
    let (mut looked, mut last, mut unrouted) = (0, routed, 0);
    while let Some(row) = rows.next()? {
        let (head, seq) = (Head::read(row)?, seq(row)?);
        (looked, last) = (looked + 1, seq);
        // At least one filter rejected it: events before the start of all subscriptions do not
        // count.
        let mut is_left_out = readers.iter().any(|reader| reader.is_judged(&head, seq));
        for reader in readers {
            is_left_out &= reader.state_found(tx, &head, seq)? == State::Skipped
                && !has_row.exists(params![reader.name.as_str(), seq])?;
        }
        if is_left_out {
            unrouted += tx.prepare_cached(UNROUTED_KEEP)?.execute(params![log.as_str(), seq])? as u64;
        }
    }
    let mut more = looked == STEP_LOOK_MAX;
    if unrouted > 0 {
        // A subscription whose filter changed since may want them now, whether its lanes took the
        // filter over or not.
        for reader in readers.iter().filter(|reader| reader.had_another_filter(routed)) {
            tx.prepare_cached(SUBSCRIPTION_ASK)?.execute(params![reader.name.as_str(), routed])?;
            more = true;
        }
    }
    if last > routed {
        tx.prepare_cached(LOG_MOVE)?.execute(params![log.as_str(), last])?;
    }
    Ok(Routed { unrouted, more })
}

/// Counts unrouted events by topic, up to a limit.
pub(crate) fn count_unrouted(session: &mut Session, log: &LogName) -> Work<Unrouted> {
    let now = session.settings.now();
    let tx = session.read()?;
    let log = require_log("unrouted", &tx, log)?;
    // By primary keys; no lock.
    let unrouted_count = format!(
        "SELECT l.topic, l.created_at FROM postbox_unrouted u JOIN {} l ON l.seq = u.seq \
         WHERE u.log = ?1 ORDER BY u.seq LIMIT {UNROUTED_COUNT_MAX}",
        log_table(&log)
    );
    let mut statement = tx.prepare_cached(&unrouted_count)?;
    let mut rows = statement.query([log.as_str()])?;
    let mut counted = Vec::new();
    while let Some(row) = rows.next()? {
        let age = until(integer(row, 1)?.unwrap_or(i64::MAX), now);
        counted.push((lossy(row, 0)?.unwrap_or_default(), 1, age));
    }
    Ok(unrouted(counted))
}
