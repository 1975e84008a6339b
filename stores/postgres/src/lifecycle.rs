//! Changes of a whole subscription: rename, reset, number of lanes, removal.
//!
//! Each is one transaction. It locks the log's row, all lanes and the subscription's row, in this
//! order: docs/cursor.md, writes W16 to W19.

use postbox_core::kit::{
    LOOK_EVENTS_MAX, ROWS_MOVED_MAX, lanes_apart, lanes_held, rows_many, subscription_changed, subscription_exists,
};
use postbox_core::limits::LANES_APART_MAX;
use postbox_core::{LogName, ResetPlan, ResetTo, Result, SubscriptionName};
use postbox_postgres_sql::{cursor_foreign, params};

use crate::admin::lock_lanes;
use crate::replay::{ends, made};
use crate::session::Session;
use crate::subscription::{FILTER_KEEP, LOG_LOCK, SubscriptionRow, look_up};

/// The place of a cursor that has passed everything.
const END: i64 = i64::MAX;

/// Locks the row, by its primary key.
const SUBSCRIPTION_LOCK: &str = "SELECT name, generation, lanes::int FROM {s}.subscription WHERE id = $1 FOR UPDATE";

/// Index: the unique name. No lock.
const SUBSCRIPTION_GENERATION: &str = "SELECT generation FROM {s}.subscription WHERE name = $1";

/// Raises the log's next epoch above those of this subscription, so that no lease of it is valid
/// for a later subscription with the same name. Indexes: primary keys. Locks the log's row.
const EPOCH_RETIRE: &str = "
UPDATE {s}.log AS g SET epoch_next = greatest(g.epoch_next, (SELECT coalesce(max(n.epoch) + 1, 0) FROM {s}.lane AS n WHERE n.subscription = $1))
WHERE g.name = $2";

/// Invalidates all leases. A lane is granted again only after the last lease would have ended,
/// because its holder does not know yet. Index: primary key. Locks the rows.
const LANE_FENCE: &str = "UPDATE {s}.lane SET epoch = epoch + 1, owner = NULL WHERE subscription = $1";

/// Index: primary key. Locks the rows.
const REPLICA_FORGET: &str = "DELETE FROM {s}.replica WHERE subscription = $1";

/// Index: primary key. Locks the row.
const SUBSCRIPTION_RENAME: &str = "UPDATE {s}.subscription SET name = $2 WHERE id = $1";

/// Notes that events so far had a reader, if this subscription took all events that were not
/// checked for routing yet: its removal does not make them unrouted. Indexes: primary keys. Locks
/// the log's row.
const LOG_TAKEN: &str = "
UPDATE {s}.log AS g SET taken_snap = pg_current_snapshot()
FROM {s}.subscription AS s
WHERE s.id = $1 AND g.name = s.log AND {takes_all_new}";

/// Deletes the subscription and, by cascade, everything that belongs to it. Index: primary key.
/// Locks the rows.
const SUBSCRIPTION_DELETE: &str = "DELETE FROM {s}.subscription WHERE id = $1";

/// The first event in a range of places, and whether it was appended at `$3` or later. Index:
/// primary key.
const LOG_AT: &str = "
SELECT l.seq, l.created_at >= $3 FROM {log} AS l WHERE l.seq > $1 AND l.seq <= $2 ORDER BY l.seq LIMIT 1";

/// The first event in a range of places that was appended at `$3` or later. Walks the range.
const LOG_SINCE: &str = "
SELECT l.seq FROM {log} AS l WHERE l.seq > $1 AND l.seq <= $2 AND l.created_at >= $3 ORDER BY l.seq LIMIT 1";

/// How far the order of times may differ from that of places.
const SINCE_MARGIN: i64 = 100_000;

/// The most events that a reset is counted among: some hundred milliseconds, however rare the
/// subscription's topics are.
const PLAN_LOOK_MAX: i64 = 100_000;

/// The effect of a reset, counted up to `$3` among the next `$4` events after the place and those
/// that the lanes have ahead, whether there are more events than that, and the epochs of all lanes.
/// Indexes: the log's primary key, and `(xid, seq)`. No lock.
pub(crate) const RESET_PLAN: &str = "
WITH n AS MATERIALIZED (SELECT * FROM {s}.lane WHERE subscription = $1),
first AS MATERIALIZED (SELECT min(pg_snapshot_xmin(n.from_snap)) AS xid FROM n),
later AS (SELECT * FROM {log} AS l WHERE l.seq > $2 ORDER BY l.seq LIMIT $4),
ahead AS (SELECT * FROM {log} AS l WHERE l.xid >= (SELECT xid FROM first) ORDER BY l.xid, l.seq LIMIT $4)
SELECT (SELECT count(*) FROM (
    SELECT FROM later AS l CROSS JOIN LATERAL (SELECT x.* FROM n AS x WHERE x.lane = l.slot % s.lanes OFFSET 0) AS n
    WHERE NOT {is_unread} AND {is_wanted} AND NOT {is_discarded} LIMIT $3) AS again),
  (SELECT count(*) FROM (
    SELECT FROM ahead AS l CROSS JOIN LATERAL (SELECT x.* FROM n AS x WHERE x.lane = l.slot % s.lanes OFFSET 0) AS n
    WHERE l.seq <= $2 AND {is_unread} AND {is_wanted} AND NOT {is_discarded} LIMIT $3) AS skipped),
  EXISTS (SELECT FROM {log} AS l WHERE l.seq > $2 ORDER BY l.seq OFFSET $4)
    OR EXISTS (SELECT FROM {log} AS l WHERE l.xid >= (SELECT xid FROM first) ORDER BY l.xid, l.seq OFFSET $4),
  (SELECT string_agg(n.epoch::text, ',' ORDER BY n.lane) FROM {s}.lane AS n WHERE n.subscription = s.id)
FROM {s}.subscription AS s WHERE s.id = $1";

/// An operator discarded the row `l`.
const IS_DISCARDED: &str =
    "EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = $1 AND d.seq = l.seq AND d.state = 'discarded')";

/// The epochs of all lanes, whether one is leased, and whether one's cursor was made in another
/// cluster. Index: primary key.
const LANE_EPOCHS: &str = "
SELECT string_agg(n.epoch::text, ',' ORDER BY n.lane), bool_or(coalesce(n.lease_until > clock_timestamp(), false)),
  coalesce(bool_or(n.cluster <> {s}.cluster_id()), false)
FROM {s}.lane AS n WHERE n.subscription = $1";

/// Records how far each lane came with its current filter: for all lanes, or only for those that
/// have yet to take over the newest filter. Indexes: primary keys.
const PASSAGE_NOTE: &str = "
INSERT INTO {s}.passage (subscription, revision, lanes, lane, from_snap, to_snap, last_seq)
SELECT n.subscription, n.revision, s.lanes, n.lane, n.from_snap, n.to_snap, n.last_seq
FROM {s}.lane AS n JOIN {s}.subscription AS s ON s.id = n.subscription
WHERE n.subscription = $1 AND ($2 OR n.revision <> s.revision) ON CONFLICT DO NOTHING";

/// Events that will be read again count as never passed. Index: primary key.
const PASSAGE_CUT: &str = "UPDATE {s}.passage SET seq_max = least(seq_max, $2) WHERE subscription = $1";

/// Raises the filter's revision by two: the last is the same filter, and the one before it is a
/// revision that wants nothing (see [`PASSAGE_SKIP`]). Events that go out again get a replay number
/// that none of them has had. Index: primary key. Locks the row.
const SUBSCRIPTION_RESET: &str = "
UPDATE {s}.subscription AS s SET revision = s.revision + 2, rerouted_seq = 0,
  replays = least(s.replays + (log.last > $2)::int, 2000000000),
  again_replay = CASE WHEN log.last > $2 THEN least(s.replays + 1, 2000000000) ELSE s.again_replay END,
  again_seq = CASE WHEN log.last > $2 THEN log.last ELSE s.again_seq END
FROM (SELECT coalesce(max(l.seq), 0) AS last FROM {log} AS l) AS log WHERE s.id = $1";

/// Sets the cursor so that it has passed everything visible now, or the part up to a place.
/// Indexes: primary keys. Locks the rows.
const LANE_RESET: &str = "
UPDATE {s}.lane AS n SET epoch = n.epoch + 1, owner = NULL, lease_until = NULL, revision = s.revision,
  from_snap = CASE WHEN $3 THEN log.snap ELSE '1:1:'::pg_snapshot END, to_snap = log.snap,
  low = CASE WHEN $3 THEN 0 ELSE $2 END, high = CASE WHEN $3 THEN 0 ELSE log.last END, last_seq = CASE WHEN $3 THEN 0 ELSE $2 END
FROM {s}.subscription AS s, (SELECT pg_current_snapshot() AS snap, coalesce(max(l.seq), 0) AS last FROM {log} AS l) AS log
WHERE s.id = $1 AND n.subscription = s.id";

/// Events that the reset skips were passed by the revision that wants nothing. Indexes: primary
/// keys.
const PASSAGE_SKIP: &str = "
INSERT INTO {s}.passage (subscription, revision, lanes, lane, from_snap, to_snap, last_seq)
SELECT n.subscription, s.revision - 1, s.lanes, n.lane, n.from_snap, n.to_snap, n.last_seq
FROM {s}.lane AS n JOIN {s}.subscription AS s ON s.id = n.subscription WHERE n.subscription = $1";

/// Deletes the delivery rows of what is read again, except for events that an operator discarded.
/// Indexes: primary keys. Locks the rows.
const DELIVERY_CUT: &str = "
DELETE FROM {s}.delivery AS d WHERE d.subscription = $1 AND d.seq > $2 AND d.state <> 'discarded'
  AND EXISTS (SELECT FROM {log} AS l WHERE l.seq = d.seq)";

/// Notes unread events with a row, which the reset skips: a person marked them dead, and may retry
/// them. Indexes: primary keys.
pub(crate) const SENT_NOTE_MARKED: &str = "
WITH n AS MATERIALIZED (SELECT * FROM {s}.lane WHERE subscription = $1)
INSERT INTO {s}.sent (subscription, seq) SELECT d.subscription, d.seq
FROM {s}.delivery AS d JOIN {log} AS l ON l.seq = d.seq
CROSS JOIN LATERAL (SELECT x.* FROM n AS x WHERE x.lane = d.lane OFFSET 0) AS n
WHERE d.subscription = $1 AND d.seq <= $2 AND d.state <> 'discarded' AND {is_unread} ON CONFLICT DO NOTHING";

/// Index: primary key. Locks the rows.
const SENT_CUT: &str = "DELETE FROM {s}.sent WHERE subscription = $1 AND seq > $2";

/// Where all new lanes begin: at the position of the furthest old lane, or beyond. Of two snapshots
/// of one cluster, the later one sees all that the earlier one sees. The later one has the higher
/// `xmax`, or fewer transactions still running. Index: primary key.
const LANES_JOIN: &str = "
WITH n AS MATERIALIZED (SELECT * FROM {s}.lane WHERE subscription = $1),
ends AS (SELECT n.to_snap, n.low, n.high FROM n
  ORDER BY pg_snapshot_xmax(n.to_snap) DESC, (SELECT count(*) FROM pg_snapshot_xip(n.to_snap)) LIMIT 1),
begins AS (SELECT n.from_snap FROM n
  ORDER BY pg_snapshot_xmax(n.from_snap) DESC, (SELECT count(*) FROM pg_snapshot_xip(n.from_snap)) LIMIT 1)
SELECT (SELECT from_snap::text FROM begins), (SELECT to_snap::text FROM ends), (SELECT low FROM ends), (SELECT high FROM ends),
  max(n.last_seq), max(n.epoch) + 1, sum(greatest(0, least(n.delivered, 1000000000000000)))::bigint, max(n.lease_until), max(n.lease_ttl), bool_or(n.cluster <> {s}.cluster_id())
FROM n";

/// How far `{unpassed}` goes for a change of lanes: no new lane has passed anything later.
const LANES_END: (&str, &str) = ("through", "max(pg_snapshot_xmax(n.to_snap))");

/// Adds a delivery row for each event that an old lane has still to read and that the new lanes
/// will have passed. Only for these it looks for a row that is there already. Indexes: the log's
/// `(xid, seq)`, primary keys.
pub(crate) const DELIVERY_LEAVE: &str = "
WITH n AS MATERIALIZED (SELECT * FROM {s}.lane WHERE subscription = $1),
ahead AS MATERIALIZED (
  SELECT l.lane, l.seq, l.key, s.ordering, CASE WHEN l.seq <= s.again_seq THEN s.again_replay ELSE 0 END AS replays,
    {later} AS later
  FROM (
    SELECT n.lane, l.* FROM {s}.subscription AS s CROSS JOIN {unpassed} AS l
    CROSS JOIN LATERAL (SELECT x.* FROM n AS x WHERE x.lane = l.slot % s.lanes OFFSET 0) AS n
    WHERE s.id = $1
      AND (pg_visible_in_snapshot(l.xid, $2::text::pg_snapshot) OR (pg_visible_in_snapshot(l.xid, $3::text::pg_snapshot) AND l.seq <= $4))
      AND {is_unread} OFFSET 0) AS l
  JOIN {s}.subscription AS s ON s.id = $1
  WHERE {is_wanted} AND NOT EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = $1 AND d.seq = l.seq OFFSET 0)
  LIMIT $5)
INSERT INTO {s}.delivery (subscription, lane, seq, key, state, ordered, replays, due_at)
SELECT $1, a.lane, a.seq, a.key, CASE WHEN a.later IS NULL THEN 'retrying' ELSE 'scheduled' END, a.ordering = 'key', a.replays,
  coalesce(a.later, statement_timestamp())
FROM ahead AS a ORDER BY a.seq ON CONFLICT DO NOTHING RETURNING seq, key";

/// Counts delivery rows up to a number. Index: primary key of `delivery`.
const ROWS_COUNT: &str = "SELECT count(*) FROM (SELECT FROM {s}.delivery AS d WHERE d.subscription = $1 LIMIT $2) AS d";

/// Index: primary key. Locks the rows.
const LANES_DELETE: &str = "DELETE FROM {s}.lane WHERE subscription = $1";

/// Index: primary key. Locks the row.
const LANES_SET: &str = "UPDATE {s}.subscription SET lanes = $2 WHERE id = $1";

/// Creates the new lanes. The count of delivered events goes to the first of them.
const LANE_MAKE: &str = "
INSERT INTO {s}.lane (subscription, lane, revision, from_snap, to_snap, low, high, last_seq, epoch, delivered, lease_until, lease_ttl)
SELECT s.id, n, s.revision, $2::text::pg_snapshot, $3::text::pg_snapshot, $4, $5, $6, $7, CASE n WHEN 0 THEN $8 ELSE 0 END, $9, $10
FROM {s}.subscription AS s, generate_series(0, s.lanes - 1) AS n WHERE s.id = $1";

/// Moves delivery rows to the lane of their key. If the event was deleted from the log, the row's
/// own key decides, and a row without a key stays. Indexes: primary keys. Locks the rows.
const DELIVERY_MOVE: &str = "
UPDATE {s}.delivery AS d SET lane = moved.lane
FROM (
  SELECT e.seq, (coalesce(l.slot, CASE WHEN e.key IS NULL THEN e.lane ELSE hashtextextended(e.key COLLATE \"C\", 0) & 32767 END) % $2)::smallint AS lane
  FROM {s}.delivery AS e LEFT JOIN {log} AS l ON l.seq = e.seq WHERE e.subscription = $1) AS moved
WHERE d.subscription = $1 AND d.seq = moved.seq AND d.lane <> moved.lane";

/// Locks everything of a subscription. Returns its generation and number of lanes.
async fn lock(session: &Session, name: &SubscriptionName, known: &SubscriptionRow) -> Result<(i64, i32)> {
    session.rows(&session.sql(LOG_LOCK), &params![known.log.as_str()]).await?;
    lock_lanes(session, known.id).await?;
    let rows = session.rows(&session.sql(SUBSCRIPTION_LOCK), &params![known.id]).await?;
    match rows.first() {
        Some(row) if row.get::<_, &str>(0) == name.as_str() => Ok((row.get(1), row.get(2))),
        _ => Err(subscription_changed(session.operation(), name)),
    }
}

/// Looks up and locks the subscription, if it still is the one with this generation. Its name may
/// be used again afterwards.
async fn retire(session: &Session, name: &SubscriptionName, generation: i64) -> Result<SubscriptionRow> {
    let known = look_up(session, name).await?;
    if lock(session, name, &known).await?.0 != generation {
        return Err(subscription_changed(session.operation(), name));
    }
    session.execute(&session.sql(EPOCH_RETIRE), &params![known.id, known.log.as_str()]).await?;
    Ok(known)
}

pub(crate) async fn rename(
    session: &Session,
    name: &SubscriptionName,
    generation: i64,
    to: &SubscriptionName,
) -> Result<()> {
    let taken = session.rows(&session.sql(SUBSCRIPTION_GENERATION), &params![to.as_str()]).await?;
    match taken.first() {
        Some(row) if row.get::<_, i64>(0) == generation && name != to => return Ok(()),
        Some(_) => return Err(subscription_exists(to)),
        None => {}
    }
    let id = retire(session, name, generation).await?.id;
    session.execute(&session.sql(LANE_FENCE), &params![id]).await?;
    session.execute(&session.sql(REPLICA_FORGET), &params![id]).await?;
    session.execute(&session.sql(SUBSCRIPTION_RENAME), &params![id, to.as_str()]).await?;
    Ok(())
}

pub(crate) async fn remove(session: &Session, name: &SubscriptionName, generation: i64) -> Result<()> {
    let id = retire(session, name, generation).await?.id;
    session.execute(&session.sql(LOG_TAKEN), &params![id]).await?;
    session.execute(&session.sql(SUBSCRIPTION_DELETE), &params![id]).await?;
    Ok(())
}

/// Returns the last place that counts as passed after a reset.
async fn place_of(session: &Session, log: &LogName, to: ResetTo) -> Result<i64> {
    Ok(match to {
        ResetTo::Beginning => 0,
        ResetTo::Now => END,
        ResetTo::Seq(seq) => seq.0.saturating_sub(1).max(0),
        ResetTo::Time(time) => place_since(session, log, time).await?,
    })
}

/// Returns the place before the first event that was appended at a time or later. Bisects, because
/// times rise with places; but nearly only, so a margin before the place found is walked.
async fn place_since(session: &Session, log: &LogName, time: jiff::Timestamp) -> Result<i64> {
    let [at, since] = [LOG_AT, LOG_SINCE].map(|template| session.log_sql(template, log));
    let (first, mut high) = ends(session, log, 0).await?;
    let mut low = first - 1;
    let mut found = None;
    while high - low > SINCE_MARGIN {
        let middle = low + (high - low) / 2;
        match session.rows(&at, &params![middle, high, time]).await?.first() {
            Some(row) if !row.get::<_, bool>(1) => low = row.get(0),
            later => {
                found = later.map(|row| row.get(0)).or(found);
                high = middle;
            }
        }
    }
    let low = low - SINCE_MARGIN;
    let earlier = session.rows(&since, &params![low, high, time]).await?.first().map(|row| row.get(0));
    Ok(earlier.or(found).map_or(END, |seq: i64| seq - 1))
}

/// Returns what a reset would do.
pub(crate) async fn plan(session: &Session, name: &SubscriptionName, to: ResetTo) -> Result<ResetPlan> {
    let known = look_up(session, name).await?;
    let place = place_of(session, &known.log, to).await?;
    let most = LOOK_EVENTS_MAX as i64 + 1;
    let template = RESET_PLAN.replace("{is_discarded}", IS_DISCARDED);
    let row =
        session.row(&session.log_sql(&template, &known.log), &params![known.id, place, most, PLAN_LOOK_MAX]).await?;
    let [again, skipped] = [0, 1].map(|column| row.get::<_, i64>(column));
    let stamp = row.get::<_, Option<String>>(3).unwrap_or_default();
    let is_estimate = again.max(skipped) == most || row.get(2);
    Ok(ResetPlan { again: again.unsigned_abs(), skipped: skipped.unsigned_abs(), is_estimate, stamp })
}

/// Resets the subscription to continue after a place. Events that are skipped were passed by a
/// revision that wants nothing. Events that are read again count as never passed.
pub(crate) async fn reset(session: &Session, name: &SubscriptionName, to: ResetTo, looked: &str) -> Result<ResetPlan> {
    let known = look_up(session, name).await?;
    let (id, sql) = (known.id, |template: &str| session.log_sql(template, &known.log));
    lock(session, name, &known).await?;
    let row = session.row(&sql(LANE_EPOCHS), &params![id]).await?;
    let (stamp, held): (Option<String>, Option<bool>) = (row.get(0), row.get(1));
    if held == Some(true) {
        return Err(lanes_held(name));
    }
    if row.get(2) {
        return Err(cursor_foreign("reset"));
    }
    if stamp.as_deref() != Some(looked) {
        return Err(subscription_changed("reset", name));
    }
    let place = place_of(session, &known.log, to).await?;
    let (of_all, at_place) = (params![id, true], params![id, place]);
    session.execute(&sql(PASSAGE_NOTE), &of_all).await?;
    session.execute(&sql(PASSAGE_CUT), &at_place).await?;
    session.execute(&sql(SUBSCRIPTION_RESET), &at_place).await?;
    session.execute(&sql(FILTER_KEEP), &params![id]).await?;
    session.execute(&sql(SENT_NOTE_MARKED), &at_place).await?;
    session.execute(&sql(LANE_RESET), &params![id, place, place == END]).await?;
    session.execute(&sql(PASSAGE_SKIP), &params![id]).await?;
    session.execute(&sql(DELIVERY_CUT), &at_place).await?;
    session.execute(&sql(SENT_CUT), &at_place).await?;
    Ok(ResetPlan { stamp: looked.to_owned(), ..ResetPlan::default() })
}

/// Changes the number of lanes. All new lanes begin at the position of the furthest old lane, or
/// beyond. Events up to there that another lane has still to read get delivery rows.
pub(crate) async fn set_lanes(session: &Session, name: &SubscriptionName, lanes: u16) -> Result<()> {
    let known = look_up(session, name).await?;
    let (id, sql) = (known.id, |template: &str| session.log_sql(template, &known.log));
    if lock(session, name, &known).await?.1 == i32::from(lanes) {
        return Ok(());
    }
    let most = ROWS_MOVED_MAX + 1;
    if session.row(&sql(ROWS_COUNT), &params![id, most]).await?.get::<_, i64>(0) == most {
        return Err(rows_many("set_lanes", name));
    }
    let row = session.row(&sql(LANES_JOIN), &params![id]).await?;
    if row.get(9) {
        return Err(cursor_foreign("set_lanes"));
    }
    let (from, to): (String, String) = (row.get(0), row.get(1));
    let [low, high, last, epoch, delivered, ttl] = [2, 3, 4, 5, 6, 8].map(|column| row.get::<_, i64>(column));
    let lease_until: Option<jiff::Timestamp> = row.get(7);
    let most = LANES_APART_MAX as i64 + 1;
    let leave = session.schema().log_sql_with(DELIVERY_LEAVE, &known.log, &[LANES_END]);
    let left = session.rows(&leave, &params![id, from, to, last, most]).await?;
    if left.len() > LANES_APART_MAX {
        return Err(lanes_apart(name));
    }
    made(session, &known, &left).await?;
    session.execute(&sql(PASSAGE_NOTE), &params![id, false]).await?;
    session.execute(&sql(LANES_DELETE), &params![id]).await?;
    session.execute(&sql(LANES_SET), &params![id, lanes.cast_signed()]).await?;
    let cursor = params![id, from, to, low, high, last, epoch, delivered, lease_until, ttl];
    session.execute(&sql(LANE_MAKE), &cursor).await?;
    session.execute(&sql(DELIVERY_MOVE), &params![id, i32::from(lanes)]).await?;
    Ok(())
}
