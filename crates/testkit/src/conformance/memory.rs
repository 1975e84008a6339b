//! The fixture of the memory store: simulated time, late commits.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use postbox_core::{
    Appended, Apply, Error, ErrorKind, Inspect as _, ListQuery, Log as _, LogName, Maintain as _, NewEvent, Outcome,
    Result, SourceName, State, Store, Subscription, SubscriptionName,
};
use postbox_memory::{MemoryStore, MemoryTransaction, Wire};

use super::faults::{Asked, Call, CallFaults, Late, Place};
use super::harness::query;
use super::{ApplyFixture, OpenTransaction, StoreCapabilities, StoreFixture};
use crate::clock::ManualClock;

/// A memory store with a clock of its own.
#[derive(Debug)]
pub struct MemoryFixture {
    /// Moves only by [`ManualClock::advance`].
    pub clock: Arc<ManualClock>,
    /// The store.
    pub store: MemoryStore,
    faults: Arc<MemoryFaults>,
}

impl MemoryFixture {
    /// An empty store.
    pub fn new() -> Self {
        let clock = Arc::new(ManualClock::default());
        let store = MemoryStore::new(clock.clone());
        Self { faults: Arc::new(MemoryFaults::new(&store)), store, clock }
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
        self.faults.clone()
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
        bound_to(&self.store)
    }

    async fn harmed(&self) -> [Arc<dyn Apply>; 2] {
        [bound_to(&self.faults.store), bound_to(&self.faults.store)]
    }

    async fn effects(&self) -> Vec<String> {
        let auditor = SubscriptionName::new("auditor").expect("a valid name");
        let log = effects_log();
        self.store.create_log(&log).await.expect("the store is migrated");
        self.store
            .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(auditor.clone(), log) })
            .await
            .expect("the log is there");
        let all = ListQuery { subscription: auditor, ..query(State::Pending) };
        let records = self.store.list(&all).await.expect("listed");
        records.iter().map(|record| String::from_utf8_lossy(&record.event.payload).into_owned()).collect()
    }
}

/// The handler under test.
fn bound_to(store: &MemoryStore) -> Arc<dyn Apply> {
    store.create_log(&effects_log()).now_or_never().expect("no wait inside").expect("the store is migrated");
    store.apply(|transaction, delivery| {
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

/// Another client of the store, whose connection to the server can be broken.
#[derive(Debug)]
struct MemoryFaults {
    store: MemoryStore,
    wire: Arc<BrokenWire>,
}

impl MemoryFaults {
    fn new(store: &MemoryStore) -> Self {
        let wire = Arc::<BrokenWire>::default();
        Self { store: store.client(Some(wire.clone())), wire }
    }
}

/// Breaks in the middle of one operation, which then arrives only when it is delivered by hand.
#[derive(Debug, Default)]
struct BrokenWire {
    breaks_at: Mutex<Option<&'static str>>,
    kept: Mutex<Option<Arc<postbox_memory::Call>>>,
}

#[async_trait]
impl Wire for BrokenWire {
    async fn carry(&self, call: Arc<postbox_memory::Call>) -> Result<()> {
        let breaks = self.breaks_at.lock().expect("no panic while held").take_if(|at| *at == call.operation);
        if breaks.is_none() {
            call.execute();
            return Ok(());
        }
        let operation = call.operation;
        *self.kept.lock().expect("no panic while held") = Some(call);
        Err(Error::new(ErrorKind::Unavailable, operation, "wire_broken", "the way to the store broke"))
    }
}

#[async_trait]
impl CallFaults for MemoryFaults {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn again(&self) -> Arc<dyn Store> {
        self.store()
    }

    fn places(&self, _call: Call) -> &'static [Place] {
        &[Place::Start]
    }

    async fn lose_answer(&self, call: Call, asked: Asked) {
        self.delay(call, Place::Start, asked).await.after(Box::pin(async {})).await;
    }

    async fn delay(&self, call: Call, _place: Place, asked: Asked) -> Box<dyn Late> {
        let operation = match call {
            Call::Subscribe => "subscribe",
            Call::Acquire => "acquire",
            Call::Renew => "renew",
            Call::Release => "release",
            Call::Leave => "leave",
            Call::NextBatch => "open",
            Call::Position | Call::Settle | Call::SettleAndRead => "settle",
            Call::Retry => "retry",
            Call::Discard => "discard",
            Call::MarkDead => "mark_dead",
            Call::Replay => "replay",
            Call::NoteUnrouted => "note_unrouted",
            Call::Prune => "prune",
            Call::Pause | Call::Resume => "pause",
            Call::Rename => "rename",
            Call::Remove => "remove",
            Call::Reset => "reset",
            Call::SetLanes => "set_lanes",
            Call::HandOver => "hand_over",
            Call::Receive => "receive",
            Call::Append => "append",
            Call::Apply => "apply",
            // These do not go through a client: they are done in one poll, or not yet begun.
            Call::Up | Call::Down => return Box::new(Stopped(asked.map(drop).boxed())),
        };
        *self.wire.breaks_at.lock().expect("no panic while held") = Some(operation);
        asked.await.unwrap_or_else(|| panic!("{call:?} was answered"));
        let kept = self.wire.kept.lock().expect("no panic while held").take();
        let kept = kept.unwrap_or_else(|| panic!("{call:?} never came to its {operation}"));
        Box::new(Stopped(async move { kept.execute() }.boxed()))
    }
}

/// The rest of a stopped call.
struct Stopped(BoxFuture<'static, ()>);

#[async_trait]
impl Late for Stopped {
    async fn after(self: Box<Self>, meanwhile: BoxFuture<'static, ()>) {
        meanwhile.await;
        self.0.await;
    }
}

/// The log where the handler under test writes its effects.
fn effects_log() -> LogName {
    LogName::new("effects").expect("a valid name")
}

struct Open {
    transaction: MemoryTransaction,
    savepoint: Option<usize>,
}

#[async_trait]
impl OpenTransaction for Open {
    async fn append(&mut self, log: &LogName, events: &[NewEvent]) -> Result<Appended> {
        self.transaction.append(log, events)
    }

    async fn once(&mut self, source: &SourceName, message_id: &str) -> Result<bool> {
        self.transaction.once(source, message_id)
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
