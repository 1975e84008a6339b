//! What an operator changes: requeue, discard, prune, pause. In bounded steps, so that the write lock is never held for long.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{EventId, LogName, Ordering, Pause, Result, Selection, State, SubscriptionName};
use rusqlite::{Transaction, params};

use crate::classify::Work;
use crate::clock::micros;
use crate::decode::{Head, seq};
use crate::inspect::Reader;
use crate::lease;
use crate::migrate::require_log;
use crate::schema::log_table;
use crate::settle::release_head;
use crate::store::SqliteStore;
use crate::thread::{Flush, Session};

/// Rows changed in one transaction: some milliseconds of the write lock.
const STEP_ROWS_MAX: usize = 2_000;
/// Events deleted per call of `prune`: the bounded step the contract asks for.
const PRUNE_EVENTS_MAX: usize = 1_000;
/// Events too young to prune that are passed over before `prune` gives up: stamps follow `seq` but for jumps of the clock.
const PRUNE_YOUNG_MAX: usize = 1_000;

/// Rows of a subscription in `seq` order, by primary key; no lock of its own.
const DELIVERY_SELECT: &str = "SELECT seq, id, topic, key, state, code, due_at FROM postbox_delivery \
WHERE subscription = ?1 AND seq > ?2 AND state IN ('retrying', 'blocked', 'scheduled', 'dead') ORDER BY seq";
/// By primary key; takes the write lock. A person's replay begins anew.
const DELIVERY_REPLAY: &str = "UPDATE postbox_delivery SET state = 'retrying', attempts = 0, replays = replays + 1, due_at = ?3, \
holds = (?4 AND key IS NOT NULL), updated_at = ?3 WHERE subscription = ?1 AND seq = ?2 AND state = 'dead'";
/// By primary key; takes the write lock.
const DELIVERY_HURRY: &str = "UPDATE postbox_delivery SET due_at = ?3, updated_at = ?3 \
WHERE subscription = ?1 AND seq = ?2 AND state = 'retrying'";
/// By primary key; takes the write lock.
const DELIVERY_DISCARD: &str = "UPDATE postbox_delivery SET state = 'discarded', holds = 0, due_at = NULL, updated_at = ?3 \
WHERE subscription = ?1 AND seq = ?2";
/// By primary key; takes the write lock.
const DELIVERY_DISCARD_UNREAD: &str = "INSERT INTO postbox_delivery \
(subscription, seq, lane, id, topic, key, created_at, state, holds, attempts, updated_at) \
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 'discarded', 0, 0, ?8) ON CONFLICT DO NOTHING";
/// Subscriptions of a log: a walk of a small table; no lock of its own.
const SUBSCRIPTIONS_OF_LOG: &str = "SELECT name FROM postbox_subscription WHERE log = ?1";
/// By primary key; no lock of its own.
const DELIVERY_STATE: &str = "SELECT state FROM postbox_delivery WHERE subscription = ?1 AND seq = ?2";
/// By primary key; takes the write lock.
const DELIVERY_DELETE: &str = "DELETE FROM postbox_delivery WHERE subscription = ?1 AND seq = ?2";
/// By primary key; takes the write lock.
const SUBSCRIPTION_PAUSE: &str =
    "UPDATE postbox_subscription SET paused_by = ?2, paused_why = ?3, paused_until = ?4 WHERE name = ?1";

/// A delivery row that a person may mean.
struct Candidate {
    seq: i64,
    key: Option<String>,
    state: State,
    due_at: Option<i64>,
}

/// A selection, ready to be asked row by row.
struct Chosen {
    selection: Selection,
    ids: Option<HashSet<String>>,
}

impl Chosen {
    fn new(selection: &Selection) -> Self {
        let ids = selection.ids.as_ref().map(|ids| ids.iter().map(EventId::to_string).collect());
        Self { selection: selection.clone(), ids }
    }

    fn topic(&self, topic: &str) -> bool {
        self.selection.topic.as_ref().is_none_or(|pattern| pattern.matches(topic))
    }

    /// The next rows after `after` that are meant and that `wanted` accepts, at most `limit`.
    fn next(
        &self,
        tx: &Transaction<'_>,
        subscription: &SubscriptionName,
        after: i64,
        limit: usize,
        wanted: impl Fn(&Candidate) -> bool,
    ) -> Work<Vec<Candidate>> {
        let mut statement = tx.prepare_cached(DELIVERY_SELECT)?;
        let mut rows = statement.query(params![subscription.as_str(), after])?;
        let mut chosen = Vec::new();
        while chosen.len() < limit
            && let Some(row) = rows.next()?
        {
            let (id, topic, code): (String, String, Option<String>) = (row.get(1)?, row.get(2)?, row.get(5)?);
            let meant = self.ids.as_ref().is_none_or(|ids| ids.contains(&id))
                && self.topic(&topic)
                && (self.selection.code.is_none() || code == self.selection.code);
            let state = row.get::<_, String>(4)?.parse()?;
            let candidate = Candidate { seq: row.get(0)?, key: row.get(3)?, state, due_at: row.get(6)? };
            if meant && wanted(&candidate) {
                chosen.push(candidate);
            }
        }
        Ok(chosen)
    }
}

/// One step of a change: how many rows, and after which place to go on (`None`: done).
type Step = (usize, Option<i64>);

/// Takes steps until one has nothing more to do or the selection's limit is reached.
async fn in_steps(
    store: &SqliteStore,
    operation: &'static str,
    limit: Option<usize>,
    step: impl Fn(&mut Session, i64, usize) -> Work<Step> + Send + Sync + 'static,
) -> Result<u64> {
    let step = Arc::new(step);
    let (mut left, mut after, mut changed) = (limit.unwrap_or(usize::MAX), 0, 0);
    while left > 0 {
        let (step, rows) = (step.clone(), left.min(STEP_ROWS_MAX));
        let (count, next) = store.writer().call(operation, move |session| step(session, after, rows)).await?;
        changed += count as u64;
        left -= count.min(left);
        let Some(next) = next else { break };
        after = next;
    }
    Ok(changed)
}

fn next_step(rows: &[Candidate], limit: usize) -> Step {
    let next = rows.last().filter(|_| rows.len() == limit).map(|row| row.seq);
    (rows.len(), next)
}

/// Makes dead rows due now as new attempts, and retrying rows due now.
pub(crate) async fn requeue(store: &SqliteStore, name: &SubscriptionName, selection: &Selection) -> Result<u64> {
    let (name, chosen) = (name.clone(), Chosen::new(selection));
    in_steps(store, "requeue", selection.limit, move |session, after, limit| {
        let now = session.settings.now();
        session.transact(Flush::Configured, |tx| {
            let stored = lease::require("requeue", tx, &name)?;
            let hold_keys = stored.ordering == Ordering::Key;
            let rows = chosen.next(tx, &name, after, limit, |row| match row.state {
                State::Dead => true,
                State::Retrying => row.due_at.is_none_or(|at| at > now),
                _ => false,
            })?;
            for row in &rows {
                match row.state {
                    State::Dead => {
                        tx.prepare_cached(DELIVERY_REPLAY)?.execute(params![name.as_str(), row.seq, now, hold_keys])?
                    }
                    _ => tx.prepare_cached(DELIVERY_HURRY)?.execute(params![name.as_str(), row.seq, now])?,
                };
            }
            Ok(next_step(&rows, limit))
        })
    })
    .await
}

/// Takes events out: rows by selection, unread ones by id.
pub(crate) async fn discard(store: &SqliteStore, name: &SubscriptionName, selection: &Selection) -> Result<u64> {
    let (of_rows, chosen) = (name.clone(), Chosen::new(selection));
    let rows = in_steps(store, "discard", selection.limit, move |session, after, limit| {
        let now = session.settings.now();
        session.transact(Flush::Configured, |tx| {
            lease::require("discard", tx, &of_rows)?;
            let rows = chosen.next(tx, &of_rows, after, limit, |row| row.state.may_become(State::Discarded))?;
            for row in &rows {
                tx.prepare_cached(DELIVERY_DISCARD)?.execute(params![of_rows.as_str(), row.seq, now])?;
            }
            for key in rows.iter().filter_map(|row| row.key.as_deref()) {
                release_head(tx, &of_rows, key, now)?;
            }
            Ok(next_step(&rows, limit))
        })
    })
    .await?;
    let left = selection.limit.map_or(usize::MAX, |limit| limit.saturating_sub(usize::try_from(rows).unwrap_or(limit)));
    // A code never matches what has none.
    if selection.code.is_some() || selection.ids.is_none() || left == 0 {
        return Ok(rows);
    }
    let (name, selection) = (name.clone(), selection.clone());
    let unread =
        store.writer().call("discard", move |session| discard_unread(session, &name, &selection, left)).await?;
    Ok(rows + unread)
}

fn discard_unread(session: &mut Session, name: &SubscriptionName, selection: &Selection, limit: usize) -> Work<u64> {
    let now = session.settings.now();
    let chosen = Chosen::new(selection);
    session.transact(Flush::Configured, |tx| {
        let reader = Reader::find("discard", tx, name)?;
        // By the unique index on id; takes no lock of its own.
        let log_head = format!("SELECT seq, topic, tenant, key, id, created_at FROM {} WHERE id = ?1", reader.table);
        let mut statement = tx.prepare_cached(&log_head)?;
        let mut discarded = 0;
        for id in selection.ids.iter().flatten() {
            if discarded == limit {
                break;
            }
            let mut rows = statement.query([id.to_string()])?;
            let Some(row) = rows.next()? else { continue };
            let (head, seq) = (Head::read(row)?, seq(row)?);
            if !reader.wants(&head) || !chosen.topic(&head.topic) || reader.state(&head, seq) != State::Pending {
                continue;
            }
            let key: Option<String> = row
                .get_ref(3)?
                .as_bytes_or_null()
                .map_err(rusqlite::Error::from)?
                .map(|key| String::from_utf8_lossy(key).into_owned());
            let created_at: i64 = row.get(5)?;
            discarded += tx.prepare_cached(DELIVERY_DISCARD_UNREAD)?.execute(params![
                name.as_str(),
                seq,
                reader.lane(&head),
                id.to_string(),
                head.topic,
                key,
                created_at,
                now
            ])?;
        }
        Ok(discarded as u64)
    })
}

/// Deletes old events that every subscription is done with.
pub(crate) async fn prune(store: &SqliteStore, log: &LogName, older_than: Duration) -> Result<u64> {
    let log = log.clone();
    let oldest_kept = store.now().saturating_sub(micros(older_than));
    store
        .writer()
        .call("prune", move |session| session.transact(Flush::Configured, |tx| prune_step(tx, &log, oldest_kept)))
        .await
}

fn prune_step(tx: &Transaction<'_>, log: &LogName, oldest_kept: i64) -> Work<u64> {
    let log = require_log("prune", tx, log)?;
    let names: Vec<String> = tx
        .prepare_cached(SUBSCRIPTIONS_OF_LOG)?
        .query_map([log.as_str()], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    let mut readers = Vec::with_capacity(names.len());
    for name in names {
        readers.push(Reader::find("prune", tx, &SubscriptionName::from_stored(name))?);
    }
    let Some(passed) = readers.iter().map(Reader::position_max).min() else { return Ok(0) };
    let table = log_table(&log);
    // Walks the primary key from its start, where the oldest are; no lock of its own.
    let log_old = format!("SELECT seq, topic, tenant, key, id, created_at FROM {table} WHERE seq <= ?1 ORDER BY seq");
    let mut gone = Vec::new();
    let mut young = 0;
    {
        let mut statement = tx.prepare_cached(&log_old)?;
        let mut rows = statement.query([passed])?;
        while gone.len() < PRUNE_EVENTS_MAX
            && young < PRUNE_YOUNG_MAX
            && let Some(row) = rows.next()?
        {
            let (head, seq) = (Head::read(row)?, seq(row)?);
            if row.get::<_, i64>(5)? > oldest_kept {
                young += 1;
            } else if is_done_with(tx, &readers, &head, seq)? {
                gone.push(seq);
            }
        }
    }
    // By primary key; takes the write lock.
    let log_delete = format!("DELETE FROM {table} WHERE seq = ?1");
    for seq in &gone {
        for reader in &readers {
            tx.prepare_cached(DELIVERY_DELETE)?.execute(params![reader.name.as_str(), seq])?;
        }
        tx.prepare_cached(&log_delete)?.execute([seq])?;
    }
    Ok(gone.len() as u64)
}

/// Whether every subscription has passed an event and needs it no more.
fn is_done_with(tx: &Transaction<'_>, readers: &[Reader], head: &Head<'_>, seq: i64) -> Work<bool> {
    let mut statement = tx.prepare_cached(DELIVERY_STATE)?;
    for reader in readers {
        if reader.state(head, seq) != State::Dispatched {
            return Ok(false);
        }
        let mut rows = statement.query(params![reader.name.as_str(), seq])?;
        if let Some(row) = rows.next()?
            && row.get::<_, String>(0)? != State::Discarded.as_str()
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Pauses, or resumes with `None`.
pub(crate) async fn pause(store: &SqliteStore, name: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
    let (name, pause) = (name.clone(), pause.cloned());
    store
        .writer()
        .call("pause", move |session| {
            session.transact(Flush::Configured, |tx| {
                lease::require("pause", tx, &name)?;
                let until = pause.as_ref().and_then(|pause| pause.until).map(|until| until.as_microsecond());
                let (by, why) = pause.map(|pause| (pause.by, pause.why)).unzip();
                tx.prepare_cached(SUBSCRIPTION_PAUSE)?.execute(params![name.as_str(), by, why, until])?;
                Ok(())
            })
        })
        .await
}
