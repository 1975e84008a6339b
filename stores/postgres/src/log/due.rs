//! Events that left the stream and whose time has come.

use std::collections::HashSet;

use postbox_core::{Batch, BatchLimit, Key, Lease, Result};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use super::page::{Shared, fitting};
use super::subscribe::Reading;
use crate::PostgresStore;
use crate::classify::{classify, told_damage};
use crate::decode::{EVENT_COLUMNS, Stored, event_columns, stored};
use crate::session::COMMIT;

/// The heads whose time has come, each with what is blocked behind it. Indexes: `delivery_due` for the heads, `delivery_held` for what is
/// behind them, then primary keys. No lock. A row whose event is gone comes too: it must be closed, or
/// it would be the head of its key for ever.
///
/// A keyed row is a head only if nothing of its key comes before it: one probe each, instead of comparing every row with every other.
/// `statement_timestamp()` and not `clock_timestamp()`, because only a stable function can bound an index scan; nothing is waited for here.
const DELIVERY_READ_DUE: &str = concat!(
    "WITH head AS MATERIALIZED (
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
SELECT ",
    event_columns!(),
    ", d.attempts, d.replays, d.holds, m.is_head,
  d.state = 'blocked' OR (d.state = 'retrying' AND coalesce(d.due_at <= statement_timestamp(), true)), m.seq, d.key
FROM (SELECT * FROM member ORDER BY seq LIMIT $2) AS m
JOIN {s}.delivery AS d ON d.subscription = $4 AND d.seq = m.seq
LEFT JOIN {log} AS l ON l.seq = m.seq
ORDER BY m.seq"
);

/// A due row: the event, and what decides whether it may go now.
struct Waiting {
    stored: Stored,
    holds: bool,
    is_head: bool,
    may_follow: bool,
}

impl PostgresStore {
    pub(crate) async fn read_due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let reading = self.reading("due", &lease.subscription).await?;
        let session = self.session("due").await?;
        let mut shared = Shared::new(lease, &reading, limit);
        let mut batch = self.read_due_on(session.client(), lease, &reading, &shared).await;
        if batch.as_ref().is_err_and(told_damage) {
            shared.leave_payloads_behind();
            batch = self.read_due_on(session.client(), lease, &reading, &shared).await;
        }
        session.finish();
        batch
    }

    async fn read_due_on(
        &self,
        client: &Client,
        lease: &Lease,
        reading: &Reading,
        shared: &Shared<'_>,
    ) -> Result<Batch> {
        let sql = self.schema().log_sql(DELIVERY_READ_DUE, &reading.log);
        let mut params: Vec<(&(dyn ToSql + Sync), Type)> = shared.params();
        params.truncate(3);
        params.push((&reading.id, Type::INT4));
        let (begun, guard, rows, committed) = futures::join!(
            client.batch_execute(&self.inner.preambles.read),
            self.guard(client, lease, reading, None),
            client.query_typed(&sql, &params),
            client.batch_execute(COMMIT),
        );
        let failed = |error: tokio_postgres::Error| classify("due", &error);
        begun.map_err(failed)?;
        let left = guard?.left_stream;
        let rows = rows.map_err(failed)?;
        committed.map_err(failed)?;
        let waiting = rows.iter().map(waiting).collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let mut ready = ready(waiting);
        ready.truncate(fitting(&ready, shared.limit));
        self.fill_payloads(client, &reading.log, &mut ready).await?;
        let exceptions = self.exceptions(client, lease, reading, left, i64::MAX).await?;
        let mut batch = Batch { due_in: exceptions.due_in, ..Batch::default() };
        ready.into_iter().for_each(|stored| batch.push(stored.delivery, stored.unreadable));
        Ok(batch)
    }
}

fn waiting(row: &Row) -> Result<Waiting, tokio_postgres::Error> {
    let mut stored = match row.try_get::<_, Option<i64>>(0)? {
        Some(_) => stored(row)?,
        None => {
            let key = row.try_get::<_, Option<String>>(EVENT_COLUMNS + 6).ok().flatten();
            Stored::missing(row.try_get(EVENT_COLUMNS + 5)?, key.map(Key::from_stored))
        }
    };
    let attempts: i32 = row.try_get(EVENT_COLUMNS)?;
    let replays: i32 = row.try_get(EVENT_COLUMNS + 1)?;
    stored.delivery.attempt = attempts.unsigned_abs() + 1;
    stored.delivery.replay = replays.unsigned_abs();
    Ok(Waiting {
        stored,
        holds: row.try_get(EVENT_COLUMNS + 2)?,
        is_head: row.try_get(EVENT_COLUMNS + 3)?,
        may_follow: row.try_get(EVENT_COLUMNS + 4)?,
    })
}

/// Of each key the head and what directly follows it; behind a row that has to wait, nothing of its key goes.
fn ready(waiting: Vec<Waiting>) -> Vec<Stored> {
    let mut open: HashSet<Key> = HashSet::new();
    let mut ready = Vec::with_capacity(waiting.len());
    for Waiting { stored, holds, is_head, may_follow } in waiting {
        if let Some(key) = stored.delivery.event.key.as_ref().filter(|_| holds) {
            let may_go = is_head || (may_follow && open.contains(key));
            if !may_go {
                open.remove(key);
                continue;
            }
            open.insert(key.clone());
        }
        ready.push(stored);
    }
    ready
}
