//! The `Log` contract. Each method has a module of its own.
//!
//! The cursor of a lane is a pair of snapshots and a place between them. A *window* is every row
//! not visible in the first and visible in the second. It is delivered in `seq` order, then the
//! next one opens. No row is ever claimed, updated or deleted in order to be read. An open
//! transaction delays only its own events: both snapshots list it as running until it ends.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Acquired, Batch, BatchLimit, Lease, Log, Migrate as _, Ordering, OwnerId, ReadOn, Result, Settlement, Subscription,
    SubscriptionName,
};
use postbox_postgres_sql::check_log_name;

use crate::due::due;
use crate::session::Session;
use crate::settle::settle;
use crate::subscription::{subscribe, unblock};
use crate::window::next_batch;
use crate::{PostgresStore, lease};

#[async_trait]
impl Log for PostgresStore {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        subscription.validate()?;
        self.for_all_tenants("subscribe")?;
        self.bounded("subscribe", self.validate()).await?;
        check_log_name("subscribe", &subscription.log)?;
        self.call("subscribe", async |session: &Session| subscribe(self, session, subscription).await).await?;
        let mut next = (subscription.ordering == Ordering::None).then(|| (String::new(), 0));
        while let Some(after) = next {
            let step = async |session: &Session| unblock(session, &subscription.name, &after).await;
            next = self.write("subscribe", &self.inner.modes.write, step).await?;
        }
        self.listen_if_asked(&subscription.log).await;
        Ok(())
    }

    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        let acquire = async |session: &Session| lease::acquire(self, session, subscription, owner, held, ttl).await;
        self.with_lock_named(self.call("acquire", acquire).await).await
    }

    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        let renew = async {
            let (session, mode) = self.renewal_session("renew").await?;
            lease::renew(self, &session, mode, lease, ttl).await
        };
        self.bounded("renew", renew).await
    }

    async fn release(&self, lease: &Lease) -> Result<()> {
        self.call("release", async |session: &Session| lease::release(self, session, lease).await).await
    }

    async fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()> {
        self.call("leave", async |session: &Session| lease::leave(self, session, subscription, owner).await).await
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let read = self.bounded("next_batch", next_batch(self, lease, None, limit)).await;
        self.with_lock_named(read.map(|read| read.batch)).await
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let due = async |session: &Session| due(self, session, lease, limit).await;
        self.with_lock_named(self.call("due", due).await).await
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        let settle = async |session: &Session| settle(self, session, lease, &settlement).await;
        self.with_lock_named(self.call("settle", settle).await).await
    }

    async fn settle_and_read(&self, lease: &Lease, settlement: Settlement<'_>, limit: BatchLimit) -> Result<ReadOn> {
        let both = next_batch(self, lease, Some(&settlement), limit);
        self.with_lock_named(self.bounded("settle_and_read", both).await).await
    }

    async fn hint(&self, lease: &Lease) {
        self.wait_for_wakeup(lease).await;
    }
}

/// A duration in microseconds, for an interval; at most a century, which stands for ever.
pub(crate) fn micros(duration: Duration) -> i64 {
    const CENTURY_MICROS: i64 = 100 * 366 * 24 * 3600 * 1_000_000;
    i64::try_from(duration.as_micros()).unwrap_or(CENTURY_MICROS).min(CENTURY_MICROS)
}
