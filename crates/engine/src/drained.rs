//! The result of a bounded run.

use std::ops::AddAssign;

use crate::metrics::MetricsSnapshot;

/// The result of one bounded run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Drained {
    /// Events read, which is what a limit counts. An event that waits behind a slow one of its key
    /// is read again at its turn, and counted again.
    pub fetched: u64,
    /// Events delivered.
    pub delivered: u64,
    /// Deliveries that failed and will be tried again.
    pub failed: u64,
    /// Events that became dead.
    pub dead: u64,
    /// Lanes lost before they were empty: taken over, paused, reset by the store to an earlier
    /// state, left at a stop because the store did not answer, or given back because a transaction
    /// of handlers failed as a whole. Their next owner delivers the rest.
    pub lanes_lost: u64,
    /// Lanes that another relay held, or that a relay left behind when it crashed.
    pub lanes_elsewhere: u64,
}

impl Drained {
    /// Returns the difference between two snapshots of a relay's metrics.
    pub fn between(before: &MetricsSnapshot, after: &MetricsSnapshot) -> Self {
        let dead = after.dead - before.dead;
        Self {
            fetched: after.fetched - before.fetched,
            delivered: after.delivered - before.delivered,
            failed: (after.failed - before.failed).saturating_sub(dead),
            dead,
            lanes_lost: 0,
            lanes_elsewhere: 0,
        }
    }
}

impl AddAssign for Drained {
    fn add_assign(&mut self, other: Self) {
        self.fetched += other.fetched;
        self.delivered += other.delivered;
        self.failed += other.failed;
        self.dead += other.dead;
        self.lanes_lost += other.lanes_lost;
        self.lanes_elsewhere = self.lanes_elsewhere.max(other.lanes_elsewhere);
    }
}
