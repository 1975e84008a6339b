//! What an implementation brings to its suite.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Apply, EventId, LogName, NewEvent, Result, Sink, SourceName, Store};

use super::faults::CallFaults;

/// What a store can do, as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreCapabilities {
    /// Several transactions may be open at once and commit in any order. `false` for a store with one writer.
    pub concurrent_transactions: bool,
}

/// A fresh store for one case: migrated, empty, nobody else's. Dropping it cleans up.
#[async_trait]
pub trait StoreFixture: Send + Sync {
    /// The store under test; the same one at every call.
    fn store(&self) -> Arc<dyn Store>;

    /// What it can do.
    fn capabilities(&self) -> StoreCapabilities;

    /// Opens a transaction of a producer, on a connection of its own. It has its place in the order of transactions at once.
    async fn begin(&self) -> Box<dyn OpenTransaction>;

    /// How many conflict records [`postbox_core::Receive`] has left.
    async fn conflicts(&self) -> u64;

    /// Harm to calls of this store; the same one at every call.
    async fn faults(&self) -> Arc<dyn CallFaults>;

    /// Lets time pass on the store's clock: waits on a real store, moves the clock of a simulated one.
    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}

/// A producer's open transaction. Dropping it rolls it back.
#[async_trait]
pub trait OpenTransaction: Send {
    /// Appends inside the transaction: the driver's `append_in`.
    async fn append(&mut self, log: &LogName, events: &[NewEvent]) -> Result<Vec<EventId>>;
    /// Whether a message is applied for the first time: the driver's `once_in`.
    async fn once(&mut self, source: &SourceName, message_id: &str) -> Result<bool>;
    /// Sets the savepoint; there is at most one.
    async fn savepoint(&mut self);
    /// Rolls back to the savepoint and forgets it.
    async fn rollback_to_savepoint(&mut self);
    /// Commits.
    async fn commit(self: Box<Self>);
    /// Rolls back.
    async fn rollback(self: Box<Self>);
}

/// A store whose handlers share its transaction.
#[async_trait]
pub trait ApplyFixture: StoreFixture {
    /// The handler under test, bound to the store. It writes the payload down as an effect, in its transaction, and only then says
    /// what became of it: `retry` fails for now, `dead` for good, `panic` panics, anything else is delivered.
    fn apply(&self) -> Arc<dyn Apply>;

    /// The same handler, bound to the store whose calls are harmed ([`CallFaults::store`]), and to the one through which its caller goes on
    /// ([`CallFaults::again`]).
    async fn harmed(&self) -> [Arc<dyn Apply>; 2];

    /// The payloads whose effect was committed, in order.
    async fn effects(&self) -> Vec<String>;
}

/// A sink and a destination that tells what reached it. Fresh for each case.
#[async_trait]
pub trait SinkFixture: Send + Sync {
    /// The sink under test; the same one at every call.
    fn sink(&self) -> Arc<dyn Sink>;

    /// Payloads that arrived at the destination and were accepted there, in order of arrival.
    async fn arrived(&self) -> Vec<Vec<u8>>;

    /// Changes an event so that the destination refuses this one (and only this one) for good.
    /// `None`: this destination takes everything.
    fn poison(&self, event: NewEvent) -> Option<NewEvent>;

    /// Lets the destination fail every delivery in a way that may pass, or work again. `false`: it cannot be made to fail.
    async fn fail(&self, failing: bool) -> bool;

    /// Takes the whole destination away: nobody listens. `false`: there is no such state.
    async fn take_down(&self) -> bool;
}
