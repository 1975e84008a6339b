//! Delivery rows whose time has come.

use postbox_core::kit::BatchLimiter;
use postbox_core::{Batch, BatchLimit, Error, Lease};
use rusqlite::{Row, Transaction, named_params, params};

use crate::classify::Work;
use crate::decode::{Decoded, LOG_COLUMNS, payload_len};
use crate::lease::{find, held};
use crate::schema::log_table;
use crate::thread::Session;
use crate::window::push;

/// Rows that are due and at the head of their key, longest due first, by `postbox_delivery_due`
/// and, for the head, `postbox_delivery_key`; no lock.
const DELIVERY_DUE: &str = "SELECT d.seq, d.attempts, d.replays, d.state, d.due_at, d.key, d.holds FROM postbox_delivery d \
WHERE d.subscription = :subscription AND d.lane = :lane AND d.state IN ('retrying', 'scheduled') AND d.due_at <= :now \
AND (d.holds = 0 OR NOT EXISTS (SELECT 1 FROM postbox_delivery h \
WHERE h.subscription = d.subscription AND h.key = d.key AND h.holds = 1 AND h.seq < d.seq)) ORDER BY d.due_at LIMIT :limit";
/// Rows behind the head of a key, by `postbox_delivery_key`; no lock.
const DELIVERY_BEHIND: &str = "SELECT seq, attempts, replays, state, due_at, key, holds FROM postbox_delivery \
WHERE subscription = ?1 AND key = ?2 AND holds = 1 AND seq > ?3 ORDER BY seq LIMIT ?4";

/// A row that may go.
struct Ready {
    seq: i64,
    attempts: u32,
    replays: u32,
    state: String,
    due_at: Option<i64>,
    key: Option<String>,
    holds: bool,
}

impl Ready {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            seq: row.get(0)?,
            attempts: row.get(1)?,
            replays: row.get(2)?,
            state: row.get(3)?,
            due_at: row.get(4)?,
            key: row.get(5)?,
            holds: row.get(6)?,
        })
    }
}

/// Reads the lane's due rows, in `seq` order, each key's head followed by the events behind it.
pub(crate) fn read(session: &mut Session, lease: &Lease, limit: BatchLimit) -> Work<Batch> {
    let now = session.settings.now();
    let tx = session.read()?;
    held("due", &tx, lease, now)?;
    let stored = find(&tx, &lease.subscription)?.ok_or_else(|| Error::stale("due"))?;
    let mut due = Batch::default();
    // By primary key; no lock.
    let log_find = format!("SELECT {LOG_COLUMNS} FROM {} l WHERE l.seq = ?1", log_table(&stored.log));
    let mut statement = tx.prepare_cached(&log_find)?;
    let mut limiter = BatchLimiter::new(limit);
    for ready in ready(&tx, lease, limit.events.max(1), now)? {
        let mut rows = statement.query([ready.seq])?;
        let row = rows.next()?;
        if !limiter.take(row.map(payload_len).transpose()?.unwrap_or_default()) {
            break;
        }
        let decoded = match row {
            Some(row) => Decoded::read(row)?,
            // It must be closed, or it would be the head of its key for ever.
            None => Decoded::missing(&tx, &lease.subscription, ready.seq)?,
        };
        push(&mut due, decoded, ready.attempts.saturating_add(1), ready.replays);
    }
    Ok(due)
}

/// At most `limit` rows in `seq` order. A key's rows are cut only at the end, so that what is given
/// of a key has no gap.
fn ready(tx: &Transaction<'_>, lease: &Lease, limit: usize, now: i64) -> Work<Vec<Ready>> {
    let parameters = named_params! {
        ":subscription": lease.subscription.as_str(),
        ":lane": lease.lane,
        ":now": now,
        ":limit": i64::try_from(limit).unwrap_or(i64::MAX),
    };
    let heads: Vec<Ready> =
        tx.prepare_cached(DELIVERY_DUE)?.query_map(parameters, Ready::read)?.collect::<Result<_, _>>()?;
    let mut all = Vec::with_capacity(heads.len());
    let mut behind = tx.prepare_cached(DELIVERY_BEHIND)?;
    let mut room = limit;
    for head in heads {
        if let Some(key) = head.key.as_ref().filter(|_| head.holds) {
            let room_left = i64::try_from(room).unwrap_or(i64::MAX);
            let rows = behind.query_map(params![lease.subscription.as_str(), key, head.seq, room_left], Ready::read)?;
            for row in rows {
                let row = row?;
                let goes =
                    row.state == "blocked" || (row.state == "retrying" && row.due_at.is_some_and(|at| at <= now));
                if !goes {
                    break;
                }
                room -= 1;
                all.push(row);
            }
        }
        all.push(head);
    }
    all.sort_by_key(|ready| ready.seq);
    all.truncate(limit);
    Ok(all)
}
