//! The read side: lanes, leases, windows and what left the stream.
//!
//! The cursor of a lane is a pair of snapshots and a place between them. A *window* is every row not visible in `from_snap` and visible
//! in `to_snap`; it is delivered in `seq` order and then the next one opens. No row is ever claimed, updated or deleted to be read,
//! and a transaction left open delays only its own events: it is in the list of running ones of both snapshots until it ends.

mod due;
pub(crate) mod hint;
mod lease;
mod page;
#[cfg(test)]
mod plans;
pub(crate) mod reader;
pub(crate) mod settle;
pub(crate) mod subscribe;
mod window;

pub(crate) use lease::is_paused;
pub(crate) use page::fitting;

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Acquired, Batch, BatchLimit, Lease, Log, OwnerId, Result, Settlement, Subscription, SubscriptionName,
};

use crate::PostgresStore;

#[async_trait]
impl Log for PostgresStore {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        subscription.validate()?;
        self.bounded("subscribe", self.make_subscription(subscription)).await
    }

    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        self.bounded("acquire", self.take_lane(subscription, owner, held, ttl)).await
    }

    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        self.bounded("renew", self.hold_lane(lease, ttl)).await
    }

    async fn release(&self, lease: &Lease) -> Result<()> {
        self.bounded("release", self.give_lane_back(lease)).await
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        self.bounded("next_batch", self.read_stream(lease, limit)).await
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        self.bounded("due", self.read_due(lease, limit)).await
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        self.bounded("settle", self.write_settlement(lease, &settlement)).await
    }

    async fn hint(&self, lease: &Lease) {
        self.await_stir(lease).await;
    }
}

/// A wait as Postgres counts it; a century is for ever.
pub(crate) fn micros(duration: Duration) -> i64 {
    const CENTURY_MICROS: i64 = 100 * 366 * 24 * 3600 * 1_000_000;
    i64::try_from(duration.as_micros()).unwrap_or(CENTURY_MICROS).min(CENTURY_MICROS)
}
