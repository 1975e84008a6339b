//! What an operator changes: retry, discard, replay, pause.
//!
//! Whatever changes delivery rows locks the subscription's lanes first, as settling does: a key's
//! next row is decided by one at a time.

use std::collections::BTreeSet;

use async_trait::async_trait;
use postbox_core::kit::check_lanes;
use postbox_core::{
    Admin, Changed, Pause, Replay, Replayed, ResetPlan, ResetTo, Result, Selection, Seq, SubscriptionName,
};
use uuid::Uuid;

use crate::PostgresStore;
use crate::criteria::{Meant, is_meant};
use crate::lifecycle;
use crate::params::params;
use crate::session::Session;
use crate::settle::DELIVERY_RELEASE;
use crate::subscription::{SubscriptionRow, look_up};

/// Locks the cursor of every lane, in order; the number of lanes. Index: primary key of `lane`.
/// Waits for a settlement under way, never for a relay's sends.
const LANE_LOCK: &str = "
SELECT (SELECT s.lanes::int FROM {s}.subscription AS s WHERE s.id = $1)
FROM {s}.lane AS n WHERE n.subscription = $1 ORDER BY n.lane FOR NO KEY UPDATE OF n";

/// Tries to lock lanes that are replaced by others meanwhile.
const LOCK_TRIES: u32 = 3;

/// The delivery rows a person means, oldest first, by a walk of the primary key from `$4`. `$2`
/// topic, `$3` code, `$4` after, `$5` limit, `$6` key, `$7` and `$8` since and until, `$9` tenant.
/// Rows whose event somebody deleted from the log are meant too, unless something of the event is
/// asked for. No lock, so it may be long.
pub(crate) const DELIVERY_CHOOSE: &str = "
SELECT d.seq FROM {s}.delivery AS d LEFT JOIN {log} AS l ON l.seq = d.seq
WHERE d.subscription = $1 AND d.seq > $4 AND {states} AND ($3::text IS NULL OR d.code = $3) AND {is_meant}
ORDER BY d.seq LIMIT $5";

/// The same of some ids, `$10`. Indexes: the log's unique id, then the primary key; fenced, or the
/// order of the result would make the planner walk all rows for a few.
const DELIVERY_CHOOSE_IDS: &str = "
SELECT chosen.seq FROM (
  SELECT d.seq FROM {log} AS l JOIN {s}.delivery AS d ON d.subscription = $1 AND d.seq = l.seq
  WHERE l.id = ANY ($10) AND d.seq > $4 AND {states} AND ($3::text IS NULL OR d.code = $3) AND {is_meant} OFFSET 0) AS chosen
ORDER BY chosen.seq LIMIT $5";

/// Dead rows and waiting ones become due now, if they still are; what a relay ended with goes
/// alone. Index: primary key. Locks the rows.
pub(crate) const DELIVERY_RETRY: &str = "
WITH raised AS (UPDATE {s}.subscription AS s SET replays = greatest(s.replays, r.replays)
  FROM (SELECT max(d.replays) + 1 AS replays FROM {s}.delivery AS d WHERE d.ctid = ANY ({places})) AS r WHERE s.id = $1)
UPDATE {s}.delivery AS d SET
  replays = d.replays + (d.state = 'dead')::int, attempts = CASE d.state WHEN 'dead' THEN 0 ELSE d.attempts END,
  crashes = CASE d.state WHEN 'dead' THEN least(d.crashes, 1) ELSE d.crashes END,
  state = 'retrying', halt = false, letter_at = '-infinity', due_at = statement_timestamp(), updated_at = clock_timestamp()
WHERE d.ctid = ANY ({places}) AND {states} RETURNING d.key";

/// Of some keys, only the head may have a time: the rest wait for their turn. Without this, a
/// thousand rows of one key that are due but not first would stand in front of everybody else's.
/// Index: `delivery_held`, then the primary key. Locks the rows.
///
/// Fenced and in order, and by their places, so that no statistics lead elsewhere: those of a table
/// of dead rows say that nothing holds its key, and to compare all that does with each of the keys
/// then looks cheap.
pub(crate) const CLEAR_FOLLOWER_DUE: &str = "
UPDATE {s}.delivery AS d SET due_at = NULL
WHERE d.ctid = ANY (ARRAY(
  SELECT behind.place FROM unnest($2::text[]) AS touched(key)
  CROSS JOIN LATERAL (
    SELECT h.seq FROM {s}.delivery AS h WHERE h.subscription = $1 AND h.key = touched.key AND h.holds ORDER BY h.seq LIMIT 1 OFFSET 0) AS head
  CROSS JOIN LATERAL (
    SELECT b.ctid AS place FROM {s}.delivery AS b WHERE b.subscription = $1 AND b.key = touched.key AND b.holds AND b.seq > head.seq
      AND b.due_at IS NOT NULL ORDER BY b.seq OFFSET 0) AS behind))";

/// Takes rows out, if nobody did. Index: primary key. Locks the rows.
const DELIVERY_DISCARD: &str = "
UPDATE {s}.delivery AS d SET state = 'discarded', due_at = NULL, updated_at = clock_timestamp()
WHERE d.ctid = ANY ({places}) AND {states} RETURNING d.key";

/// Unread events, named by id, as the rows that mark them. Index: the log's unique id; fenced, as
/// [`DELIVERY_CHOOSE_IDS`] is.
const PENDING_CHOOSE: &str = "
SELECT $1::int, n.lane, l.seq, l.key, 'discarded', false
FROM (SELECT * FROM {log} WHERE id = ANY ($2) OFFSET 0) AS l
JOIN {s}.subscription AS o ON o.id = $1
JOIN {s}.lane AS n ON n.subscription = $1 AND n.lane = l.slot % o.lanes
WHERE {is_meant} AND {is_unread} AND ($5::text[] IS NULL OR l.topic LIKE ANY ($5)) AND ($6::text IS NULL OR l.tenant = $6)
  AND NOT EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = $1 AND d.seq = l.seq)
ORDER BY l.seq LIMIT $4";

/// Marks them, so that they are not sent when they are read.
const DELIVERY_DISCARD_PENDING: &str =
    "INSERT INTO {s}.delivery (subscription, lane, seq, key, state, ordered) {pending} ON CONFLICT DO NOTHING";

/// Pauses or resumes. Index: the unique name. Locks the row.
const SUBSCRIPTION_SET_PAUSE: &str = "
UPDATE {s}.subscription SET paused_by = $2, paused_why = $3, paused_until = $4 WHERE name = $1";

#[async_trait]
impl Admin for PostgresStore {
    async fn retry(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        selection.validate("retry")?;
        // Pinned to indexes, as all that is fenced above counts on.
        let retry = async |session: &Session| {
            change_rows(session, &look_up(session, subscription).await?, &RETRY, selection).await
        };
        self.change_or_look("retry", selection.dry_run, retry).await
    }

    async fn discard(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        selection.validate("discard")?;
        let discard = async |session: &Session| {
            let subscription = look_up(session, subscription).await?;
            let changed = change_rows(session, &subscription, &DISCARD, selection).await?;
            // Pending events have no row and no code; only ids name them.
            match &selection.ids {
                Some(_) if selection.code.is_none() && changed.next.is_none() => {
                    discard_pending(session, &subscription, selection, changed).await
                }
                _ => Ok(changed),
            }
        };
        self.change_or_look("discard", selection.dry_run, discard).await
    }

    async fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed> {
        replay.validate()?;
        let step = async |session: &Session| crate::replay::replay(session, subscription, replay).await;
        self.change_or_look("replay", replay.dry_run, step).await
    }

    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
        let set = async |session: &Session| {
            let (by, why) = (pause.map(|pause| pause.by.as_str()), pause.map(|pause| pause.why.as_str()));
            let (name, until) = (subscription.as_str(), pause.and_then(|pause| pause.until));
            if session.execute(&session.sql(SUBSCRIPTION_SET_PAUSE), &params![name, by, why, until]).await? == 0 {
                look_up(session, subscription).await?;
            }
            Ok(())
        };
        self.change("pause", &self.inner.modes.change, set).await
    }

    async fn rename(&self, subscription: &SubscriptionName, generation: i64, to: &SubscriptionName) -> Result<()> {
        self.for_all_tenants("rename")?;
        let rename = async |session: &Session| lifecycle::rename(session, subscription, generation, to).await;
        self.change("rename", &self.inner.modes.change, rename).await
    }

    async fn remove(&self, subscription: &SubscriptionName, generation: i64) -> Result<()> {
        self.for_all_tenants("remove")?;
        let remove = async |session: &Session| lifecycle::remove(session, subscription, generation).await;
        self.change("remove", &self.inner.modes.change, remove).await
    }

    async fn reset(&self, subscription: &SubscriptionName, to: ResetTo, stamp: Option<&str>) -> Result<ResetPlan> {
        let Some(stamp) = stamp else {
            let plan = async |session: &Session| lifecycle::plan(session, subscription, to).await;
            return self.report("reset", plan).await;
        };
        self.for_all_tenants("reset")?;
        let reset = async |session: &Session| lifecycle::reset(session, subscription, to, stamp).await;
        self.change("reset", &self.inner.modes.change, reset).await
    }

    async fn set_lanes(&self, subscription: &SubscriptionName, lanes: u16) -> Result<()> {
        check_lanes("set_lanes", subscription, lanes)?;
        self.for_all_tenants("set_lanes")?;
        let set = async |session: &Session| lifecycle::set_lanes(session, subscription, lanes).await;
        self.change("set_lanes", &self.inner.modes.write, set).await
    }
}

impl PostgresStore {
    /// Runs changes in one transaction, committed if they succeed.
    pub(crate) async fn change<T>(
        &self,
        operation: &'static str,
        mode: &str,
        write: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let changed = self.call(operation, async |session: &Session| session.step_by_step(mode, write).await).await?;
        self.wake();
        Ok(changed)
    }

    /// Runs a step over delivery rows, or what of it only looks.
    async fn change_or_look<T>(
        &self,
        operation: &'static str,
        dry_run: bool,
        step: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        match dry_run {
            true => self.dry_run(operation, step).await,
            false => self.change(operation, &self.inner.modes.write, step).await,
        }
    }

    /// Runs what of a change only looks.
    pub(crate) async fn dry_run<T>(
        &self,
        operation: &'static str,
        step: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        self.call(operation, async |session: &Session| session.step_by_step(&self.inner.modes.dry_run, step).await)
            .await
    }
}

/// Locks the lanes of a subscription, also where they are replaced by others meanwhile.
pub(crate) async fn lock_lanes(session: &Session, subscription: i32) -> Result<()> {
    for _ in 0..LOCK_TRIES {
        let rows = session.rows(&session.sql(LANE_LOCK), &params![subscription]).await?;
        let lanes = rows.first().map_or(0, |row| row.get::<_, i32>(0));
        if !rows.is_empty() && usize::try_from(lanes) == Ok(rows.len()) {
            break;
        }
    }
    Ok(())
}

/// A change of delivery rows, as statements.
struct RowChange {
    /// Which rows may be changed.
    states: &'static str,
    change: &'static str,
    /// What the keys of the changed rows need.
    afterwards: &'static str,
}

const RETRY: RowChange = RowChange { states: MAY_BE_RETRIED, change: DELIVERY_RETRY, afterwards: CLEAR_FOLLOWER_DUE };

/// The states of rows that a person may send again.
pub(crate) const MAY_BE_RETRIED: &str =
    "(d.state = 'dead' OR (d.state = 'retrying' AND d.due_at > statement_timestamp()))";

const DISCARD: RowChange =
    RowChange { states: "d.state <> 'discarded'", change: DELIVERY_DISCARD, afterwards: DELIVERY_RELEASE };

/// One step over delivery rows.
///
/// What is meant is found before the lanes are locked, however many rows have to be looked at for
/// it: under the lock only the step's own rows are written, each if it still is what was found. Ids
/// are the exception. They are few, and what a relay writes down of them between the look and the
/// lock must not fall between rows and unread events.
async fn change_rows(
    session: &Session,
    subscription: &SubscriptionRow,
    change: &RowChange,
    selection: &Selection,
) -> Result<Changed> {
    let id = subscription.id;
    let meant = is_meant([2, 6, 7, 8, 9]);
    let values = [("states", change.states), ("is_meant", meant.as_str())];
    let sql = |template: &str| session.schema().log_sql_with(template, &subscription.log, &values);
    let Meant { topic, key, since, until, tenant } = Meant::by(&selection.which);
    let after = after(selection);
    let (code, limit) = (&selection.code, selection.step_max() as i64);
    let rows = match uuids(selection) {
        Some(ids) => {
            if !selection.dry_run {
                lock_lanes(session, id).await?;
            }
            let params = params![id, topic, code, after, limit, key, since, until, tenant, ids];
            session.rows(&sql(DELIVERY_CHOOSE_IDS), &params).await?
        }
        None => {
            let params = params![id, topic, code, after, limit, key, since, until, tenant];
            session.rows(&sql(DELIVERY_CHOOSE), &params).await?
        }
    };
    let seqs: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    let Some(last) = seqs.last() else { return Ok(Changed::default()) };
    let next = (seqs.len() as i64 == limit).then_some(Seq(*last));
    if selection.dry_run {
        return Ok(Changed { count: seqs.len() as u64, next });
    }
    if selection.ids.is_none() {
        lock_lanes(session, id).await?;
    }
    let rows = session.rows(&sql(change.change), &params![id, seqs]).await?;
    let keys: BTreeSet<String> = rows.iter().filter_map(|row| row.get(0)).collect();
    session.execute(&sql(change.afterwards), &params![id, Vec::from_iter(keys)]).await?;
    Ok(Changed { count: rows.len() as u64, next })
}

/// What of a step is left over for unread events.
async fn discard_pending(
    session: &Session,
    subscription: &SubscriptionRow,
    selection: &Selection,
    changed: Changed,
) -> Result<Changed> {
    let left = selection.step_max() as i64 - changed.count as i64;
    let (ids, Meant { topic, key, since, until, tenant }) = (uuids(selection), Meant::by(&selection.which));
    let (id, wanted) = (subscription.id, subscription.tenant());
    let params = params![id, ids, topic, left, subscription.likes, wanted, key, since, until, tenant];
    let template = match selection.dry_run {
        true => PENDING_CHOOSE.to_owned(),
        false => DELIVERY_DISCARD_PENDING.replace("{pending}", PENDING_CHOOSE),
    };
    let sql = session.schema().log_sql_with(&template, &subscription.log, &[("is_meant", &is_meant([3, 7, 8, 9, 10]))]);
    let pending = session.execute(&sql, &params).await?;
    // They are not found again, so the next step may look from the same place; a dry run would find
    // them again, and has seen all that are named.
    let is_full = pending > 0 && pending == left as u64 && !selection.dry_run;
    Ok(Changed { count: changed.count + pending, next: is_full.then_some(Seq(after(selection))) })
}

fn after(selection: &Selection) -> i64 {
    selection.after.map_or(i64::MIN, |after| after.0)
}

fn uuids(selection: &Selection) -> Option<Vec<Uuid>> {
    selection.ids.as_ref().map(|ids| ids.iter().map(|id| id.as_uuid()).collect())
}
