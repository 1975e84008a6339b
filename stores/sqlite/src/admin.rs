//! What an operator changes: retry, discard, mark dead, replay, pause. Each change runs in bounded
//! steps, so that the write lock is never held for long.

use std::collections::BTreeSet;

use async_trait::async_trait;
use postbox_core::kit::check_lanes;
use postbox_core::{
    Admin, Change, Changed, EventId, LogName, Ordering, Pause, Replay, Replayed, ResetPlan, ResetTo, Result, Selection,
    Seq, State, SubscriptionName,
};
use rusqlite::{OptionalExtension as _, Row, Transaction, params};

use crate::classify::Work;
use crate::clock::{timestamp, until};
use crate::decode::{
    DELIVERY_COLUMNS, DELIVERY_COLUMNS_COUNT, DeliveryRow, HEAD_COLUMNS, Head, integer, is_meant, lossy,
};
use crate::inspect::Reader;
use crate::maintain::DELIVERY_STATE;
use crate::schema::log_table;
use crate::settle::release_head;
use crate::store::SqliteStore;
use crate::thread::Session;
use crate::window::DELIVERY_KEY_HELD;
use crate::{lease, lifecycle};

/// How many rows one step reads: some tens of milliseconds of the write lock, however few of them
/// match.
const STEP_LOOK_MAX: usize = 20_000;

/// By primary key; takes the write lock. A retry resets the attempts. An event that crashed relays
/// is sent alone.
const DELIVERY_RETRY: &str = "UPDATE postbox_delivery SET state = 'retrying', attempts = 0, replays = replays + 1, letter_at = 0, due_at = ?3, \
crashes = min(crashes, 1), holds = (?4 AND key IS NOT NULL), updated_at = ?3 WHERE subscription = ?1 AND seq = ?2 AND state = 'dead'";
/// Puts a retried row behind an earlier one of its key, which releases it. Due itself, it would be
/// looked at again and again until then. By primary key; takes the write lock.
const DELIVERY_BLOCK: &str = "UPDATE postbox_delivery SET state = 'blocked', due_at = NULL \
WHERE subscription = ?1 AND seq = ?2 AND state = 'retrying'";
/// Raises the highest replay that an event of the subscription had, by primary key; takes the write
/// lock.
const REPLAYS_RAISE: &str = "UPDATE postbox_subscription SET replays = max(replays, ?2) WHERE name = ?1";
/// By primary key; takes the write lock.
const DELIVERY_MAKE_DUE: &str = "UPDATE postbox_delivery SET due_at = ?3, updated_at = ?3 \
WHERE subscription = ?1 AND seq = ?2 AND state = 'retrying'";
/// Events that were marked dead before their lane passed them, and so are still in the stream. By
/// `postbox_delivery_state` from the slowest lane's position; no lock of its own.
const DELIVERY_AHEAD: &str = "SELECT d.seq FROM postbox_delivery d INDEXED BY postbox_delivery_state JOIN postbox_lane n ON n.subscription = d.subscription AND n.lane = d.lane \
WHERE d.subscription = ?1 AND d.state = 'dead' AND d.seq > (SELECT min(position) FROM postbox_lane WHERE subscription = ?1) \
AND d.seq > n.position";
/// Discards, or marks dead. By primary key; takes the write lock.
const DELIVERY_END: &str = "UPDATE postbox_delivery SET state = ?4, holds = (?5 AND key IS NOT NULL), code = coalesce(?6, code), due_at = NULL, \
updated_at = ?3, error = coalesce(substr(?7 || coalesce('; before: ' || error, ''), 1, 2048), error) WHERE subscription = ?1 AND seq = ?2";
/// The same for an event that is not read yet. By primary key; takes the write lock.
const DELIVERY_END_UNREAD: &str = "INSERT INTO postbox_delivery \
(subscription, seq, lane, id, topic, key, created_at, state, holds, attempts, replays, code, error, updated_at) \
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, (?9 AND ?6 IS NOT NULL), 0, ?10, ?11, ?12, ?13) ON CONFLICT DO NOTHING";
/// By primary key; takes the write lock.
const SUBSCRIPTION_PAUSE: &str =
    "UPDATE postbox_subscription SET paused_by = ?2, paused_why = ?3, paused_until = ?4 WHERE name = ?1";

#[async_trait]
impl Admin for SqliteStore {
    async fn change(&self, subscription: &SubscriptionName, change: &Change, selection: &Selection) -> Result<Changed> {
        selection.validate(change.operation())?;
        let (operation, dry_run) = (change.operation(), selection.dry_run);
        let (name, change, selection) = (subscription.clone(), change.clone(), selection.clone());
        let step = move |tx: &Transaction<'_>, now| match change {
            Change::Retry => retry(tx, &name, &selection, now),
            Change::Discard | Change::MarkDead { .. } => End::of(tx, &name, &change, &selection, now)?.step(),
        };
        self.change_or_look(operation, dry_run, step).await
    }

    async fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed> {
        replay.validate()?;
        let (name, replay, dry_run) = (subscription.clone(), replay.clone(), replay.dry_run);
        let step = move |tx: &Transaction<'_>, now| crate::replay::replay(tx, &name, &replay, now);
        self.change_or_look("replay", dry_run, step).await
    }

    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
        let (name, pause) = (subscription.clone(), pause.cloned());
        let set = move |tx: &Transaction<'_>, now| {
            lease::require("pause", tx, &name)?;
            pause.iter().try_for_each(|pause| pause.validate(timestamp(now)))?;
            let until = pause.as_ref().and_then(|pause| pause.until).map(|until| until.as_microsecond());
            let (by, why) = pause.map(|pause| (pause.by, pause.why)).unzip();
            tx.prepare_cached(SUBSCRIPTION_PAUSE)?.execute(params![name.as_str(), by, why, until])?;
            Ok(())
        };
        self.write("pause", set).await
    }

    async fn rename(&self, subscription: &SubscriptionName, generation: i64, to: &SubscriptionName) -> Result<()> {
        let (name, to) = (subscription.clone(), to.clone());
        self.write("rename", move |tx, _| lifecycle::rename(tx, &name, generation, &to)).await
    }

    async fn remove(&self, subscription: &SubscriptionName, generation: i64) -> Result<()> {
        let name = subscription.clone();
        self.write("remove", move |tx, _| lifecycle::remove(tx, &name, generation)).await
    }

    async fn reset(&self, subscription: &SubscriptionName, to: ResetTo, stamp: Option<&str>) -> Result<ResetPlan> {
        let (name, stamp) = (subscription.clone(), stamp.map(str::to_owned));
        let Some(stamp) = stamp else {
            let plan = move |session: &mut Session| lifecycle::plan(&session.read()?, &name, to);
            return self.inspector().call("reset", plan).await;
        };
        // Found before the write lock is taken, because the whole log may have to be walked.
        let of = name.clone();
        let place = move |session: &mut Session| lifecycle::place(&session.read()?, &of, to);
        let to = self.inspector().call("reset", place).await?;
        self.write("reset", move |tx, now| lifecycle::reset(tx, &name, to, &stamp, now)).await
    }

    async fn set_lanes(&self, subscription: &SubscriptionName, lanes: u16) -> Result<()> {
        check_lanes("set_lanes", subscription, lanes)?;
        let name = subscription.clone();
        self.write("set_lanes", move |tx, now| lifecycle::set_lanes(tx, &name, lanes, now)).await
    }
}

impl SqliteStore {
    /// Runs a change in one transaction and wakes the relays.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        operation: &'static str,
        change: impl FnOnce(&Transaction<'_>, i64) -> Work<T> + Send + 'static,
    ) -> Result<T> {
        let now = self.now();
        let write = move |session: &mut Session| session.transact(|tx| change(tx, now));
        let changed = self.writer().call(operation, write).await?;
        self.wake();
        Ok(changed)
    }

    /// Runs a step over many events, or only its reads for a dry run.
    pub(crate) async fn change_or_look<T: Send + 'static>(
        &self,
        operation: &'static str,
        dry_run: bool,
        step: impl FnOnce(&Transaction<'_>, i64) -> Work<T> + Send + 'static,
    ) -> Result<T> {
        if !dry_run {
            return self.write(operation, step).await;
        }
        let now = self.now();
        self.inspector().call(operation, move |session| step(&session.read()?, now)).await
    }
}

/// Returns the next rows that match a selection and that `wanted` accepts, oldest first, and where
/// the next step begins.
fn choose(
    tx: &Transaction<'_>,
    name: &SubscriptionName,
    log: &LogName,
    selection: &Selection,
    now: i64,
    wanted: impl Fn(&DeliveryRow) -> bool,
) -> Work<(Vec<DeliveryRow>, Option<Seq>)> {
    let (max, after) = (selection.step_max(), after(selection));
    // Only the log has the tenant. By its primary key; no lock of its own.
    let mut tenant_of = tx.prepare_cached(&format!("SELECT tenant FROM {} WHERE seq = ?1", log_table(log)))?;
    let mut is_meant = |(row, updated_at): &(DeliveryRow, i64)| -> Work<bool> {
        let created_at = timestamp(row.created_at);
        let tenant: Option<String> = match selection.which.tenant {
            Some(_) => tenant_of.query_row([row.seq], |found| lossy(found, 0)).optional()?.flatten(),
            None => None,
        };
        Ok(selection.which.mean(&row.topic, row.key.as_deref(), tenant.as_deref(), created_at)
            && selection.means_code(row.code.as_deref())
            && selection.means_state(row.state, row.holds, until(*updated_at, now))
            && wanted(row))
    };
    let mut chosen = Vec::new();
    if max == 0 {
        return Ok((chosen, None));
    }
    let read = |row: &Row<'_>| Ok((DeliveryRow::read(row, 0)?, row.get(DELIVERY_COLUMNS_COUNT)?));
    if let Some(ids) = &selection.ids {
        // A row by primary key; no lock of its own.
        let delivery_one = format!(
            "SELECT {DELIVERY_COLUMNS}, d.updated_at FROM postbox_delivery d WHERE d.subscription = ?1 AND d.seq = ?2"
        );
        let mut statement = tx.prepare_cached(&delivery_one)?;
        for seq in seqs_of(tx, log, ids)?.into_iter().filter(|seq| *seq > after) {
            let found = statement.query_row(params![name.as_str(), seq], read);
            if let Some(row) = found.optional()?
                && is_meant(&row)?
            {
                chosen.push(row.0);
            }
            if chosen.len() == max {
                return Ok((chosen, Some(Seq(seq))));
            }
        }
        return Ok((chosen, None));
    }
    // Rows of a subscription in `seq` order, by primary key; no lock of its own. All of them count
    // as looked at: a condition on the state would pass discarded ones for free, without an end.
    let delivery_walk = format!(
        "SELECT {DELIVERY_COLUMNS}, d.updated_at FROM postbox_delivery d WHERE d.subscription = ?1 AND d.seq > ?2 ORDER BY d.seq"
    );
    let mut statement = tx.prepare_cached(&delivery_walk)?;
    let mut rows = statement.query(params![name.as_str(), after])?;
    let (mut looked, mut last) = (0, after);
    while chosen.len() < max && looked < STEP_LOOK_MAX {
        let Some(row) = rows.next()? else { return Ok((chosen, None)) };
        let row = read(row)?;
        (looked, last) = (looked + 1, row.0.seq);
        if is_meant(&row)? {
            chosen.push(row.0);
        }
    }
    Ok((chosen, Some(Seq(last))))
}

fn after(selection: &Selection) -> i64 {
    selection.after.map_or(i64::MIN, |after| after.0)
}

/// Returns the places of events in a log, in order.
pub(crate) fn seqs_of(tx: &Transaction<'_>, log: &LogName, ids: &[EventId]) -> Work<BTreeSet<i64>> {
    // By the unique index on id; takes no lock of its own.
    let mut statement = tx.prepare_cached(&format!("SELECT seq FROM {} WHERE id = ?1", log_table(log)))?;
    let mut seqs = BTreeSet::new();
    for id in ids {
        seqs.extend(statement.query_row([id.to_string()], |row| row.get::<_, i64>(0)).optional()?);
    }
    Ok(seqs)
}

/// Runs one step of a retry: dead rows become due now as a new replay, retrying rows become due
/// now.
fn retry(tx: &Transaction<'_>, name: &SubscriptionName, selection: &Selection, now: i64) -> Work<Changed> {
    let stored = lease::require("retry", tx, name)?;
    let hold_keys = stored.ordering == Ordering::Key;
    // Retried before their lane has passed them in the stream, they would be sent twice.
    let ahead: BTreeSet<i64> =
        tx.prepare_cached(DELIVERY_AHEAD)?.query_map([name.as_str()], |row| row.get(0))?.collect::<Result<_, _>>()?;
    let (rows, next) = choose(tx, name, &stored.log, selection, now, |row| match row.state {
        State::Dead => !ahead.contains(&row.seq),
        State::Retrying => !row.is_due(now),
        _ => false,
    })?;
    let changed = Changed { count: rows.len() as u64, next };
    if selection.dry_run {
        return Ok(changed);
    }
    for row in &rows {
        if row.state != State::Dead {
            tx.prepare_cached(DELIVERY_MAKE_DUE)?.execute(params![name.as_str(), row.seq, now])?;
            continue;
        }
        tx.prepare_cached(REPLAYS_RAISE)?.execute(params![name.as_str(), row.replays + 1])?;
        tx.prepare_cached(DELIVERY_RETRY)?.execute(params![name.as_str(), row.seq, now, hold_keys])?;
        let mut is_held = tx.prepare_cached(DELIVERY_KEY_HELD)?;
        if hold_keys && row.key.is_some() && is_held.exists(params![name.as_str(), row.key, row.seq])? {
            tx.prepare_cached(DELIVERY_BLOCK)?.execute(params![name.as_str(), row.seq])?;
        }
    }
    Ok(changed)
}

/// One step that discards or marks dead.
struct End<'a> {
    tx: &'a Transaction<'a>,
    reader: Reader,
    selection: &'a Selection,
    change: &'a Change,
    /// Whether the rows hold their keys.
    holds: bool,
    code: Option<&'static str>,
    note: Option<String>,
    now: i64,
}

impl<'a> End<'a> {
    fn of(
        tx: &'a Transaction<'_>,
        name: &SubscriptionName,
        change: &'a Change,
        selection: &'a Selection,
        now: i64,
    ) -> Work<Self> {
        let reader = Reader::find(change.operation(), tx, name)?;
        let (code, note) = (change.code(), change.note(selection));
        let holds = change.state() == State::Dead && reader.stored.halts();
        Ok(Self { tx, reader, selection, change, holds, code, note, now })
    }

    /// Rows are selected by criteria or id, unread events only by id.
    fn step(&self) -> Work<Changed> {
        let Self { tx, reader, selection, change, now, .. } = self;
        let wanted = |row: &DeliveryRow| change.takes(row.state);
        let (rows, next) = choose(tx, &reader.name, &reader.stored.log, selection, *now, wanted)?;
        if !selection.dry_run {
            self.end(&rows)?;
        }
        let mut changed = Changed { count: rows.len() as u64, next };
        if next.is_none() {
            let left = selection.step_max() - rows.len();
            let unread = self.end_unread(left)?;
            changed.count += unread as u64;
            // Marked events are not found again, so the next step may start from the same place. A
            // dry run would find them again, and has seen all that are named.
            changed.next = (unread > 0 && unread == left && !selection.dry_run).then_some(Seq(after(selection)));
        }
        Ok(changed)
    }

    /// Ends rows, and releases the rows behind them.
    fn end(&self, rows: &[DeliveryRow]) -> Work<()> {
        let Self { tx, reader, change, holds, code, note, now, .. } = self;
        for row in rows {
            let row = params![reader.name.as_str(), row.seq, now, change.state().as_str(), holds, code, note];
            tx.prepare_cached(DELIVERY_END)?.execute(row)?;
        }
        for key in rows.iter().filter_map(|row| row.key.as_deref()) {
            release_head(tx, &reader.name, key, *now)?;
        }
        Ok(())
    }

    /// Marks unread events that are named by id, so that they are not sent when they are read.
    fn end_unread(&self, limit: usize) -> Work<usize> {
        let Self { tx, reader, selection, change, holds, code, note, now } = self;
        let (Some(ids), name) = (&selection.ids, reader.name.as_str()) else { return Ok(0) };
        // By primary key; takes no lock of its own.
        let log_head =
            format!("SELECT {HEAD_COLUMNS} FROM {} l WHERE l.seq = ?1 AND (?2 OR l.deliver_at IS NULL)", reader.table);
        let mut statement = tx.prepare_cached(&log_head)?;
        let takes_scheduled = change.takes(State::Scheduled);
        let mut ended = 0;
        for seq in seqs_of(tx, &reader.stored.log, ids)? {
            if ended == limit {
                break;
            }
            let mut rows = statement.query(params![seq, takes_scheduled])?;
            let Some(row) = rows.next()? else { continue };
            let head = Head::read(row)?;
            let is_named = is_meant(&selection.which, row, &head)? && selection.means_unread();
            if !is_named || !reader.wants(&head) || reader.state(&head, seq) != State::Pending {
                continue;
            }
            if selection.dry_run {
                ended += usize::from(!tx.prepare_cached(DELIVERY_STATE)?.exists(params![name, seq])?);
                continue;
            }
            let (key, id, created_at) = (lossy(row, 3)?, lossy(row, 4)?, integer(row, 5)?.unwrap_or(0));
            let (lane, replay) = (reader.lane(&head), reader.stored.replay_of(seq));
            let (topic, state) = (head.topic, change.state().as_str());
            let row = params![name, seq, lane, id, topic, key, created_at, state, holds, replay, code, note, now];
            ended += tx.prepare_cached(DELIVERY_END_UNREAD)?.execute(row)?;
        }
        Ok(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plans::{database, fill, instructions};

    /// Statistics of many discarded rows make another index look better, but then all rows that are
    /// not discarded would have to be sorted first.
    #[test]
    fn rows_are_walked_in_order_without_sorting() {
        let mut database = database();
        fill(&database, 1_000, "0, NULL, 'dead', 0, NULL");
        fill(&database, 20_000, "0, NULL, 'discarded', 0, NULL");
        let (name, log) = ("s".parse().expect("a name"), LogName::outbox());
        let three = Selection { limit: Some(3), ..Selection::default() };
        for statistics in ["", "ANALYZE"] {
            database.execute_batch(statistics).expect("analysed");
            let tx = database.transaction().expect("begun");
            let ((rows, next), steps) =
                instructions(&tx, || choose(&tx, &name, &log, &three, 0, |_| true).expect("chosen"));
            assert_eq!((rows.len(), next), (3, Some(Seq(3))));
            assert!(steps < 1_000, "{steps} instructions");
        }
    }
}
