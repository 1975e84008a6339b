//! What a bounded run did.

use std::ops::AddAssign;

use crate::metrics::MetricsSnapshot;

/// What one bounded run did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Drained {
    /// Events read: what a limit counts. One that waits behind a slow one of its key is read again
    /// when its turn comes, and counted again.
    pub fetched: u64,
    /// Events the destination has now.
    pub delivered: u64,
    /// Deliveries that failed and will be tried again.
    pub failed: u64,
    /// Events that died.
    pub dead: u64,
    /// Lanes that were lost before they were empty: taken over, paused, or the store went back to
    /// an earlier state. What was left of them is for their next owner.
    pub lanes_lost: u64,
}

impl Drained {
    /// What was done between two moments of a relay's metrics.
    pub fn between(before: &MetricsSnapshot, after: &MetricsSnapshot) -> Self {
        let dead = after.dead - before.dead;
        Self {
            fetched: after.fetched - before.fetched,
            delivered: after.delivered - before.delivered,
            failed: (after.failed - before.failed).saturating_sub(dead),
            dead,
            lanes_lost: 0,
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
    }
}
