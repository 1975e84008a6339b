//! Unrouted events: those that no subscription of their log wants. An event is checked once it is
//! older than every open transaction, so that nothing can come before it. Unrouted ones are kept,
//! and handed to the first subscription whose filter begins to want them.
//!
//! What decides is the filter that a lane passed an event with, or will read it with. So nothing is
//! decided while a leased lane has yet to take over a new filter; a lane without a lease passes
//! nothing more with the former one. Decisions are made again when a filter changes:
//! docs/cursor.md, writes W13 and W14.

use std::time::Duration;

use postbox_core::kit::unrouted;
use postbox_core::limits::UNROUTED_COUNT_MAX;
use postbox_core::{LogName, Result, Routed, SubscriptionName, Unrouted};
use postbox_postgres_sql::{log_unknown, params};

use crate::admin::lock_lanes;
use crate::decode::Raw;
use crate::replay::{REPLAY_NEXT, made};
use crate::session::Session;
use crate::subscription::look_up;

/// How many rows one step reads, of a log with few lanes.
const STEP_LOOK_MAX: i64 = 10_000;

/// How many rows a step reads of a log whose subscriptions have so many lanes: it compares each row
/// with each of them (measured with 1,600: 250 rows take a second, 10,000 would take longer than a
/// statement may).
fn step_look_max(lanes: i64) -> i64 {
    (40 * STEP_LOOK_MAX / lanes.max(1)).clamp(250, STEP_LOOK_MAX)
}

/// How far the log was checked, two reasons to stop, and the number of lanes. The step ends if a
/// leased lane has yet to take over a new filter. No further events are checked if the log has no
/// subscription, or one takes everything that was not checked yet. Indexes: primary keys. Locks the
/// log's row, and skips it if it is locked.
const LOG_ROUTED: &str = "
SELECT g.routed_xid::text, g.routed_seq,
  EXISTS (SELECT FROM {s}.subscription AS s JOIN {s}.lane AS n ON n.subscription = s.id
    WHERE s.log = g.name AND n.revision <> s.revision AND n.lease_until > clock_timestamp()),
  NOT EXISTS (SELECT FROM {s}.subscription AS s WHERE s.log = g.name) OR {takes_everything},
  (SELECT count(*) FROM {s}.subscription AS s JOIN {s}.lane AS n ON n.subscription = s.id WHERE s.log = g.name)
FROM {s}.log AS g WHERE g.name = $1 FOR NO KEY UPDATE SKIP LOCKED";

/// The number of lanes that have yet to take over their subscription's filter, and how many of them
/// nobody is writing to. A settlement that checked its lease in time moves its lane only at its
/// commit. Locks the lanes that are free, and waits for none. Indexes: primary keys.
const LANES_BEHIND: &str = "
WITH behind AS MATERIALIZED (
  SELECT n.subscription, n.lane FROM {s}.subscription AS s JOIN {s}.lane AS n ON n.subscription = s.id
  WHERE s.log = $1 AND n.revision <> s.revision),
locked AS (
  SELECT n.lane FROM {s}.lane AS n JOIN behind AS b ON b.subscription = n.subscription AND b.lane = n.lane
  FOR NO KEY UPDATE OF n SKIP LOCKED)
SELECT (SELECT count(*) FROM behind), (SELECT count(*) FROM locked)";

/// Index: primary key. No lock.
pub(crate) const LOG_EXISTS: &str = "SELECT FROM {s}.log WHERE name = $1";

/// The next subscription whose filter was not compared with all unrouted events yet. Reads a small
/// table.
const SUBSCRIPTION_TO_REROUTE: &str = "
SELECT s.name, s.rerouted_seq FROM {s}.subscription AS s WHERE s.log = $1 AND s.rerouted <> s.revision ORDER BY s.id LIMIT 1";

/// Takes unrouted events, from a place on, that the subscription wants now. Those that its lanes
/// have passed with a former filter get delivery rows; the others it is about to read. Events
/// before the subscription's start stay unrouted. Indexes: primary keys.
pub(crate) const UNROUTED_TAKE: &str = "
WITH n AS MATERIALIZED (SELECT * FROM {s}.lane WHERE subscription = $1),
looked AS MATERIALIZED (
  SELECT u.seq FROM {s}.unrouted AS u WHERE u.log = $3 AND u.seq > $4 ORDER BY u.seq LIMIT $5),
wanted AS MATERIALIZED (
  SELECT l.seq, l.key, n.subscription, n.lane, s.ordering, {is_taken} AS taken,
    {later} AS later
  FROM looked AS k JOIN {log} AS l ON l.seq = k.seq
  JOIN {s}.subscription AS s ON s.id = $1
  CROSS JOIN LATERAL (SELECT x.* FROM n AS x WHERE x.lane = l.slot % s.lanes OFFSET 0) AS n
  WHERE {is_wanted} AND {is_judged}),
gone AS (DELETE FROM {s}.unrouted AS u USING wanted AS w WHERE u.log = $3 AND u.seq = w.seq),
noted AS (INSERT INTO {s}.sent (subscription, seq) SELECT w.subscription, w.seq FROM wanted AS w WHERE NOT w.taken ON CONFLICT DO NOTHING),
sent AS (
  INSERT INTO {s}.delivery (subscription, lane, seq, key, state, ordered, replays, due_at)
  SELECT w.subscription, w.lane, w.seq, w.key, CASE WHEN w.later IS NULL THEN 'retrying' ELSE 'scheduled' END, w.ordering = 'key', $2,
    coalesce(w.later, statement_timestamp())
  FROM wanted AS w WHERE NOT w.taken ORDER BY w.seq ON CONFLICT DO NOTHING RETURNING seq, key),
progress AS (
  UPDATE {s}.subscription AS s SET
    rerouted_seq = CASE WHEN k.looked < $5 THEN 0 ELSE k.last END,
    rerouted = CASE WHEN k.looked < $5 THEN s.revision ELSE s.rerouted END
  FROM (SELECT count(*) AS looked, max(seq) AS last FROM looked) AS k WHERE s.id = $1)
SELECT seq, key FROM sent";

/// Checks the next rows that are older than every open transaction, and keeps those that no
/// subscription wanted, if at least one filter rejected them: events before the start of all
/// subscriptions do not count. A subscription whose filter changed since may want them now, whether
/// its lanes took the filter over or not, so it is compared again. Index: `(xid, seq)` of the log,
/// walked from its place.
const LOG_ROUTE: &str = "
WITH n AS MATERIALIZED (
  SELECT n.*, o.lanes FROM {s}.subscription AS o JOIN {s}.lane AS n ON n.subscription = o.id WHERE o.log = $1),
page AS MATERIALIZED (
  SELECT l.xid, l.seq, l.topic, l.tenant, l.kind, l.aggregate, l.headers, l.slot FROM {log} AS l
  WHERE (l.xid, l.seq) > ($2::text::xid8, $3) AND l.xid < pg_snapshot_xmin(pg_current_snapshot())
  ORDER BY l.xid, l.seq LIMIT $4),
kept AS (
  INSERT INTO {s}.unrouted (log, seq)
  SELECT $1, l.seq FROM page AS l
  WHERE NOT pg_visible_in_snapshot(l.xid, (SELECT g.taken_snap FROM {s}.log AS g WHERE g.name = $1)) AND NOT EXISTS (
    SELECT FROM n WHERE n.lane = l.slot % n.lanes
      AND ({is_taken} OR {is_sent} OR EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = n.subscription AND d.seq = l.seq)) OFFSET 0)
  AND EXISTS (SELECT FROM n WHERE n.lane = l.slot % n.lanes AND {is_judged} OFFSET 0)
  ON CONFLICT DO NOTHING RETURNING seq),
ask AS (
  UPDATE {s}.subscription AS o SET rerouted = 0,
    rerouted_seq = least(k.seq - 1, CASE WHEN o.rerouted = o.revision THEN k.seq - 1 ELSE o.rerouted_seq END)
  FROM (SELECT min(seq) AS seq FROM kept) AS k
  WHERE o.log = $1 AND k.seq IS NOT NULL AND (
    EXISTS (SELECT FROM {s}.passage AS p WHERE p.subscription = o.id AND p.revision > 0 AND pg_snapshot_xmax(p.to_snap) > $2::text::xid8)
    OR EXISTS (SELECT FROM {s}.lane AS n WHERE n.subscription = o.id AND n.revision <> o.revision AND pg_snapshot_xmax(n.to_snap) > $2::text::xid8))
  RETURNING o.id),
last AS (SELECT p.xid, p.seq FROM page AS p ORDER BY p.xid DESC, p.seq DESC LIMIT 1),
moved AS (UPDATE {s}.log AS g SET routed_xid = last.xid, routed_seq = last.seq FROM last WHERE g.name = $1)
SELECT (SELECT count(*) FROM page), (SELECT count(*) FROM kept), EXISTS (SELECT FROM ask)";

/// Unrouted events by topic, oldest first. Indexes: primary keys. No lock.
const UNROUTED_COUNT: &str = "
SELECT l.topic, count(*), (extract(epoch FROM clock_timestamp() - min(l.created_at)) * 1000000)::bigint
FROM (SELECT u.seq FROM {s}.unrouted AS u WHERE u.log = $1 ORDER BY u.seq LIMIT $2) AS k
JOIN {log} AS l ON l.seq = k.seq GROUP BY l.topic";

/// Runs one step.
pub(crate) async fn note_unrouted(session: &Session, log: &LogName) -> Result<Routed> {
    let name = log.as_str();
    let rows = session.rows(&session.sql(LOG_ROUTED), &params![name]).await?;
    let Some(row) = rows.first() else {
        // Another process is checking this log, or there is no such log.
        let known = session.rows(&session.sql(LOG_EXISTS), &params![name]).await?;
        return if known.is_empty() { Err(log_unknown("note_unrouted", name)) } else { Ok(Routed::default()) };
    };
    let (xid, seq, waits, routed): (String, i64, bool, bool) = (row.get(0), row.get(1), row.get(2), row.get(3));
    let lanes: i64 = row.get(4);
    if waits {
        return Ok(Routed::default());
    }
    if let Some(row) = session.rows(&session.sql(SUBSCRIPTION_TO_REROUTE), &params![name]).await?.first() {
        let (subscription, after) = (SubscriptionName::from_stored(row.get::<_, String>(0)), row.get::<_, i64>(1));
        let subscription = look_up(session, &subscription).await?;
        let id = subscription.id;
        lock_lanes(session, id).await?;
        let number: i32 = session.row(&session.sql(REPLAY_NEXT), &params![id]).await?.get(0);
        let params = params![id, number, name, after, STEP_LOOK_MAX];
        let rows = session.rows(&session.log_sql(UNROUTED_TAKE, log), &params).await?;
        made(session, &subscription, &rows).await?;
        return Ok(Routed { unrouted: 0, more: true });
    }
    if routed {
        return Ok(Routed::default());
    }
    let row = session.row(&session.sql(LANES_BEHIND), &params![name]).await?;
    if row.get::<_, i64>(0) != row.get::<_, i64>(1) {
        return Ok(Routed::default());
    }
    let limit = step_look_max(lanes);
    let row = session.row(&session.log_sql(LOG_ROUTE, log), &params![name, xid, seq, limit]).await?;
    let (looked, kept, is_asked): (i64, i64, bool) = (row.get(0), row.get(1), row.get(2));
    Ok(Routed { unrouted: kept.unsigned_abs(), more: looked == limit || is_asked })
}

/// Counts unrouted events by topic, up to a limit.
pub(crate) async fn count_unrouted(session: &Session, log: &LogName) -> Result<Unrouted> {
    let (name, limit) = (log.as_str(), UNROUTED_COUNT_MAX as i64);
    let rows = session.rows(&session.log_sql(UNROUTED_COUNT, log), &params![name, limit]).await?;
    Ok(unrouted(rows.iter().map(|row| {
        let topic = String::from_utf8_lossy(row.get::<_, Raw<'_>>(0).0).into_owned();
        let age = row.get::<_, Option<i64>>(2).unwrap_or_default().max(0);
        (topic, row.get::<_, i64>(1).unsigned_abs(), Duration::from_micros(age.unsigned_abs()))
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_reads_fewer_rows_the_more_lanes_they_are_compared_with() {
        for (lanes, rows) in [(0, 10_000), (40, 10_000), (256, 1_562), (1_600, 250), (100_000, 250)] {
            assert_eq!(step_look_max(lanes), rows, "{lanes}");
        }
    }
}
