//! What the relay knows about its handlers' transactions, and how many deliveries the next one
//! takes.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postbox_core::{Delivery, Outcome, Seq, lock};

/// Maximum deliveries in one transaction. Bounds how long it lasts and how much a rollback repeats.
pub(crate) const APPLY_CHUNK_MAX: usize = 64;

/// The outcome of an event whose transaction did not settle it, and how long that took.
pub(crate) type Known = (Outcome, Duration);

pub(crate) struct ApplyState {
    chunk: AtomicUsize,
    /// Outcomes of events whose transaction failed with no other event in it, or was committed by a
    /// handler. Such an event is not handled again when it is read again. Each outcome is stored
    /// with the attempt and replay number of its delivery; if these differ later, the transaction
    /// did settle the event.
    known: Mutex<HashMap<Seq, (u32, u32, Known)>>,
}

impl Default for ApplyState {
    fn default() -> Self {
        Self { chunk: AtomicUsize::new(APPLY_CHUNK_MAX), known: Mutex::default() }
    }
}

impl ApplyState {
    /// Returns the number of deliveries the next transaction takes.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk.load(Ordering::Relaxed)
    }

    /// Notes that a transaction committed in time. The next ones may be larger, by little: if they
    /// overrun their time at some size, few do.
    pub(crate) fn committed(&self) {
        let chunk = self.chunk();
        if chunk < APPLY_CHUNK_MAX {
            self.chunk.store((chunk + (chunk / 8).max(1)).min(APPLY_CHUNK_MAX), Ordering::Relaxed);
        }
    }

    /// Notes that a transaction failed because of a handler. The next ones take one delivery each,
    /// to find the event at fault. If this one had a single delivery, `outcome` is remembered for
    /// it.
    pub(crate) fn failed(&self, deliveries: &[&Delivery], outcome: Known) {
        self.chunk.store(1, Ordering::Relaxed);
        if let [single] = deliveries {
            self.know(single, outcome);
        }
    }

    /// Remembers the outcome to use when this delivery is read again.
    pub(crate) fn know(&self, delivery: &Delivery, outcome: Known) {
        lock(&self.known).insert(delivery.seq, (delivery.attempt, delivery.replay, outcome));
    }

    /// Removes and returns the remembered outcome of this delivery, if there is one.
    pub(crate) fn take_known(&self, delivery: &Delivery) -> Option<Known> {
        let (attempt, replay, known) = lock(&self.known).remove(&delivery.seq)?;
        ((attempt, replay) == (delivery.attempt, delivery.replay)).then_some(known)
    }
}
