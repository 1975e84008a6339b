//! Retention: old events go by ranges of `seq`, one bounded step a call.
//!
//! Each step begins where its caller says the one before ended, and looks at nothing twice: what
//! has to stay costs a run once, and what is young costs it one step
//! (`docs/decisions/retention-by-range.md` has the measurements).

use std::time::Duration;

use postbox_core::kit::{PRUNE_ROWS_MAX, PRUNE_YOUNG_MAX};
use postbox_core::{Changed, LogName, Result, Seq};

use crate::classify::log_unknown;
use crate::log::micros;
use crate::params::params;
use crate::session::Session;

/// Whether a log exists, has readers (one without any is not pruned, because nobody has passed it),
/// and whether one of them takes everything. Reads small tables. Locks the log's row: no filter
/// changes meanwhile. Waits for another step on the same log, whose lock ends with its
/// transaction: two at once would wait for each other's rows.
const PRUNE_BEGIN: &str = "
SELECT EXISTS (SELECT FROM {s}.subscription AS s WHERE s.log = g.name), {takes_everything},
  pg_advisory_xact_lock(hashtextextended($2, 0))
FROM {s}.log AS g WHERE g.name = $1 FOR SHARE";

/// Deletes, of the next events in `seq` order, those that every subscription of the log has passed
/// and nobody needs any more. `$1` age, `$2` log, `$3` the place after which the step begins. Gives
/// how many, where the step ended if there are more, and whether so many were young that nothing
/// beyond is to be looked at. Indexes: primary keys. Locks the rows.
///
/// An event below `horizon` is visible in every snapshot that a reader began its window with, so
/// all have passed it. Only the others are compared with each lane. A row that a subscription does
/// not want is passed whatever its cursor says. One that nobody wants is kept, and so is what was
/// not looked at yet, unless somebody takes everything (`$4`): it may be one (`unrouted.rs`).
///
/// The three lists are small and read once: `lane` has an old version for each batch while anybody
/// holds a snapshot, and an index of `delivery` probed for each event and subscription costs more
/// than the delete. `NOT IN` and `IN … IS TRUE` are looked up in a hash whatever the statistics
/// say; as joins they become nested loops over both lists (5 s a step, measured).
pub(crate) const LOG_PRUNE: &str = "
WITH reader AS MATERIALIZED (
  SELECT s.topics, s.tenant, s.lanes, n.lane, n.from_snap, n.to_snap, n.last_seq
  FROM {s}.subscription AS s JOIN {s}.lane AS n ON n.subscription = s.id WHERE s.log = $2),
horizon AS MATERIALIZED (SELECT pg_snapshot_xmin(r.from_snap) AS xid FROM reader AS r ORDER BY 1 LIMIT 1),
step AS MATERIALIZED (
  SELECT l.seq AS last FROM {log} AS l WHERE l.seq > $3 ORDER BY l.seq OFFSET {rows_max} - 1 LIMIT 1),
needed AS MATERIALIZED (
  SELECT d.seq FROM {s}.delivery AS d
  WHERE d.subscription = ANY (ARRAY(SELECT s.id FROM {s}.subscription AS s WHERE s.log = $2))
    AND d.seq > $3 AND d.seq <= coalesce((SELECT last FROM step), 9223372036854775807) AND d.state <> 'discarded'
  UNION ALL
  SELECT u.seq FROM {s}.unrouted AS u
  WHERE u.log = $2 AND u.seq > $3 AND u.seq <= coalesce((SELECT last FROM step), 9223372036854775807)),
gone AS (
  DELETE FROM {log} AS l
  WHERE l.seq > $3 AND l.seq <= coalesce((SELECT last FROM step), 9223372036854775807)
    AND l.created_at <= statement_timestamp() - $1 * interval '1 microsecond'
    AND (l.xid < (SELECT xid FROM horizon) OR NOT EXISTS (
      SELECT FROM reader AS n CROSS JOIN LATERAL (SELECT n.topics, n.tenant) AS s
      WHERE n.lane = l.slot % n.lanes AND {is_unread} AND {is_wanted} OFFSET 0))
    AND l.seq NOT IN (SELECT seq FROM needed)
    AND ($4 OR (l.xid, l.seq) <= (SELECT g.routed_xid, g.routed_seq FROM {s}.log AS g WHERE g.name = $2))
  RETURNING l.seq),
marks AS (
  DELETE FROM {s}.delivery AS d
  WHERE d.subscription = ANY (ARRAY(SELECT s.id FROM {s}.subscription AS s WHERE s.log = $2))
    AND d.seq > $3 AND d.seq <= coalesce((SELECT last FROM step), 9223372036854775807) AND d.state = 'discarded'
    AND (d.seq IN (SELECT seq FROM gone)) IS TRUE),
sent AS (
  DELETE FROM {s}.sent AS t
  WHERE t.subscription = ANY (ARRAY(SELECT s.id FROM {s}.subscription AS s WHERE s.log = $2))
    AND t.seq > $3 AND t.seq <= coalesce((SELECT last FROM step), 9223372036854775807)
    AND (t.seq IN (SELECT seq FROM gone)) IS TRUE)
SELECT (SELECT count(*) FROM gone), (SELECT last FROM step),
  (SELECT count(*) FROM gone) <= {rows_max} - {young_max} AND {young_max} = (SELECT count(*) FROM (
    SELECT FROM {log} AS l WHERE l.seq > $3 AND l.seq <= (SELECT last FROM step)
      AND l.created_at > statement_timestamp() - $1 * interval '1 microsecond' LIMIT {young_max}) AS young)";

/// Deletes rows of events that somebody deleted from the log, once they are closed and as old as
/// the events to be pruned. Indexes: `delivery_missing`, the log's primary key. Locks the rows.
const DELIVERY_PRUNE_MISSING: &str = "
DELETE FROM {s}.delivery AS d USING (
  SELECT m.subscription, m.seq FROM {s}.subscription AS s JOIN {s}.delivery AS m ON m.subscription = s.id
  WHERE s.log = $2 AND m.code = 'event_missing' AND m.state IN ('dead', 'discarded')
    AND m.updated_at <= statement_timestamp() - $1 * interval '1 microsecond'
    AND NOT EXISTS (SELECT FROM {log} AS l WHERE l.seq = m.seq)
  LIMIT 1000 FOR UPDATE OF m SKIP LOCKED) AS gone
WHERE d.subscription = gone.subscription AND d.seq = gone.seq";

/// The statement of a step.
pub(crate) fn log_prune(session: &Session, log: &LogName) -> String {
    let (rows_max, young_max) = (PRUNE_ROWS_MAX.to_string(), PRUNE_YOUNG_MAX.to_string());
    session.schema().log_sql_with(LOG_PRUNE, log, &[("rows_max", &rows_max), ("young_max", &young_max)])
}

/// One step, in the transaction of the session.
pub(crate) async fn prune(
    session: &Session,
    log: &LogName,
    older_than: Duration,
    after: Option<Seq>,
) -> Result<Changed> {
    let (name, turn) = (log.as_str(), format!("postbox prune {}.{log}", session.schema().quoted()));
    let rows = session.rows(&session.sql(PRUNE_BEGIN), &params![name, turn]).await?;
    let row = rows.first().ok_or_else(|| log_unknown("prune", log.as_str()))?;
    let (has_readers, takes_everything): (bool, bool) = (row.get(0), row.get(1));
    if !has_readers {
        return Ok(Changed::default());
    }
    let (age_micros, after) = (micros(older_than), after.map_or(0, |after| after.0));
    let row = session.row(&log_prune(session, log), &params![age_micros, name, after, takes_everything]).await?;
    let (count, last, is_young): (i64, Option<i64>, Option<bool>) = (row.get(0), row.get(1), row.get(2));
    let count = count.unsigned_abs();
    if let Some(last) = last.filter(|_| is_young != Some(true)) {
        return Ok(Changed { count, next: Some(Seq(last)) });
    }
    let missing = session.execute(&session.log_sql(DELIVERY_PRUNE_MISSING, log), &params![age_micros, name]).await?;
    Ok(Changed { count: count + missing, next: (missing > 0).then_some(Seq(after)) })
}
