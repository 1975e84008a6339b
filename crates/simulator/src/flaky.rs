//! The store as a relay sees it: a read may also fail after the store has recorded what it
//! returned.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Acquired, Batch, BatchLimit, Lease, Log, OwnerId, ReadOn, Result, Settlement, Subscription, SubscriptionName,
};
use postbox_memory::MemoryStore;

use crate::world::SimWire;

/// A client whose reads may fail after they were recorded.
pub(crate) struct FlakyLog {
    pub(crate) wire: Arc<SimWire>,
    pub(crate) store: MemoryStore,
}

#[async_trait]
impl Log for FlakyLog {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        self.store.subscribe(subscription).await
    }

    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        self.store.acquire(subscription, owner, held, ttl).await
    }

    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        self.store.renew(lease, ttl).await
    }

    async fn release(&self, lease: &Lease) -> Result<()> {
        self.store.release(lease).await
    }

    async fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()> {
        self.store.leave(subscription, owner).await
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        // The client itself records what was read, so the read runs neither late nor twice.
        let met = self.wire.set_out("next_batch").await?;
        let batch = self.store.next_batch(lease, limit).await;
        self.wire.come_back(&met, true).await?;
        batch
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        self.store.due(lease, limit).await
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        self.store.settle(lease, settlement).await
    }

    async fn settle_and_read(&self, lease: &Lease, settlement: Settlement<'_>, limit: BatchLimit) -> Result<ReadOn> {
        // Not lost on its way back: the store must not give out events of a later window and fail.
        // Its single steps may be.
        self.store.settle_and_read(lease, settlement, limit).await
    }

    async fn hint(&self, lease: &Lease) {
        self.store.hint(lease).await;
    }
}
