//! Explains lag: the newest events, and who is in the way: whose locks others wait for, and what
//! holds the database's horizon.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Arrival, Blocker, Diagnose, Error, Hold, LogName, Result};
use postbox_postgres_sql::{check_log_name, is_undefined, log_unknown, params};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::classify::one_line;
use crate::decode::Raw;
use crate::session::Session;

/// The newest events of a log. Index: the log's primary key, backwards. No lock.
pub(crate) const LOG_NEWEST: &str = "
SELECT l.topic, l.tenant, l.key, l.created_at, clock_timestamp(), l.kind, l.aggregate, l.headers::text FROM {log} AS l ORDER BY l.seq DESC LIMIT $1";

/// How long a transaction may be open before it is called the holder of the horizon: far longer
/// than a request, and too short for the log to grow much.
const HORIZON_HELD: Duration = Duration::from_secs(600);

/// How many transactions a replication slot or a standby may hold the horizon back. They record no
/// time; a database with a thousand writes per second gets there in a quarter of an hour.
const HORIZON_SLOT_XIDS: i32 = 1_000_000;

/// Sessions and prepared transactions that have blocked others on our tables for more than a
/// second, and sessions that hold locks there while their commit waits for a synchronous standby. A
/// session that waits for a lock itself is not the cause. Reads the server's lists of locks and
/// sessions; waits for nothing.
///
/// `pg_blocking_pids` does not say which prepared transaction blocks, so their locks are compared:
/// a mode clashes with all `levels`. Rolling back an innocent one would lose what it did.
const BLOCKERS: &str = "
WITH locks AS (SELECT * FROM pg_locks),
ours AS (
  SELECT l.pid, l.virtualtransaction AS tx, l.granted, c.relname::text AS name FROM locks AS l
  JOIN pg_class AS c ON c.oid = l.relation
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
  WHERE n.nspname = $1 AND c.relkind = 'r'
    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())),
prepared AS (
  SELECT l.virtualtransaction AS tx, quote_literal(p.gid) AS gid, 'role ' || p.owner AS owner FROM pg_prepared_xacts AS p
  JOIN locks AS l ON l.locktype = 'transactionid' AND l.transactionid = p.transaction AND l.pid IS NULL),
clash (mode, level, levels) AS (VALUES
  ('AccessShareLock', '1', '8'), ('RowShareLock', '2', '78'), ('RowExclusiveLock', '3', '5678'),
  ('ShareUpdateExclusiveLock', '4', '45678'), ('ShareLock', '5', '34678'), ('ShareRowExclusiveLock', '6', '345678'),
  ('ExclusiveLock', '7', '2345678'), ('AccessExclusiveLock', '8', '12345678')),
waiting AS (
  SELECT w.* FROM locks AS w
  WHERE NOT w.granted AND w.waitstart < clock_timestamp() - INTERVAL '1 second' AND w.pid IN (SELECT ours.pid FROM ours)),
waits AS (
  SELECT w.pid, w.waitstart, unnest(pg_blocking_pids(w.pid)) AS blocker, NULL AS tx FROM waiting AS w
  UNION ALL
  SELECT w.pid, w.waitstart, NULL, h.virtualtransaction FROM waiting AS w
  JOIN locks AS h ON h.pid IS NULL AND h.granted AND h.locktype = w.locktype
    AND (h.database, h.relation, h.page, h.tuple, h.transactionid) IS NOT DISTINCT FROM (w.database, w.relation, w.page, w.tuple, w.transactionid)
  JOIN clash AS a ON a.mode = w.mode
  JOIN clash AS b ON b.mode = h.mode AND strpos(a.levels, b.level) > 0
  UNION ALL
  SELECT c.pid, c.state_change, c.pid, NULL FROM pg_stat_activity AS c
  WHERE c.wait_event = 'SyncRep' AND c.state_change < clock_timestamp() - INTERVAL '1 second')
SELECT CASE WHEN held.pid IS NULL THEN 'prepared' ELSE 'session' END, coalesce(held.pid::text, p.gid),
  coalesce(max(a.application_name), p.owner, ''), coalesce(left(max(a.query), 80), ''),
  array_agg(DISTINCT held.name ORDER BY held.name), count(DISTINCT waits.pid),
  (extract(epoch FROM clock_timestamp() - min(waits.waitstart)) * 1000)::bigint,
  CASE WHEN max(a.wait_event) = 'SyncRep' THEN 'standby' ELSE 'lock' END
FROM waits
JOIN ours AS held ON held.granted AND (held.pid = waits.blocker OR held.pid IS NULL AND held.tx = waits.tx)
LEFT JOIN pg_stat_activity AS a ON a.pid = held.pid
LEFT JOIN prepared AS p ON held.pid IS NULL AND p.tx = held.tx
WHERE (held.pid IS NOT NULL OR p.gid IS NOT NULL)
  AND NOT EXISTS (SELECT FROM locks AS w WHERE w.pid = held.pid AND NOT w.granted)
GROUP BY held.pid, p.gid, p.owner ORDER BY min(waits.waitstart) LIMIT 5";

/// The oldest holder of the horizon, in the same columns. A transaction that has written anywhere
/// on the server goes first: retention and routing wait for it. A snapshot holds only what VACUUM
/// removes, and only in its own database; that of a VACUUM holds nothing. Without rights on a
/// session, its age is not shown to us. A standby with `hot_standby_feedback` holds what its own
/// sessions see: in its slot, if it has one. Reads the server's lists; waits for nothing.
const HORIZON: &str = "
SELECT 'session', a.pid::text, coalesce(a.application_name, ''), coalesce(left(a.query, 80), ''), '{}'::text[], 0::bigint,
  (extract(epoch FROM clock_timestamp() - a.xact_start) * 1000)::bigint AS age_ms,
  CASE WHEN a.backend_xid IS NULL THEN 'snapshot' ELSE 'writes' END AS hold
FROM pg_stat_activity AS a
WHERE a.xact_start < clock_timestamp() - $1 * INTERVAL '1 millisecond' AND a.leader_pid IS NULL AND a.pid <> pg_backend_pid()
  AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL AND a.datname = current_database()
    AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS v WHERE v.pid = a.pid))
UNION ALL
SELECT 'prepared', quote_literal(p.gid), 'role ' || p.owner || ', database ' || p.database, '', '{}', 0,
  (extract(epoch FROM clock_timestamp() - p.prepared) * 1000)::bigint, 'writes'
FROM pg_prepared_xacts AS p WHERE p.prepared < clock_timestamp() - $1 * INTERVAL '1 millisecond'
UNION ALL
SELECT 'slot', quote_literal(s.slot_name), age(s.xmin) || ' transactions behind', '', '{}', 0, 0, 'snapshot'
FROM pg_replication_slots AS s WHERE age(s.xmin) > $2
UNION ALL
SELECT 'standby', r.pid::text, concat_ws(', ', nullif(r.application_name, ''), r.client_addr, age(r.backend_xmin) || ' transactions behind'), '', '{}', 0, 0, 'snapshot'
FROM pg_stat_replication AS r WHERE age(r.backend_xmin) > $2
ORDER BY hold DESC, age_ms DESC LIMIT 1";

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
        let read = async |session: &Session| {
            let (blockers, horizon) =
                futures::join!(session.rows(BLOCKERS, &params), horizon(session, HORIZON_HELD, HORIZON_SLOT_XIDS));
            Ok::<_, Error>([blockers?, horizon?])
        };
        let look = async |session: &Session| session.at_once(&self.inner.modes.count, read).await;
        let rows = self.call("blockers", look).await?;
        Ok(rows.iter().flatten().map(blocker).collect())
    }
}

/// What has held the horizon for longer, in time or in transactions.
async fn horizon(session: &Session, longer: Duration, xids: i32) -> Result<Vec<Row>> {
    let longer_ms = i64::try_from(longer.as_millis()).unwrap_or(i64::MAX);
    session.rows(HORIZON, &params![longer_ms, xids]).await
}

/// A row of [`BLOCKERS`] or [`HORIZON`]. The texts of other databases may be in their encoding.
fn blocker(row: &Row) -> Blocker {
    let text = |column: usize| String::from_utf8_lossy(row.get::<_, Raw<'_>>(column).0);
    let (holder, end) = holder(row.get(0), &text(1));
    Blocker {
        holder,
        program: named(&text(2)).to_owned(),
        query: one_line(&text(3)),
        tables: row.get(4),
        waiting: row.get::<_, i64>(5).unsigned_abs(),
        waited: Duration::from_millis(row.get::<_, i64>(6).unsigned_abs()),
        end,
        hold: match row.get::<_, &str>(7) {
            "lock" => Hold::Lock,
            "standby" => Hold::Standby,
            hold => Hold::Horizon { has_written: hold == "writes" },
        },
    }
}

/// The name that a program gave itself.
pub(crate) fn named(program: &str) -> &str {
    if program.is_empty() { "a program without a name" } else { program }
}

/// Who may end a session. The role of a relay or an operator may not.
const WHO_MAY: &str = "-- as a superuser, or a member of pg_signal_backend";

/// The name of a holder, and the statement that ends it, or what does. `name` is the number of a
/// session, and an SQL literal otherwise.
pub(crate) fn holder(kind: &str, name: &str) -> (String, String) {
    match kind {
        "prepared" => (format!("the prepared transaction {name}"), format!("ROLLBACK PREPARED {name}")),
        "slot" => (format!("the replication slot {name}"), format!("SELECT pg_drop_replication_slot({name})")),
        "standby" => (
            format!("the standby that session {name} sends to"),
            "on the standby, end its long transactions, or turn hot_standby_feedback off".to_owned(),
        ),
        // A comment, so that the line can be executed as it is printed.
        _ => (format!("session {name}"), format!("SELECT pg_terminate_backend({name}) {WHO_MAY}")),
    }
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

#[cfg(test)]
mod tests {
    use postbox_core::Migrate as _;
    use postbox_testkit::servers::{PrivatePostgres, Settings, Version};
    use tokio_postgres::NoTls;

    use super::*;
    use crate::PostgresConfig;

    #[test]
    fn a_standby_is_not_ended_here_because_it_would_connect_again() {
        let (holder, end) = holder("standby", "7");
        assert_eq!(holder, "the standby that session 7 sends to");
        assert!(end.starts_with("on the standby, ") && end.contains("hot_standby_feedback"), "{end}");
    }

    /// Retention and routing wait for what has written, in any database of the server, so it is
    /// named before an older snapshot.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_holds_the_horizon_is_named() {
        for version in Version::ALL {
            let postgres = PrivatePostgres::launch(version, Settings::fast().with("autovacuum", "off")).await;
            let url = postgres.fresh_database().await;
            let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("a store");
            store.up().await.expect("migrated");
            assert!(store.blockers().await.expect("looked").is_empty(), "nothing is that old");
            let session = store.session("test").await.expect("a session");
            let look = async || {
                let mode = &store.inner.modes.count;
                let read = async |session: &Session| horizon(session, Duration::ZERO, HORIZON_SLOT_XIDS).await;
                let found = session.at_once(mode, read).await.expect("looked");
                blocker(found.first().expect("a holder"))
            };
            let client = async |url: &str| {
                let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connected");
                tokio::spawn(connection);
                client
            };
            let reader = client(&url).await;
            let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM postbox.lane";
            reader.batch_execute(begin).await.expect("begun");
            let found = look().await;
            assert_eq!((found.hold, found.query.as_str()), (Hold::Horizon { has_written: false }, begin));
            let elsewhere = client(&postgres.url()).await;
            let prepare = "BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'it''s'";
            elsewhere.batch_execute(prepare).await.expect("prepared");
            let found = look().await;
            assert_eq!(found.hold, Hold::Horizon { has_written: true });
            assert_eq!(found.holder, "the prepared transaction 'it''s'");
            assert_eq!(found.program, "role postgres, database postgres");
            elsewhere.batch_execute(&found.end).await.expect("ended as it says");
            elsewhere.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.expect("written");
            assert_eq!(look().await.hold, Hold::Horizon { has_written: true });
        }
    }
}
