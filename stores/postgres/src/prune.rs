//! Retention: old events are deleted by ranges of `seq`, one bounded step per call.
//!
//! Each step begins where the one before ended, as the caller passes it in. Nothing is read twice:
//! events that have to stay cost a run one read, and young events cost it one step
//! (`docs/decisions/retention-by-range.md` has the measurements).

use postbox_core::kit::{PRUNE_ROWS_MAX, PRUNE_YOUNG_MAX};
use postbox_core::{Changed, Criteria, LogName, Prune, Result, Seq};
use postbox_postgres_sql::{is_meant, params};

use crate::criteria::Meant;
use crate::log::micros;
use crate::row_security::log_not_locked;
use crate::session::Session;

/// Whether a log exists, whether it has readers, and whether one of them takes everything. A log
/// without readers is not pruned, because nobody has passed its events. Reads small tables. Locks
/// the log's row, so that no filter changes meanwhile, and no other step runs: two at once would
/// wait for each other's rows. A dry run neither waits nor locks.
const PRUNE_BEGIN: &str = "
SELECT EXISTS (SELECT FROM {s}.subscription AS s WHERE s.log = g.name), {takes_everything}, g.kept_from
FROM {s}.log AS g WHERE g.name = $1{lock}";

/// Of the next events in `seq` order, finds those that every subscription of the log has passed and
/// that nobody needs any more, and handles them as `{gone}` says. `$1` is the age, `$2` the log,
/// `$3` the place after which the step begins, `$5` to `$9` the criteria. Returns their number,
/// where the step ended if there are more, whether so many were young that later events need not
/// be read, the last place of the step, and whether every transaction that still runs began after
/// those of the step. Indexes: primary keys.
///
/// Conditions that nobody asked for are left out, because Postgres plans the statement in each step
/// (measured: a third of a step).
///
/// An event below `horizon` is visible in every snapshot that a reader began its window with, so
/// all have passed it. Only other events are compared with lanes, and only with those that are
/// `behind`: the others began their window with a snapshot that shows the whole step (measured with
/// 1,600 lanes, one of them behind: 0.04 s a step instead of 4 s). An event that a subscription
/// does not want counts as passed, wherever its cursor stands. An unrouted event is kept. So is an
/// event that was not checked for routing yet, because it may be unrouted (`unrouted.rs`), unless a
/// subscription takes everything (`$4`). An unrouted event that a filter wants by now is about to
/// be handed over, so it stays too.
///
/// The lists are small and read once. `lane` has an old version for each batch while anyone holds a
/// snapshot, and probing an index of `delivery` for each event and subscription costs more than the
/// delete. `NOT IN` and `IN … IS TRUE` use a hash table whatever the statistics say. As joins they
/// become nested loops over both lists (measured: 5 s a step).
const LOG_PRUNE: &str = "
WITH reader AS MATERIALIZED (
  SELECT s.topics, s.tenant, s.kinds, s.aggregates, s.headers, s.lanes, n.lane, n.from_snap, n.to_snap, n.last_seq
  FROM {s}.subscription AS s JOIN {s}.lane AS n ON n.subscription = s.id WHERE s.log = $2),
horizon AS MATERIALIZED (SELECT pg_snapshot_xmin(r.from_snap) AS xid FROM reader AS r ORDER BY 1 LIMIT 1),
step AS MATERIALIZED (
  SELECT CASE count(*) WHEN {rows_max} THEN max(l.seq) END AS last, max(l.xid) AS newest, max(l.seq) AS looked
  FROM (SELECT l.seq, l.xid FROM {log} AS l WHERE l.seq > $3 ORDER BY l.seq LIMIT {rows_max}) AS l),
behind AS MATERIALIZED (SELECT r.* FROM reader AS r WHERE pg_snapshot_xmin(r.from_snap) <= (SELECT newest FROM step)),
needed AS MATERIALIZED (
  SELECT d.seq FROM {s}.delivery AS d
  WHERE d.subscription = ANY (ARRAY(SELECT s.id FROM {s}.subscription AS s WHERE s.log = $2))
    AND d.seq > $3 AND d.seq <= coalesce((SELECT last FROM step), 9223372036854775807) AND d.state <> 'discarded'
  {or_unrouted}),
{gone}
SELECT (SELECT count(*) FROM gone), (SELECT last FROM step),
  (SELECT count(*) FROM gone) <= {rows_max} - {young_max} AND {young_max} = (SELECT count(*) FROM (
    SELECT FROM {log} AS l WHERE l.seq > $3 AND l.seq <= (SELECT last FROM step)
      AND l.created_at > statement_timestamp() - $1 * interval '1 microsecond'
      AND l.created_at <= statement_timestamp() LIMIT {young_max}) AS young),
  (SELECT looked FROM step), (SELECT newest < pg_snapshot_xmin(pg_current_snapshot()) FROM step)";

/// Moves the place where counts begin to the first event that the step left, or behind the step.
/// Only if nothing was kept before the step: then `kept_from` is behind `$2`. Forward only with
/// `$4`: an event that commits later then nearly always has a higher place. Back in any case, to an
/// event that has a lower one. Index: the log's primary key. The log's row is locked already.
const LOG_KEPT_FROM: &str = "
UPDATE {s}.log AS g SET kept_from = first.seq
FROM (SELECT coalesce((SELECT l.seq FROM {log} AS l WHERE l.seq > $2 AND l.seq <= $3 ORDER BY l.seq LIMIT 1), $3 + 1) AS seq) AS first
WHERE g.name = $1 AND g.kept_from > $2 AND (first.seq < g.kept_from OR first.seq > g.kept_from AND $4)";

/// The events of the step that are unrouted.
const UNROUTED: &str = "
SELECT u.seq FROM {s}.unrouted AS u
WHERE u.log = $2 AND u.seq > $3 AND u.seq <= coalesce((SELECT last FROM step), 9223372036854775807)";

/// The events that may be deleted.
pub(crate) const MAY_GO: &str = "
  l.seq > $3 AND l.seq <= coalesce((SELECT last FROM step), 9223372036854775807)
    AND l.created_at <= statement_timestamp() - $1 * interval '1 microsecond'
    AND (l.xid < (SELECT xid FROM horizon) OR NOT EXISTS (
      SELECT FROM (SELECT b.* FROM behind AS b WHERE b.lane = l.slot % b.lanes OFFSET 0) AS n
        CROSS JOIN LATERAL (SELECT n.topics, n.tenant, n.kinds, n.aggregates, n.headers) AS s
      WHERE {is_unread} AND {is_wanted} OFFSET 0))
    AND l.seq NOT IN (SELECT seq FROM needed)
    AND ($4 OR (l.xid, l.seq) <= (SELECT g.routed_xid, g.routed_seq FROM {s}.log AS g WHERE g.name = $2))";

/// Only events that no subscription wants.
const ONLY_UNROUTED: &str = "
    AND (l.seq IN ({unrouted})) IS TRUE
    AND NOT EXISTS (
      SELECT FROM {s}.subscription AS s JOIN {s}.lane AS n ON n.subscription = s.id AND n.lane = l.slot % s.lanes
      WHERE s.log = $2 AND {is_wanted} AND {is_judged} OFFSET 0)";

/// Only events that were discarded for the reason `$10`.
const ONLY_CODE: &str = "
    AND (l.seq IN (
      SELECT d.seq FROM {s}.delivery AS d
      WHERE d.subscription = ANY (ARRAY(SELECT s.id FROM {s}.subscription AS s WHERE s.log = $2))
        AND d.seq > $3 AND d.seq <= coalesce((SELECT last FROM step), 9223372036854775807)
        AND d.state = 'discarded' AND d.code = $10)) IS TRUE";

/// The oldest `{limit}` events that may be deleted. A step without a limit need not find them
/// first.
const OLDEST_GO: &str = "
  l.seq IN (SELECT l.seq FROM {log} AS l WHERE {may_go} ORDER BY l.seq LIMIT {limit})";

/// Deletes them and what is recorded of them. Locks the rows.
const GONE: &str = "
gone AS (DELETE FROM {log} AS l WHERE {goes} RETURNING l.seq),
marks AS (
  DELETE FROM {s}.delivery AS d
  WHERE d.subscription = ANY (ARRAY(SELECT s.id FROM {s}.subscription AS s WHERE s.log = $2))
    AND d.seq > $3 AND d.seq <= coalesce((SELECT last FROM step), 9223372036854775807) AND d.state = 'discarded'
    AND (d.seq IN (SELECT seq FROM gone)) IS TRUE),
sent AS (
  DELETE FROM {s}.sent AS t
  WHERE t.subscription = ANY (ARRAY(SELECT s.id FROM {s}.subscription AS s WHERE s.log = $2))
    AND t.seq > $3 AND t.seq <= coalesce((SELECT last FROM step), 9223372036854775807)
    AND (t.seq IN (SELECT seq FROM gone)) IS TRUE)";

/// Deletes the marks of unrouted events, those whose event is gone included.
const UNWANTED: &str = ",
unwanted AS (
  DELETE FROM {s}.unrouted AS u
  WHERE u.log = $2 AND u.seq > $3 AND u.seq <= coalesce((SELECT last FROM step), 9223372036854775807)
    AND ((u.seq IN (SELECT seq FROM gone)) IS TRUE OR NOT EXISTS (SELECT FROM {log} AS l WHERE l.seq = u.seq)))";

/// Only reads them. Locks nothing.
const WOULD_GO: &str = "gone AS MATERIALIZED (SELECT l.seq FROM {log} AS l WHERE {goes})";

/// Delivery rows whose events were deleted from the log by hand, if they are closed and as old as
/// the events to be pruned. Indexes: `delivery_missing`, the log's primary key. No lock.
const MISSING_CHOOSE: &str = "
  SELECT m.subscription, m.seq FROM {s}.subscription AS s JOIN {s}.delivery AS m ON m.subscription = s.id
  WHERE s.log = $2 AND m.code = 'event_missing' AND m.state IN ('dead', 'discarded')
    AND m.updated_at <= statement_timestamp() - $1 * interval '1 microsecond'
    AND NOT EXISTS (SELECT FROM {log} AS l WHERE l.seq = m.seq)";

/// Deletes up to 1000 of these rows. Locks them.
const DELIVERY_PRUNE_MISSING: &str = "
DELETE FROM {s}.delivery AS d USING ({missing} LIMIT 1000 FOR UPDATE OF m SKIP LOCKED) AS gone
WHERE d.subscription = gone.subscription AND d.seq = gone.seq";

/// Runs one step, in the transaction of the session.
pub(crate) async fn prune(session: &Session, log: &LogName, prune: &Prune) -> Result<Changed> {
    let sql = |template: &str, values: &[(&str, &str)]| session.schema().log_sql_with(template, log, values);
    let name = log.as_str();
    let lock = if prune.dry_run { "" } else { " FOR NO KEY UPDATE" };
    let rows = session.rows(&sql(PRUNE_BEGIN, &[("lock", lock)]), &params![name]).await?;
    let Some(row) = rows.first() else { return Err(log_not_locked(session, log).await) };
    let (has_readers, takes_everything, kept_from): (bool, bool, i64) = (row.get(0), row.get(1), row.get(2));
    if !has_readers || prune.limit == Some(0) {
        return Ok(Changed::default());
    }
    let (age_micros, after) = (micros(prune.older_than), prune.after.map_or(0, |after| after.0));
    let (rows_max, young_max) = (PRUNE_ROWS_MAX.to_string(), PRUNE_YOUNG_MAX.to_string());
    // A step deletes no more than it reads, so a larger limit changes nothing in it.
    let limit = prune.limit.filter(|limit| *limit <= PRUNE_ROWS_MAX);
    let limit_text = limit.unwrap_or(PRUNE_ROWS_MAX).to_string();
    let mut may_go = MAY_GO.to_owned();
    if prune.unrouted {
        may_go += &ONLY_UNROUTED.replace("{unrouted}", UNROUTED);
    }
    if prune.code.is_some() {
        may_go += ONLY_CODE;
    }
    if prune.which != Criteria::default() {
        may_go += &format!(" AND {}", is_meant([5, 6, 7, 8, 9]));
    }
    let (gone, unwanted) = match (prune.dry_run, prune.unrouted) {
        (true, _) => (WOULD_GO, ""),
        (false, true) => (GONE, UNWANTED),
        (false, false) => (GONE, ""),
    };
    let or_unrouted = if prune.unrouted { String::new() } else { format!("UNION ALL {UNROUTED}") };
    let template = LOG_PRUNE
        .replace("{or_unrouted}", &or_unrouted)
        .replace("{gone}", &format!("{gone}{unwanted}"))
        .replace("{goes}", if limit.is_some() { OLDEST_GO } else { "{may_go}" })
        .replace("{may_go}", &may_go);
    let step = sql(&template, &[("rows_max", &rows_max), ("young_max", &young_max), ("limit", &limit_text)]);
    let Meant { topic, key, since, until, tenant } = Meant::by(&prune.which);
    let params = params![age_micros, name, after, takes_everything, topic, key, since, until, tenant, prune.code];
    let row = session.row(&step, &params).await?;
    let (count, last, is_young): (i64, Option<i64>, Option<bool>) = (row.get(0), row.get(1), row.get(2));
    let count = count.unsigned_abs();
    if let (Some(looked), false) = (row.get::<_, Option<i64>>(3), prune.dry_run || kept_from <= after) {
        // A role to which policies show one tenant only would pass over events of others. It can
        // delete none.
        let forward = count > 0 && row.get::<_, Option<bool>>(4) == Some(true);
        session.execute(&sql(LOG_KEPT_FROM, &[]), &params![name, after, looked, forward]).await?;
    }
    if prune.limit.is_some_and(|limit| count >= limit as u64) {
        return Ok(Changed { count, next: None });
    }
    if let Some(last) = last.filter(|_| is_young != Some(true)) {
        return Ok(Changed { count, next: Some(Seq(last)) });
    }
    if !prune.means_all() {
        return Ok(Changed { count, next: None });
    }
    if prune.dry_run {
        let missing = session.execute(&sql(MISSING_CHOOSE, &[]), &params![age_micros, name]).await?;
        return Ok(Changed { count: count + missing, next: None });
    }
    let template = DELIVERY_PRUNE_MISSING.replace("{missing}", MISSING_CHOOSE);
    let missing = session.execute(&sql(&template, &[]), &params![age_micros, name]).await?;
    Ok(Changed { count: count + missing, next: (missing > 0).then_some(Seq(after)) })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use postbox_core::kit::LOOK_EVENTS_MAX;
    use postbox_testkit::servers::Version;

    use super::*;
    use crate::inspect::LOG_COUNT;
    use crate::plans::filled;
    use crate::subscription::LOG_IS_FROM_FUTURE;

    /// The entries of the log's indexes that were looked up in this transaction, those of rows that
    /// nobody sees included.
    const ENTRIES: &str = "
SELECT sum(pg_stat_get_xact_tuples_returned(i.indexrelid))::bigint FROM pg_index AS i WHERE i.indrelid = 'postbox.outbox'::regclass";

    /// Entries of deleted events stay in the indexes while anyone holds a snapshot, and rows of a
    /// transaction that runs count towards no limit. No count may look at all of them.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn counts_pass_by_what_is_deleted_and_what_still_runs() {
        const LOOK: i64 = LOOK_EVENTS_MAX as i64 + 1;
        for version in Version::ALL {
            // Old, and so are their transactions: others on this server may run for longer.
            let insert = "INSERT INTO postbox.outbox (xid, topic, payload, created_at)
                SELECT '101'::xid8, 'topic', 'x', now() - CASE WHEN n <= 90000 THEN interval '1 day' ELSE interval '0' END";
            let store = filled(version, insert).await;
            let session = store.session("test").await.expect("a session");
            let read = "INSERT INTO postbox.subscription (name, log, topics, ordering, lanes) VALUES ('s', 'outbox', '{rare}', 'key', 1);
                INSERT INTO postbox.lane (subscription, lane, from_snap, to_snap, low, high, last_seq)
                SELECT s.id, 0, '700:700:', '700:700:', 0, 0, 0 FROM postbox.subscription AS s;
                UPDATE postbox.log SET routed_xid = '102' WHERE name = 'outbox'";
            session.client().batch_execute(read).await.expect("read");
            let hold = "BEGIN ISOLATION LEVEL REPEATABLE READ; SET LOCAL idle_in_transaction_session_timeout = 0; SELECT FROM postbox.outbox LIMIT 1";
            let holder = store.session("test").await.expect("a session");
            holder.client().batch_execute(hold).await.expect("held");
            let (mut deleted, mut after) = (0, None);
            loop {
                let wanted = Prune { older_than: Duration::from_secs(3_600), after, ..Prune::default() };
                session.begin(&store.inner.modes.prune).await.expect("begun");
                let step = prune(&session, &LogName::outbox(), &wanted).await.expect("pruned");
                session.commit().await.expect("ended");
                (deleted, after) = (deleted + step.count, step.next);
                if after.is_none() {
                    break;
                }
            }
            assert_eq!(deleted, 90_000);
            let kept =
                session.row("SELECT kept_from FROM postbox.log WHERE name = 'outbox'", &[]).await.expect("noted");
            assert_eq!(kept.get::<_, i64>(0), 90_001, "counts begin at the first event that is left");
            let append = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0;
                INSERT INTO postbox.outbox (topic, payload) SELECT 'rare', 'x' FROM generate_series(1, 50000)";
            let writer = store.session("test").await.expect("a session");
            writer.client().batch_execute(append).await.expect("appended");
            // One that ends later: the snapshot's end is beyond the one that runs.
            session.client().batch_execute("SELECT pg_current_xact_id()").await.expect("ended");
            let depths = format!("SELECT count(*) FROM postbox.depths(ARRAY['s'], {LOOK})");
            let count = session.log_sql(LOG_COUNT, &LogName::outbox()).replace("$1", "5000");
            for (sql, entries_max) in
                [(depths, 3 * LOOK), (count, 60_000), (session.log_sql(LOG_IS_FROM_FUTURE, &LogName::outbox()), 100)]
            {
                session.begin(&store.inner.modes.count).await.expect("begun");
                let before: i64 = session.row(ENTRIES, &[]).await.expect("counted").get(0);
                session.row(&sql, &[]).await.expect("executed");
                let entries = session.row(ENTRIES, &[]).await.expect("counted").get::<_, i64>(0) - before;
                session.commit().await.expect("ended");
                assert!(entries <= entries_max, "{entries} entries (Postgres {}) by {sql}", version.number());
            }
            for open in [&holder, &writer] {
                open.client().batch_execute("ROLLBACK").await.expect("ended");
            }
        }
    }
}
