//! Maintenance of logs: unrouted events, and retention. It runs in bounded steps, so that the write
//! lock is never held for long.

use async_trait::async_trait;
use postbox_core::kit::{PRUNE_ROWS_MAX, PRUNE_YOUNG_MAX, STEP_ROWS_MAX, rebase_not_needed};
use postbox_core::{Changed, LogName, Maintain, Prune, Result, Routed, Seq, State, SubscriptionName};
use rusqlite::{Transaction, params};

use crate::classify::Work;
use crate::clock::{micros, timestamp};
use crate::decode::{HEAD_COLUMNS, Head, integer, is_meant, seq};
use crate::inspect::Reader;
use crate::lease::check_cursors;
use crate::migrate::{self, checked_log, require_log};
use crate::parts::check_parts;
use crate::schema::log_table;
use crate::store::SqliteStore;
use crate::thread::Session;
use crate::unrouted::{UNROUTED_FORGET, is_unrouted, note_unrouted, routed};

/// Subscriptions of a log: a walk of a small table; no lock of its own.
const SUBSCRIPTIONS_OF_LOG: &str = "SELECT name FROM postbox_subscription WHERE log = ?1";
/// By primary key; no lock of its own.
pub(crate) const DELIVERY_STATE: &str = "SELECT state FROM postbox_delivery WHERE subscription = ?1 AND seq = ?2";
/// By primary key; no lock of its own.
const DELIVERY_DISCARDED_CODE: &str =
    "SELECT 1 FROM postbox_delivery WHERE subscription = ?1 AND seq = ?2 AND state = 'discarded' AND code = ?3";
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
        self.write("note_unrouted", move |tx, now| note_unrouted(tx, &log, now)).await
    }

    async fn prune(&self, log: &LogName, prune: &Prune) -> Result<Changed> {
        let (log, wanted) = (log.clone(), prune.clone());
        self.change_or_look("prune", prune.dry_run, move |tx, now| prune_step(tx, &log, &wanted, now)).await
    }

    async fn time(&self) -> Result<jiff::Timestamp> {
        Ok(timestamp(self.now()))
    }

    async fn check_receiving(&self) -> Result<()> {
        Ok(())
    }

    async fn check_integrity(&self) -> Result<()> {
        let check = |session: &mut Session| {
            let tx = session.read()?;
            // The position of a missing log is not known.
            check_parts(&tx)?;
            check_cursors(&tx)
        };
        self.inspector().call("check_integrity", check).await
    }

    async fn rebase(&self) -> Result<()> {
        Err(rebase_not_needed())
    }
}

/// Returns the subscriptions of a log.
pub(crate) fn readers_of(operation: &'static str, tx: &Transaction<'_>, log: &LogName) -> Work<Vec<Reader>> {
    let names: Vec<String> = tx
        .prepare_cached(SUBSCRIPTIONS_OF_LOG)?
        .query_map([log.as_str()], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    names.into_iter().map(|name| Reader::find(operation, tx, &SubscriptionName::from_stored(name))).collect()
}

/// Runs one step that deletes old events that every subscription is done with. Unrouted events are
/// kept, and so are events that were not checked for routing yet, because they may be unrouted.
fn prune_step(tx: &Transaction<'_>, log: &LogName, prune: &Prune, now: i64) -> Work<Changed> {
    let oldest_kept = now.saturating_sub(micros(prune.older_than));
    let log = require_log("prune", tx, log)?;
    let readers = readers_of("prune", tx, &log)?;
    let routed = routed(tx, &log)?;
    if readers.is_empty() || prune.limit == Some(0) {
        return Ok(Changed::default());
    }
    let takes_everything = readers.iter().any(|reader| reader.takes_everything(routed));
    let known = if takes_everything { i64::MAX } else { routed };
    let (after, table) = (prune.after.map_or(i64::MIN, |after| after.0), log_table(&log));
    // Walks the primary key; no lock of its own.
    let log_old = format!("SELECT {HEAD_COLUMNS} FROM {table} l WHERE l.seq > ?1 AND l.seq <= ?2 ORDER BY l.seq");
    let (mut gone, mut looked, mut young, mut next) = (Vec::new(), 0, 0, None);
    {
        let mut statement = tx.prepare_cached(&log_old)?;
        let mut rows = statement.query([after, known])?;
        while young < PRUNE_YOUNG_MAX
            && let Some(row) = rows.next()?
        {
            let (head, seq) = (Head::read(row)?, seq(row)?);
            let created_at = integer(row, 5)?.unwrap_or(0);
            if created_at > oldest_kept {
                // A clock was wrong if it is in the future, which says nothing about what follows.
                young += usize::from(created_at <= now);
            } else if is_meant(&prune.which, row, &head)?
                && is_done_with(tx, &readers, &head, seq)?
                && was_taken_out(tx, &readers, prune.code.as_deref(), seq)?
                && prune.unrouted == is_unrouted(tx, &log, seq)?
                // An unrouted event that a subscription wants by now is about to be handed over.
                && !(prune.unrouted
                    && !head.is_unparsable()
                    && readers.iter().any(|reader| reader.is_given(&head, seq)))
            {
                gone.push(seq);
            }
            if prune.limit == Some(gone.len()) {
                break;
            }
            looked += 1;
            if looked == PRUNE_ROWS_MAX {
                next = Some(Seq(seq));
                break;
            }
        }
    }
    if !prune.dry_run {
        delete(tx, &log, &readers, &gone)?;
    }
    let mut count = gone.len() as u64;
    if next.is_none() && prune.means_all() {
        let missing = prune_missing(tx, &readers, &table, oldest_kept, prune.dry_run)?;
        count += missing;
        next = (missing > 0 && !prune.dry_run).then_some(Seq(after));
    }
    Ok(Changed { count, next })
}

/// Deletes events and what is recorded of them.
fn delete(tx: &Transaction<'_>, log: &LogName, readers: &[Reader], gone: &[i64]) -> Work<()> {
    // By primary key; takes the write lock.
    let log_delete = format!("DELETE FROM {} WHERE seq = ?1", log_table(log));
    for seq in gone {
        for reader in readers {
            tx.prepare_cached(DELIVERY_DELETE)?.execute(params![reader.name.as_str(), seq])?;
            tx.prepare_cached(SENT_DELETE)?.execute(params![reader.name.as_str(), seq])?;
        }
        tx.prepare_cached(UNROUTED_FORGET)?.execute(params![log.as_str(), seq])?;
        tx.prepare_cached(&log_delete)?.execute([seq])?;
    }
    Ok(())
}

/// Deletes old delivery rows whose event was deleted from the log by hand, so that nobody can
/// deliver it. Deletes one step of them; a dry run counts all.
fn prune_missing(tx: &Transaction<'_>, readers: &[Reader], table: &str, oldest_kept: i64, dry_run: bool) -> Work<u64> {
    // By `postbox_delivery_missing`.
    let missing = format!(
        "FROM postbox_delivery d INDEXED BY postbox_delivery_missing WHERE d.subscription = ?1 \
         AND d.code = 'event_missing' AND d.state IN ('dead', 'discarded') AND d.updated_at <= ?2 \
         AND NOT EXISTS (SELECT 1 FROM {table} l WHERE l.seq = d.seq)"
    );
    // Counting takes no lock, deleting the write lock.
    let (count, delete) = (
        format!("SELECT count(*) {missing}"),
        format!(
            "DELETE FROM postbox_delivery WHERE subscription = ?1 AND seq IN (SELECT d.seq {missing} LIMIT {STEP_ROWS_MAX})"
        ),
    );
    let mut pruned = 0;
    for reader in readers {
        let params = params![reader.name.as_str(), oldest_kept];
        pruned += match dry_run {
            true => tx.prepare_cached(&count)?.query_row(params, |row| crate::inspect::count(row, 0))?,
            false => tx.prepare_cached(&delete)?.execute(params)? as u64,
        };
    }
    Ok(pruned)
}

/// Whether an event was discarded with this code in any subscription; true if no code is given.
fn was_taken_out(tx: &Transaction<'_>, readers: &[Reader], code: Option<&str>, seq: i64) -> Work<bool> {
    let Some(code) = code else { return Ok(true) };
    let mut statement = tx.prepare_cached(DELIVERY_DISCARDED_CODE)?;
    for reader in readers {
        if statement.exists(params![reader.name.as_str(), seq, code])? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether every subscription that wants an event has passed it and needs it no more.
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
