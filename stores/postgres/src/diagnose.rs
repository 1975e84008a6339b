//! Explains lag: the newest events, and the sessions whose locks others wait for.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Arrival, Blocker, Diagnose, LogName, Result};
use postbox_postgres_sql::{check_log_name, is_undefined, log_unknown, params};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::session::Session;

/// The newest events of a log. Index: the log's primary key, backwards. No lock.
pub(crate) const LOG_NEWEST: &str = "
SELECT l.topic, l.tenant, l.key, l.created_at, clock_timestamp(), l.kind, l.aggregate, l.headers::text FROM {log} AS l ORDER BY l.seq DESC LIMIT $1";

/// Sessions that have blocked others on our tables for more than a second, and sessions that hold
/// locks there while their commit waits for a synchronous standby. A session that waits for a lock
/// itself is not the cause. Reads the server's lists of locks and sessions; waits for nothing.
const BLOCKERS: &str = "
WITH ours AS (
  SELECT l.pid, l.granted, c.relname::text AS name FROM pg_locks AS l
  JOIN pg_class AS c ON c.oid = l.relation
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
  WHERE n.nspname = $1 AND c.relkind = 'r'
    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())),
waits AS (
  SELECT w.pid, w.waitstart, unnest(pg_blocking_pids(w.pid)) AS blocker FROM pg_locks AS w
  WHERE NOT w.granted AND w.waitstart < clock_timestamp() - INTERVAL '1 second' AND w.pid IN (SELECT ours.pid FROM ours)
  UNION ALL
  SELECT c.pid, c.state_change, c.pid FROM pg_stat_activity AS c
  WHERE c.wait_event = 'SyncRep' AND c.state_change < clock_timestamp() - INTERVAL '1 second')
SELECT held.pid, coalesce(max(a.application_name), ''), coalesce(left(max(a.query), 80), ''),
  array_agg(DISTINCT held.name ORDER BY held.name), count(DISTINCT waits.pid),
  (extract(epoch FROM clock_timestamp() - min(waits.waitstart)) * 1000)::bigint, coalesce(max(a.wait_event) = 'SyncRep', false)
FROM waits
JOIN ours AS held ON held.pid = waits.blocker AND held.granted
LEFT JOIN pg_stat_activity AS a ON a.pid = held.pid
WHERE NOT EXISTS (SELECT FROM pg_locks AS w WHERE w.pid = held.pid AND NOT w.granted)
GROUP BY held.pid ORDER BY min(waits.waitstart) LIMIT 5";

#[async_trait]
impl Diagnose for PostgresStore {
    async fn arrivals(&self, log: &LogName, limit: usize) -> Result<Vec<Arrival>> {
        check_log_name("arrivals", log)?;
        let limit = limit as i64;
        let params = params![limit];
        let read = async |session: &Session| session.rows(&session.log_sql(LOG_NEWEST, log), &params).await;
        match self.look("arrivals", read).await {
            Err(error) if is_undefined(&error) => Err(log_unknown("arrivals", log.as_str())),
            rows => Ok(rows?.iter().filter_map(arrival).collect()),
        }
    }

    async fn blockers(&self) -> Result<Vec<Blocker>> {
        let schema = self.schema().as_str();
        let params = params![schema];
        let read = async |session: &Session| session.rows(BLOCKERS, &params).await;
        let look = async |session: &Session| session.at_once(&self.inner.modes.count, read).await;
        let rows = self.call("blockers", look).await?;
        let blocker = |row: &Row| {
            let session = row.get::<_, i32>(0);
            Blocker {
                session: session.into(),
                program: named(row.get(1)).to_owned(),
                query: row.get(2),
                tables: row.get(3),
                waiting: row.get::<_, i64>(4).unsigned_abs(),
                waited: Duration::from_millis(row.get::<_, i64>(5).unsigned_abs()),
                end: end(session),
                awaits_standby: row.get(6),
            }
        };
        Ok(rows.iter().map(blocker).collect())
    }
}

/// The name that a program gave itself.
pub(crate) fn named(program: &str) -> &str {
    if program.is_empty() { "a program without a name" } else { program }
}

/// The statement that ends a session.
pub(crate) fn end(session: i32) -> String {
    format!("SELECT pg_terminate_backend({session})")
}

/// `None` for a row that cannot be read.
fn arrival(row: &Row) -> Option<Arrival> {
    let [created_at, now] = [3, 4].map(|column| row.try_get::<_, Timestamp>(column).ok());
    let headers: Option<&str> = row.try_get(7).ok()?;
    Some(Arrival {
        topic: row.try_get(0).ok()?,
        tenant: row.try_get(1).ok()?,
        key: row.try_get(2).ok()?,
        kind: row.try_get(5).ok()?,
        aggregate: row.try_get(6).ok()?,
        headers: headers.and_then(|json| serde_json::from_str(json).ok()).unwrap_or_default(),
        age: Duration::try_from(now?.duration_since(created_at?)).unwrap_or_default(),
    })
}
