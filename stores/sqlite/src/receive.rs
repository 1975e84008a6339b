//! The inbox's write side: stores each message id once.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::kit::STEP_ROWS_MAX;
use postbox_core::{Inbound, LogName, Receive, Received, Result};
use rusqlite::{OptionalExtension, Transaction, params};

use crate::append::insert_one;
use crate::classify::Work;
use crate::clock::micros;
use crate::migrate::require_log;
use crate::store::SqliteStore;

/// By primary key; no lock of its own.
const RECEIPT_FIND: &str = "SELECT digest FROM postbox_receipt WHERE source = ?1 AND tenant = ?2 AND message_id = ?3";
/// By primary key; takes the write lock.
const RECEIPT_INSERT: &str =
    "INSERT INTO postbox_receipt (source, tenant, message_id, digest, received_at) VALUES (?1, ?2, ?3, ?4, ?5)";
/// By primary key; takes the write lock. The same refused body again only raises the count, so that
/// a sender who repeats it does not fill the disk.
const CONFLICT_NOTE: &str = "INSERT INTO postbox_conflict (source, tenant, message_id, digest_stored, digest_refused, times, first_at, last_at) \
VALUES (?1, ?2, ?3, ?4, ?5, 1, ?6, ?6) \
ON CONFLICT (source, tenant, message_id, digest_refused) DO UPDATE SET times = times + 1, last_at = excluded.last_at";
/// By `postbox_receipt_age`; takes the write lock.
const RECEIPT_FORGET: &str = "DELETE FROM postbox_receipt WHERE (source, tenant, message_id) IN \
(SELECT source, tenant, message_id FROM postbox_receipt WHERE received_at <= ?1 ORDER BY received_at LIMIT ?2)";
/// By `postbox_once_age`; takes the write lock.
const ONCE_FORGET: &str = "DELETE FROM postbox_once WHERE (source, message_id) IN \
(SELECT source, message_id FROM postbox_once WHERE seen_at <= ?1 ORDER BY seen_at LIMIT ?2)";
/// By `postbox_conflict_age`; takes the write lock.
const CONFLICT_FORGET: &str = "DELETE FROM postbox_conflict WHERE (source, tenant, message_id, digest_refused) IN \
(SELECT source, tenant, message_id, digest_refused FROM postbox_conflict WHERE last_at <= ?1 ORDER BY last_at LIMIT ?2)";

#[async_trait]
impl Receive for SqliteStore {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        if inbound.is_empty() {
            return Ok(Vec::new());
        }
        inbound.iter().try_for_each(Inbound::validate)?;
        let (log, inbound) = (log.clone(), inbound.to_vec());
        let now = self.now();
        let received = self
            .writer()
            .call("receive", move |session| {
                session.transact(|tx| {
                    let log = require_log("receive", tx, &log)?;
                    inbound.iter().map(|inbound| receive(tx, &log, inbound, now)).collect::<Work<Vec<_>>>()
                })
            })
            .await?;
        if received.iter().any(|received| matches!(received, Received::Accepted(_))) {
            self.wake();
        }
        Ok(received)
    }

    async fn forget(&self, older_than: Duration) -> Result<u64> {
        let oldest_kept = self.now().saturating_sub(micros(older_than));
        self.writer()
            .call("forget", move |session| {
                session.transact(|tx| {
                    let step = params![oldest_kept, STEP_ROWS_MAX as i64];
                    let receipts = tx.prepare_cached(RECEIPT_FORGET)?.execute(step)?;
                    let onces = tx.prepare_cached(ONCE_FORGET)?.execute(step)?;
                    // Records of conflicts expire like the ids they belong to.
                    let conflicts = tx.prepare_cached(CONFLICT_FORGET)?.execute(step)?;
                    Ok((receipts + onces + conflicts) as u64)
                })
            })
            .await
    }
}

fn receive(tx: &Transaction<'_>, log: &LogName, inbound: &Inbound, now: i64) -> Work<Received> {
    let source = inbound.source.as_str();
    let tenant = inbound.event.tenant.as_deref().unwrap_or_default();
    let message_id = inbound.message_id.as_str();
    let stored: Option<Vec<u8>> =
        tx.prepare_cached(RECEIPT_FIND)?.query_row(params![source, tenant, message_id], |row| row.get(0)).optional()?;
    match stored {
        Some(stored) if stored == inbound.digest => return Ok(Received::Duplicate),
        Some(stored) => {
            let row = params![source, tenant, message_id, stored, inbound.digest.as_slice(), now];
            tx.prepare_cached(CONFLICT_NOTE)?.execute(row)?;
            return Ok(Received::Conflict);
        }
        None => {}
    }
    let id = insert_one(tx, log, &inbound.event, now)?;
    let row = params![source, tenant, message_id, inbound.digest.as_slice(), now];
    tx.prepare_cached(RECEIPT_INSERT)?.execute(row)?;
    Ok(Received::Accepted(id))
}
