//! `due`: events that left the stream and whose time has come.

use std::time::Duration;

use postbox_core::kit::DueOrder;
use postbox_core::{Batch, BatchLimit, Error, Key, Lease, Result};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use crate::PostgresStore;
use crate::classify::{classify, has_damage_code};
use crate::decode::{EVENT_COLUMNS, Stored, stored};
use crate::payload::fitting;
use crate::session::COMMIT;
use crate::subscription::SubscriptionRow;
use crate::window::ReadParams;

/// Where the columns after those of an event begin.
const COLUMN: usize = EVENT_COLUMNS.len();

/// Whether the lane is ours, and whether anything of the subscription left the stream. Nothing is
/// ours on a standby: it may lack rows that are settled. Indexes: primary keys of `lane` and
/// `delivery`. No lock.
const LANE_HELD: &str = "
SELECT EXISTS (SELECT FROM {s}.delivery WHERE subscription = $1) FROM {s}.lane AS l
WHERE l.subscription = $1 AND l.lane = $2 AND l.epoch = $3 AND l.lease_until > clock_timestamp() AND NOT pg_is_in_recovery()";

/// The heads whose time has come, each with what is blocked behind it. Indexes: `delivery_due` for
/// the heads, `delivery_held` for what is behind them, then primary keys. No lock. A row whose
/// event is gone comes too: it must be closed, or it would be the head of its key for ever.
///
/// A keyed row is a head only if nothing of its key comes before it: one probe each, instead of
/// comparing every row with every other. `statement_timestamp()` and not `clock_timestamp()`,
/// because only a stable function can bound an index scan; nothing is waited for here.
const DELIVERY_READ_DUE: &str = "
WITH head AS MATERIALIZED (
  SELECT d.seq, d.key, d.holds FROM {s}.delivery AS d
  WHERE d.subscription = $4 AND d.lane = $3 AND d.due_at <= statement_timestamp()
    AND (NOT d.holds OR d.seq = (SELECT h.seq FROM {s}.delivery AS h
      WHERE h.subscription = $4 AND h.key = d.key AND h.holds ORDER BY h.seq LIMIT 1))
  ORDER BY d.due_at LIMIT $2),
member AS MATERIALIZED (
  SELECT head.seq, true AS is_head FROM head
  UNION ALL
  SELECT behind.seq, false FROM head CROSS JOIN LATERAL (
    SELECT f.seq FROM {s}.delivery AS f
    WHERE f.subscription = $4 AND f.key = head.key AND f.holds AND f.seq > head.seq ORDER BY f.seq LIMIT $2 OFFSET 0) AS behind
  WHERE head.holds)
SELECT {columns}, d.attempts, d.replays, d.holds, m.is_head,
  d.state = 'blocked' OR (d.state = 'retrying' AND coalesce(d.due_at <= statement_timestamp(), true)), m.seq, d.key
FROM (SELECT * FROM member ORDER BY seq LIMIT $2) AS m
JOIN {s}.delivery AS d ON d.subscription = $4 AND d.seq = m.seq
LEFT JOIN {log} AS l ON l.seq = m.seq
ORDER BY m.seq";

/// What left the stream in a lane: whether keys are held, whether unread events were discarded, and
/// how long until the next is due, in microseconds. Indexes: `delivery_held_lane`,
/// `delivery_discarded`, `delivery_due`. No lock. Rows behind an unfinished one of their key are
/// not due, whatever their time says.
const LANE_EXCEPTIONS: &str = "
SELECT EXISTS (SELECT FROM {s}.delivery WHERE subscription {=} $1 AND lane {=} $2 AND holds),
  EXISTS (SELECT FROM {s}.delivery WHERE subscription {=} $1 AND lane {=} $2 AND state {=} 'discarded' AND seq {>} $3),
  (SELECT greatest(0, extract(epoch FROM d.due_at {-} pg_catalog.clock_timestamp()) {*} 1000000)::bigint
   FROM {s}.delivery AS d
   WHERE d.subscription {=} $1 AND d.lane {=} $2 AND d.due_at IS NOT NULL
     AND (NOT d.holds OR d.seq {=} (SELECT h.seq FROM {s}.delivery AS h
       WHERE h.subscription {=} d.subscription AND h.key {=} d.key AND h.holds ORDER BY h.seq LIMIT 1))
   ORDER BY d.due_at LIMIT 1)";

/// What left the stream in a lane.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Exceptions {
    pub(crate) holds: bool,
    pub(crate) discards: bool,
    pub(crate) due_in: Option<Duration>,
}

/// A due row: the event, and what decides whether it may go now.
struct Waiting {
    stored: Stored,
    holds: bool,
    is_head: bool,
    may_follow: bool,
}

pub(crate) async fn due(store: &PostgresStore, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
    let subscription = store.subscription("due", &lease.subscription).await?;
    let session = store.session("due").await?;
    let mut params = ReadParams::new(lease, &subscription, limit);
    let mut batch = read(store, session.client(), lease, &subscription, &params).await;
    if batch.as_ref().is_err_and(has_damage_code) {
        params.leave_payloads_behind();
        batch = read(store, session.client(), lease, &subscription, &params).await;
    }
    session.finish();
    batch
}

async fn read(
    store: &PostgresStore,
    client: &Client,
    lease: &Lease,
    subscription: &SubscriptionRow,
    params: &ReadParams<'_>,
) -> Result<Batch> {
    let (held, due) = (store.schema().sql(LANE_HELD), store.schema().log_sql(DELIVERY_READ_DUE, &subscription.log));
    let of_lane: [(&(dyn ToSql + Sync), Type); 3] =
        [(&subscription.id, Type::INT4), (&params.lane, Type::INT4), (&lease.epoch, Type::INT8)];
    let of_rows: [(&(dyn ToSql + Sync), Type); 4] = [
        (&params.inline_bytes, Type::INT4),
        (&params.rows, Type::INT8),
        (&params.lane, Type::INT4),
        (&subscription.id, Type::INT4),
    ];
    let (begun, held, rows, committed) = futures::join!(
        client.batch_execute(&store.inner.modes.read),
        client.query_typed_opt(&held, &of_lane),
        client.query_typed(&due, &of_rows),
        client.batch_execute(COMMIT),
    );
    let failed = |error: tokio_postgres::Error| classify("due", &error);
    begun.map_err(failed)?;
    let left_stream = held.map_err(failed)?.ok_or_else(|| Error::stale("due"))?.get(0);
    let rows = rows.map_err(failed)?;
    committed.map_err(failed)?;
    let waiting = rows.iter().map(waiting).collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let mut order = DueOrder::default();
    let mut ready: Vec<Stored> = waiting.into_iter().filter(|row| row.goes(&mut order)).map(|row| row.stored).collect();
    ready.truncate(fitting(&ready, params.limit));
    store.fill_payloads(client, &subscription.log, &mut ready).await?;
    let exceptions = store.exceptions(client, lease, subscription, left_stream, i64::MAX).await?;
    let mut batch = Batch { due_in: exceptions.due_in, ..Batch::default() };
    ready.into_iter().for_each(|stored| batch.push(stored.delivery, stored.unreadable));
    Ok(batch)
}

impl PostgresStore {
    /// What left the stream in a lane, where something did.
    pub(crate) async fn exceptions(
        &self,
        client: &Client,
        lease: &Lease,
        subscription: &SubscriptionRow,
        left_stream: bool,
        after: i64,
    ) -> Result<Exceptions> {
        if !left_stream {
            return Ok(Exceptions::default());
        }
        let lane = lease.lane.cast_signed();
        let params: [(&(dyn ToSql + Sync), Type); 3] =
            [(&subscription.id, Type::INT4), (&lane, Type::INT2), (&after, Type::INT8)];
        let row = client.query_typed_one(&self.schema().sql(LANE_EXCEPTIONS), &params).await;
        let row = row.map_err(|error| classify("next_batch", &error))?;
        let wait = |micros: i64| Duration::from_micros(micros.unsigned_abs());
        Ok(Exceptions { holds: row.get(0), discards: row.get(1), due_in: row.get::<_, Option<i64>>(2).map(wait) })
    }
}

impl Waiting {
    fn goes(&self, order: &mut DueOrder) -> bool {
        let key = self.stored.delivery.event.key.as_ref().filter(|_| self.holds);
        order.admits(key, self.is_head, self.may_follow)
    }
}

fn waiting(row: &Row) -> Result<Waiting, tokio_postgres::Error> {
    let mut stored = match row.try_get::<_, Option<i64>>(0)? {
        Some(_) => stored(row)?,
        None => {
            let key = row.try_get::<_, Option<String>>(COLUMN + 6).ok().flatten();
            Stored::missing(row.try_get(COLUMN + 5)?, key.map(Key::from_stored))
        }
    };
    let attempts: i32 = row.try_get(COLUMN)?;
    let replays: i32 = row.try_get(COLUMN + 1)?;
    stored.delivery.attempt = attempts.unsigned_abs() + 1;
    stored.delivery.replay = replays.unsigned_abs();
    Ok(Waiting {
        stored,
        holds: row.try_get(COLUMN + 2)?,
        is_head: row.try_get(COLUMN + 3)?,
        may_follow: row.try_get(COLUMN + 4)?,
    })
}
