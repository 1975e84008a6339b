//! A memory store with one subscription under simulated time, and a sink that records events and
//! follows a script.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{
    Append, Capabilities, Clock, Criteria, Delivery, Error, ErrorKind, Headers, Inspect, ListQuery, Log, LogName,
    NewEvent, OnDead, Outcome, Record, Result, RetryPolicy, Sink, State, Stats, Store as _, Subscription, lock,
};
use postbox_engine::{Relay, RelayBuilder, RelaySettings, SystemRandom, TokioClock};
use postbox_memory::{Call, MemoryStore, Wire};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Retries and leases of a few seconds, so that simulated minutes are enough.
pub fn fast() -> RelaySettings {
    RelaySettings {
        retry: RetryPolicy { attempts_max: 4, base: Duration::from_secs(1), ..RetryPolicy::default() },
        lease_ttl: Duration::from_secs(5),
        deliver_timeout: Duration::from_secs(10),
        ..RelaySettings::default()
    }
}

/// The combinations of capabilities that a sink is driven with.
pub fn all_capabilities() -> [Capabilities; 4] {
    [
        Capabilities { batch_max: 1, concurrency: 16, prefix: false, system: None },
        Capabilities { batch_max: 10, concurrency: 3, prefix: false, system: None },
        Capabilities { batch_max: 25, concurrency: 1, prefix: true, system: None },
        Capabilities { batch_max: 10_000, concurrency: 4, prefix: true, system: None },
    ]
}

/// Event number `n`, of key `key`.
pub fn event(key: u64, n: u64) -> NewEvent {
    NewEvent::json("t", "{}").key(key.to_string()).version(n as i64)
}

/// Number of the event, as [`event`] set it; -1 without one.
pub fn version(delivery: &Delivery) -> i64 {
    delivery.event.version.unwrap_or(-1)
}

/// A memory store with a subscription `test` to its outbox.
pub struct TestEnv {
    /// The store.
    pub store: Arc<MemoryStore>,
    /// What the subscription does about dead events.
    pub on_dead: OnDead,
    clock: TokioClock,
    lanes: u16,
}

impl TestEnv {
    /// Creates an environment whose subscription has one lane.
    pub async fn new() -> Self {
        Self::with_lanes(1).await
    }

    /// Creates an environment with these events in its log.
    pub async fn with(events: impl IntoIterator<Item = NewEvent>) -> Self {
        let env = Self::new().await;
        env.append(events).await;
        env
    }

    /// Creates an environment whose subscription has this many lanes.
    pub async fn with_lanes(lanes: u16) -> Self {
        let clock = TokioClock::simulated(Timestamp::UNIX_EPOCH);
        let store = Arc::new(MemoryStore::new(Arc::new(clock.clone())));
        Self { clock, ..Self::on(store, lanes).await }
    }

    /// Subscribes to an existing store.
    pub async fn on(store: Arc<MemoryStore>, lanes: u16) -> Self {
        let env = Self { store, on_dead: OnDead::default(), clock: TokioClock::new(), lanes };
        env.store.subscribe(&env.subscription()).await.expect("subscribed");
        env
    }

    /// Returns the subscription, as a relay is given it.
    pub fn subscription(&self) -> Subscription {
        let name = "test".parse().expect("a name");
        Subscription { lanes: Some(self.lanes), on_dead: self.on_dead, ..Subscription::new(name, LogName::outbox()) }
    }

    /// Returns the simulated time.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Appends these events in one transaction.
    pub async fn append(&self, events: impl IntoIterator<Item = NewEvent>) {
        let events: Vec<NewEvent> = events.into_iter().collect();
        self.store.append(&LogName::outbox(), &events).await.expect("appended");
    }

    /// Appends these events `apart` from each other, round robin over the keys.
    pub async fn append_each(&self, events: std::ops::Range<u64>, keys: u64, apart: Duration) {
        for n in events {
            self.append([event(n % keys, n)]).await;
            tokio::time::sleep(apart).await;
        }
    }

    /// Returns a relay whose connection to the store can be cut.
    pub fn cuttable(&self) -> (Arc<Cable>, Arc<Recorder>, Relay) {
        let (cable, sink) = (Arc::new(Cable::default()), Recorder::new(Capabilities::default()));
        let log = Arc::new(self.store.client(Some(cable.clone())));
        (cable, sink.clone(), self.relay_on(log, sink, fast()))
    }

    /// Starts building a relay of this subscription.
    pub fn builder(&self, subscription: Subscription, settings: RelaySettings) -> RelayBuilder {
        self.builder_on(self.store.clone(), subscription, settings)
    }

    /// Starts building a relay that uses this client of the store.
    pub fn builder_on(&self, log: Arc<dyn Log>, subscription: Subscription, settings: RelaySettings) -> RelayBuilder {
        Relay::builder(log, subscription)
            .settings(settings)
            .admin(self.store.clone())
            .clock(Arc::new(self.clock.clone()))
            .random(Arc::new(SystemRandom))
    }

    /// Returns a relay to this recorder.
    pub fn relay(&self, sink: Arc<Recorder>, settings: RelaySettings) -> Relay {
        self.relay_on(self.store.clone(), sink, settings)
    }

    /// Returns a relay to this recorder that uses this client of the store.
    pub fn relay_on(&self, log: Arc<dyn Log>, sink: Arc<Recorder>, settings: RelaySettings) -> Relay {
        sink.set_clock(self.clock.clone());
        self.builder_on(log, self.subscription(), settings).sink(sink).build().expect("built")
    }

    /// Returns a relay to a new recorder.
    pub fn recorded(&self, capabilities: Capabilities, settings: RelaySettings) -> (Arc<Recorder>, Relay) {
        let sink = Recorder::new(capabilities);
        (sink.clone(), self.relay(sink, settings))
    }

    /// Runs the relay until `operate` has ended.
    pub async fn run_while<T>(&self, relay: &Relay, operate: impl Future<Output = T>) -> T {
        let stop = CancellationToken::new();
        let operating = async {
            let outcome = operate.await;
            stop.cancel();
            outcome
        };
        let (ended, outcome) = tokio::join!(relay.run(stop.clone()), operating);
        ended.expect("ran");
        outcome
    }

    /// Runs the relay for this time.
    pub async fn run_for(&self, relay: &Relay, time: Duration) {
        self.run_while(relay, tokio::time::sleep(time)).await;
    }

    /// Returns the counts of the subscription.
    pub async fn stats(&self) -> Stats {
        self.store.stats(&self.subscription().name).await.expect("stats")
    }

    /// Returns the events in this state.
    pub async fn list(&self, state: State) -> Vec<Record> {
        let subscription = self.subscription().name;
        let query = ListQuery {
            subscription,
            state: Some(state),
            which: Criteria::default(),
            code: None,
            headers: Headers::new(),
            after: None,
            limit: 1_000,
            payloads: true,
        };
        self.store.list(&query).await.expect("listed")
    }
}

/// A connection to the store that can be cut.
#[derive(Default)]
pub struct Cable(AtomicBool);

impl Cable {
    /// Cuts the connection, or mends it.
    pub fn cut(&self, cut: bool) {
        self.0.store(cut, Ordering::SeqCst);
    }
}

#[async_trait]
impl Wire for Cable {
    async fn carry(&self, call: Arc<Call>) -> Result<()> {
        if self.0.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "simulate", "store_down", "the cable is cut"));
        }
        call.execute();
        Ok(())
    }
}

/// A connection to the store on which this operation fails with the error that the function
/// returns, if it returns one.
pub struct FailsAt<F>(pub &'static str, pub F);

#[async_trait]
impl<F: Fn() -> Option<Error> + Send + Sync + 'static> Wire for FailsAt<F> {
    async fn carry(&self, call: Arc<Call>) -> Result<()> {
        if call.operation == self.0
            && let Some(error) = (self.1)()
        {
            return Err(error);
        }
        call.execute();
        Ok(())
    }
}

/// How the sink answers one delivery.
pub enum Answer {
    /// With this outcome.
    Say(Outcome),
    /// With one outcome more than there are deliveries.
    SayTooMuch,
    /// It panics.
    Panic,
    /// Never.
    Hang,
}

impl From<Outcome> for Answer {
    fn from(outcome: Outcome) -> Self {
        Self::Say(outcome)
    }
}

/// A delivery that the recorder accepted.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The key of the event.
    pub key: Option<String>,
    /// Its number; see [`event`].
    pub version: i64,
    /// Its dedupe id.
    pub dedupe_id: String,
    /// The number of the attempt, from 1.
    pub attempt: u32,
    /// Time from append to arrival.
    pub waited: Duration,
}

type Script = Box<dyn Fn(&Delivery) -> Answer + Send + Sync>;

/// Records deliveries in order of arrival.
pub struct Recorder {
    capabilities: Capabilities,
    script: Mutex<Script>,
    arrivals: Mutex<Vec<Arrival>>,
    calls: AtomicUsize,
    down: AtomicBool,
    takes: Mutex<Duration>,
    arrived: Notify,
    clock: Mutex<Option<TokioClock>>,
}

impl Recorder {
    /// Creates a recorder that accepts everything at once.
    pub fn new(capabilities: Capabilities) -> Arc<Self> {
        Arc::new(Self {
            capabilities,
            script: Mutex::new(Box::new(|_| Outcome::DELIVERED.into())),
            arrivals: Mutex::default(),
            calls: AtomicUsize::default(),
            down: AtomicBool::default(),
            takes: Mutex::default(),
            arrived: Notify::new(),
            clock: Mutex::new(None),
        })
    }

    /// Sets how it answers each delivery.
    pub fn script<A: Into<Answer>>(&self, script: impl Fn(&Delivery) -> A + Send + Sync + 'static) {
        *lock(&self.script) = Box::new(move |delivery| script(delivery).into());
    }

    /// Gives one event this answer each time. All others are delivered.
    pub fn answers(&self, event: i64, outcome: Outcome) {
        self.script(move |delivery| if version(delivery) == event { outcome.clone() } else { Outcome::DELIVERED });
    }

    /// Makes it unreachable, or reachable again.
    pub fn down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    /// Sets how long each call takes.
    pub fn takes(&self, time: Duration) {
        *lock(&self.takes) = time;
    }

    /// Returns the number of calls.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Returns what arrived, in order.
    pub fn arrivals(&self) -> Vec<Arrival> {
        lock(&self.arrivals).clone()
    }

    fn set_clock(&self, clock: TokioClock) {
        *lock(&self.clock) = Some(clock);
    }

    /// Waits until this many deliveries have arrived.
    pub async fn wait_for(&self, count: usize) {
        loop {
            let arrived = self.arrived.notified();
            if lock(&self.arrivals).len() >= count {
                return;
            }
            arrived.await;
        }
    }

    /// Returns the versions of the events that arrived, in order.
    pub fn versions(&self) -> Vec<i64> {
        self.arrivals().iter().map(|arrival| arrival.version).collect()
    }

    /// Asserts that first arrivals of each key have rising versions.
    pub fn assert_in_order(&self) {
        let (mut latest, mut seen) = (HashMap::new(), HashSet::new());
        for Arrival { key, version, .. } in self.arrivals() {
            if key.is_some() && seen.insert(version) {
                let before = latest.insert(key.clone(), version).unwrap_or(i64::MIN);
                assert!(before < version, "key {key:?}: {version} arrived after {before}");
            }
        }
    }

    fn arrive(&self, delivery: &Delivery) {
        let now = lock(&self.clock).as_ref().map_or(Timestamp::UNIX_EPOCH, Clock::now);
        let waited = Duration::try_from(now.duration_since(delivery.event.created_at)).unwrap_or_default();
        lock(&self.arrivals).push(Arrival {
            key: delivery.event.key.as_ref().map(|key| key.to_string()),
            version: version(delivery),
            dedupe_id: delivery.dedupe_id(),
            attempt: delivery.attempt,
            waited,
        });
        self.arrived.notify_waiters();
    }
}

#[async_trait]
impl Sink for Recorder {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        assert!(deliveries.len() <= self.capabilities.batch_max, "a call within the sink's limit");
        let takes = *lock(&self.takes);
        if !takes.is_zero() {
            tokio::time::sleep(takes).await;
        }
        let mut outcomes = Vec::new();
        let mut failed_keys = HashSet::new();
        for delivery in deliveries {
            let key = delivery.event.key.clone();
            if self.down.load(Ordering::SeqCst) {
                outcomes.push(Outcome::unavailable("connect_refused", "down"));
                continue;
            }
            // A sink that declares `prefix` promises this; other sinks never get two events of a
            // key.
            if key.as_ref().is_some_and(|key| failed_keys.contains(key)) {
                assert!(self.capabilities.prefix, "two events of a key in one call");
                outcomes.push(Outcome::retry("behind", "an earlier event of the key failed"));
                continue;
            }
            let answer = (lock(&self.script))(delivery);
            match answer {
                Answer::Say(outcome) => {
                    if outcome.is_delivered() {
                        self.arrive(delivery);
                    } else {
                        failed_keys.extend(key);
                    }
                    outcomes.push(outcome);
                }
                Answer::SayTooMuch => return vec![Outcome::DELIVERED; deliveries.len() + 1],
                Answer::Panic => panic!("as the script says"),
                Answer::Hang => std::future::pending().await,
            }
        }
        outcomes
    }
}
