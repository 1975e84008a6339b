//! The upkeep of logs: what nobody wants, and retention. In bounded steps, so that the write lock
//! is never held for long.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::kit::{PRUNE_ROWS_MAX, PRUNE_YOUNG_MAX, STEP_ROWS_MAX, rebase_not_needed};
use postbox_core::{Changed, LogName, Maintain, Result, Routed, Seq, State, SubscriptionName};
use rusqlite::{Transaction, params};

use crate::classify::Work;
use crate::clock::micros;
use crate::decode::{Head, integer, seq};
use crate::inspect::Reader;
use crate::migrate::{self, checked_log, require_log};
use crate::schema::log_table;
use crate::store::SqliteStore;
use crate::unrouted::{give_up_unrouted, is_unrouted, note_unrouted, routed};

/// Subscriptions of a log: a walk of a small table; no lock of its own.
const SUBSCRIPTIONS_OF_LOG: &str = "SELECT name FROM postbox_subscription WHERE log = ?1";
/// By primary key; no lock of its own.
pub(crate) const DELIVERY_STATE: &str = "SELECT state FROM postbox_delivery WHERE subscription = ?1 AND seq = ?2";
/// By primary key; takes the write lock.
const DELIVERY_DELETE: &str = "DELETE FROM postbox_delivery WHERE subscription = ?1 AND seq = ?2";
/// By primary key; takes the write lock.
const SENT_DELETE: &str = "DELETE FROM postbox_sent WHERE subscription = ?1 AND seq = ?2";

#[async_trait]
impl Maintain for SqliteStore {
    async fn create_log(&self, log: &LogName) -> Result<()> {
        let log = checked_log("create_log", log)?;
        self.writer().call("create_log", move |session| migrate::create_log(session, &log)).await
    }

    async fn note_unrouted(&self, log: &LogName) -> Result<Routed> {
        let log = log.clone();
        self.change("note_unrouted", move |tx, now| note_unrouted(tx, &log, now)).await
    }

    async fn give_up_unrouted(&self, log: &LogName, older_than: Duration) -> Result<u64> {
        let log = log.clone();
        let step =
            move |tx: &Transaction<'_>, now: i64| give_up_unrouted(tx, &log, now.saturating_sub(micros(older_than)));
        self.change("give_up_unrouted", step).await
    }

    async fn prune(&self, log: &LogName, older_than: Duration, after: Option<Seq>) -> Result<Changed> {
        let (log, age) = (log.clone(), micros(older_than));
        self.change("prune", move |tx, now| prune(tx, &log, now.saturating_sub(age), after)).await
    }

    async fn check_receiving(&self) -> Result<()> {
        Ok(())
    }

    async fn rebase(&self) -> Result<()> {
        Err(rebase_not_needed())
    }
}

/// The subscriptions of a log.
pub(crate) fn readers_of(operation: &'static str, tx: &Transaction<'_>, log: &LogName) -> Work<Vec<Reader>> {
    let names: Vec<String> = tx
        .prepare_cached(SUBSCRIPTIONS_OF_LOG)?
        .query_map([log.as_str()], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    names.into_iter().map(|name| Reader::find(operation, tx, &SubscriptionName::from_stored(name))).collect()
}

/// One step that deletes old events that every subscription is done with. What nobody wants is
/// kept, and so is what was not looked at yet: it may be wanted by nobody.
fn prune(tx: &Transaction<'_>, log: &LogName, oldest_kept: i64, after: Option<Seq>) -> Work<Changed> {
    let log = require_log("prune", tx, log)?;
    let readers = readers_of("prune", tx, &log)?;
    let routed = routed(tx, &log)?;
    let takes_everything = readers.iter().any(|reader| reader.takes_everything(routed));
    let known = if takes_everything { i64::MAX } else { routed };
    let Some(passed) = readers.iter().map(Reader::position_max).min().map(|passed| passed.min(known)) else {
        return Ok(Changed::default());
    };
    let (after, table) = (after.map_or(i64::MIN, |after| after.0), log_table(&log));
    // Walks the primary key; no lock of its own.
    let log_old = format!(
        "SELECT seq, topic, tenant, key, id, created_at FROM {table} WHERE seq > ?1 AND seq <= ?2 ORDER BY seq"
    );
    let (mut gone, mut looked, mut young, mut next) = (Vec::new(), 0, 0, None);
    {
        let mut statement = tx.prepare_cached(&log_old)?;
        let mut rows = statement.query([after, passed])?;
        while young < PRUNE_YOUNG_MAX
            && let Some(row) = rows.next()?
        {
            let (head, seq) = (Head::read(row)?, seq(row)?);
            if integer(row, 5)?.unwrap_or(0) > oldest_kept {
                young += 1;
            } else if is_done_with(tx, &readers, &head, seq)? && !is_unrouted(tx, &log, seq)? {
                gone.push(seq);
            }
            looked += 1;
            if looked == PRUNE_ROWS_MAX {
                next = Some(Seq(seq));
                break;
            }
        }
    }
    // By primary key; takes the write lock.
    let log_delete = format!("DELETE FROM {table} WHERE seq = ?1");
    for seq in &gone {
        for reader in &readers {
            tx.prepare_cached(DELIVERY_DELETE)?.execute(params![reader.name.as_str(), seq])?;
            tx.prepare_cached(SENT_DELETE)?.execute(params![reader.name.as_str(), seq])?;
        }
        tx.prepare_cached(&log_delete)?.execute([seq])?;
    }
    let mut count = gone.len() as u64;
    if next.is_none() {
        let missing = prune_missing(tx, &readers, &table, oldest_kept)?;
        count += missing;
        next = (missing > 0).then_some(Seq(after));
    }
    Ok(Changed { count, next })
}

/// Deletes old rows whose event somebody deleted from the log: nobody can deliver it.
fn prune_missing(tx: &Transaction<'_>, readers: &[Reader], table: &str, oldest_kept: i64) -> Work<u64> {
    // By `postbox_delivery_missing`; takes the write lock.
    let delivery_prune_missing = format!(
        "DELETE FROM postbox_delivery WHERE subscription = ?1 AND seq IN (SELECT d.seq FROM postbox_delivery d WHERE d.subscription = ?1 \
         AND d.code = 'event_missing' AND d.state IN ('dead', 'discarded') AND d.updated_at <= ?2 \
         AND NOT EXISTS (SELECT 1 FROM {table} l WHERE l.seq = d.seq) LIMIT {STEP_ROWS_MAX})"
    );
    let mut pruned = 0;
    for reader in readers {
        pruned += tx.prepare_cached(&delivery_prune_missing)?.execute(params![reader.name.as_str(), oldest_kept])?;
    }
    Ok(pruned as u64)
}

/// Whether every subscription has passed an event and needs it no more.
fn is_done_with(tx: &Transaction<'_>, readers: &[Reader], head: &Head<'_>, seq: i64) -> Work<bool> {
    let mut statement = tx.prepare_cached(DELIVERY_STATE)?;
    for reader in readers {
        if reader.state(head, seq) == State::Pending {
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
