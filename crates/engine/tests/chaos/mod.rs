//! The faults of the simulation, all drawn from one seed.

#![allow(dead_code, unreachable_pub, reason = "a module of several test binaries, each of which uses its part")]

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Acquired, Apply, Batch, BatchLimit, Capabilities, Decide, Delivery, Disposition, Entry, Error, ErrorKind, Key,
    Lease, Log, LogName, MemoryStore, MemoryTransaction, NewEvent, Outcome, OwnerId, Random, Result, Settlement, Sink,
    Subscription, SubscriptionName,
};
use postbox_engine::SeededRandom;
use tokio::time::{Instant, sleep};

const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);

/// How likely each fault is, per call.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    /// The store answers `Unavailable` and did nothing.
    store_refuses: f64,
    /// The store did it, and its answer is lost.
    store_loses_answer: f64,
    /// The lane's lease is taken away behind its holder's back.
    lease_stolen: f64,
    store_latency_max: Duration,
    sink_latency_max: Duration,
    sink_fails: f64,
    sink_panics: f64,
    sink_hangs: f64,
    sink_breaks_contract: f64,
    /// Part of all events that the sink refuses for good, always.
    poison: f64,
    sink_outages: bool,
    store_outages: bool,
}

impl Faults {
    pub fn storm() -> Self {
        Self {
            store_refuses: 0.02,
            store_loses_answer: 0.01,
            lease_stolen: 0.005,
            store_latency_max: 20 * MS,
            sink_latency_max: 100 * MS,
            sink_fails: 0.05,
            sink_panics: 0.01,
            sink_hangs: 0.005,
            sink_breaks_contract: 0.005,
            poison: 0.02,
            sink_outages: true,
            store_outages: true,
        }
    }

    pub fn slow() -> Self {
        Self { store_latency_max: 20 * MS, sink_latency_max: 400 * MS, ..Self::default() }
    }

    pub fn outages() -> Self {
        Self { sink_outages: true, ..Self::slow() }
    }
}

/// The one source of chance, and the weather.
pub struct Chaos {
    random: SeededRandom,
    faults: Mutex<Faults>,
    sink_down: AtomicBool,
    store_down: AtomicBool,
}

impl Chaos {
    pub fn new(seed: u64, faults: Faults) -> Arc<Self> {
        let random = SeededRandom::new(seed);
        let faults = Mutex::new(faults);
        Arc::new(Self { random, faults, sink_down: AtomicBool::new(false), store_down: AtomicBool::new(false) })
    }

    pub fn chance(&self, likely: f64) -> bool {
        self.random.unit() < likely
    }

    pub fn pick(&self, count: usize) -> usize {
        (self.random.unit() * count as f64) as usize
    }

    pub fn draw(&self) -> u64 {
        (self.random.unit() * u64::MAX as f64) as u64
    }

    pub fn up_to(&self, max: Duration) -> Duration {
        max.mul_f64(self.random.unit())
    }

    fn faults(&self) -> Faults {
        *self.faults.lock().unwrap()
    }

    /// The faults end; poison stays poison.
    pub fn calm(&self) {
        let mut faults = self.faults.lock().unwrap();
        *faults = Faults { poison: faults.poison, ..Faults::default() };
        self.sink_down.store(false, Ordering::SeqCst);
        self.store_down.store(false, Ordering::SeqCst);
    }

    /// The store goes away or comes back.
    pub fn store_down(&self, down: bool) {
        self.store_down.store(down, Ordering::SeqCst);
    }

    /// Outages come and go.
    pub async fn weather(&self, until: Instant) {
        while Instant::now() < until {
            sleep(self.up_to(6 * S)).await;
            let faults = self.faults();
            self.sink_down.store(faults.sink_outages && self.chance(0.4), Ordering::SeqCst);
            self.store_down.store(faults.store_outages && self.chance(0.2), Ordering::SeqCst);
        }
    }
}

/// A memory store behind a bad wire.
pub struct ChaosLog {
    chaos: Arc<Chaos>,
    inner: MemoryStore,
}

impl ChaosLog {
    pub fn new(chaos: Arc<Chaos>, inner: MemoryStore) -> Self {
        Self { chaos, inner }
    }

    async fn there(&self, lease: Option<&Lease>) -> Result<()> {
        let faults = self.chaos.faults();
        if !faults.store_latency_max.is_zero() {
            sleep(self.chaos.up_to(faults.store_latency_max)).await;
        }
        if let Some(lease) = lease.filter(|_| self.chaos.chance(faults.lease_stolen)) {
            self.inner.release(lease).await?;
        }
        if self.chaos.store_down.load(Ordering::SeqCst) || self.chaos.chance(faults.store_refuses) {
            return Err(down());
        }
        Ok(())
    }

    async fn back<T>(&self, answer: Result<T>) -> Result<T> {
        let faults = self.chaos.faults();
        if !faults.store_latency_max.is_zero() {
            sleep(self.chaos.up_to(faults.store_latency_max)).await;
        }
        if self.chaos.chance(faults.store_loses_answer) { Err(down()) } else { answer }
    }
}

fn down() -> Error {
    Error::new(ErrorKind::Unavailable, "simulate", "store_down", "the simulated store is down")
}

#[async_trait]
impl Log for ChaosLog {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        self.there(None).await?;
        self.back(self.inner.subscribe(subscription).await).await
    }

    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        self.there(None).await?;
        self.back(self.inner.acquire(subscription, owner, held, ttl).await).await
    }

    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        self.there(Some(lease)).await?;
        self.back(self.inner.renew(lease, ttl).await).await
    }

    async fn release(&self, lease: &Lease) -> Result<()> {
        self.there(None).await?;
        self.back(self.inner.release(lease).await).await
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        self.there(Some(lease)).await?;
        self.back(self.inner.next_batch(lease, limit).await).await
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        self.there(Some(lease)).await?;
        self.back(self.inner.due(lease, limit).await).await
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        self.there(Some(lease)).await?;
        self.back(self.inner.settle(lease, settlement).await).await
    }

    async fn hint(&self, lease: &Lease) {
        self.inner.hint(lease).await;
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    pub number: i64,
    pub attempt: u32,
}

impl Arrival {
    fn of(delivery: &Delivery) -> Self {
        Self { number: delivery.event.version.expect("every event has its number"), attempt: delivery.attempt }
    }

    /// Whether the event is one of the part that is always refused.
    fn is_poison(&self, part: f64) -> bool {
        // A fixed scramble of the number, so that the same events are poison for every caller.
        let scrambled = (self.number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        (scrambled as f64) < part * f64::from(1 << 24)
    }
}

/// A destination in bad weather.
pub struct ChaosSink {
    chaos: Arc<Chaos>,
    capabilities: Capabilities,
    arrivals: Mutex<Vec<Arrival>>,
}

impl ChaosSink {
    pub fn new(chaos: Arc<Chaos>, capabilities: Capabilities) -> Self {
        Self { chaos, capabilities, arrivals: Mutex::default() }
    }

    pub fn arrivals(&self) -> Vec<Arrival> {
        self.arrivals.lock().unwrap().clone()
    }

    fn judge(&self, delivery: &Delivery, faults: &Faults) -> Outcome {
        let arrival = Arrival::of(delivery);
        if self.chaos.sink_down.load(Ordering::SeqCst) {
            return Outcome::unavailable("connect_refused", "the simulated destination is down");
        }
        if arrival.is_poison(faults.poison) {
            return Outcome::dead("http_422", "poison");
        }
        if self.chaos.chance(faults.sink_fails) {
            return Outcome::retry("http_500", "bad luck");
        }
        self.arrivals.lock().unwrap().push(arrival);
        // It arrived, and the destination says it did not.
        if self.chaos.chance(faults.sink_fails / 2.0) { Outcome::retry("http_504", "lost") } else { Outcome::DELIVERED }
    }
}

#[async_trait]
impl Sink for ChaosSink {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let faults = self.chaos.faults();
        sleep(self.chaos.up_to(faults.sink_latency_max)).await;
        assert!(!self.chaos.chance(faults.sink_panics), "a simulated panic");
        let mut failed: HashSet<&Key> = HashSet::new();
        let mut outcomes = Vec::new();
        for delivery in deliveries {
            let key = delivery.event.key.as_ref();
            if key.is_some_and(|key| failed.contains(key)) {
                outcomes.push(Outcome::retry("behind", "an earlier event of the key failed"));
                continue;
            }
            let outcome = self.judge(delivery, &faults);
            if !outcome.is_delivered() {
                failed.extend(key);
            }
            outcomes.push(outcome);
        }
        if self.chaos.chance(faults.sink_hangs) {
            std::future::pending::<()>().await;
        }
        if self.chaos.chance(faults.sink_breaks_contract) {
            outcomes.pop();
        }
        sleep(self.chaos.up_to(faults.sink_latency_max)).await;
        outcomes
    }
}

/// A handler in the memory store's "transaction": its effects count only if the settlement was written.
pub struct ChaosApply {
    chaos: Arc<Chaos>,
    store: MemoryStore,
    effects: Mutex<Vec<Arrival>>,
}

impl ChaosApply {
    pub fn new(chaos: Arc<Chaos>, store: MemoryStore) -> Self {
        Self { chaos, store, effects: Mutex::default() }
    }

    pub fn effects(&self) -> Vec<Arrival> {
        self.effects.lock().unwrap().clone()
    }
}

#[async_trait]
impl Apply for ChaosApply {
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        let faults = self.chaos.faults();
        sleep(self.chaos.up_to(faults.sink_latency_max)).await;
        if self.chaos.store_down.load(Ordering::SeqCst) || self.chaos.chance(faults.store_refuses) {
            return Err(down());
        }
        assert!(!self.chaos.chance(faults.sink_panics), "a simulated panic");
        if self.chaos.chance(faults.sink_hangs) {
            std::future::pending::<()>().await;
        }
        let mut settlement = settlement;
        let (mut effects, mut outcomes) = (Vec::new(), Vec::new());
        let mut failed: HashSet<&Key> = HashSet::new();
        for delivery in deliveries {
            let key = delivery.event.key.as_ref().filter(|_| settlement.hold_keys);
            if key.is_some_and(|key| failed.contains(key)) {
                settlement.entries.push(Entry { delivery, disposition: Disposition::Block });
                outcomes.push(None);
                continue;
            }
            let arrival = Arrival::of(delivery);
            let outcome = match () {
                () if self.chaos.sink_down.load(Ordering::SeqCst) => Outcome::unavailable("down", "down"),
                () if arrival.is_poison(faults.poison) => Outcome::dead("declined", "poison"),
                () if self.chaos.chance(faults.sink_fails) => Outcome::retry("handler_error", "bad luck"),
                () => Outcome::DELIVERED,
            };
            if outcome.is_delivered() {
                effects.push(arrival);
            } else {
                failed.extend(key);
            }
            // Due batches have an entry for every delivery; in the stream the position says it.
            if !outcome.is_delivered() || settlement.position.is_none() {
                settlement.entries.push(Entry { delivery, disposition: decide(delivery, &outcome) });
            }
            outcomes.push(Some(outcome));
        }
        // No await between the two: one transaction.
        self.store.settle(lease, settlement).await?;
        self.effects.lock().unwrap().extend(effects);
        sleep(self.chaos.up_to(faults.store_latency_max)).await;
        if self.chaos.chance(faults.store_loses_answer) { Err(down()) } else { Ok(outcomes) }
    }
}

/// Appends in transactions that hold their keys, commit late or roll back.
pub struct Producer {
    chaos: Arc<Chaos>,
    store: MemoryStore,
    number: i64,
    committed: BTreeMap<String, Vec<i64>>,
}

impl Producer {
    pub fn new(chaos: Arc<Chaos>, store: MemoryStore) -> Self {
        Self { chaos, store, number: 0, committed: BTreeMap::new() }
    }

    /// The numbers of committed events of each key, in commit order; those without key under their own name.
    pub fn committed(self) -> BTreeMap<String, Vec<i64>> {
        self.committed
    }

    pub async fn run(&mut self, until: Instant) {
        let keys = [1, 5, 40][self.chaos.pick(3)];
        let mut open = Vec::new();
        let mut taken: BTreeSet<String> = BTreeSet::new();
        while Instant::now() < until || !open.is_empty() {
            sleep(self.chaos.up_to(60 * MS)).await;
            if Instant::now() < until && open.len() < 6 {
                let key = format!("key-{}", self.chaos.pick(keys));
                // A writer serialises on its aggregate: one open transaction a key.
                if taken.insert(key.clone()) {
                    open.push(self.write(key).await);
                }
            }
            // Any of them ends, late ones too.
            if !open.is_empty() && self.chaos.chance(0.6) {
                let (transaction, key, written) = open.swap_remove(self.chaos.pick(open.len()));
                taken.remove(&key);
                if self.chaos.chance(0.1) {
                    drop(transaction);
                } else {
                    transaction.commit();
                    for (name, number) in written {
                        self.committed.entry(name).or_default().push(number);
                    }
                }
            }
        }
    }

    /// A transaction with events of one key, and now and then one without.
    async fn write(&mut self, key: String) -> (MemoryTransaction, String, Vec<(String, i64)>) {
        let mut transaction = self.store.begin();
        let (mut events, mut written) = (Vec::new(), Vec::new());
        for _ in 0..=self.chaos.pick(6) {
            self.number += 1;
            let event = NewEvent::json("sim", "{}").version(self.number);
            if self.chaos.chance(0.1) {
                events.push(event);
                written.push((format!("none-{}", self.number), self.number));
            } else {
                events.push(event.key(key.clone()));
                written.push((key.clone(), self.number));
            }
        }
        transaction.append(&LogName::outbox(), &events).expect("appended");
        (transaction, key, written)
    }
}
