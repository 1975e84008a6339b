//! The fixture of the memory store: simulated time, late commits.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use postbox_core::{
    Apply, EventId, Inspect as _, ListQuery, Log as _, LogName, MemoryStore, MemoryTransaction, NewEvent, Outcome,
    Result, State, Store, Subscription, SubscriptionName,
};

use super::faults::{Asked, Call, CallFaults, Late, Place};
use super::{ApplyFixture, OpenTransaction, StoreCapabilities, StoreFixture};
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

    async fn faults(&self) -> Arc<dyn CallFaults> {
        Arc::new(MemoryFaults(self.store.clone()))
    }

    async fn begin(&self) -> Box<dyn OpenTransaction> {
        Box::new(Open { transaction: self.store.begin(), savepoint: None })
    }

    async fn conflicts(&self) -> u64 {
        self.store.conflicts(usize::MAX).await.expect("listed").len() as u64
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }
}

#[async_trait]
impl ApplyFixture for MemoryFixture {
    fn apply(&self) -> Arc<dyn Apply> {
        self.store.create_log(&effects_log()).expect("the store is migrated");
        self.store.apply(|transaction, delivery| {
            let payload = delivery.event.payload.clone();
            let effect = NewEvent::json("effect", payload.clone());
            transaction.append(&effects_log(), &[effect]).expect("the effect is written");
            match &payload[..] {
                b"retry" => Outcome::retry("later", "not now"),
                b"dead" => Outcome::dead("never", "not ever"),
                b"panic" => panic!("as asked"),
                _ => Outcome::DELIVERED,
            }
        })
    }

    async fn harmed(&self) -> [Arc<dyn Apply>; 2] {
        [self.apply(), self.apply()]
    }

    async fn effects(&self) -> Vec<String> {
        let auditor = SubscriptionName::new("auditor").expect("a valid name");
        let log = effects_log();
        self.store.create_log(&log).expect("the store is migrated");
        self.store.subscribe(&Subscription::new(auditor.clone(), log)).await.expect("the log is there");
        let all = ListQuery {
            subscription: auditor,
            state: State::Pending,
            topic: None,
            code: None,
            after: None,
            limit: 1_000,
        };
        let records = self.store.list(&all).await.expect("listed");
        records.iter().map(|record| String::from_utf8_lossy(&record.event.payload).into_owned()).collect()
    }
}

/// A call of this store is done in one poll: it can be polled late, and its answer thrown away.
struct MemoryFaults(MemoryStore);

#[async_trait]
impl CallFaults for MemoryFaults {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }

    fn again(&self) -> Arc<dyn Store> {
        self.store()
    }

    fn places(&self, _call: Call) -> &'static [Place] {
        &[Place::Start]
    }

    async fn lose_answer(&self, _call: Call, asked: Asked) {
        asked.await;
    }

    async fn delay(&self, _call: Call, _place: Place, asked: Asked) -> Box<dyn Late> {
        Box::new(Unpolled(asked))
    }
}

struct Unpolled(Asked);

#[async_trait]
impl Late for Unpolled {
    async fn after(self: Box<Self>, meanwhile: BoxFuture<'static, ()>) {
        meanwhile.await;
        self.0.await;
    }
}

/// Where the handler under test writes its effects.
fn effects_log() -> LogName {
    LogName::new("effects").expect("a valid name")
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
