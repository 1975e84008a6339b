//! The log contract: how a relay reads committed events and writes their results.

use std::time::Duration;

use async_trait::async_trait;

use crate::batch::{Batch, BatchLimit, Settlement};
use crate::error::Result;
use crate::inspect::Pause;
use crate::names::{LogName, OwnerId, SubscriptionName};
use crate::subscription::Subscription;

/// The fencing number of a lease. It rises with every grant of the lane, and every write checks it.
pub type Epoch = i64;

/// The right to drive one lane until a deadline on the store's clock.
///
/// It is only advisory for sending, but exact for state: two owners who both believe that they hold
/// a lane may both send, but only the newer epoch can write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The subscription of the lane.
    pub subscription: SubscriptionName,
    /// The log it reads.
    pub log: LogName,
    /// The lane's number, from 0.
    pub lane: u16,
    /// The fencing number.
    pub epoch: Epoch,
    /// The holder.
    pub owner: OwnerId,
    /// How many holders in a row vanished: they neither released the lane nor held it for long. The
    /// next holder finds the number that was released with the lane ([`Log::release`]).
    pub crashes: u32,
}

impl Lease {
    /// A holder that held a lane for more than this many lease lengths held it for long. Earlier
    /// crashes are then no longer in a row with its own.
    pub const LONG: u32 = 10;
}

/// The answer to [`Log::acquire`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acquired {
    /// A free lane, now ours for the requested time, counted from the moment the call was *made*.
    /// `None`: no lane is free.
    pub lease: Option<Lease>,
    /// How many relays asked or renewed for this subscription within the last lease time, including
    /// this one; at least 1. A relay keeps at most `ceil(lanes / replicas)` lanes and releases the
    /// rest, so that replicas share evenly.
    pub replicas: u16,
    /// Number of lanes the subscription has.
    pub lanes: u16,
    /// Set if a person or a `410 Gone` paused the subscription. Then no lease is granted.
    pub paused: Option<Pause>,
}

/// The answer to [`Log::settle_and_read`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOn {
    /// The next events, possibly none.
    pub batch: Batch,
    /// Whether the settlement is written. If not, `batch` is empty, and the caller still has to
    /// settle.
    pub is_settled: bool,
}

/// The read side of a log, for leased lanes.
///
/// Behaviour, checked for every store by the conformance suite:
/// - **Windows.** `next_batch` returns events in `seq` order within a window, each exactly once per
///   settled position. It returns only committed events, and only once they are durable: it commits
///   before it returns, so that a crash of the store cannot take back an event we published.
/// - **No loss.** An event whose transaction commits late is returned in a later window, whatever
///   its `seq`. A transaction left open delays only its own events.
/// - **Per-key order.** For writers that serialise on their aggregate before appending, `seq` order
///   within a window, and window after window, is commit order.
/// - **Lanes.** A key always belongs to the same lane. Lanes partition the events.
/// - **Prefetch.** While `Batch::more` is set, `next_batch` may be called before the previous
///   batches are settled. Settling is in order. A call without `more` opens no window while the
///   current one is unsettled, so nothing can be lost.
/// - **Caught up.** However many events keep arriving, a lease soon gets a batch with
///   `Batch::caught_up`, or an empty one without `more`. By then everything was read that was
///   committed before its first read.
/// - **Crash.** What was read but not settled is returned again to the next holder of the lane.
/// - **Fencing.** Every write carries the epoch. A lease that expired or was taken over gets
///   `Stale` from `renew`, `next_batch`, `due` and `settle`, and changes nothing. `release` of such
///   a lease succeeds and does nothing.
/// - **Held keys.** A key with an unfinished delivery row appears in `Batch::held` when later
///   events of it are read.
/// - **Due.** `due` returns the lane's rows that are due, in `seq` order: the head of each key,
///   followed by the events blocked behind it as far as the limit allows. It never returns a dead
///   row, nor rows of a key whose head is not due yet (except `Scheduled` rows, which hold
///   nothing).
/// - **Unreadable.** An event that cannot be read, or whose row was deleted from the log while a
///   delivery row waits for it, affects only itself. It is in its batch with a reason
///   ([`Batch::unreadable`]), and everything around it is returned as usual. No read fails because
///   of one event.
/// - **Settle is atomic**: position, rows and releases commit together or not at all. Settling a
///   due row that vanished (discarded meanwhile) succeeds and does nothing for it. When the head of
///   a key is delivered, discarded or dead (without `halt`), the next of the key becomes due.
/// - **Settle and read.** `settle_and_read` returns no event before the settlement is written.
/// - An empty log returns an empty batch at once and writes nothing.
/// - Every call is bounded in time by the store's own timeout. A store that is down answers
///   `Unavailable`.
///
/// Cancel-safety: every future may be dropped. A dropped `settle` may or may not have committed, so
/// the caller must drop the lease and acquire again before it continues.
#[async_trait]
pub trait Log: Send + Sync + 'static {
    /// Creates the subscription if it is new, otherwise checks that it fits. Idempotent. Its start
    /// and its number of lanes are set only when it is created.
    ///
    /// Errors: `NotFound` `log_unknown`; `Conflict` `log_differs`; `Mismatch` with the cure if the
    /// schema is missing (`schema_missing`), older (`schema_old`) or newer (`schema_newer`), if the
    /// cursor or rows come from the future (`cursor_from_future`), or if the store's role sees
    /// nothing of the log (`log_hidden`).
    async fn subscribe(&self, subscription: &Subscription) -> Result<()>;

    /// Takes a free lane for `ttl`, and counts as a heartbeat of `owner`. Needs `subscribe` first.
    ///
    /// `held` are the lanes the caller knows it holds. If a lane is leased to `owner` but not among
    /// them, the answer that granted it was lost. Such a lane is granted again at once, with a new
    /// epoch, if no other lane is free.
    ///
    /// With the grant, rows of the lane that wait for a call in flight
    /// ([`Disposition::InFlight`](crate::Disposition::InFlight)) become due now. The call ended
    /// with the former holder, and one that stopped gracefully wrote its outcome before it released
    /// the lane. Rows whose event was sent alone
    /// ([`Disposition::Alone`](crate::Disposition::Alone)) count one more crash
    /// ([`Batch::crashes`]) and get the code [`RELAY_CRASHED`](crate::Disposition::RELAY_CRASHED);
    /// their due time stays.
    ///
    /// If the lease of another owner ran out, [`Lease::crashes`] rises by one, or becomes 1 if that
    /// owner held the lane for long. Otherwise it stays.
    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired>;

    /// Extends the lease to `ttl` from now. Refused with `Stale` while the subscription is paused;
    /// the lease then lasts to its end, so that what is in flight can be settled.
    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()>;

    /// Releases the lane at once, for anybody to acquire, and stores its [`Lease::crashes`].
    async fn release(&self, lease: &Lease) -> Result<()>;

    /// Notes that `owner` asks for no more lanes. It no longer counts as a replica, so that others
    /// take all lanes at once. Called when a relay stops, after it released its lanes. Idempotent.
    /// If it arrives late or twice, the next heartbeat undoes it, and no lease changes. Succeeds if
    /// the subscription is gone.
    async fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()>;

    /// Returns the next events of the lane, possibly none.
    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch>;

    /// Returns delivery rows of the lane that are due, possibly none, in the order of the log.
    ///
    /// For each key it returns its first unfinished event (its head), if that is due, and the
    /// events that directly follow and only wait for it. If there are more heads than the limit
    /// allows, those due for longest come first. The heads share the rest of the limit evenly, so
    /// that a key with a deep backlog keeps no other waiting.
    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch>;

    /// Writes the results of a batch.
    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()>;

    /// Settles a batch that ends what was read, and returns the next events. If there are none, a
    /// store may leave the settlement to a later call: it then writes nothing until there is
    /// something to read.
    ///
    /// An error does not say whether the settlement was written. Unless it is stale, the caller
    /// repeats the settlement with [`settle`](Self::settle), then rewinds and reads. If the store
    /// had opened the next window by then, it answers `Stale`, and never takes the position for one
    /// of that window.
    async fn settle_and_read(&self, lease: &Lease, settlement: Settlement<'_>, limit: BatchLimit) -> Result<ReadOn> {
        self.settle(lease, settlement).await?;
        Ok(ReadOn { batch: self.next_batch(lease, limit).await?, is_settled: true })
    }

    /// Resolves when there may be something new for the lane. Only a hint: it may resolve without
    /// reason, or never.
    async fn hint(&self, lease: &Lease);
}
