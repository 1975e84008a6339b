//! What the relay knows about its handlers' transactions, and how many deliveries the next one
//! takes.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postbox_core::{Delivery, EventId, Outcome, Seq, lock};

/// Maximum deliveries in one transaction. Bounds how long it lasts and how much a rollback repeats.
pub(crate) const APPLY_CHUNK_MAX: usize = 64;

/// Maximum outcomes remembered. An event that another relay handles is never asked about again, so
/// the oldest ones are forgotten.
const KNOWN_MAX: usize = 10_000;

/// The outcome of an event whose transaction did not settle it, and how long that took.
pub(crate) type Known = (Outcome, Duration);

pub(crate) struct ApplyState {
    chunk: AtomicUsize,
    /// Outcomes of events whose transaction failed with no other event in it, or was committed by a
    /// handler. Such an event is not handled again, however often it is read, until its outcome is
    /// written.
    known: Mutex<BTreeMap<Seq, (Attempt, Known)>>,
}

/// The event, its attempt and its replay. If these differ later, the transaction did settle the
/// event, or the place is another event's after a failover.
type Attempt = (EventId, u32, u32);

fn attempt(delivery: &Delivery) -> Attempt {
    (delivery.event.id, delivery.attempt, delivery.replay)
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
        self.shrink();
        if let [single] = deliveries {
            self.know(single, outcome);
        }
    }

    /// Notes the outcome of a delivery whose handler ran in a transaction that a handler ended. The
    /// next ones take one delivery each: it may happen again.
    pub(crate) fn ended(&self, delivery: &Delivery, outcome: Known) {
        self.shrink();
        self.know(delivery, outcome);
    }

    /// Makes the next transactions take one delivery each: this one outlasted its lease, and the
    /// same work would be rolled back without end.
    pub(crate) fn shrink(&self) {
        self.chunk.store(1, Ordering::Relaxed);
    }

    fn know(&self, delivery: &Delivery, outcome: Known) {
        let mut known = lock(&self.known);
        known.insert(delivery.seq, (attempt(delivery), outcome));
        if known.len() > KNOWN_MAX {
            known.pop_first();
        }
    }

    /// Returns the remembered outcome of this delivery, if there is one.
    pub(crate) fn known(&self, delivery: &Delivery) -> Option<Known> {
        let known = lock(&self.known);
        let (of, outcome) = known.get(&delivery.seq)?;
        (*of == attempt(delivery)).then(|| outcome.clone())
    }

    /// Forgets what is written.
    pub(crate) fn forget(&self, written: &[Delivery]) {
        let mut known = lock(&self.known);
        if !known.is_empty() {
            written.iter().for_each(|delivery| _ = known.remove(&delivery.seq));
        }
    }
}
