//! What an operator changes: retry, discard, prune, pause. In bounded steps, so that the write lock
//! is never held for long.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::kit::{STEP_ROWS_MAX, rebase_not_needed};
use postbox_core::{
    Admin, Changed, EventId, LogName, Ordering, Pause, Result, Selection, Seq, State, SubscriptionName,
};
use rusqlite::{OptionalExtension as _, Row, Transaction, params};

use crate::classify::Work;
use crate::clock::micros;
use crate::decode::{Head, integer, seq};
use crate::inspect::Reader;
use crate::lease::{self, SubscriptionRow};
use crate::migrate::{self, checked_log, require_log};
use crate::schema::log_table;
use crate::settle::release_head;
use crate::store::SqliteStore;
use crate::thread::{Flush, Session};

/// Rows looked at in one step: some tens of milliseconds of the write lock, however few of them are
/// meant.
const STEP_LOOK_MAX: usize = 20_000;
/// Events too young to prune that are passed over before `prune` gives up: stamps follow `seq` but
/// for jumps of the clock.
const PRUNE_YOUNG_MAX: usize = 1_000;

/// Rows of a subscription in `seq` order, by primary key; no lock of its own.
const DELIVERY_SELECT: &str = "SELECT seq, id, topic, key, state, code, due_at FROM postbox_delivery \
WHERE subscription = ?1 AND seq > ?2 AND state IN ('retrying', 'blocked', 'scheduled', 'dead') ORDER BY seq";
/// The same, one row.
const DELIVERY_ONE: &str = "SELECT seq, id, topic, key, state, code, due_at FROM postbox_delivery \
WHERE subscription = ?1 AND seq = ?2 AND state IN ('retrying', 'blocked', 'scheduled', 'dead')";
/// By primary key; takes the write lock. A person's replay begins anew.
const DELIVERY_REPLAY: &str = "UPDATE postbox_delivery SET state = 'retrying', attempts = 0, replays = replays + 1, due_at = ?3, \
holds = (?4 AND key IS NOT NULL), updated_at = ?3 WHERE subscription = ?1 AND seq = ?2 AND state = 'dead'";
/// By primary key; takes the write lock.
const DELIVERY_MAKE_DUE: &str = "UPDATE postbox_delivery SET due_at = ?3, updated_at = ?3 \
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

#[async_trait]
impl Admin for SqliteStore {
    async fn retry(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        let changed = retry(self, subscription, selection).await?;
        self.wake();
        Ok(changed)
    }

    async fn discard(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        let changed = discard(self, subscription, selection).await?;
        self.wake();
        Ok(changed)
    }

    async fn prune(&self, log: &LogName, older_than: Duration) -> Result<u64> {
        prune(self, log, older_than).await
    }

    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
        pause_or_resume(self, subscription, pause).await?;
        self.wake();
        Ok(())
    }

    async fn create_log(&self, log: &LogName) -> Result<()> {
        let log = checked_log("create_log", log)?;
        self.writer().call("create_log", move |session| migrate::create_log(session, &log)).await
    }

    async fn check_receiving(&self) -> Result<()> {
        Ok(())
    }

    async fn rebase(&self) -> Result<()> {
        Err(rebase_not_needed())
    }
}

/// A delivery row that a person may mean.
struct Candidate {
    seq: i64,
    id: String,
    topic: String,
    key: Option<String>,
    state: State,
    code: Option<String>,
    due_at: Option<i64>,
}

impl Candidate {
    fn read(row: &Row<'_>) -> Work<Self> {
        let state = row.get::<_, String>(4)?.parse()?;
        let (seq, id, topic, key) = (row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?);
        Ok(Self { seq, id, topic, key, state, code: row.get(5)?, due_at: row.get(6)? })
    }
}

/// A selection, ready to be asked row by row.
struct Chosen {
    selection: Selection,
    ids: Option<HashSet<String>>,
    after: i64,
}

impl Chosen {
    fn new(selection: &Selection) -> Self {
        let ids = selection.ids.as_ref().map(|ids| ids.iter().map(EventId::to_string).collect());
        Self { selection: selection.clone(), ids, after: selection.after.map_or(i64::MIN, |after| after.0) }
    }

    fn topic(&self, topic: &str) -> bool {
        self.selection.topic.as_ref().is_none_or(|pattern| pattern.matches(topic))
    }

    fn means(&self, row: &Candidate) -> bool {
        self.ids.as_ref().is_none_or(|ids| ids.contains(&row.id))
            && self.topic(&row.topic)
            && (self.selection.code.is_none() || row.code == self.selection.code)
    }

    /// The next rows that are meant and that `wanted` accepts, oldest first, and where the next
    /// step begins.
    fn next(
        &self,
        tx: &Transaction<'_>,
        stored: &SubscriptionRow,
        subscription: &SubscriptionName,
        wanted: impl Fn(&Candidate) -> bool,
    ) -> Work<(Vec<Candidate>, Option<Seq>)> {
        let max = self.selection.step_max();
        let mut chosen = Vec::new();
        if max == 0 {
            return Ok((chosen, None));
        }
        if let Some(ids) = &self.ids {
            let mut statement = tx.prepare_cached(DELIVERY_ONE)?;
            for seq in seqs_of(tx, stored, ids)?.into_iter().filter(|seq| *seq > self.after) {
                let mut rows = statement.query(params![subscription.as_str(), seq])?;
                let Some(row) = rows.next()? else { continue };
                let candidate = Candidate::read(row)?;
                if self.means(&candidate) && wanted(&candidate) {
                    chosen.push(candidate);
                }
                if chosen.len() == max {
                    return Ok((chosen, Some(Seq(seq))));
                }
            }
            return Ok((chosen, None));
        }
        let mut statement = tx.prepare_cached(DELIVERY_SELECT)?;
        let mut rows = statement.query(params![subscription.as_str(), self.after])?;
        let (mut looked, mut last) = (0, self.after);
        while chosen.len() < max && looked < STEP_LOOK_MAX {
            let Some(row) = rows.next()? else { return Ok((chosen, None)) };
            let candidate = Candidate::read(row)?;
            (looked, last) = (looked + 1, candidate.seq);
            if self.means(&candidate) && wanted(&candidate) {
                chosen.push(candidate);
            }
        }
        Ok((chosen, Some(Seq(last))))
    }
}

/// The places of events in a subscription's log, in their order.
fn seqs_of(tx: &Transaction<'_>, stored: &SubscriptionRow, ids: &HashSet<String>) -> Work<BTreeSet<i64>> {
    // By the unique index on id; takes no lock of its own.
    let log_seq = format!("SELECT seq FROM {} WHERE id = ?1", log_table(&stored.log));
    let mut statement = tx.prepare_cached(&log_seq)?;
    let mut seqs = BTreeSet::new();
    for id in ids {
        let seq: Option<i64> = statement.query_row([id], |row| row.get(0)).optional()?;
        seqs.extend(seq);
    }
    Ok(seqs)
}

/// One step that makes dead rows due now as new attempts, and retrying rows due now.
async fn retry(store: &SqliteStore, name: &SubscriptionName, selection: &Selection) -> Result<Changed> {
    selection.validate("retry")?;
    let (name, chosen) = (name.clone(), Chosen::new(selection));
    store.writer().call("retry", move |session| retry_step(session, &name, &chosen)).await
}

fn retry_step(session: &mut Session, name: &SubscriptionName, chosen: &Chosen) -> Work<Changed> {
    let now = session.settings.now();
    session.transact(Flush::Configured, |tx| {
        let stored = lease::require("retry", tx, name)?;
        let hold_keys = stored.ordering == Ordering::Key;
        let (rows, next) = chosen.next(tx, &stored, name, |row| match row.state {
            State::Dead => true,
            State::Retrying => row.due_at.is_none_or(|at| at > now),
            _ => false,
        })?;
        for row in &rows {
            match row.state {
                State::Dead => {
                    tx.prepare_cached(DELIVERY_REPLAY)?.execute(params![name.as_str(), row.seq, now, hold_keys])?
                }
                _ => tx.prepare_cached(DELIVERY_MAKE_DUE)?.execute(params![name.as_str(), row.seq, now])?,
            };
        }
        Ok(Changed { count: rows.len() as u64, next })
    })
}

/// One step that takes events out: rows by selection, unread ones by id.
async fn discard(store: &SqliteStore, name: &SubscriptionName, selection: &Selection) -> Result<Changed> {
    selection.validate("discard")?;
    let (name, chosen) = (name.clone(), Chosen::new(selection));
    store.writer().call("discard", move |session| discard_step(session, &name, &chosen)).await
}

fn discard_step(session: &mut Session, name: &SubscriptionName, chosen: &Chosen) -> Work<Changed> {
    let now = session.settings.now();
    session.transact(Flush::Configured, |tx| {
        let stored = lease::require("discard", tx, name)?;
        let (rows, next) = chosen.next(tx, &stored, name, |row| row.state.may_become(State::Discarded))?;
        for row in &rows {
            tx.prepare_cached(DELIVERY_DISCARD)?.execute(params![name.as_str(), row.seq, now])?;
        }
        for key in rows.iter().filter_map(|row| row.key.as_deref()) {
            release_head(tx, name, key, now)?;
        }
        let mut changed = Changed { count: rows.len() as u64, next };
        // A code never matches what has none.
        if next.is_none() && chosen.selection.code.is_none() {
            let left = chosen.selection.step_max() - rows.len();
            let unread = discard_unread(tx, name, chosen, left, now)?;
            changed.count += unread as u64;
            // They are not found again, so the next step may look from the same place.
            changed.next = (unread > 0 && unread == left).then_some(Seq(chosen.after));
        }
        Ok(changed)
    })
}

/// Marks unread events, named by id, so that they are not sent when they are read.
fn discard_unread(
    tx: &Transaction<'_>,
    name: &SubscriptionName,
    chosen: &Chosen,
    limit: usize,
    now: i64,
) -> Work<usize> {
    let Some(ids) = &chosen.ids else { return Ok(0) };
    let reader = Reader::find("discard", tx, name)?;
    // By primary key; takes no lock of its own.
    let log_head = format!("SELECT seq, topic, tenant, key, id, created_at FROM {} WHERE seq = ?1", reader.table);
    let mut statement = tx.prepare_cached(&log_head)?;
    let mut discarded = 0;
    for seq in seqs_of(tx, &reader.stored, ids)? {
        if discarded == limit {
            break;
        }
        let mut rows = statement.query([seq])?;
        let Some(row) = rows.next()? else { continue };
        let head = Head::read(row)?;
        if !reader.wants(&head) || !chosen.topic(&head.topic) || reader.state(&head, seq) != State::Pending {
            continue;
        }
        let text = |column: usize| -> Work<Option<String>> {
            let bytes = row.get_ref(column)?.as_bytes_or_null().map_err(rusqlite::Error::from)?;
            Ok(bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned()))
        };
        let (key, id, created_at) = (text(3)?, text(4)?, integer(row, 5)?.unwrap_or(0));
        discarded += tx.prepare_cached(DELIVERY_DISCARD_UNREAD)?.execute(params![
            name.as_str(),
            seq,
            reader.lane(&head),
            id,
            head.topic,
            key,
            created_at,
            now
        ])?;
    }
    Ok(discarded)
}

/// Deletes old events that every subscription is done with.
async fn prune(store: &SqliteStore, log: &LogName, older_than: Duration) -> Result<u64> {
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
        while gone.len() < STEP_ROWS_MAX
            && young < PRUNE_YOUNG_MAX
            && let Some(row) = rows.next()?
        {
            let (head, seq) = (Head::read(row)?, seq(row)?);
            if integer(row, 5)?.unwrap_or(0) > oldest_kept {
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
    // By `postbox_delivery_missing`; takes the write lock. Nobody can deliver what is no longer in
    // the log.
    let delivery_prune_missing = format!(
        "DELETE FROM postbox_delivery WHERE subscription = ?1 AND seq IN (SELECT d.seq FROM postbox_delivery d WHERE d.subscription = ?1 \
         AND d.code = 'event_missing' AND d.state IN ('dead', 'discarded') AND d.updated_at <= ?2 \
         AND NOT EXISTS (SELECT 1 FROM {table} l WHERE l.seq = d.seq) LIMIT {STEP_ROWS_MAX})"
    );
    let mut pruned = gone.len();
    for reader in &readers {
        pruned += tx.prepare_cached(&delivery_prune_missing)?.execute(params![reader.name.as_str(), oldest_kept])?;
    }
    Ok(pruned as u64)
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
async fn pause_or_resume(store: &SqliteStore, name: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
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
