//! Dead letters: which dead events have not been handed over.

use async_trait::async_trait;
use postbox_core::kit::BatchLimiter;
use postbox_core::{BatchLimit, DeadLetter, DeadLetters, Delivery, Event, Handover, Lease, Result, Seq, Unreadable};

use crate::state::DeliveryRow;
use crate::{MemoryStore, Server};

#[async_trait]
impl DeadLetters for MemoryStore {
    async fn dead_letters(&self, lease: &Lease, limit: BatchLimit) -> Result<Vec<DeadLetter>> {
        let called = lease.clone();
        self.call("dead_letters", Some(lease), move |server| server.dead_letters(&called, limit)).await
    }

    async fn hand_over(&self, lease: &Lease, handovers: &[Handover]) -> Result<()> {
        let (called, handovers) = (lease.clone(), handovers.to_vec());
        self.call("hand_over", Some(lease), move |server| server.hand_over(&called, &handovers)).await
    }
}

impl Server {
    fn dead_letters(&self, lease: &Lease, limit: BatchLimit) -> Result<Vec<DeadLetter>> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("dead_letters")?;
        let (reader, log) = state.data.leased("dead_letters", lease, monotonic)?;
        let is_due = |row: &DeliveryRow| row.is_letter() && row.letter_at.is_none_or(|at| at <= now);
        let mut rows: Vec<_> = reader.deliveries().filter(|(_, row)| row.lane == lease.lane && is_due(row)).collect();
        rows.sort_by_key(|(seq, row)| (row.letter_at, *seq));
        let mut limiter = BatchLimiter::new(limit);
        let letter = |(seq, row): (i64, &DeliveryRow)| {
            let placeholder = Delivery::placeholder(Seq(seq));
            let (event, unreadable) = match log.rows.get(&seq) {
                Some(found) => (found.event.clone(), None),
                None => (Event { key: row.key.clone(), ..placeholder.event }, Some(Unreadable::missing())),
            };
            let delivery = Delivery { event, seq: Seq(seq), attempt: row.attempts, replay: row.replays, trace: None };
            let (code, error) = (row.code.clone().unwrap_or_default(), row.error.clone().unwrap_or_default());
            DeadLetter { delivery, unreadable, code, error }
        };
        let letters = rows.into_iter().map(letter);
        Ok(letters.take_while(|letter| limiter.take(letter.delivery.event.payload.len())).collect())
    }

    fn hand_over(&self, lease: &Lease, handovers: &[Handover]) -> Result<()> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("hand_over")?;
        let (reader, _) = state.data.leased("hand_over", lease, monotonic)?;
        for Handover { seq, replay, again } in handovers {
            let row = reader.delivery(seq.0).filter(|row| row.is_letter() && row.replays == *replay);
            let Some(mut row) = row.cloned() else { continue };
            match again {
                None => row.letters = replay + 1,
                Some(wait) => row.letter_at = Some(now.checked_add(*wait).unwrap_or(jiff::Timestamp::MAX)),
            }
            reader.put(seq.0, row);
        }
        state.flush();
        Ok(())
    }
}
