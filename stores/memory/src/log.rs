//! The log contract: calls to the server, and what the client remembers of the answers.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Acquired, Batch, BatchLimit, Lease, Log, OwnerId, ReadOn, Result, Settlement, Subscription, SubscriptionName,
};

use crate::MemoryStore;
use crate::settle::Write;

#[async_trait]
impl Log for MemoryStore {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        subscription.validate()?;
        let subscription = subscription.clone();
        self.call("subscribe", None, move |server| server.subscribe(&subscription)).await
    }

    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        let (subscription, owner, held) = (subscription.clone(), owner.clone(), held.to_vec());
        let acquired =
            self.call("acquire", None, move |server| server.acquire(&subscription, &owner, &held, ttl)).await?;
        if let Some(lease) = &acquired.lease {
            self.client.begin(lease);
        }
        Ok(acquired)
    }

    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        let called = lease.clone();
        self.call("renew", Some(lease), move |server| server.renew(&called, ttl)).await
    }

    async fn release(&self, lease: &Lease) -> Result<()> {
        let called = lease.clone();
        self.client.forget(lease);
        self.call("release", Some(lease), move |server| server.release(&called)).await
    }

    async fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()> {
        let (subscription, owner) = (subscription.clone(), owner.clone());
        self.call("leave", None, move |server| server.leave(&subscription, &owner)).await
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        self.read_on(lease, limit).await
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let called = lease.clone();
        self.call("due", Some(lease), move |server| server.due(&called, limit)).await
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        let write = Write::of(&settlement, self.client.position(lease).as_ref());
        let (called, position) = (lease.clone(), write.place.as_ref().map(|place| place.position));
        let settled = self.call("settle", Some(lease), move |server| server.settle(&called, &write)).await;
        self.client.note_settled(lease, position, settlement.rewind, &settled);
        settled
    }

    /// In two steps, and only if there is something new, so that the engine meets both answers.
    async fn settle_and_read(&self, lease: &Lease, settlement: Settlement<'_>, limit: BatchLimit) -> Result<ReadOn> {
        if let Some(window) = self.client.window_ended_by(lease, &settlement) {
            let called = lease.clone();
            let (has_news, batch, wakeups) =
                self.call("page", Some(lease), move |server| server.look(&called, window)).await?;
            if !has_news {
                self.client.note_look(lease, wakeups);
                return Ok(ReadOn { batch, is_settled: false });
            }
        }
        self.settle(lease, settlement).await?;
        Ok(ReadOn { batch: self.next_batch(lease, limit).await?, is_settled: true })
    }

    async fn hint(&self, lease: &Lease) {
        poll_fn(|context| {
            let mut state = self.server.lock();
            let wakeups = state.wakeups;
            // Comparing with the value at the last read closes the gap between an empty read and
            // this wait.
            if self.client.position(lease).is_none_or(|at| at.wakeups != wakeups) {
                return Poll::Ready(());
            }
            state.waiting.insert((lease.subscription.clone(), lease.lane), context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
