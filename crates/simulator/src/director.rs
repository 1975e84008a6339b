//! Runs a plan: writers, relays and a person act. Then the faults end, and everything must drain.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{
    BatchLimit, Change, Filter, LogName, NewEvent, OwnerId, Pause, Prune, RetryPolicy, Selection, State, Subscription,
    TopicPattern,
};
use postbox_engine::{BreakerPolicy, Relay, RelaySettings, SeededRandom};
use postbox_memory::Snapshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::plan::{Action, At, End, Fate, OPERATOR, Plan, RELAYS_MAX, Step};
use crate::server::{Client, Store, Transaction};
use crate::sink::SimSink;
use crate::world::{LEASE, RelayClock, World};

const MS: Duration = Duration::from_millis(1);
/// Longest time after the last fault until everything is delivered: a lease, the retries, and the
/// waits until calls reach their time limit.
const DRAINS_WITHIN: Duration = Duration::from_secs(60);
/// Longest stop: the drain time and one settlement.
const STOPS_WITHIN: Duration = Duration::from_secs(20);

/// What happens at one moment of the timeline.
enum Moment {
    Do(Step),
    /// The transaction of this step ends.
    End(usize),
    Snapshot,
}

/// A running relay.
struct Running {
    stop: CancellationToken,
    task: JoinHandle<postbox_core::Result<()>>,
}

/// An open transaction.
struct Open {
    transaction: Transaction,
    numbers: Vec<usize>,
    key: Option<u8>,
    end: End,
}

struct Director {
    world: Arc<World>,
    running: BTreeMap<u8, Running>,
    lives: [u32; RELAYS_MAX as usize + 1],
    open: BTreeMap<usize, Open>,
    /// Those of `open` that wait for another one to end.
    waiting: Vec<usize>,
    snapshots: Vec<(At, Snapshot)>,
    operator: Client,
    stopping: Vec<JoinHandle<()>>,
    /// Commands of a person.
    acting: Vec<JoinHandle<()>>,
}

/// Runs the world of a plan. Violations are recorded in the world's ledger.
pub(crate) async fn direct(world: Arc<World>) {
    let operator = Client::new(&world, (OPERATOR, 0));
    let mut director = Director {
        operator,
        running: BTreeMap::new(),
        lives: [0; RELAYS_MAX as usize + 1],
        open: BTreeMap::new(),
        waiting: Vec::new(),
        snapshots: Vec::new(),
        stopping: Vec::new(),
        acting: Vec::new(),
        world,
    };
    director.run().await;
}

/// Returns the moments of a plan, in order.
fn timeline(plan: &Plan) -> Vec<(At, Moment)> {
    let mut moments = Vec::with_capacity(2 * plan.steps.len());
    for (index, step) in plan.steps.iter().enumerate() {
        let at = match *step {
            Step::Write { at, held, .. } => {
                moments.push((at + held, Moment::End(index)));
                at
            }
            Step::Failover { at, behind } => {
                moments.push((at.saturating_sub(behind), Moment::Snapshot));
                at
            }
            Step::Start { at, .. }
            | Step::Stop { at, .. }
            | Step::Kill { at, .. }
            | Step::Stall { at, .. }
            | Step::Operator { at, .. }
            | Step::Crash { at } => at,
            Step::Fault { .. } | Step::Mishap { .. } | Step::Outage { .. } => continue,
        };
        moments.push((at, Moment::Do(*step)));
    }
    // A write must begin before it ends. The sort is stable, and its end was put first.
    moments.sort_by_key(|(at, moment)| (*at, matches!(moment, Moment::End(_))));
    moments
}

impl Director {
    async fn run(&mut self) {
        let world = self.world.clone();
        world.server.set_up(&world.subscription).await;
        world.committed(&[]);
        for (at, moment) in timeline(&world.plan) {
            self.pass(Duration::from_millis(at.saturating_sub(world.now()))).await;
            if world.is_violated() {
                return;
            }
            match moment {
                Moment::Do(step) => self.step(step).await,
                Moment::End(index) => self.end(index),
                Moment::Snapshot => {
                    let snapshot = world.server.snapshot();
                    self.snapshots.extend(snapshot.map(|snapshot| (world.now(), snapshot)));
                }
            }
        }
        self.pass(Duration::from_millis(world.plan.shape.calm.saturating_sub(world.now()))).await;
        self.drain().await;
    }

    /// Lets time pass. A relay that an event ended is restarted as a new process.
    async fn pass(&mut self, time: Duration) {
        let (world, until) = (self.world.clone(), tokio::time::Instant::now() + time);
        while let Ok(who) = tokio::time::timeout_at(until, world.next_ended()).await {
            if world.state().lives.get(&who.0) == Some(&who.1) {
                self.kill(who.0).await;
                self.start(who.0);
            }
        }
    }

    async fn step(&mut self, step: Step) {
        let world = self.world.clone();
        match step {
            Step::Write { .. } => self.write(step),
            Step::Start { relay, .. } => self.start(relay),
            Step::Stop { relay, .. } => self.stop(relay),
            Step::Kill { relay, .. } => self.kill(relay).await,
            Step::Stall { relay, held, .. } => {
                world.note(|| format!("relay {relay} stands still for {held} ms"));
                world.stall(relay, held);
            }
            Step::Operator { action, .. } => self.act(action),
            Step::Crash { .. } => {
                // A file has no server. If its machine crashes, the processes that have opened it
                // die.
                let is_file = world.plan.store == Store::Sqlite;
                let died: Vec<u8> = self.running.keys().copied().filter(|_| is_file).collect();
                for relay in &died {
                    self.kill(*relay).await;
                }
                self.roll_back();
                world.go_back(false, || world.server.crash());
                if is_file {
                    self.operator = Client::new(&world, (OPERATOR, 0));
                }
                died.into_iter().for_each(|relay| self.start(relay));
            }
            Step::Failover { at, behind } => {
                self.roll_back();
                let Some(place) = self.snapshots.iter().position(|(taken, _)| *taken >= at.saturating_sub(behind))
                else {
                    return;
                };
                world.go_back(true, || world.server.restore(&self.snapshots[place].1));
            }
            Step::Fault { .. } | Step::Mishap { .. } | Step::Outage { .. } => {}
        }
    }

    fn roll_back(&mut self) {
        self.open.clear();
        self.waiting.clear();
    }

    fn write(&mut self, step: Step) {
        let Step::Write { at, key, events, topic, wait, fate, end, .. } = step else { return };
        // A writer serialises on its aggregate: one open transaction per key.
        if key.is_some() && self.open.values().any(|open| open.key == key) {
            return;
        }
        let world = &self.world;
        let (mut numbers, mut appended) = (Vec::new(), Vec::new());
        for _ in 0..events {
            let fate = if fate == Fate::Ends && !numbers.is_empty() { Fate::Fine } else { fate };
            let number = world.state().ledger.append(key, topic, fate, (wait > 0).then_some(at + wait));
            let mut event = NewEvent::json(["t0", "t1"][usize::from(topic)], "{}").version(number as i64);
            if let Some(key) = key {
                event = event.key(["a", "b", "c", "d"][usize::from(key)]);
            }
            if wait > 0 {
                event = event.deliver_at(jiff::Timestamp::UNIX_EPOCH + Duration::from_millis(at + wait));
            }
            appended.push(event);
            numbers.push(number);
        }
        world.note(|| format!("a transaction appends events {numbers:?} of key {key:?}"));
        let index = world.plan.steps.iter().position(|other| *other == step).unwrap_or_default();
        let transaction = world.server.begin(&appended, world.plan.locks_while(&step));
        self.open.insert(index, Open { transaction, numbers, key, end });
    }

    fn end(&mut self, index: usize) {
        if self.open.get(&index).is_some_and(|open| open.transaction.waits()) {
            return self.waiting.push(index);
        }
        let Some(Open { transaction, mut numbers, end, .. }) = self.open.remove(&index) else { return };
        let world = &self.world;
        world.note(|| format!("the transaction of events {numbers:?} ends: {end:?}"));
        transaction.end(end);
        if end == End::Savepoint {
            numbers.pop();
        }
        if end != End::Rollback {
            world.committed(&numbers);
        }
        for waiting in std::mem::take(&mut self.waiting) {
            self.end(waiting);
        }
    }

    fn start(&mut self, relay: u8) {
        if self.running.contains_key(&relay) {
            return;
        }
        let (world, shape) = (&self.world, &self.world.plan.shape);
        self.lives[usize::from(relay)] += 1;
        let who = (relay, self.lives[usize::from(relay)]);
        let client = Client::new(world, who);
        let settings = RelaySettings {
            batch: BatchLimit { events: shape.batch, ..BatchLimit::default() },
            retry: RetryPolicy {
                attempts_max: shape.attempts_max,
                base: 60 * MS,
                delay_max: 500 * MS,
                delays: Vec::new(),
            },
            breaker: BreakerPolicy { base: 60 * MS, max: 400 * MS },
            lease_ttl: LEASE,
            deliver_timeout: 800 * MS,
            drain_timeout: 3_000 * MS,
            poll_min: 2 * MS,
            poll_max: 900 * MS,
            ..RelaySettings::default()
        };
        let builder = Relay::builder(client.log, world.subscription.clone())
            .settings(settings)
            .clock(Arc::new(RelayClock { world: world.clone(), relay }))
            .random(Arc::new(SeededRandom::new(world.plan.seed ^ u64::from(who.1) << 8 ^ u64::from(relay))))
            .owner(OwnerId::new(format!("relay-{relay}-{}", who.1)).expect("a name"))
            .admin(client.admin);
        let builder = match shape.apply {
            true => builder.apply(client.apply),
            false => builder.sink(Arc::new(SimSink { world: world.clone(), who })),
        };
        let relay_built = builder.build().expect("valid settings");
        world.note(|| format!("relay {relay}.{} starts", who.1));
        world.state().lives.insert(relay, who.1);
        let stop = CancellationToken::new();
        let stopping = stop.clone();
        let task = tokio::spawn(async move { relay_built.run(stopping).await });
        self.running.insert(relay, Running { stop, task });
    }

    /// Lets a relay finish, beside everything else.
    fn stop(&mut self, relay: u8) {
        let Some(Running { stop, task }) = self.running.remove(&relay) else { return };
        let world = self.world.clone();
        world.note(|| format!("relay {relay} is to stop"));
        world.state().lives.remove(&relay);
        stop.cancel();
        self.stopping.push(tokio::spawn(async move {
            match tokio::time::timeout(STOPS_WITHIN, task).await {
                Err(_) => world.state().ledger.fail(|| format!("stop: relay {relay} did not stop")),
                Ok(Ok(Ok(()))) => world.note(|| format!("relay {relay} stopped")),
                Ok(ended) => world.state().ledger.fail(|| format!("stop: relay {relay} ended with {ended:?}")),
            }
        }));
    }

    async fn kill(&mut self, relay: u8) {
        let Some(Running { task, .. }) = self.running.remove(&relay) else { return };
        self.world.note(|| format!("relay {relay} is killed"));
        self.world.state().lives.remove(&relay);
        task.abort();
        _ = task.await;
    }

    /// Runs a person's command, beside everything else. Its answer does not matter here.
    fn act(&mut self, action: Action) {
        let (world, operator) = (self.world.clone(), self.operator.clone());
        world.note(|| format!("a person: {action:?}"));
        if let Action::Filter(Some(out)) = action {
            world.state().ledger.left_out[usize::from(out)] = true;
        }
        self.acting.push(tokio::spawn(async move { perform(&world, &operator, action).await }));
    }

    /// Ends the faults. The rest must then be delivered.
    async fn drain(&mut self) {
        let world = self.world.clone();
        world.calm();
        let mut open: Vec<usize> = self.open.keys().copied().collect();
        open.sort_unstable();
        open.into_iter().for_each(|index| self.end(index));
        self.start(RELAYS_MAX - 1);
        let begun = tokio::time::Instant::now();
        loop {
            self.pass(100 * MS).await;
            self.notice_ends().await;
            if world.is_violated() {
                return;
            }
            // A command that is still stuck somewhere may send dead events again.
            if world.is_drained() && self.acting.iter().all(JoinHandle::is_finished) {
                break;
            }
            if begun.elapsed() > DRAINS_WITHIN {
                return world
                    .state()
                    .ledger
                    .fail(|| format!("liveness: not drained {DRAINS_WITHIN:?} after the last fault"));
            }
            // End a pause that nobody ended, or that a destination asked for.
            world.server.resume(&world.subscription.name).await;
        }
        for relay in 0..RELAYS_MAX {
            self.stop(relay);
        }
        for stopping in self.stopping.drain(..) {
            _ = stopping.await;
        }
    }

    /// Checks that no relay ended by itself.
    async fn notice_ends(&mut self) {
        let ended = self.running.iter().find(|(_, running)| running.task.is_finished()).map(|(relay, _)| *relay);
        if let Some(relay) = ended
            && let Some(running) = self.running.remove(&relay)
        {
            let ended = running.task.await;
            self.world.state().ledger.fail(|| format!("relay: relay {relay} ended by itself: {ended:?}"));
        }
    }
}

async fn perform(world: &World, operator: &Client, action: Action) {
    let Client { log, admin: store, maintain, .. } = operator;
    let name = &world.subscription.name;
    let all = Selection::default();
    match action {
        Action::Retry => _ = store.change(name, &Change::Retry, &all).await,
        Action::DiscardDead => {
            let mut dead = Vec::new();
            world.server.each_place(|it| dead.extend((it.state == State::Dead).then_some(it.id)));
            _ = store.change(name, &Change::Discard, &Selection { ids: Some(dead), ..all }).await;
        }
        Action::Discard(number) | Action::MarkDead(number) => {
            let mut ids = Vec::new();
            let change = match action {
                Action::Discard(_) => Change::Discard,
                _ => Change::MarkDead { why: None },
            };
            let meant = |version: Option<i64>| version == Some(number as i64);
            world.server.each_place(|it| ids.extend(meant(it.version).then_some(it.id)));
            _ = store.change(name, &change, &Selection { ids: Some(ids), ..all }).await;
        }
        Action::Pause => {
            let pause = Pause { until: None, by: "ada".into(), why: "maintenance".into() };
            _ = store.pause(name, Some(&pause)).await;
        }
        Action::Resume => _ = store.pause(name, None).await,
        Action::Prune => {
            _ = maintain.note_unrouted(&LogName::outbox()).await;
            _ = maintain.prune(&LogName::outbox(), &Prune::default()).await;
        }
        Action::Filter(out) => {
            let topics = ["t0", "t1"].into_iter().zip(0..).filter(|(_, number)| out.is_some_and(|out| out != *number));
            let topics = topics.filter_map(|(topic, _)| TopicPattern::new(topic).ok()).collect();
            let filter = Filter { topics, ..Filter::default() };
            _ = log.subscribe(&Subscription { filter, ..world.subscription.clone() }).await;
        }
    }
}
