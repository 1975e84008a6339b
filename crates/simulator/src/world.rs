//! One world: the server, the clock, the wire, and how the plan affects them.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Clock, Delivery, Error, ErrorKind, Event, Lease, LogName, OnDead, Result, Subscription, lock};
use postbox_memory::{Call, Wire};
use tokio::sync::Notify;
use tokio::time::{sleep, sleep_until};

use crate::gate::SimTime;
use crate::ledger::{Ledger, Who};
use crate::plan::{At, CALLERS, Fate, Fault, LANES_MAX, Mishap, OPERATOR, Plan, Step};
use crate::rng::Rng;
use crate::server::Server;
use crate::sink::Effect;
use crate::sqlite_client::SqliteCall;

/// The lease of a lane.
pub(crate) const LEASE: Duration = Duration::from_millis(2_000);

/// How long a call of the destination, or a handler's transaction, may take.
pub(crate) const DELIVER_TIMEOUT: Duration = Duration::from_millis(800);

/// Maximum store calls in one world. Ordinary ones make a few hundred; short runs that follow each
/// other for a minute make many more.
const CALLS_MAX: u32 = 60_000;

/// Returns an event's number in the ledger.
pub(crate) fn number_of(event: &Event) -> usize {
    event.version.unwrap_or_default() as usize
}

pub(crate) struct World {
    pub(crate) plan: Plan,
    /// Each is driven by other relays.
    pub(crate) subscriptions: Vec<Subscription>,
    /// The server itself, without a wire.
    pub(crate) server: Server,
    time: Arc<SimTime>,
    /// Rises each time the store goes back. Calls that were on their way to the server before are
    /// lost with it.
    generation: AtomicU64,
    /// Set when the faults have ended.
    calm: AtomicBool,
    /// Wakes relays that stand still when the faults end, with all their calls.
    thaw: Notify,
    /// Notified when an event has ended a relay.
    ended: Notify,
    /// Number of calls that the server will execute later.
    late: AtomicU64,
    stalled: [AtomicU64; CALLERS],
    outages: Vec<(At, At)>,
    faults: HashMap<(u8, &'static str, u32), Fault>,
    state: Mutex<WorldState>,
    tracing: bool,
}

pub(crate) struct WorldState {
    /// By subscription.
    pub(crate) ledgers: Vec<Ledger>,
    rng: Rng,
    /// How often each operation was called, by relay.
    calls: HashMap<(u8, &'static str), u32>,
    /// The life of each relay that runs and is not stopping.
    pub(crate) lives: HashMap<u8, u32>,
    /// Relays that an event ended and that were not restarted yet.
    ended: VecDeque<Who>,
    sends: u32,
    /// By number of the call.
    mishaps: HashMap<u32, Mishap>,
    /// Number of events that the destination accepted, by the relay that sent them.
    pub(crate) accepted: HashMap<Who, usize>,
    carried: u32,
    effects_seen: HashMap<i64, i64>,
    /// A hash of everything that happened, in order.
    hash: u64,
    trace: Vec<String>,
    /// By subscription and lane: its last line in the history.
    traced: HashMap<(usize, usize), String>,
}

impl WorldState {
    /// Adds to the history.
    pub(crate) fn note(&mut self, world: &World, line: impl FnOnce() -> String) {
        if world.tracing {
            self.trace.push(format!("{:>6} ms  {}", world.now(), line()));
        }
    }

    /// Returns the ledger of the subscription that a relay drives.
    pub(crate) fn ledger(&mut self, who: Who) -> &mut Ledger {
        let count = self.ledgers.len();
        &mut self.ledgers[usize::from(who.0) % count]
    }

    /// Records a violation of the world as a whole.
    pub(crate) fn fail(&mut self, violation: impl FnOnce() -> String) {
        self.ledgers[0].fail(violation);
    }

    fn violation(&self) -> Option<&String> {
        self.ledgers.iter().find_map(|ledger| ledger.violation.as_ref())
    }

    fn mix(&mut self, value: u64) {
        self.hash = (self.hash ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    }
}

impl World {
    pub(crate) fn new(plan: Plan, tracing: bool) -> Self {
        let time = Arc::new(SimTime::new());
        let subscription = |index: u16| Subscription {
            lanes: Some((plan.shape.lanes - 1 + index) % LANES_MAX + 1),
            ordering: match plan.shape.ordered {
                true => postbox_core::Ordering::Key,
                false => postbox_core::Ordering::None,
            },
            on_dead: if plan.shape.halt { OnDead::Halt } else { OnDead::Continue },
            ..Subscription::new(format!("sim-{index}").parse().expect("a name"), LogName::outbox())
        };
        let subscriptions: Vec<Subscription> = (0..u16::from(plan.shape.subscriptions)).map(subscription).collect();
        let (mut faults, mut mishaps, mut outages) = (HashMap::new(), HashMap::new(), Vec::new());
        for step in &plan.steps {
            match *step {
                Step::Fault { relay, operation, nth, fault } => {
                    _ = faults.insert((relay, plan.store.operation(operation), nth), fault);
                }
                Step::Mishap { nth, mishap } => _ = mishaps.insert(nth, mishap),
                Step::Outage { at, held } => outages.push((at, at + held)),
                _ => {}
            }
        }
        let ledger = |index| Ledger::new(index, plan.shape.attempts_max, plan.shape.ordered, plan.shape.halt);
        let state = WorldState {
            ledgers: (0..subscriptions.len()).map(ledger).collect(),
            rng: Rng::new(plan.seed ^ 0xA5A5),
            calls: HashMap::new(),
            lives: HashMap::new(),
            ended: VecDeque::new(),
            sends: 0,
            mishaps,
            accepted: HashMap::new(),
            carried: 0,
            effects_seen: HashMap::new(),
            hash: 0xcbf2_9ce4_8422_2325,
            trace: Vec::new(),
            traced: HashMap::new(),
        };
        Self {
            server: Server::new(&plan, &time, &subscriptions),
            subscriptions,
            time,
            generation: AtomicU64::new(0),
            calm: AtomicBool::new(false),
            thaw: Notify::new(),
            ended: Notify::new(),
            late: AtomicU64::new(0),
            stalled: Default::default(),
            outages,
            faults,
            state: Mutex::new(state),
            tracing,
            plan,
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, WorldState> {
        lock(&self.state)
    }

    pub(crate) fn now(&self) -> At {
        u64::try_from(self.time.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn note(&self, line: impl FnOnce() -> String) {
        if self.tracing {
            self.state().note(self, line);
        }
    }

    /// Returns whether nothing is waiting in the store and no call in flight can change that. A
    /// late retry by a person, for example, sends dead events again.
    pub(crate) fn is_drained(&self) -> bool {
        self.late.load(Ordering::Relaxed) == 0 && self.state().ledgers.iter().all(Ledger::is_drained)
    }

    /// Lets the destination accept what it answered as if it were down. Returns whether there was
    /// anything.
    pub(crate) fn heal(&self) -> bool {
        let mut state = self.state();
        let facts = state.ledgers.iter_mut().flat_map(|ledger| &mut ledger.facts);
        facts.filter(|fact| fact.fate == Fate::SeemsDown).map(|fact| fact.fate = Fate::Fine).count() > 0
    }

    pub(crate) fn is_violated(&self) -> bool {
        self.state().violation().is_some()
    }

    /// Ends the faults.
    pub(crate) fn calm(&self) {
        self.calm.store(true, Ordering::Relaxed);
        self.stalled.iter().for_each(|until| until.store(0, Ordering::Relaxed));
        self.thaw.notify_waiters();
        self.note(|| "the faults end".to_owned());
    }

    pub(crate) fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    pub(crate) fn is_out(&self) -> bool {
        let now = self.now();
        !self.is_calm() && self.outages.iter().any(|(from, until)| (*from..*until).contains(&now))
    }

    /// Lets a relay stand still.
    pub(crate) fn stall(&self, relay: u8, held: At) {
        self.stalled[usize::from(relay)].store(self.now() + held, Ordering::Relaxed);
        self.disturb(relay);
    }

    /// Records that something abrupt happens to a relay.
    pub(crate) fn disturb(&self, relay: u8) {
        self.state().ledger((relay, 0)).disturb(relay);
    }

    /// Waits while the relay stands still.
    async fn gate(&self, relay: u8) {
        let until = self.stalled[usize::from(relay)].load(Ordering::Relaxed);
        if until > self.now() {
            tokio::select! {
                biased;
                () = self.thaw.notified() => {}
                () = sleep_until(self.time.zero() + Duration::from_millis(until)) => {}
            }
            // It may have got a lane meanwhile.
            self.disturb(relay);
        }
    }

    /// A point where the scheduler may run something else first.
    pub(crate) async fn jitter(&self, who: Who) {
        self.gate(who.0).await;
        let jitter = self.plan.shape.jitter;
        if jitter == 0 {
            return;
        }
        let draw = self.state().rng.below(16);
        match draw {
            0..=8 => {}
            9..=13 => tokio::task::yield_now().await,
            _ => sleep(Duration::from_millis(draw % 4 + jitter * jitter)).await,
        }
    }

    /// Returns whether there were more calls than any work can need: something asks again and again
    /// while no time passes.
    fn spins(&self, who: Who, operation: &str) -> bool {
        let mut state = self.state();
        state.carried += 1;
        if state.carried > CALLS_MAX {
            state.fail(|| format!("spin: relay {}.{} calls {operation} again and again", who.0, who.1));
        }
        state.violation().is_some()
    }

    /// Returns the fault for this call of an operation.
    pub(crate) fn fault(&self, relay: u8, operation: &'static str) -> Option<Fault> {
        let mut state = self.state();
        let count = state.calls.entry((relay, operation)).or_insert(0);
        let nth = *count;
        *count += 1;
        if self.is_calm() { None } else { self.faults.get(&(relay, operation, nth)).copied() }
    }

    /// Executes a call on the server, unless it was lost with the server it was on its way to.
    async fn execute(&self, trip: &Trip, who: Who, generation: u64, is_late: bool) -> bool {
        if self.generation() != generation {
            return false;
        }
        match trip {
            Trip::Sqlite(call) => (call.execute)(is_late).await,
            Trip::Memory(call) => {
                call.execute();
                self.observe(call.operation, call.lease.as_ref(), who);
                true
            }
        }
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Checks the store after an operation.
    pub(crate) fn observe(&self, operation: &'static str, lease: Option<&Lease>, who: Who) {
        let lease_ends = self.now() + LEASE.as_millis() as u64;
        let mut state = self.state();
        state.mix(self.now() << 8 | u64::from(who.0));
        operation.bytes().for_each(|byte| state.mix(byte.into()));
        state.note(self, || {
            let epoch = lease.map(|lease| format!(" lane {} epoch {}", lease.lane, lease.epoch));
            format!("relay {}.{}: {operation}{}", who.0, who.1, epoch.unwrap_or_default())
        });
        if operation == "apply" {
            self.count_effects(&mut state);
        }
        let subscription = self.plan.subscription_of(who.0);
        for (index, ledger) in state.ledgers.iter_mut().enumerate() {
            match index == subscription || matches!(operation, "prune" | "note_unrouted") {
                true => ledger.observe(&self.server, operation, lease, who, lease_ends),
                false => ledger.observe_other(&self.server, operation),
            }
        }
        if self.tracing && matches!(operation, "open" | "settle" | "apply" | "acquire" | "set_lanes" | "reset") {
            for (lane, at) in self.server.cursors(subscription).into_iter().enumerate() {
                let line =
                    format!("lane {lane}: epoch {}, window {} to {}, settled {}", at.epoch, at.from, at.to, at.settled);
                if state.traced.insert((subscription, lane), line.clone()).as_ref() != Some(&line) {
                    state.note(self, || format!("        {line}"));
                }
            }
        }
    }

    /// Checks what handlers wrote.
    fn count_effects(&self, state: &mut WorldState) {
        let mut fresh = Vec::new();
        self.server.each_effect(|seq, version| match state.effects_seen.get(&version).copied() {
            Some(known) if known == seq => {}
            Some(_) => state.fail(|| format!("effect: {:?} was applied twice", Effect::of(version))),
            None => fresh.push((seq, version)),
        });
        for (seq, version) in fresh {
            if state.effects_seen.insert(version, seq).is_some_and(|other| other != seq) {
                state.fail(|| format!("effect: {:?} was applied twice", Effect::of(version)));
            }
            let Effect { subscription, number, replay } = Effect::of(version);
            state.ledgers[subscription].arrive(number, replay);
        }
    }

    /// Records that a writer's transaction ended.
    pub(crate) fn committed(&self, numbers: &[usize]) {
        let mut state = self.state();
        for ledger in &mut state.ledgers {
            numbers.iter().for_each(|number| ledger.commit(*number));
            ledger.observe(&self.server, "commit", None, (OPERATOR, 0), 0);
        }
    }

    /// Takes the store back to an earlier state. Calls on their way to it are lost.
    pub(crate) fn go_back(&self, may_lose: bool, back: impl FnOnce()) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        back();
        let mut state = self.state();
        state.effects_seen.clear();
        let apply = self.plan.shape.apply;
        state.ledgers.iter_mut().for_each(|ledger| ledger.went_back(&self.server, may_lose, apply));
        if apply {
            self.count_effects(&mut state);
        }
        let cursors = || (0..self.subscriptions.len()).map(|index| self.server.cursors(index)).collect::<Vec<_>>();
        state.note(self, || format!("the store went back; cursors {:?}", cursors()));
    }

    /// Takes what lets a handler's transaction wait, from the mishaps of as many calls.
    pub(crate) fn take_wait(&self, calls: usize) -> Option<Mishap> {
        let state = &mut *self.state();
        let is_wait = |nth: &u32| matches!(state.mishaps.get(nth), Some(Mishap::Hangs | Mishap::Slow(_)));
        let nth = (state.sends..).take(calls).find(is_wait)?;
        state.mishaps.remove(&nth).filter(|_| !self.is_calm())
    }

    /// Begins a call of the destination.
    pub(crate) fn begin_call(&self, who: Who, deliveries: &[&Delivery]) -> Option<Mishap> {
        let now = self.now();
        let mut state = self.state();
        let nth = state.sends;
        state.sends += 1;
        state.mix(now << 8 | 0xFF);
        for delivery in deliveries {
            let number = number_of(&delivery.event);
            state.mix(number as u64);
            state.ledger(who).send(who, number, delivery.attempt, delivery.replay, now);
        }
        let mishap = if self.is_calm() { None } else { state.mishaps.get(&nth).copied() };
        state.note(self, || {
            let numbers: Vec<usize> = deliveries.iter().map(|delivery| number_of(&delivery.event)).collect();
            format!("relay {}.{}: call {nth} with events {numbers:?} {mishap:?}", who.0, who.1)
        });
        mishap
    }

    /// Ends the relay that sends an event, if that relay still exists.
    pub(crate) async fn ends(&self, who: Who, number: usize) {
        {
            let mut state = self.state();
            state.ledger(who).ended(number);
            state.ended.push_back(who);
            state.note(self, || format!("event {number} ends relay {}.{}", who.0, who.1));
        }
        self.ended.notify_one();
        std::future::pending().await
    }

    /// Waits for the next relay that an event ended.
    pub(crate) async fn next_ended(&self) -> Who {
        loop {
            let ended = self.state().ended.pop_front();
            match ended {
                Some(who) => return who,
                None => self.ended.notified().await,
            }
        }
    }

    /// Records a result, or none, that counts as an attempt of each delivery.
    pub(crate) fn charge(&self, who: Who, deliveries: &[&Delivery]) {
        let mut state = self.state();
        deliveries.iter().for_each(|delivery| state.ledger(who).failed(number_of(&delivery.event)));
    }

    /// Returns the number of store calls by relays.
    pub(crate) fn calls(&self) -> u64 {
        self.state().carried.into()
    }

    /// Returns the violation, the hash of the history, and the history.
    pub(crate) fn end(&self) -> (Option<String>, u64, Vec<String>) {
        let mut state = self.state();
        // A world that ended early has not drained.
        if state.violation().is_none() {
            state.ledgers.iter_mut().for_each(|ledger| ledger.close(self.plan.shape.clean));
        }
        let mut trace = std::mem::take(&mut state.trace);
        if self.tracing {
            trace.extend(state.ledgers.iter().flat_map(Ledger::lines));
        }
        (state.violation().cloned(), state.hash, trace)
    }
}

pub(crate) fn down() -> Error {
    Error::new(ErrorKind::Unavailable, "simulate", "store_down", "the simulated store did not answer")
}

/// The connection of one relay to the server.
pub(crate) struct SimWire {
    pub(crate) world: Arc<World>,
    pub(crate) who: Who,
}

impl SimWire {
    /// Lets the server execute a call later, whether or not its caller still exists.
    fn execute_late(&self, trip: Trip, after: At, generation: u64) {
        let (world, who) = (self.world.clone(), self.who);
        world.late.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            sleep(Duration::from_millis(after)).await;
            world.note(|| format!("relay {}.{}: late or again: {}", who.0, who.1, trip.operation()));
            world.disturb(who.0);
            world.execute(&trip, who, generation, true).await;
            world.disturb(who.0);
            world.late.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

/// A call on its way.
#[derive(Clone)]
pub(crate) enum Trip {
    Memory(Arc<Call>),
    Sqlite(Arc<SqliteCall>),
}

impl Trip {
    fn operation(&self) -> &'static str {
        match self {
            Self::Memory(call) => call.operation,
            Self::Sqlite(call) => call.operation,
        }
    }
}

/// What a call met on its way to the server.
pub(crate) struct Met {
    fault: Option<Fault>,
    /// The server it was on its way to.
    generation: u64,
}

impl SimWire {
    /// Sends a call to the server. It may be refused.
    pub(crate) async fn set_out(&self, operation: &'static str) -> Result<Met> {
        let (world, who) = (&self.world, self.who);
        if world.spins(who, operation) {
            return std::future::pending().await;
        }
        let fault = world.fault(who.0, operation);
        let generation = world.generation();
        if fault.is_some() {
            world.note(|| format!("relay {}.{}: {operation} meets {fault:?}", who.0, who.1));
            world.disturb(who.0);
        }
        world.jitter(who).await;
        match fault {
            Some(Fault::Refuse) => return Err(down()),
            Some(Fault::Slow(there, _)) => sleep(Duration::from_millis(there)).await,
            _ => {}
        }
        Ok(Met { fault, generation })
    }

    /// The way back of a call. Fails if its answer is lost or it was not executed. For a call that
    /// cannot be executed later, [`Fault::Late`] only loses the answer.
    pub(crate) async fn come_back(&self, met: &Met, executed: bool) -> Result<()> {
        let (world, who) = (&self.world, self.who);
        match met.fault {
            Some(Fault::Slow(_, back)) => sleep(Duration::from_millis(back)).await,
            Some(Fault::Freeze(held)) => world.stall(who.0, held),
            _ => {}
        }
        if met.fault.is_some() {
            world.disturb(who.0);
        }
        world.jitter(who).await;
        let is_lost = matches!(met.fault, Some(Fault::Lose | Fault::Late(_)));
        if is_lost || !executed { Err(down()) } else { Ok(()) }
    }

    /// Carries a call that can be executed late and twice.
    pub(crate) async fn travel(&self, trip: Trip) -> Result<()> {
        let (world, who) = (&self.world, self.who);
        let met = self.set_out(trip.operation()).await?;
        if let Some(Fault::Late(after)) = met.fault {
            self.execute_late(trip, after, met.generation);
            return Err(down());
        }
        let mut executed = world.execute(&trip, who, met.generation, false).await;
        match met.fault {
            Some(Fault::Twice(0)) => executed = world.execute(&trip, who, met.generation, false).await,
            Some(Fault::Twice(after)) => self.execute_late(trip, after, met.generation),
            _ => {}
        }
        self.come_back(&met, executed).await
    }
}

#[async_trait]
impl Wire for SimWire {
    async fn carry(&self, call: Arc<Call>) -> Result<()> {
        self.travel(Trip::Memory(call)).await
    }
}

/// The clock of one relay. It wakes up late if the relay stands still, and its wall time is wrong.
pub(crate) struct RelayClock {
    pub(crate) world: Arc<World>,
    pub(crate) relay: u8,
}

#[async_trait]
impl Clock for RelayClock {
    fn now(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH + self.world.time.elapsed() + Duration::from_secs(u64::from(self.relay) * 86_400)
    }

    fn monotonic(&self) -> Duration {
        self.world.time.elapsed() + Duration::from_secs(u64::from(self.relay))
    }

    async fn sleep(&self, duration: Duration) {
        sleep(duration).await;
        self.world.gate(self.relay).await;
    }
}
