//! `due`: delivery rows whose time has come.

use std::collections::{BTreeMap, HashSet};

use postbox_core::{Batch, BatchLimit, Error, Key, Lease, Result};
use postbox_postgres_sql::{EVENT_COLUMNS, params};

use crate::PostgresStore;
use crate::classify::is_damage;
use crate::decode::Stored;
use crate::payload::{fill_payloads, fitting};
use crate::session::Session;
use crate::subscription::SubscriptionRow;
use crate::window::{Exceptions, ReadParams};

/// The first column after those of an event.
const COLUMN: usize = EVENT_COLUMNS.len();

/// Whether this relay holds the lane, and whether the subscription has any delivery rows. On a
/// standby no relay holds a lane, because the standby may lack rows that are settled. Indexes:
/// primary keys of `lane` and `delivery`. No lock.
pub(crate) const LANE_HELD: &str = "
SELECT EXISTS (SELECT FROM {s}.delivery WHERE subscription = $1) FROM {s}.lane AS l
WHERE l.subscription = $1 AND l.lane = $2 AND l.epoch = $3 AND l.lease_until > clock_timestamp() AND NOT pg_is_in_recovery()";

/// The rows that are first of their key and due, each with the blocked rows behind it. Indexes:
/// `delivery_due` for the heads, `delivery_held` for the rows behind them, then primary keys. No
/// lock. A row whose event is gone is returned too: unless it is closed, it would stay the head of
/// its key for ever. So is one whose event belongs to another tenant than the subscription: whoever
/// works for a tenant may write rows, but must not have the events of others sent.
///
/// A keyed row is a head only if no row of its key comes before it. This costs one index probe per
/// row, instead of comparing every row with every other. The rows themselves are found one by one
/// behind a fence. As a plain join, their order would come from a walk of all rows of the
/// subscription (30 s with 800,000 scheduled ones). The heads share the limit, so that a key
/// with many rows neither starves others nor is read again and again. `statement_timestamp()`
/// rather than `clock_timestamp()`, because only a stable function can bound an index scan; this
/// statement waits for nothing, so the two hardly differ. Rows come in the order in which they are
/// taken until the batch is full: the longest due first, each head before the rows behind it.
pub(crate) const DELIVERY_READ_DUE: &str = "
WITH head AS MATERIALIZED (
  SELECT d.seq, d.key, d.holds, d.due_at FROM {s}.delivery AS d
  WHERE d.subscription = $4 AND d.lane = $3 AND d.due_at <= statement_timestamp()
    AND (NOT d.holds OR d.seq = (SELECT h.seq FROM {s}.delivery AS h
      WHERE h.subscription = $4 AND h.key = d.key AND h.holds ORDER BY h.key, h.seq LIMIT 1))
  ORDER BY d.due_at LIMIT $2),
member AS MATERIALIZED (
  SELECT head.seq, head.due_at, true AS is_head FROM head
  UNION ALL
  SELECT behind.seq, head.due_at, false FROM head CROSS JOIN LATERAL (
    SELECT f.seq FROM {s}.delivery AS f
    WHERE f.subscription = $4 AND f.key = head.key AND f.holds AND f.seq > head.seq ORDER BY f.seq
    LIMIT $2 / (SELECT count(*) FROM head) - 1 OFFSET 0) AS behind
  WHERE head.holds)
SELECT {columns}, d.attempts, d.replays, d.holds, m.is_head,
  d.state = 'blocked' OR (d.state = 'retrying' AND coalesce(d.due_at <= statement_timestamp(), true)), m.seq, d.key, d.crashes
FROM member AS m
CROSS JOIN LATERAL (SELECT * FROM {s}.delivery AS r WHERE r.subscription = $4 AND r.seq = m.seq OFFSET 0) AS d
LEFT JOIN {log} AS l ON l.seq = m.seq AND {of_its_tenant}
ORDER BY m.due_at, m.seq";

pub(crate) async fn due(store: &PostgresStore, session: &Session, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
    let subscription = store.leased(session, lease).await?;
    let mut params = ReadParams::new(lease, &subscription, limit);
    match read(store, session, lease, &subscription, &params).await {
        Err(error) if is_damage(&error) => {
            params.leave_payloads_behind();
            read(store, session, lease, &subscription, &params).await
        }
        batch => batch,
    }
}

async fn read(
    store: &PostgresStore,
    session: &Session,
    lease: &Lease,
    subscription: &SubscriptionRow,
    params: &ReadParams<'_>,
) -> Result<Batch> {
    let (held, due) = (session.sql(LANE_HELD), session.log_sql(DELIVERY_READ_DUE, &subscription.log));
    let of_lane = params![subscription.id, params.lane, lease.epoch];
    // Not `params.rows`, which is one more: all that is read has room in the batch.
    let events = params.limit.events as i64;
    let of_rows = params![params.inline_bytes, events, params.lane, subscription.id];
    let look = async |session: &Session| {
        let (held, rows) = futures::join!(session.rows(&held, &of_lane), session.rows(&due, &of_rows));
        let left_stream: bool = held?.first().ok_or_else(|| Error::stale("due"))?.get(0);
        Ok((left_stream, rows?))
    };
    let (left_stream, rows) = session.at_once(&store.inner.modes.read, look).await?;
    let mut order = DueOrder::default();
    let (mut ready, mut crashes) = (Vec::new(), BTreeMap::new());
    for row in &rows {
        let mut stored = Stored::of_delivery(row, COLUMN + 5);
        let count = |column: usize| row.get::<_, i32>(column).unsigned_abs();
        (stored.delivery.attempt, stored.delivery.replay) = (count(COLUMN) + 1, count(COLUMN + 1));
        let (holds, is_head): (bool, bool) = (row.get(COLUMN + 2), row.get(COLUMN + 3));
        let key = stored.delivery.event.key.as_ref().filter(|_| holds);
        if order.admits(key, is_head, row.get(COLUMN + 4)) {
            let crashed = count(COLUMN + 7);
            crashes.extend((crashed > 0).then_some((stored.delivery.seq, crashed)));
            ready.push(stored);
        }
    }
    ready.truncate(fitting(&ready, params.limit));
    ready.sort_by_key(Stored::seq);
    fill_payloads(session, &subscription.log, &mut ready).await?;
    let exceptions = Exceptions::ask(session, lease, subscription.id, left_stream, i64::MAX).await?;
    let mut batch = Batch { due_in: exceptions.due_in, crashes, ..Batch::default() };
    ready.into_iter().for_each(|stored| stored.into_batch(&mut batch));
    Ok(batch)
}

/// Looks at a lane's rows, those of a key in `seq` order. Of each key it admits the head and the
/// rows directly behind it; nothing of a key passes a row that has to wait.
#[derive(Debug, Default)]
struct DueOrder {
    open: HashSet<Key>,
}

impl DueOrder {
    /// Whether a row may be sent. `holds` is the key that it holds, if any. `goes_first` means that
    /// its time has come and that it is the first of its key or holds no key. `may_follow` means
    /// that it may be sent right after the row before it.
    fn admits(&mut self, holds: Option<&Key>, goes_first: bool, may_follow: bool) -> bool {
        let Some(key) = holds else { return goes_first };
        let goes = goes_first || (may_follow && self.open.contains(key));
        if goes {
            self.open.insert(key.clone());
        } else {
            self.open.remove(key);
        }
        goes
    }
}
