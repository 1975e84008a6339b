//! What is known of a handler's transactions: how many deliveries the next one may take.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postbox_core::{Delivery, Outcome, Seq};

use crate::lock::lock;

/// Most deliveries of one transaction: bounds both its length and what a rollback repeats.
pub(crate) const APPLY_CHUNK_MAX: usize = 64;

/// The outcome of an event whose transaction did not settle it, and how long that took.
pub(crate) type Known = (Outcome, Duration);

pub(crate) struct ApplyState {
    chunk: AtomicUsize,
    /// Events that are not handled when they are read again, because it is known what becomes of
    /// them: their transaction failed alone, or a handler committed it. With the attempt and replay
    /// that it was; at another one the transaction did settle them.
    known: Mutex<HashMap<Seq, (u32, u32, Known)>>,
}

impl Default for ApplyState {
    fn default() -> Self {
        Self { chunk: AtomicUsize::new(APPLY_CHUNK_MAX), known: Mutex::default() }
    }
}

impl ApplyState {
    /// How many deliveries the next transaction takes.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk.load(Ordering::Relaxed)
    }

    /// A transaction was committed in time: larger ones are tried again.
    pub(crate) fn committed(&self) {
        let chunk = self.chunk();
        if chunk < APPLY_CHUNK_MAX {
            self.chunk.store((chunk * 2).min(APPLY_CHUNK_MAX), Ordering::Relaxed);
        }
    }

    /// A transaction failed because of a handler: the next ones take one delivery each, to find
    /// whose it was. `outcome` becomes of that one.
    pub(crate) fn failed(&self, deliveries: &[&Delivery], outcome: Known) {
        self.chunk.store(1, Ordering::Relaxed);
        if let [single] = deliveries {
            self.know(single, outcome);
        }
    }

    /// What becomes of this delivery when it is read again.
    pub(crate) fn know(&self, delivery: &Delivery, outcome: Known) {
        lock(&self.known).insert(delivery.seq, (delivery.attempt, delivery.replay, outcome));
    }

    /// What becomes of this delivery, if that is known; says so once.
    pub(crate) fn take_known(&self, delivery: &Delivery) -> Option<Known> {
        let (attempt, replay, known) = lock(&self.known).remove(&delivery.seq)?;
        ((attempt, replay) == (delivery.attempt, delivery.replay)).then_some(known)
    }
}
