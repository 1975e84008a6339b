//! What is known of a handler's transactions: how many deliveries the next one may take.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postbox_core::{Delivery, Outcome, Seq};

use crate::lock::lock;

/// Most deliveries of one transaction: bounds both its length and what a rollback repeats.
pub(crate) const APPLY_CHUNK_MAX: usize = 64;

/// What becomes of an event whose transaction failed, and how long that took.
pub(crate) type Failed = (Outcome, Duration);

pub(crate) struct ApplyState {
    chunk: AtomicUsize,
    /// Events whose transaction failed alone, with the attempt and replay that it was. Read again,
    /// that is a failed attempt; at another attempt it is not, because the transaction did commit.
    failed: Mutex<HashMap<Seq, (u32, u32, Failed)>>,
}

impl Default for ApplyState {
    fn default() -> Self {
        Self { chunk: AtomicUsize::new(APPLY_CHUNK_MAX), failed: Mutex::default() }
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
    /// whose it was. `failed` becomes of that one.
    pub(crate) fn failed(&self, deliveries: &[&Delivery], failed: Failed) {
        self.chunk.store(1, Ordering::Relaxed);
        if let [single] = deliveries {
            lock(&self.failed).insert(single.seq, (single.attempt, single.replay, failed));
        }
    }

    /// What becomes of this delivery, if its transaction failed alone; says so once.
    pub(crate) fn take_failed(&self, delivery: &Delivery) -> Option<Failed> {
        let (attempt, replay, failed) = lock(&self.failed).remove(&delivery.seq)?;
        ((attempt, replay) == (delivery.attempt, delivery.replay)).then_some(failed)
    }
}
