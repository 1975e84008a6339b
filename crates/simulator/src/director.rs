//! Runs a plan: writers, relays and a person act. Then the faults end, and everything must drain.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{
    Admin, BatchLimit, Change, Clock as _, Filter, LogName, NewEvent, Outage, OwnerId, Pause, Prune, Replay, ResetTo,
    RetryPolicy, Selection, State, Subscription, SubscriptionName, TopicPattern,
};
use postbox_engine::{BreakerPolicy, Every, Relay, RelaySettings, SeededRandom, Turns};
use postbox_memory::Snapshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::ledger::{Ledger, Who};
use crate::plan::{Action, At, End, Fate, OPERATOR, Plan, RELAYS_MAX, Run, Step};
use crate::server::{Client, Store, Transaction};
use crate::sink::SimSink;
use crate::world::{DELIVER_TIMEOUT, LEASE, RelayClock, World};

const MS: Duration = Duration::from_millis(1);
/// Longest time after the last fault until everything is delivered: a lease, the retries, and the
/// waits until calls reach their time limit.
const DRAINS_WITHIN: Duration = Duration::from_secs(60);
/// Longest time after that until no relay reports a fault: it remembers failures of a lane that it
/// lost for a minute.
const CALM_WITHIN: Duration = Duration::from_secs(70);
/// Longest stop: the drain time and one settlement.
const STOPS_WITHIN: Duration = Duration::from_secs(20);
/// The wait between two bounded runs, and between two tries of a reset.
const PAUSE: Duration = Duration::from_millis(100);
/// How often a reset is tried. Meanwhile leases end.
const RESETS_MAX: u32 = 40;
/// How often relays work until nothing is left. A person's filter may hide what is in flight, and
/// what the first run of a relay wants, of each subscription in turn.
const ROUNDS_MAX: u32 = 4;

/// What happens at one moment of the timeline.
enum Moment {
    Do(Step),
    /// The transaction of this step ends.
    End(usize),
    Snapshot,
}

/// A running relay.
struct Running {
    relay: Arc<Relay>,
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
    /// A person's connection, for each subscription.
    operators: Vec<Client>,
    stopping: Vec<JoinHandle<()>>,
    /// Commands of a person.
    acting: Vec<JoinHandle<()>>,
}

/// Runs the world of a plan. Violations are recorded in the world's ledger.
pub(crate) async fn direct(world: Arc<World>) {
    let mut director = Director {
        operators: operators(&world),
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

fn operators(world: &Arc<World>) -> Vec<Client> {
    (0..world.plan.shape.subscriptions).map(|index| Client::new(world, (OPERATOR + index, 0))).collect()
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
        world.server.set_up(&world.subscriptions).await;
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
            Step::Operator { operator, action, .. } => self.act(operator, action),
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
                    self.operators = operators(&world);
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
            let (mut state, mut number) = (world.state(), 0);
            for ledger in &mut state.ledgers {
                number = ledger.append(key, topic, fate, (wait > 0).then_some(at + wait));
            }
            drop(state);
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
        let locks = world.plan.locks_while(&step);
        if locks {
            world.state().ledgers.iter_mut().for_each(Ledger::disturb_all);
        }
        let transaction = world.server.begin(&appended, locks);
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
            deliver_timeout: DELIVER_TIMEOUT,
            drain_timeout: 3_000 * MS,
            poll_min: 2 * MS,
            poll_max: 900 * MS,
            ..RelaySettings::default()
        };
        let subscription = world.subscriptions[world.plan.subscription_of(relay)].clone();
        let builder = Relay::builder(client.log, subscription)
            .settings(settings)
            .clock(Arc::new(RelayClock { world: world.clone(), relay }))
            .random(Arc::new(SeededRandom::new(world.plan.seed ^ u64::from(who.1) << 8 ^ u64::from(relay))))
            .owner(OwnerId::new(format!("relay-{relay}-{}", who.1)).expect("a name"))
            .admin(client.admin)
            .turns(Turns::default());
        let builder = match shape.apply {
            true => builder.apply(client.apply),
            false => builder.sink(Arc::new(SimSink { world: world.clone(), who })),
        };
        let built = Arc::new(builder.build().expect("valid settings"));
        world.note(|| format!("relay {relay}.{} starts", who.1));
        world.state().lives.insert(relay, who.1);
        let stop = CancellationToken::new();
        let task = tokio::spawn(drive(world.clone(), who, built.clone(), stop.clone()));
        self.running.insert(relay, Running { relay: built, stop, task });
    }

    /// Lets a relay finish, beside everything else.
    fn stop(&mut self, relay: u8) {
        let Some(Running { stop, task, .. }) = self.running.remove(&relay) else { return };
        let world = self.world.clone();
        world.note(|| format!("relay {relay} is to stop"));
        world.state().lives.remove(&relay);
        stop.cancel();
        self.stopping.push(tokio::spawn(async move {
            match tokio::time::timeout(STOPS_WITHIN, task).await {
                Err(_) => world.state().fail(|| format!("stop: relay {relay} did not stop")),
                Ok(Ok(Ok(()))) => world.note(|| format!("relay {relay} stopped")),
                Ok(ended) => world.state().fail(|| format!("stop: relay {relay} ended with {ended:?}")),
            }
        }));
    }

    async fn kill(&mut self, relay: u8) {
        let Some(Running { task, .. }) = self.running.remove(&relay) else { return };
        self.world.note(|| format!("relay {relay} is killed"));
        self.world.disturb(relay);
        self.world.state().lives.remove(&relay);
        task.abort();
        _ = task.await;
    }

    /// Runs a person's command, beside everything else. Its answer does not matter here.
    fn act(&mut self, operator: u8, action: Action) {
        let (world, client) = (self.world.clone(), self.operators[usize::from(operator - OPERATOR)].clone());
        let index = world.plan.subscription_of(operator);
        world.note(|| format!("a person, for subscription {index}: {action:?}"));
        self.acting.push(tokio::spawn(async move { perform(&world, index, &client, action).await }));
    }

    /// Ends the faults. The rest must then be delivered, and no relay may report a fault any more.
    async fn drain(&mut self) {
        let world = self.world.clone();
        world.calm();
        let mut open: Vec<usize> = self.open.keys().copied().collect();
        open.sort_unstable();
        open.into_iter().for_each(|index| self.end(index));
        let hides = |step: &Step| matches!(step, Step::Operator { action: Action::Filter(Some(_)), .. });
        let rounds = if world.plan.steps.iter().any(hides) { ROUNDS_MAX } else { 1 };
        for _ in 0..rounds {
            self.work_off().await;
            if world.is_drained() || world.is_violated() {
                return;
            }
        }
    }

    /// Lets relays work until nothing is left to do, and then finish.
    async fn work_off(&mut self) {
        let world = self.world.clone();
        // At least one for each subscription.
        (RELAYS_MAX - world.plan.shape.subscriptions..RELAYS_MAX).for_each(|relay| self.start(relay));
        let mut begun = tokio::time::Instant::now();
        loop {
            self.pass(100 * MS).await;
            self.notice_ends().await;
            if world.is_violated() {
                return;
            }
            if world.is_drained() && world.heal() {
                begun = tokio::time::Instant::now();
            }
            // A command that is still stuck somewhere may send dead events again.
            let is_drained = world.is_drained() && self.acting.iter().all(JoinHandle::is_finished);
            if is_drained {
                // What ends by itself has no status.
                let is_bounded = |relay: &u8| matches!(world.plan.run_of(*relay), Run::Bounded(_));
                (0..RELAYS_MAX).filter(is_bounded).for_each(|relay| self.stop(relay));
            }
            let fault = self.fault();
            let waited = begun.elapsed();
            match &fault {
                None if is_drained => break,
                _ if !is_drained && waited > DRAINS_WITHIN => {
                    let violation = || format!("liveness: not drained {DRAINS_WITHIN:?} after the last fault");
                    return world.state().fail(violation);
                }
                Some(fault) if waited > DRAINS_WITHIN + CALM_WITHIN => {
                    return world.state().fail(|| format!("calm: all is over, but {fault}"));
                }
                _ => {}
            }
            // End a pause that nobody ended, or that a destination asked for.
            for subscription in &world.subscriptions {
                world.server.resume(&subscription.name).await;
            }
        }
        for relay in 0..RELAYS_MAX {
            self.stop(relay);
        }
        for stopping in self.stopping.drain(..) {
            _ = stopping.await;
        }
    }

    /// Returns what a running relay still reports, if anything.
    fn fault(&self) -> Option<String> {
        self.running.iter().find_map(|(number, Running { relay, .. })| {
            let lanes = relay.failing_lanes().first().map(|lane| format!("{lane:?} fails"));
            let outages = [
                ("store", relay.store_outage()),
                ("lease", relay.lease_outage()),
                ("destination", relay.metrics().outage()),
            ];
            let outage = |(what, outage): (&str, Option<Outage>)| outage.map(|it| format!("{what} outage: {it:?}"));
            let fault = lanes.or_else(|| outages.into_iter().find_map(outage))?;
            Some(format!("relay {number} reports: {fault}"))
        })
    }

    /// Checks that no relay ended by itself.
    async fn notice_ends(&mut self) {
        let ended = self.running.iter().find(|(_, running)| running.task.is_finished()).map(|(relay, _)| *relay);
        if let Some(relay) = ended
            && let Some(running) = self.running.remove(&relay)
        {
            let ended = running.task.await;
            self.world.state().fail(|| format!("relay: relay {relay} ended by itself: {ended:?}"));
        }
    }
}

/// Runs a relay until `stop`. An error is permanent.
async fn drive(world: Arc<World>, who: Who, relay: Arc<Relay>, stop: CancellationToken) -> postbox_core::Result<()> {
    let limit = match world.plan.run_of(who.0) {
        Run::Always => return relay.run(stop).await,
        Run::Every(pause) => return relay.run_on(&Every(Duration::from_millis(pause)), stop).await,
        Run::Bounded(limit) => limit,
    };
    let clock = RelayClock { world: world.clone(), relay: who.0 };
    let accepted = || world.state().accepted.get(&who).copied().unwrap_or_default();
    while !stop.is_cancelled() {
        let before = accepted();
        let fetched = match relay.drain_until(Some(limit), stop.clone()).await {
            Ok(drained) => drained.fetched,
            Err(error) if error.is_permanent() => return Err(error),
            Err(_) => 0,
        };
        let sent = accepted() - before;
        if fetched.max(sent as u64) > limit as u64 {
            world.state().fail(|| format!("limit: a run of {limit} reads {fetched} and delivers {sent}"));
        }
        _ = stop.run_until_cancelled(clock.sleep(PAUSE)).await;
    }
    Ok(())
}

async fn perform(world: &World, index: usize, operator: &Client, action: Action) {
    let Client { log, admin: store, maintain, .. } = operator;
    let name = &world.subscriptions[index].name;
    let all = Selection::default();
    match action {
        Action::Retry => _ = store.change(name, &Change::Retry, &all).await,
        Action::DiscardDead => {
            let mut dead = Vec::new();
            world.server.each_place(index, |it| dead.extend((it.state == State::Dead).then_some(it.id)));
            _ = store.change(name, &Change::Discard, &Selection { ids: Some(dead), ..all }).await;
        }
        Action::Discard(number) | Action::MarkDead(number) => {
            let mut ids = Vec::new();
            let change = match action {
                Action::Discard(_) => Change::Discard,
                _ => Change::MarkDead { why: None },
            };
            let meant = |version: Option<i64>| version == Some(number as i64);
            world.server.each_place(index, |it| ids.extend(meant(it.version).then_some(it.id)));
            _ = store.change(name, &change, &Selection { ids: Some(ids), ..all }).await;
        }
        Action::Pause => _ = store.pause(name, Some(&pause())).await,
        Action::Resume => _ = store.pause(name, None).await,
        Action::Prune => {
            _ = maintain.note_unrouted(&LogName::outbox()).await;
            _ = maintain.prune(&LogName::outbox(), &Prune::default()).await;
        }
        Action::Filter(out) => {
            let topics = ["t0", "t1"].into_iter().zip(0..).filter(|(_, number)| out.is_some_and(|out| out != *number));
            let topics = topics.filter_map(|(topic, _)| TopicPattern::new(topic).ok()).collect();
            let filter = Filter { topics, ..Filter::default() };
            _ = log.subscribe(&Subscription { filter, ..world.subscriptions[index].clone() }).await;
        }
        Action::Lanes(lanes) => _ = store.set_lanes(name, lanes).await,
        Action::Replay => _ = store.replay(name, &Replay::default()).await,
        Action::Reset(to) => {
            _ = store.pause(name, Some(&pause())).await;
            reset(store.as_ref(), name, to).await;
            _ = store.pause(name, None).await;
        }
    }
}

fn pause() -> Pause {
    Pause { until: None, by: "ada".into(), why: "maintenance".into() }
}

/// Tries a reset until no lane is held, or a call fails.
async fn reset(store: &dyn Admin, name: &SubscriptionName, to: ResetTo) {
    for _ in 0..RESETS_MAX {
        let Ok(plan) = store.reset(name, to, None).await else { return };
        match store.reset(name, to, Some(&plan.stamp)).await {
            Err(error) if matches!(error.code(), "lanes_held" | "subscription_changed") => {
                tokio::time::sleep(PAUSE).await;
            }
            _ => return,
        }
    }
}
