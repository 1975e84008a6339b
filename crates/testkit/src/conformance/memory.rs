//! The fixture of the memory store: simulated time, late commits.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{EventId, LogName, MemoryStore, MemoryTransaction, NewEvent, Result, Store};

use super::{OpenTransaction, StoreCapabilities, StoreFixture};
use crate::clock::ManualClock;

/// A memory store under a clock of its own.
#[derive(Debug)]
pub struct MemoryFixture {
    /// Moves only when told.
    pub clock: Arc<ManualClock>,
    /// The store.
    pub store: MemoryStore,
}

impl MemoryFixture {
    /// An empty store.
    pub fn new() -> Self {
        let clock = Arc::new(ManualClock::default());
        Self { store: MemoryStore::new(clock.clone()), clock }
    }
}

impl Default for MemoryFixture {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl StoreFixture for MemoryFixture {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn capabilities(&self) -> StoreCapabilities {
        StoreCapabilities { concurrent_transactions: true }
    }

    async fn begin(&self) -> Box<dyn OpenTransaction> {
        Box::new(Open { transaction: self.store.begin(), savepoint: None })
    }

    async fn conflicts(&self) -> u64 {
        self.store.conflicts().len() as u64
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }
}

struct Open {
    transaction: MemoryTransaction,
    savepoint: Option<usize>,
}

#[async_trait]
impl OpenTransaction for Open {
    async fn append(&mut self, log: &LogName, events: &[NewEvent]) -> Result<Vec<EventId>> {
        self.transaction.append(log, events)
    }

    async fn savepoint(&mut self) {
        self.savepoint = Some(self.transaction.savepoint());
    }

    async fn rollback_to_savepoint(&mut self) {
        self.transaction.rollback_to(self.savepoint.take().expect("a savepoint was set"));
    }

    async fn commit(self: Box<Self>) {
        self.transaction.commit();
    }

    async fn rollback(self: Box<Self>) {
        self.transaction.rollback();
    }
}
