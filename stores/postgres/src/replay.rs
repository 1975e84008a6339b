//! Replay: sends events again that were delivered or skipped. They get delivery rows that are due
//! now.

use std::collections::BTreeSet;

use postbox_core::{LogName, Replay, Replayed, Result, Seq, SubscriptionName};
use postbox_postgres_sql::{is_meant, params};
use tokio_postgres::Row;
use uuid::Uuid;

use crate::admin::{CLEAR_FOLLOWER_DUE, lock_lanes};
use crate::criteria::Meant;
use crate::session::Session;
use crate::subscription::{LOG_LOCK, SubscriptionRow, look_up};

/// How many places of the log one step reads: some tens of milliseconds under the lanes' locks,
/// however few events match.
const STEP_LOOK_MAX: i64 = 20_000;

/// The first place of a log after another, and its last one. Index: its primary key, from both
/// ends. Not from `kept_from`: what is sent again must not depend on it. A step that begins where
/// the one before ended walks no entries of deleted events.
const LOG_ENDS: &str = "
SELECT coalesce((SELECT l.seq FROM {log} AS l WHERE l.seq > $1 ORDER BY l.seq LIMIT 1), 0),
  coalesce((SELECT max(l.seq) FROM {log} AS l), 0)";

/// The replay number of this step, which no event of the subscription has had before, up to a bound
/// that only a hostile role reaches. Index: primary key. Locks the row.
pub(crate) const REPLAY_NEXT: &str =
    "UPDATE {s}.subscription SET replays = least(replays + 1, 2000000000) WHERE id = $1 RETURNING replays";

/// Events between two places that are to be sent again, oldest first, without those that have
/// expired. Index: the log's primary key, walked between the two places; for ids, its unique one.
/// No lock.
///
/// Here, as in the other changes that compare many events with the lanes `n`, the lanes are read
/// once. While anyone holds a snapshot, `lane` has an old version for each batch, and a look-up for
/// each event reads all of them (measured with 22,000 versions: 1 s a step). `OFFSET 0` finds an
/// event's lane before its snapshots are asked. A plain join asks those of every lane (measured
/// with 256 lanes and 100,000 events: 38 s instead of 2 s).
const REPLAY_CHOOSE: &str = "
  WITH n AS MATERIALIZED (SELECT * FROM {s}.lane WHERE subscription = $1)
  SELECT n.lane, l.seq, l.key, o.ordering, {is_taken} AS taken,
    {later} AS later
  FROM {named} AS l
  JOIN {s}.subscription AS o ON o.id = $1
  CROSS JOIN LATERAL (SELECT x.* FROM n AS x WHERE x.lane = l.slot % o.lanes OFFSET 0) AS n
  WHERE l.seq > $3 AND l.seq <= $4 AND {is_meant}
    AND ($5::uuid[] IS NOT NULL OR EXISTS (SELECT FROM {s}.subscription AS s WHERE s.id = $1 AND {is_wanted}))
    AND NOT EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = $1 AND d.seq = l.seq OFFSET 0)
    AND NOT ({is_unread} AND {is_taken}) AND (l.expires_at IS NULL OR l.expires_at > statement_timestamp())
  ORDER BY l.seq LIMIT $10";

/// Adds their delivery rows. Locks only the new rows.
const DELIVERY_REPLAY: &str = "
WITH chosen AS MATERIALIZED ({chosen}),
noted AS (INSERT INTO {s}.sent (subscription, seq) SELECT $1, c.seq FROM chosen AS c WHERE NOT c.taken ON CONFLICT DO NOTHING)
INSERT INTO {s}.delivery (subscription, lane, seq, key, state, ordered, replays, due_at)
SELECT $1, c.lane, c.seq, c.key, CASE WHEN c.later IS NULL THEN 'retrying' ELSE 'scheduled' END, c.ordering = 'key', $2,
  coalesce(c.later, statement_timestamp()) FROM chosen AS c ORDER BY c.seq
ON CONFLICT DO NOTHING RETURNING seq, key";

/// Removes them from `unrouted`, because they are being delivered now. Index: primary key.
const UNROUTED_FORGET: &str = "DELETE FROM {s}.unrouted AS u WHERE u.log = $1 AND u.seq = ANY ($2::bigint[])";

/// Returns the first place of a log after another (0: there is none), and its last one.
pub(crate) async fn ends(session: &Session, log: &LogName, after: i64) -> Result<(i64, i64)> {
    let ends = session.row(&session.log_sql(LOG_ENDS, log), &params![after]).await?;
    Ok((ends.get(0), ends.get(1)))
}

/// Runs one step.
pub(crate) async fn replay(session: &Session, name: &SubscriptionName, replay: &Replay) -> Result<Replayed> {
    let subscription = look_up(session, name).await?;
    let after = replay.after.map_or(0, |after| after.0);
    let (first, last) = ends(session, &subscription.log, after).await?;
    let through = replay.through.map_or(last, |through| through.0.min(last));
    let after = after.max(first - 1);
    let until = match replay.ids {
        Some(_) => through,
        None => through.min(after.saturating_add(STEP_LOOK_MAX)),
    };
    let id = subscription.id;
    let ids: Option<Vec<Uuid>> = replay.ids.as_ref().map(|ids| ids.iter().map(|id| id.as_uuid()).collect());
    let named = match ids {
        Some(_) => "(SELECT * FROM {log} WHERE id = ANY ($5) OFFSET 0)",
        None => "{log}",
    };
    let chosen = REPLAY_CHOOSE.replace("{named}", named);
    let sql = |template: &str| {
        session.schema().log_sql_with(template, &subscription.log, &[("is_meant", &is_meant([6, 7, 8, 9, 11]))])
    };
    let Meant { topic, key, since, until: before, tenant } = Meant::by(&replay.which);
    let limit = replay.step_max() as i64;
    let next = |seqs: &[i64]| {
        let is_full = seqs.len() as i64 == limit;
        if is_full { seqs.last().copied() } else { (until < through).then_some(until) }
    };
    let seqs = if replay.dry_run {
        let params = params![id, 0, after, until, ids, topic, key, since, before, limit, tenant];
        session.rows(&sql(&chosen), &params).await?.iter().map(|row| row.get(1)).collect()
    } else {
        // Retention holds it too: it must not delete what is chosen here.
        session.rows(&session.sql(LOG_LOCK), &params![subscription.log.as_str()]).await?;
        lock_lanes(session, id).await?;
        let number: i32 = session.row(&session.sql(REPLAY_NEXT), &params![id]).await?.get(0);
        let params = params![id, number, after, until, ids, topic, key, since, before, limit, tenant];
        let rows = session.rows(&sql(&DELIVERY_REPLAY.replace("{chosen}", &chosen)), &params).await?;
        made(session, &subscription, &rows).await?
    };
    Ok(Replayed { count: seqs.len() as u64, next: next(&seqs).map(Seq), through: Seq(through) })
}

/// Does what follows from new delivery rows, given as `seq` and key. Returns each `seq`, sorted.
pub(crate) async fn made(session: &Session, subscription: &SubscriptionRow, rows: &[Row]) -> Result<Vec<i64>> {
    let mut seqs: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    seqs.sort_unstable();
    let keys: BTreeSet<String> = rows.iter().filter_map(|row| row.get(1)).collect();
    let keys: Vec<String> = keys.into_iter().collect();
    let log = subscription.log.as_str();
    session.execute(&session.sql(UNROUTED_FORGET), &params![log, seqs]).await?;
    session.execute(&session.sql(CLEAR_FOLLOWER_DUE), &params![subscription.id, keys]).await?;
    Ok(seqs)
}

#[cfg(test)]
mod tests {
    use postbox_core::limits::CHANGE_EVENTS_MAX;
    use postbox_core::{Log as _, ResetTo, Subscription};
    use postbox_testkit::servers::Version;

    use super::*;
    use crate::lifecycle::{DELIVERY_LEAVE, RESET_PLAN, SENT_NOTE_MARKED, plan, reset, set_lanes};
    use crate::plans::filled;
    use crate::prune::MAY_GO;
    use crate::unrouted::{UNROUTED_TAKE, note_unrouted};

    /// See [`REPLAY_CHOOSE`].
    #[test]
    fn an_events_lane_is_found_before_its_snapshots_are_asked() {
        for sql in [REPLAY_CHOOSE, DELIVERY_LEAVE, RESET_PLAN, SENT_NOTE_MARKED, UNROUTED_TAKE, MAY_GO] {
            let (asked, found) = (sql.matches("{is_unread}").count(), sql.matches(".lane = ").count());
            assert!(asked <= found && sql.matches("OFFSET 0) AS n").count() == found, "{sql}");
        }
    }

    /// An open transaction holds back the `xmin` of every snapshot. Whatever all lanes have passed
    /// beside it is not read again; what it wrote before it ended is.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn other_lanes_read_little_of_what_was_passed_beside_an_open_transaction() {
        const READS: &str = "SELECT (seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_xact_user_tables
            WHERE schemaname = 'postbox' AND relname = 'outbox'";
        for version in Version::ALL {
            let insert = "INSERT INTO postbox.outbox (xid, topic, key, payload)
                SELECT (CASE n % 10000 WHEN 0 THEN '101' ELSE '500' END)::xid8, 'topic', 'k' || n % 10000, 'x'";
            let store = filled(version, insert).await;
            let name = SubscriptionName::new("s").expect("a name");
            let subscription = Subscription { lanes: Some(2), ..Subscription::new(name.clone(), LogName::outbox()) };
            store.subscribe(&subscription).await.expect("subscribed");
            let session = store.session("test").await.expect("a session");
            session.begin(&store.inner.modes.write).await.expect("begun");
            // The lane of the key `k0` opened its last window before that transaction ended.
            let stands = "UPDATE postbox.lane SET from_snap = at.snap, to_snap = at.snap
                FROM (SELECT n.lane, (CASE n.lane WHEN l.slot % 2 THEN '101:1000:101' ELSE '1000:1000:' END)::pg_snapshot AS snap
                  FROM postbox.lane AS n, (SELECT slot FROM postbox.outbox WHERE key = 'k0' LIMIT 1) AS l) AS at
                WHERE at.lane = postbox.lane.lane";
            session.run(stands).await.expect("set");
            let before: i64 = session.row(READS, &[]).await.expect("counted").get(0);
            set_lanes(&session, &name, 3).await.expect("changed");
            let reads = session.row(READS, &[]).await.expect("counted").get::<_, i64>(0) - before;
            let left = session.row("SELECT count(*) FROM postbox.delivery", &[]).await.expect("counted");
            let context = format!("{reads} events read (Postgres {})", version.number());
            assert_eq!(left.get::<_, i64>(0), 10, "{context}");
            assert!(reads <= 100, "{context}");
            session.commit().await.expect("ended");
        }
    }

    /// The changes that compare many events with the lanes `n`, see [`REPLAY_CHOOSE`].
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_step_over_many_events_reads_its_lanes_once() {
        const SCANS: &str = "SELECT (seq_scan + idx_scan)::bigint FROM pg_stat_xact_user_tables
            WHERE schemaname = 'postbox' AND relname = 'lane'";
        for version in Version::ALL {
            let insert = "INSERT INTO postbox.outbox (xid, topic, key, payload) SELECT '101'::xid8, 'topic', 'k' || n % 1000, 'x'";
            let store = filled(version, insert).await;
            let (name, log) = (SubscriptionName::new("s").expect("a name"), LogName::outbox());
            let subscription = Subscription { lanes: Some(2), ..Subscription::new(name.clone(), log.clone()) };
            store.subscribe(&subscription).await.expect("subscribed");
            let session = store.session("test").await.expect("a session");
            session.begin(&store.inner.modes.write).await.expect("begun");
            for (step, stands) in [
                (
                    "route",
                    "UPDATE postbox.filter SET topics = '{rare}';
                     UPDATE postbox.subscription SET topics = '{rare}', rerouted = revision",
                ),
                (
                    "take",
                    "UPDATE postbox.filter SET topics = '{}'; UPDATE postbox.subscription SET topics = '{}', rerouted = 0",
                ),
                ("replay", "UPDATE postbox.lane SET from_snap = '700:700:', to_snap = '700:700:'"),
                ("set lanes", "UPDATE postbox.lane SET from_snap = '1:1:', to_snap = '1:1:' WHERE lane = 1"),
                ("reset", "UPDATE postbox.delivery SET state = 'dead', due_at = NULL"),
            ] {
                session.run(stands).await.expect(step);
                let before: i64 = session.row(SCANS, &[]).await.expect("counted").get(0);
                match step {
                    "route" => assert_eq!(note_unrouted(&session, &log).await.expect(step).unrouted, 10_000),
                    "take" => assert!(note_unrouted(&session, &log).await.expect(step).more),
                    "replay" => {
                        let replayed = replay(&session, &name, &Replay::default()).await.expect(step);
                        assert_eq!(replayed.count, CHANGE_EVENTS_MAX as u64);
                    }
                    "reset" => {
                        let planned = plan(&session, &name, ResetTo::Now).await.expect(step);
                        assert!(planned.skipped > 0, "{planned:?}");
                        reset(&session, &name, ResetTo::Now, &planned.stamp).await.expect(step);
                    }
                    _ => assert_eq!(set_lanes(&session, &name, 3).await.expect_err(step).code(), "lanes_apart"),
                }
                let scans = session.row(SCANS, &[]).await.expect("counted").get::<_, i64>(0) - before;
                assert!(scans <= 30, "{scans} scans of the lanes to {step} (Postgres {})", version.number());
            }
            session.commit().await.expect("ended");
        }
    }
}
