//! What the relay knows about its handlers' transactions, and how many deliveries the next one
//! takes.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use postbox_core::{Delivery, EventId, Outcome, Seq, lock};

/// Maximum deliveries in one transaction. Bounds how long it lasts and how much a rollback repeats.
pub(crate) const APPLY_CHUNK_MAX: usize = 64;

/// A transaction in which a handler was victim of a deadlock lasts at least this long: Postgres
/// looks for one after a second (`deadlock_timeout`).
const DEADLOCK_AFTER: Duration = Duration::from_secs(1);

/// Maximum of [`Chunk::grows_every`]: so many small transactions take about as long as a deadlock.
const GROWS_EVERY_MAX: u32 = 256;

/// Maximum outcomes remembered. An event that another relay handles is never asked about again, so
/// the oldest ones are forgotten.
const KNOWN_MAX: usize = 10_000;

/// The outcome of an event whose transaction did not settle it, and how long that took.
pub(crate) type Known = (Outcome, Duration);

/// How many deliveries a transaction takes, and how that grows.
struct Chunk {
    size: usize,
    /// Commits after which it grows.
    grows_every: u32,
    /// Commits since it last changed.
    commits: u32,
}

pub(crate) struct ApplyState {
    chunk: Mutex<Chunk>,
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
        let chunk = Chunk { size: APPLY_CHUNK_MAX, grows_every: 1, commits: 0 };
        Self { chunk: Mutex::new(chunk), known: Mutex::default() }
    }
}

impl ApplyState {
    /// Returns the number of deliveries the next transaction takes.
    pub(crate) fn chunk(&self) -> usize {
        lock(&self.chunk).size
    }

    /// Notes that a transaction of this many deliveries committed in time, and whether a handler
    /// failed in it. The next ones may be larger, by little: if they overrun their time at some
    /// size, few do. After what looks like a deadlock with another transaction, they take one
    /// delivery each, and grow the slower the more often this happens: each costs about a second.
    pub(crate) fn committed(&self, deliveries: usize, has_failed: bool, took: Duration) {
        let is_slow = took >= DEADLOCK_AFTER;
        let chunk = &mut *lock(&self.chunk);
        if is_slow && has_failed && deliveries > 1 {
            let grows_every = (chunk.grows_every * 4).min(GROWS_EVERY_MAX);
            *chunk = Chunk { size: 1, grows_every, commits: 0 };
            return;
        }
        if is_slow && deliveries == 1 {
            // Something else is slow, e.g. the store: small transactions make that worse.
            chunk.grows_every = 1;
        }
        chunk.commits += 1;
        if chunk.commits >= chunk.grows_every {
            chunk.size = (chunk.size + (chunk.size / 8).max(1)).min(APPLY_CHUNK_MAX);
            chunk.commits = 0;
            if chunk.size == APPLY_CHUNK_MAX {
                chunk.grows_every = 1;
            }
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

    /// Makes the next transactions take one delivery each, e.g. because this one outlasted its
    /// lease, and the same work would be rolled back without end.
    pub(crate) fn shrink(&self) {
        let chunk = &mut *lock(&self.chunk);
        (chunk.size, chunk.commits) = (1, 0);
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

    /// Forgets the failures with this code, also of other lanes, which end with this one. Their
    /// events are handled again, with the same attempt.
    pub(crate) fn forget_failed(&self, code: &str) {
        let is_other = |outcome: &Outcome| !matches!(outcome, Outcome::Retry { code: of, .. } if *of == code);
        lock(&self.known).retain(|_, (_, (outcome, _))| is_other(outcome));
    }
}
