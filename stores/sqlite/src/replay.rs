//! Replay: sends events again that were delivered or skipped. They get delivery rows that are due
//! now.

use std::collections::BTreeSet;

use postbox_core::{Ordering, Replay, Replayed, Seq, State, SubscriptionName};
use rusqlite::{Row, Transaction, params};

use crate::admin::seqs_of;
use crate::classify::Work;
use crate::decode::{
    EXPIRES_AT, Head, LOOK_COLUMNS, LOOK_COLUMNS_COUNT, LOOK_DELIVER_AT, integer, is_meant, lossy, seq,
};
use crate::inspect::Reader;
use crate::unrouted::UNROUTED_FORGET;
use crate::window::{DELIVERY_KEY_HELD, log_end};

/// How many places of the log one step reads: some tens of milliseconds of the write lock, however
/// few events match and however many have a delivery row.
const STEP_LOOK_MAX: i64 = 20_000;

/// The replay number of this step, which no event of the subscription has had before. By primary
/// key; takes the write lock.
pub(crate) const REPLAY_NEXT: &str =
    "UPDATE postbox_subscription SET replays = replays + 1 WHERE name = ?1 RETURNING replays";
/// By primary key; takes the write lock.
const DELIVERY_LEAVE: &str = "INSERT INTO postbox_delivery \
(subscription, seq, lane, id, topic, key, created_at, state, holds, attempts, replays, due_at, updated_at) \
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, 0, ?10, ?11, ?12) ON CONFLICT DO NOTHING";

/// Records a skipped event that is sent all the same. By primary key; takes the write lock.
const SENT_NOTE: &str = "INSERT OR IGNORE INTO postbox_sent (subscription, seq) VALUES (?1, ?2)";

/// Adds delivery rows, due now or at their time, all of one replay.
pub(crate) struct SendAgain<'a> {
    tx: &'a Transaction<'a>,
    reader: &'a Reader,
    replay: i64,
    now: i64,
}

impl<'a> SendAgain<'a> {
    pub(crate) fn new(tx: &'a Transaction<'_>, reader: &'a Reader, now: i64) -> Work<Self> {
        let replay = tx.prepare_cached(REPLAY_NEXT)?.query_row([reader.name.as_str()], |row| row.get(0))?;
        Ok(Self { tx, reader, replay, now })
    }

    /// Sends the event of a row of [`crate::decode::HEAD_COLUMNS`], at `deliver_at` if that is in
    /// the future.
    pub(crate) fn send(&self, row: &Row<'_>, deliver_at: Option<i64>) -> Work<()> {
        let Self { tx, reader, replay, now } = self;
        let (head, seq) = (Head::read(row)?, seq(row)?);
        leave_stream(tx, reader, row, (&head, seq), deliver_at, *replay, *now)?;
        if reader.state(&head, seq) == State::Skipped {
            tx.prepare_cached(SENT_NOTE)?.execute(params![reader.name.as_str(), seq])?;
        }
        tx.prepare_cached(UNROUTED_FORGET)?.execute(params![reader.stored.log.as_str(), seq])?;
        Ok(())
    }
}

/// Adds the delivery row of an event that leaves the stream for another reason than a failure. It
/// is due now, at `deliver_at`, or once those before it in its key are done: if many rows of a key
/// were due, each call of `due` would look at all of them to find the first. `row` has
/// [`crate::decode::HEAD_COLUMNS`].
pub(crate) fn leave_stream(
    tx: &Transaction<'_>,
    reader: &Reader,
    row: &Row<'_>,
    (head, seq): (&Head<'_>, i64),
    deliver_at: Option<i64>,
    replay: i64,
    now: i64,
) -> Work<()> {
    let (key, id, created_at) = (lossy(row, 3)?, lossy(row, 4)?, integer(row, 5)?.unwrap_or(0));
    let later = deliver_at.filter(|at| *at > now);
    let holds = reader.stored.ordering == Ordering::Key && key.is_some() && later.is_none();
    let (name, lane) = (reader.name.as_str(), reader.lane(head));
    let mut is_held = tx.prepare_cached(DELIVERY_KEY_HELD)?;
    let (state, due_at) = match later {
        Some(at) => (State::Scheduled, Some(at)),
        None if holds && is_held.exists(params![name, key, seq])? => (State::Blocked, None),
        None => (State::Retrying, Some(now)),
    };
    let state = state.as_str();
    let values = params![name, seq, lane, id, head.topic, key, created_at, state, holds, replay, due_at, now];
    tx.prepare_cached(DELIVERY_LEAVE)?.execute(values)?;
    Ok(())
}

/// Runs one step.
pub(crate) fn replay(tx: &Transaction<'_>, name: &SubscriptionName, replay: &Replay, now: i64) -> Work<Replayed> {
    let reader = Reader::find("replay", tx, name)?;
    // The first place, by primary key; no lock of its own.
    let log_first = format!("SELECT coalesce(min(seq), 1) FROM {}", reader.table);
    let first: i64 = tx.query_row(&log_first, [], |row| row.get(0))?;
    let last = log_end(tx, &reader.table)?;
    let through = replay.through.map_or(last, |seq| seq.0.min(last));
    if replay.step_max() == 0 {
        return Ok(Replayed { count: 0, next: None, through: Seq(through) });
    }
    let again = if replay.dry_run { None } else { Some(SendAgain::new(tx, &reader, now)?) };
    let after = replay.after.map_or(first - 1, |seq| seq.0.max(first - 1));
    let until = match replay.ids {
        Some(_) => through,
        None => through.min(after.saturating_add(STEP_LOOK_MAX)),
    };
    let named = match &replay.ids {
        Some(ids) => format!(" AND l.seq IN ({})", places(&seqs_of(tx, &reader.stored.log, ids)?)),
        None => String::new(),
    };
    // Walks the log's primary key, or looks up places in it; no lock of its own. Reads no payload.
    let log_walk = format!(
        "SELECT {LOOK_COLUMNS}, {EXPIRES_AT} FROM {} l WHERE l.seq > ?2 AND l.seq <= ?3{named} \
         AND NOT EXISTS (SELECT 1 FROM postbox_delivery d WHERE d.subscription = ?1 AND d.seq = l.seq) ORDER BY l.seq",
        reader.table
    );
    let mut statement = tx.prepare(&log_walk)?;
    let mut rows = statement.query(params![name.as_str(), after, until])?;
    let next = (until < through).then_some(Seq(until));
    let mut replayed = Replayed { count: 0, next, through: Seq(through) };
    while let Some(row) = rows.next()? {
        let (head, seq) = (Head::read(row)?, seq(row)?);
        let is_sent = is_meant(&replay.which, row, &head)?
            && (replay.ids.is_some() || reader.wants(&head))
            && reader.state(&head, seq) != State::Pending
            && integer(row, LOOK_COLUMNS_COUNT)?.is_none_or(|end| end > now);
        if is_sent {
            again.as_ref().map_or(Ok(()), |again| again.send(row, integer(row, LOOK_DELIVER_AT)?))?;
            replayed.count += 1;
        }
        if replayed.count == replay.step_max() as u64 {
            replayed.next = Some(Seq(seq));
            break;
        }
    }
    Ok(replayed)
}

/// A list of numbers for `IN`, which contains only digits.
fn places(seqs: &BTreeSet<i64>) -> String {
    let seqs: Vec<String> = seqs.iter().map(i64::to_string).collect();
    seqs.join(", ")
}
