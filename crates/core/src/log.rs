//! The log contract: how a relay reads what was committed, and writes down what became of it.

use std::time::Duration;

use async_trait::async_trait;

use crate::batch::{Batch, BatchLimit, Settlement};
use crate::error::Result;
use crate::inspect::Pause;
use crate::names::{LogName, OwnerId, SubscriptionName};
use crate::subscription::Subscription;

/// The fencing number of a lease: rises with every grant of the lane, guards every write.
pub type Epoch = i64;

/// The right to drive one lane until a deadline on the store's clock.
///
/// Advisory for exclusivity, exact for state: two owners who both believe they hold a lane may both
/// send, but only the newer epoch can write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Whose lane.
    pub subscription: SubscriptionName,
    /// The log it reads.
    pub log: LogName,
    /// Which lane, from 0.
    pub lane: u16,
    /// The fencing number.
    pub epoch: Epoch,
    /// Who holds it.
    pub owner: OwnerId,
    /// How many holders in a row vanished: they neither gave the lane back nor held it for long.
    /// What is given back with the lane ([`Log::release`]) the next holder finds.
    pub crashes: u32,
}

impl Lease {
    /// Who held a lane for more than so many times the length of its lease held it for long: the
    /// crashes before are no longer in a row with its own.
    pub const LONG: u32 = 10;
}

/// The answer to [`Log::acquire`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acquired {
    /// A lane that was free, now ours for the asked time, counted from the moment the call was
    /// *made*. `None`: no lane is free.
    pub lease: Option<Lease>,
    /// How many relays asked or renewed for this subscription within the last lease time, this one
    /// included; at least 1. A relay keeps at most `ceil(lanes / replicas)` lanes and releases the
    /// rest, so that replicas share evenly.
    pub replicas: u16,
    /// How many lanes the subscription has.
    pub lanes: u16,
    /// Set when a person or a `410 Gone` paused the subscription: no lease is given.
    pub paused: Option<Pause>,
}

/// The read side of a log for leased lanes.
///
/// Behaviour, checked for every store by the conformance suite:
/// - **Windows.** `next_batch` gives events in `seq` order within a window, each exactly once per
///   settled position; only committed events, and only once what it gives is durable (it commits
///   before it returns, so that a crash of the store cannot take back an event we published).
/// - **No loss.** An event whose transaction commits late is given in a later window, whatever its
///   `seq`. A transaction left open delays only its own events.
/// - **Per-key order.** For writers that serialise on their aggregate before appending, `seq` order
///   within a window and window after window is commit order.
/// - **Lanes.** A key always belongs to the same lane; lanes partition the events.
/// - **Prefetch.** While `Batch::more`, `next_batch` may be called before the previous batches are
///   settled. Settling is in order. Called without `more`, it opens no window over an unsettled
///   one: nothing may be lost by it.
/// - **Crash.** What was read but not settled is given again to the next holder of the lane.
/// - **Fencing.** Every write carries the epoch. A lease that expired or was taken over gets
///   `Stale` from `renew`, `next_batch`, `due` and `settle`, and changes nothing. `release` of such
///   a lease succeeds and does nothing.
/// - **Held keys.** A key with an unfinished delivery row appears in `Batch::held` when later
///   events of it are read.
/// - **Due.** `due` gives each lane's rows whose time has come, in `seq` order, each key's head
///   followed by the events blocked behind it as far as the limit goes; never a dead one; never
///   rows of a key whose head is not due yet (except `Scheduled` rows, which hold nothing).
/// - **Unreadable.** An event that cannot be read, or whose row was deleted from the log while a
///   delivery row waits for it, concerns only itself: it is in its batch with a reason
///   ([`Batch::unreadable`]), and everything around it is given as ever. No read fails because of
///   one event.
/// - **Settle is atomic**: position, rows and releases commit together or not at all. Settling a
///   due row that vanished (discarded meanwhile) succeeds and does nothing for it. When the head of
///   a key is delivered, discarded or dead (without `halt`), the next of the key becomes due.
/// - An empty log gives an empty batch at once and writes nothing.
/// - Every call is bounded in time by the store's own timeout; a store that is down answers
///   `Unavailable`.
///
/// Cancel-safety: every future may be dropped; a dropped `settle` may or may not have committed, so
/// the caller must drop the lease and acquire again before it goes on.
#[async_trait]
pub trait Log: Send + Sync + 'static {
    /// Makes the subscription if it is new and checks that it fits if it is not. Idempotent. Where
    /// it begins and how many lanes it has is said when it is made.
    ///
    /// Errors: `NotFound` `log_unknown`; `Conflict` `log_differs`; `Mismatch`
    /// with the cure when the schema is missing (`schema_missing`), older (`schema_old`) or newer
    /// (`schema_newer`), or when the cursor or rows come from the future (`cursor_from_future`).
    async fn subscribe(&self, subscription: &Subscription) -> Result<()>;

    /// Takes a lane that nobody holds, for `ttl`, and counts as a heartbeat of `owner`. Needs
    /// `subscribe` first.
    ///
    /// `held` are the lanes the caller knows it holds. A lane that is leased to `owner` and not
    /// among them was granted in an answer that never arrived: where no lane is free it is granted
    /// again at once, with a new epoch.
    ///
    /// With the grant, rows of the lane that wait for a call in flight
    /// ([`Disposition::InFlight`](crate::Disposition::InFlight)) become due now: the call ended
    /// with the former holder, and a graceful one has written its outcome before it gave the lane
    /// back. Rows of the lane that say that their event is sent alone
    /// ([`Disposition::Alone`](crate::Disposition::Alone)) count one crash more
    /// ([`Batch::crashes`]) and say [`RELAY_CRASHED`](crate::Disposition::RELAY_CRASHED); they are
    /// due when they were to be.
    ///
    /// If the lease of another owner ran out, [`Lease::crashes`] is one more than before, or 1
    /// where that one held the lane for long; otherwise it stays.
    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired>;

    /// Holds the lane for another `ttl` from now. A pause also ends the lease: `Stale`.
    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()>;

    /// Gives the lane back at once, for anybody to acquire, and with it [`Lease::crashes`].
    async fn release(&self, lease: &Lease) -> Result<()>;

    /// `owner` asks for no lane any more: from now on it does not count as a replica, so that
    /// others take all lanes at once. Called when it stops, after it gave back what it held.
    /// Idempotent; done late or twice it is undone by the next heartbeat, and changes no lease. A
    /// subscription that is gone is fine.
    async fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()>;

    /// The next events of the lane, possibly none.
    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch>;

    /// Delivery rows of the lane whose time has come, possibly none, in the order of the log.
    ///
    /// Of each key the first unfinished event, its head, if it is due, and what directly follows it
    /// and only waits for it. Of more heads than the limit allows, those that are due longest. What
    /// is left of the limit the heads share evenly, so that a key with a deep backlog keeps no
    /// other waiting.
    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch>;

    /// Writes down what became of a batch.
    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()>;

    /// Resolves when there may be something new for the lane. Only a hint: it may resolve for
    /// nothing, or never.
    async fn hint(&self, lease: &Lease);
}
