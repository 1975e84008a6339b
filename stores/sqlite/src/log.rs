//! The `Log` contract: each call is one or two jobs on a store thread.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Acquired, Batch, BatchLimit, Error, Lease, Log, Ordering, OwnerId, Result, Settlement, Subscription,
    SubscriptionName,
};

use crate::lease::AcquireRequest;
use crate::settle::Owned;
use crate::store::SqliteStore;
use crate::{due, lease, settle, window};

/// How many pages of unwanted rows one `next_batch` passes. Then it returns an empty batch, and the
/// next call continues, so that a call stays short.
const PAGES_MAX: usize = 20;

#[async_trait]
impl Log for SqliteStore {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        subscription.validate()?;
        let wanted = subscription.clone();
        self.writer().call("subscribe", move |session| lease::subscribe(session, &wanted)).await?;
        let name = subscription.name.clone();
        // Asked of the reader, so that no start takes the write lock for nothing.
        let mut more = subscription.ordering == Ordering::None
            && self.reader().call("subscribe", move |session| window::holds_any(session.connection()?, &name)).await?;
        while more {
            let (name, began) = (subscription.name.clone(), self.clock().monotonic());
            more = self.write("subscribe", move |tx, now| lease::unblock(tx, &name, now)).await?;
            if more {
                // Others poll for the write lock, so they hardly get it without a pause.
                self.clock().sleep(self.clock().monotonic().saturating_sub(began)).await;
            }
        }
        Ok(())
    }

    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        let (subscription, owner) = (subscription.clone(), owner.clone());
        let request = AcquireRequest { subscription, owner, held: held.to_vec(), ttl, asked_at: self.now() };
        let peeking = request.clone();
        if let Some(nothing) = self.reader().call("acquire", move |session| lease::peek(session, &peeking)).await? {
            return Ok(nothing);
        }
        let acquired = self.writer().call("acquire", move |session| lease::acquire(session, &request)).await?;
        if let Some(lease) = &acquired.lease {
            // After the tables were made anew or restored, an epoch may be given a second time.
            self.set_cursor(lease, None);
        }
        Ok(acquired)
    }

    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        let renewed = lease.clone();
        let held = self.writer().call("renew", move |session| lease::renew(session, &renewed, ttl)).await?;
        if held { Ok(()) } else { Err(Error::stale("renew")) }
    }

    async fn release(&self, lease: &Lease) -> Result<()> {
        let released = lease.clone();
        if self.writer().call("release", move |session| lease::release(session, &released)).await? {
            self.set_cursor(lease, None);
            // Relays that wait for a free lane need not wait for their next poll.
            self.wake();
        }
        Ok(())
    }

    async fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()> {
        let (subscription, owner) = (subscription.clone(), owner.clone());
        self.writer().call("leave", move |session| lease::leave(session, &subscription, &owner)).await?;
        self.wake();
        Ok(())
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let mut batch = Batch::default();
        for _ in 0..PAGES_MAX {
            batch = self.next_page(lease, limit).await?;
            if !batch.is_empty() || !batch.more {
                break;
            }
        }
        Ok(batch)
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let reading = lease.clone();
        self.reader().call("due", move |session| due::read(session, &reading, limit)).await
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        let rewind = settlement.rewind;
        let owned = Owned::new("settle", settlement, self.cursor(lease))?;
        let settling = lease.clone();
        self.writer().call("settle", move |session| settle::settle(session, &settling, &owned)).await?;
        if rewind {
            // The next read starts from the settled position.
            self.set_cursor(lease, None);
        }
        Ok(())
    }

    async fn hint(&self, lease: &Lease) {
        let mut wakeups = self.wakeups().subscribe();
        // Compare with what the last read saw: this closes the gap between an empty read and this
        // wait.
        let seen = self.cursor(lease).map_or_else(|| *wakeups.borrow(), |cursor| cursor.wakeups);
        // The store owns the sender, so the wait cannot fail while `self` is borrowed.
        _ = wakeups.wait_for(|now| *now != seen).await;
    }
}

impl SqliteStore {
    /// Reads one page, and writes what must be written before it may be handed out.
    ///
    /// The cursor moves only after everything is done and nothing is awaited any more: a future
    /// that is dropped before that has read nothing.
    async fn next_page(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let cursor = self.cursor(lease);
        let wakeups = *self.wakeups().borrow();
        let reading = lease.clone();
        let read = self
            .reader()
            .call("next_batch", move |session| window::read(session, &reading, limit, cursor, wakeups))
            .await?;
        if let Some(update) = read.update {
            let opened = lease.clone();
            self.writer().call("next_batch", move |session| window::open(session, &opened, &update)).await?;
        }
        self.set_cursor(lease, Some(read.cursor));
        Ok(read.batch)
    }
}
