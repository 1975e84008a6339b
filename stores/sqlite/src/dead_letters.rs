//! Dead letters: dead events that have not been handed over yet.

use async_trait::async_trait;
use postbox_core::kit::BatchLimiter;
use postbox_core::{BatchLimit, DeadLetter, DeadLetters, Delivery, Error, Handover, Lease, Result, Seq};
use rusqlite::params;

use crate::classify::Work;
use crate::clock::micros;
use crate::decode::{DELIVERY_COLUMNS, DELIVERY_COLUMNS_COUNT, Decoded, DeliveryRow, log_find, lossy, payload_len};
use crate::lease::{find, held};
use crate::schema::log_table;
use crate::store::SqliteStore;
use crate::thread::Session;

/// By primary key; takes the write lock.
const LETTER_DONE: &str = "UPDATE postbox_delivery SET letters = ?3 + 1 \
WHERE subscription = ?1 AND seq = ?2 AND state = 'dead' AND replays = ?3 AND letters <= ?3";
/// By primary key; takes the write lock.
const LETTER_PUT_OFF: &str = "UPDATE postbox_delivery SET letter_at = ?4 \
WHERE subscription = ?1 AND seq = ?2 AND state = 'dead' AND replays = ?3 AND letters <= ?3";

#[async_trait]
impl DeadLetters for SqliteStore {
    async fn dead_letters(&self, lease: &Lease, limit: BatchLimit) -> Result<Vec<DeadLetter>> {
        let reading = lease.clone();
        self.reader().call("dead_letters", move |session| read(session, &reading, limit)).await
    }

    async fn hand_over(&self, lease: &Lease, handovers: &[Handover]) -> Result<()> {
        let (writing, handovers) = (lease.clone(), handovers.to_vec());
        self.writer().call("hand_over", move |session| write(session, &writing, &handovers)).await
    }
}

fn read(session: &mut Session, lease: &Lease, limit: BatchLimit) -> Work<Vec<DeadLetter>> {
    let now = session.settings.now();
    let tx = session.read()?;
    held("dead_letters", &tx, lease, now)?;
    let stored = find(&tx, &lease.subscription)?.ok_or_else(|| Error::stale("dead_letters"))?;
    // Longest-waiting first, by `postbox_delivery_letter`; no lock.
    let letters = format!(
        "SELECT {DELIVERY_COLUMNS}, d.error FROM postbox_delivery d \
         WHERE d.subscription = ?1 AND d.lane = ?2 AND d.state = 'dead' AND d.letters <= d.replays AND d.letter_at <= ?3 \
         ORDER BY d.letter_at, d.seq LIMIT ?4"
    );
    let room = i64::try_from(limit.events.max(1)).unwrap_or(i64::MAX);
    let (mut letters, mut events) = (tx.prepare_cached(&letters)?, log_find(&tx, &log_table(&stored.log))?);
    let mut rows = letters.query(params![lease.subscription.as_str(), lease.lane, now, room])?;
    let mut limiter = BatchLimiter::new(limit);
    let mut read = Vec::new();
    while let Some(row) = rows.next()? {
        let dead = DeliveryRow::read(row, 0)?;
        let mut found = events.query([dead.seq])?;
        let event = found.next()?;
        if !limiter.take(event.map(payload_len).transpose()?.unwrap_or_default()) {
            break;
        }
        let Decoded { event, unreadable, .. } = event.map_or_else(|| Ok(Decoded::missing(&dead)), Decoded::read)?;
        let delivery =
            Delivery { event, seq: Seq(dead.seq), attempt: dead.attempts, replay: dead.replays, trace: None };
        let error = lossy(row, DELIVERY_COLUMNS_COUNT)?.unwrap_or_default();
        read.push(DeadLetter { delivery, unreadable, code: dead.code.unwrap_or_default(), error });
    }
    Ok(read)
}

fn write(session: &mut Session, lease: &Lease, handovers: &[Handover]) -> Work<()> {
    let now = session.settings.now();
    session.transact(|tx| {
        held("hand_over", tx, lease, now)?;
        let name = lease.subscription.as_str();
        for Handover { seq, replay, again } in handovers {
            match again {
                None => tx.prepare_cached(LETTER_DONE)?.execute(params![name, seq.0, replay])?,
                Some(wait) => {
                    let at = now.saturating_add(micros(*wait));
                    tx.prepare_cached(LETTER_PUT_OFF)?.execute(params![name, seq.0, replay, at])?
                }
            };
        }
        Ok(())
    })
}
