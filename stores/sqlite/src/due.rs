//! Delivery rows whose time has come.

use postbox_core::kit::BatchLimiter;
use postbox_core::{Batch, BatchLimit, Error, Lease, Seq, State};
use rusqlite::{Transaction, params};

use crate::classify::Work;
use crate::decode::{DELIVERY_COLUMNS, Decoded, DeliveryRow, log_find, payload_len};
use crate::lease::{find, held};
use crate::schema::log_table;
use crate::thread::Session;
use crate::window::push;

/// Reads the lane's due rows in `seq` order, each key's head followed by the events behind it.
pub(crate) fn read(session: &mut Session, lease: &Lease, limit: BatchLimit) -> Work<Batch> {
    let now = session.settings.now();
    let tx = session.read()?;
    held("due", &tx, lease, now)?;
    let stored = find(&tx, &lease.subscription)?.ok_or_else(|| Error::stale("due"))?;
    let mut due = Batch::default();
    let mut statement = log_find(&tx, &log_table(&stored.log))?;
    let (mut limiter, mut fitting) = (BatchLimiter::new(limit), Vec::new());
    for ready in ready(&tx, lease, limit.events.max(1), now)? {
        let mut rows = statement.query([ready.seq])?;
        let row = rows.next()?;
        if !limiter.take(row.map(payload_len).transpose()?.unwrap_or_default()) {
            break;
        }
        // An event that is gone must be closed, or it would stay the head of its key for ever.
        let decoded = row.map_or_else(|| Ok(Decoded::missing(&ready)), Decoded::read)?;
        fitting.push((ready, decoded));
    }
    fitting.sort_by_key(|(ready, _)| ready.seq);
    for (ready, decoded) in fitting {
        if ready.crashes > 0 {
            due.crashes.insert(Seq(ready.seq), ready.crashes);
        }
        push(&mut due, decoded, (ready.attempts.saturating_add(1), ready.replays), now);
    }
    Ok(due)
}

/// Returns at most `limit` rows: the heads, those due for longest first, each followed by the rows
/// behind it. The heads share the limit. Rows of a key are cut only at the end, so that the
/// returned part of a key has no gap.
fn ready(tx: &Transaction<'_>, lease: &Lease, limit: usize, now: i64) -> Work<Vec<DeliveryRow>> {
    // Rows that are due and at the head of their key, longest due first, by `postbox_delivery_due`
    // and, for the head, `postbox_delivery_key`; no lock.
    let delivery_due = format!(
        "SELECT {DELIVERY_COLUMNS} FROM postbox_delivery d \
         WHERE d.subscription = ?1 AND d.lane = ?2 AND d.state IN ('retrying', 'scheduled') AND d.due_at <= ?3 \
         AND (d.holds = 0 OR NOT EXISTS (SELECT 1 FROM postbox_delivery h INDEXED BY postbox_delivery_key \
         WHERE h.subscription = d.subscription AND h.key = d.key AND h.holds = 1 AND h.seq < d.seq)) ORDER BY d.due_at LIMIT ?4"
    );
    // Rows behind the head of a key, by `postbox_delivery_key`; no lock.
    let delivery_behind = format!(
        "SELECT {DELIVERY_COLUMNS} FROM postbox_delivery d INDEXED BY postbox_delivery_key \
         WHERE d.subscription = ?1 AND d.key = ?2 AND d.holds = 1 AND d.seq > ?3 ORDER BY d.seq LIMIT ?4"
    );
    let (name, read) = (lease.subscription.as_str(), |row: &rusqlite::Row<'_>| DeliveryRow::read(row, 0));
    let count = |rows: usize| i64::try_from(rows).unwrap_or(i64::MAX);
    let heads: Vec<DeliveryRow> = tx
        .prepare_cached(&delivery_due)?
        .query_map(params![name, lease.lane, now, count(limit)], read)?
        .collect::<Result<_, _>>()?;
    let followers = (limit / heads.len().max(1)).saturating_sub(1);
    let mut all = Vec::with_capacity(limit.min(heads.len() * (followers + 1)));
    let mut behind = tx.prepare_cached(&delivery_behind)?;
    for head in heads {
        let (seq, key) = (head.seq, head.key.clone().filter(|_| head.holds));
        all.push(head);
        if let Some(key) = key {
            for row in behind.query_map(params![name, key, seq, count(followers)], read)? {
                let row = row?;
                if row.state != State::Blocked && !(row.state == State::Retrying && row.is_due(now)) {
                    break;
                }
                all.push(row);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use postbox_core::LogName;

    use super::*;
    use crate::plans::{ROWS, database, fill, instructions};

    #[test]
    fn what_is_not_due_is_not_read() {
        let mut database = database();
        // Too early, of another lane, dead; then due ones, and many behind one of them.
        for (rows, values) in [
            (ROWS, "0, NULL, 'retrying', 0, 1000"),
            (ROWS, "1, NULL, 'retrying', 0, 1"),
            (ROWS, "0, NULL, 'dead', 0, NULL"),
            (3, "0, NULL, 'scheduled', 0, 1"),
            (1, "0, 'k', 'retrying', 1, 1"),
            (ROWS, "0, 'k', 'blocked', 1, NULL"),
        ] {
            fill(&database, rows, values);
        }
        let (subscription, owner) = ("s".parse().expect("a name"), "me".parse().expect("a name"));
        let lease = Lease { subscription, log: LogName::outbox(), lane: 0, epoch: 1, owner, crashes: 0 };
        for statistics in ["", "ANALYZE"] {
            database.execute_batch(statistics).expect("analysed");
            let tx = database.transaction().expect("begun");
            let (due, steps) = instructions(&tx, || ready(&tx, &lease, 12, 100).expect("read"));
            assert_eq!(due.len(), 6, "four heads, and two behind one of them");
            assert!(steps < ROWS, "{steps} instructions");
        }
    }
}
