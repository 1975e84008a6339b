//! Rebasing: adapts the rows and cursors of a restored dump to the cluster they are in now.
//!
//! Rows carry the ids of the transactions that wrote them, and cursors consist of such ids. In
//! another cluster these numbers mean nothing: a cursor beyond the new cluster's counter would wait
//! for years without an error.

use postbox_core::{Error, ErrorKind, LogName, Migrate as _, Result};
use postbox_postgres_sql::LOG_NAMES;
use postbox_postgres_sql::migration::DOWN_LOCK_TIMEOUT;

use crate::PostgresStore;
use crate::migrate::{MIGRATION_BEGIN, in_use, owner_sees_all};
use crate::session::Session;

/// Locks every lane, and returns whether it is leased. Locks the rows.
const LANE_LOCK_ALL: &str =
    "SELECT lease_until > clock_timestamp() FROM {s}.lane ORDER BY subscription, lane FOR UPDATE";

/// Keeps everyone from appending meanwhile. Waits for writers, as long as `down` does: whoever
/// appends waits behind it.
const LOG_TABLE_LOCK: &str = "LOCK TABLE {log} IN ACCESS EXCLUSIVE MODE";

/// The first event that was appended in this cluster since the restore. Walks the log.
///
/// Its `xid` may be in a snapshot of the other cluster, but nobody has passed it. It is known by
/// its `xmin`, which is always of this cluster: it comes after that of the log's primary key, which
/// a restore adds once the rows are there. `pg_upgrade` keeps the `xmin` of rows and adds the key
/// anew. Not the log's CHECK, which a person may have written since. `xid` is compared too, because
/// numbers of 32 bits come round, and because this cluster has given out no number beyond the end
/// of a snapshot that is taken when every writer is done.
const LOG_NEW: &str = "
CREATE TEMPORARY TABLE postbox_new ON COMMIT DROP AS
SELECT coalesce(min(l.seq), 9223372036854775807) AS seq
FROM {log} AS l
JOIN pg_constraint AS c ON c.conrelid = l.tableoid AND c.contype = 'p'
CROSS JOIN (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xid) AS now
WHERE (now.xid - l.xmin::text::bigint & 4294967295) < (now.xid - c.xmin::text::bigint & 4294967295)
  AND l.xid::text::bigint BETWEEN now.xid - (now.xid - c.xmin::text::bigint & 4294967295) AND now.xid
  AND EXISTS (SELECT FROM {s}.subscription AS s JOIN {s}.lane AS n ON n.subscription = s.id
    WHERE s.log = '{name}' AND n.cluster <> {s}.cluster_id())";

/// The last row each lane has passed. Walks the log.
const LANE_PASSED: &str = "
CREATE TEMPORARY TABLE postbox_passed ON COMMIT DROP AS
SELECT n.subscription, n.lane, coalesce(max(l.seq) FILTER
  (WHERE NOT {is_unread} AND (l.seq < new.seq OR n.cluster = {s}.cluster_id())), 0) AS seq
FROM {s}.subscription AS s JOIN {s}.lane AS n ON n.subscription = s.id
CROSS JOIN postbox_new AS new
LEFT JOIN {log} AS l ON l.slot % s.lanes = n.lane
WHERE s.log = '{name}' GROUP BY n.subscription, n.lane";

/// Adds delivery rows for unread events before that row that the subscription wants, due now or at
/// their later time, as if they had been read. Having delivery rows, they keep the order of their
/// key. Walks the log.
const DELIVERY_OF_STRAGGLERS: &str = "
INSERT INTO {s}.delivery (subscription, lane, seq, key, state, ordered, due_at)
SELECT s.id, n.lane, l.seq, l.key, CASE WHEN l.deliver_at > l.created_at AND isfinite(l.deliver_at) THEN 'scheduled' ELSE 'retrying' END, s.ordering = 'key',
  CASE WHEN l.deliver_at > l.created_at AND isfinite(l.deliver_at) THEN l.deliver_at ELSE clock_timestamp() END
FROM {s}.subscription AS s
JOIN {s}.lane AS n ON n.subscription = s.id
JOIN postbox_passed AS p ON p.subscription = s.id AND p.lane = n.lane
JOIN {log} AS l ON l.slot % s.lanes = n.lane AND l.seq < p.seq
WHERE s.log = '{name}' AND {is_wanted} AND {is_unread}
ON CONFLICT DO NOTHING";

/// Converts how far each lane came with a former filter into the same kind of cursor. Walks the
/// log.
const PASSAGE_REBASE: &str = "
UPDATE {s}.passage AS p SET from_snap = '1:1:', to_snap = '4:4:', last_seq = passed.seq
FROM (SELECT p.subscription, p.revision, p.lanes, p.lane, coalesce(max(l.seq), 0) AS seq
  FROM {s}.subscription AS s JOIN {s}.passage AS p ON p.subscription = s.id
  CROSS JOIN postbox_new AS new
  LEFT JOIN {log} AS l ON l.slot % p.lanes = p.lane AND l.seq <= p.seq_max AND l.seq < new.seq
    AND (pg_visible_in_snapshot(l.xid, p.from_snap) OR (pg_visible_in_snapshot(l.xid, p.to_snap) AND l.seq <= p.last_seq))
  WHERE s.log = '{name}' GROUP BY p.subscription, p.revision, p.lanes, p.lane) AS passed
WHERE (p.subscription, p.revision, p.lanes, p.lane) = (passed.subscription, passed.revision, passed.lanes, passed.lane)";

/// Makes the search for unrouted events and the counts start again from the beginning.
const LOG_ROUTE_ANEW: &str = "
UPDATE {s}.log SET routed_xid = '0', routed_seq = 0, kept_from = 1,
  taken_snap = CASE WHEN pg_snapshot_xmax(taken_snap) > '1' THEN '4:4:' ELSE taken_snap END WHERE name = '{name}'";

/// Gives every row the oldest possible id: 3, the first of any cluster. Rewrites the table, with
/// its CHECK dropped meanwhile, because that requires the id of the current transaction.
const LOG_RESTAMP: &str = "ALTER TABLE {log} DROP CONSTRAINT IF EXISTS event_invalid; UPDATE {log} SET xid = '3'; SELECT {s}.guard_log('{name}')";

/// Sets the cursors to a window of everything with id 3, passed up to where each lane was. The
/// epoch rises, so that no old lease can write.
const LANE_REBASE: &str = "
UPDATE {s}.lane AS n SET from_snap = '1:1:', to_snap = '4:4:', low = 0, high = 9223372036854775807, last_seq = p.seq,
  epoch = epoch + 1, lease_until = NULL, cluster = {s}.cluster_id()
FROM postbox_passed AS p WHERE p.subscription = n.subscription AND p.lane = n.lane";

/// Runs in one transaction. If dropped, nothing has changed.
pub(crate) async fn rebase(store: &PostgresStore) -> Result<()> {
    store.validate().await?;
    let session = store.session_on_schema("rebase").await?;
    session.step_by_step(&format!("{MIGRATION_BEGIN}{DOWN_LOCK_TIMEOUT}"), rebase_all).await.map_err(in_use)
}

async fn rebase_all(session: &Session) -> Result<()> {
    let forced = owner_sees_all(session).await?;
    let names = session.rows(&session.sql(LOG_NAMES), &[]).await?;
    let lanes = session.rows(&session.sql(LANE_LOCK_ALL), &[]).await?;
    if lanes.iter().any(|row| row.get::<_, Option<bool>>(0) == Some(true)) {
        let message = "a relay holds a lane; stop all relays first, or wait until their leases end";
        return Err(Error::new(ErrorKind::Conflict, "rebase", "lanes_held", message));
    }
    let logs: Vec<LogName> = names.iter().map(|row| LogName::from_stored(row.get::<_, String>(0))).collect();
    for log in &logs {
        session.run(&session.log_sql(LOG_TABLE_LOCK, log)).await?;
    }
    session.run("SET LOCAL lock_timeout = 0").await?;
    for log in &logs {
        for template in [
            LOG_NEW,
            LANE_PASSED,
            PASSAGE_REBASE,
            DELIVERY_OF_STRAGGLERS,
            LOG_RESTAMP,
            LANE_REBASE,
            LOG_ROUTE_ANEW,
            "DROP TABLE postbox_passed, postbox_new",
        ] {
            // DDL takes no parameters. The name of a log never contains a quote.
            session.run(&session.log_sql(template, log)).await?;
        }
    }
    for force in &forced {
        session.run(force).await?;
    }
    Ok(())
}
