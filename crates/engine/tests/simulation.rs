//! A seeded simulation of everything that goes wrong at once: failing, hanging and panicking sinks, outages, a store that is
//! down or loses its answers, leases taken away behind a relay's back, crashes and stops at any moment, late commits.
//!
//! Real engine, memory store, simulated time. A failure prints the seed and the command that replays it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod bench;
mod chaos;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bench::all_capabilities;
use chaos::{Chaos, ChaosApply, ChaosLog, ChaosSink, Faults, Producer};
use futures::FutureExt;
use jiff::Timestamp;
use postbox_core::{BatchLimit, Inspect, ListQuery, Log, LogName, MemoryStore, RetryPolicy, Sink, State, Subscription};
use postbox_engine::{OnDead, Relay, RelayBuilder, RelaySettings, SeededRandom, TokioClock};
use tokio_util::sync::CancellationToken;

const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);
/// Seeds per scenario in an ordinary run; `POSTBOX_SEEDS` asks for more, `POSTBOX_SEED` replays one.
const SEEDS: u64 = 12;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Destination {
    Sink,
    Apply,
}

/// One simulated world.
struct World {
    chaos: Arc<Chaos>,
    store: MemoryStore,
    clock: TokioClock,
    subscription: Subscription,
    settings: RelaySettings,
    sink: Arc<ChaosSink>,
    apply: Arc<ChaosApply>,
    destination: Destination,
    crashes: bool,
}

impl World {
    async fn new(seed: u64, faults: Faults, destination: Destination, crashes: bool) -> Self {
        let chaos = Chaos::new(seed, faults);
        let clock = TokioClock::simulated(Timestamp::UNIX_EPOCH);
        let store = MemoryStore::new(Arc::new(clock.clone()));
        let name = "sim".parse().expect("a name");
        let lanes = chaos.pick(3) as u16 + 1;
        let subscription = Subscription { lanes, ..Subscription::new(name, LogName::outbox()) };
        store.subscribe(&subscription).await.expect("subscribed");
        let capabilities = all_capabilities()[chaos.pick(4)];
        let settings = RelaySettings {
            batch: BatchLimit { events: [1, 7, 40, 500][chaos.pick(4)], ..BatchLimit::default() },
            retry: RetryPolicy { attempts_max: 4, base: 200 * MS, delay_max: 5 * S, delays: Vec::new() },
            on_dead: if chaos.chance(0.2) { OnDead::Halt } else { OnDead::Continue },
            lease_ttl: 2 * S,
            deliver_timeout: S,
            drain_timeout: 3 * S,
            ..RelaySettings::default()
        };
        let sink = Arc::new(ChaosSink::new(chaos.clone(), capabilities));
        let apply = Arc::new(ChaosApply::new(chaos.clone(), store.clone()));
        Self { chaos, store, clock, subscription, settings, sink, apply, destination, crashes }
    }

    fn builder(&self) -> RelayBuilder {
        let log = Arc::new(ChaosLog::new(self.chaos.clone(), self.store.clone()));
        let builder = Relay::builder(log, self.subscription.clone())
            .settings(self.settings.clone())
            .clock(Arc::new(self.clock.clone()))
            .random(Arc::new(SeededRandom::new(self.chaos.draw())));
        match self.destination {
            Destination::Sink => builder.sink(self.sink.clone() as Arc<dyn Sink>),
            Destination::Apply => builder.apply(self.apply.clone()),
        }
    }

    /// One replica: started, stopped or crashed, and started again as another.
    async fn replica(&self, until: tokio::time::Instant) {
        while tokio::time::Instant::now() < until {
            let relay = self.builder().build().expect("built");
            let stop = CancellationToken::new();
            let task = tokio::spawn({
                let stop = stop.clone();
                async move { relay.run(stop).await }
            });
            tokio::time::sleep(self.chaos.up_to(8 * S)).await;
            if self.crashes && self.chaos.chance(0.5) {
                task.abort();
                _ = task.await;
            } else {
                stop.cancel();
                let asked = tokio::time::Instant::now();
                task.await.expect("no panic").expect("no permanent error");
                assert!(asked.elapsed() < 10 * S, "stopped only after {:?}", asked.elapsed());
            }
            tokio::time::sleep(self.chaos.up_to(S)).await;
        }
    }

    /// Everything at once for a while; then the faults end, and what is left is drained.
    async fn live(&self) -> BTreeMap<String, Vec<i64>> {
        let until = tokio::time::Instant::now() + 40 * S;
        let mut producer = Producer::new(self.chaos.clone(), self.store.clone());
        let weather = self.chaos.weather(until);
        tokio::join!(self.replica(until), self.replica(until), producer.run(until), weather);
        self.chaos.calm();
        let relay = self.builder().build().expect("built");
        let stop = CancellationToken::new();
        let drained = async {
            for _ in 0..3_600 {
                tokio::time::sleep(S).await;
                let stats = self.store.stats(&self.subscription.name).await.expect("stats");
                let waiting_for_a_person = match self.settings.on_dead {
                    OnDead::Halt => stats.blocked,
                    OnDead::Continue => 0,
                };
                if stats.pending == waiting_for_a_person {
                    break;
                }
            }
            stop.cancel();
        };
        let (ended, ()) = tokio::join!(relay.run(stop.clone()), drained);
        ended.expect("ran");
        producer.committed()
    }

    async fn ids_in(&self, state: State) -> BTreeSet<i64> {
        let query = ListQuery {
            subscription: self.subscription.name.clone(),
            state,
            topic: None,
            code: None,
            after: None,
            limit: 100_000,
        };
        let records = self.store.list(&query).await.expect("listed");
        records.iter().map(|record| record.event.version.expect("every event has its number")).collect()
    }

    fn arrivals(&self) -> Vec<chaos::Arrival> {
        match self.destination {
            Destination::Sink => self.sink.arrivals(),
            Destination::Apply => self.apply.effects(),
        }
    }

    /// What must hold at the end, counted from the arrivals.
    async fn check(&self, committed: &BTreeMap<String, Vec<i64>>) {
        let arrivals = self.arrivals();
        let arrived: BTreeSet<i64> = arrivals.iter().map(|arrival| arrival.number).collect();
        let all: BTreeSet<i64> = committed.values().flatten().copied().collect();
        let mut excused = self.ids_in(State::Dead).await;
        if self.settings.on_dead == OnDead::Halt {
            excused.extend(self.ids_in(State::Blocked).await);
        }
        let phantom: Vec<_> = arrived.difference(&all).collect();
        assert!(phantom.is_empty(), "phantom: {phantom:?}");
        let lost: Vec<_> = all.iter().filter(|n| !arrived.contains(n) && !excused.contains(n)).collect();
        assert!(lost.is_empty(), "lost: {lost:?}");
        let mut place: BTreeMap<i64, usize> = BTreeMap::new();
        for (at, arrival) in arrivals.iter().enumerate() {
            place.entry(arrival.number).or_insert(at);
        }
        for (key, numbers) in committed {
            let places: Vec<_> = numbers.iter().filter_map(|n| place.get(n).map(|at| (*at, *n))).collect();
            for pair in places.windows(2) {
                assert!(pair[0].0 < pair[1].0, "key {key}: {} arrived before {}", pair[1].1, pair[0].1);
            }
        }
        assert!(all.len() > 100, "something happened: {} events", all.len());
    }
}

fn seeds() -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    match number("POSTBOX_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("POSTBOX_SEEDS").unwrap_or(SEEDS)).collect(),
    }
}

/// Runs a scenario for every seed, each in a fresh runtime with paused time.
fn for_each_seed<F: Future<Output = ()>>(test: &str, scenario: impl Fn(u64) -> F) {
    for seed in seeds() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
        let failed = runtime.block_on(AssertUnwindSafe(scenario(seed)).catch_unwind()).is_err();
        assert!(
            !failed,
            "seed {seed} failed; replay: POSTBOX_SEED={seed} cargo nextest run --all-features -p postbox-engine {test}"
        );
    }
}

#[test]
fn storm_loses_nothing_and_keeps_the_order() {
    for_each_seed("storm_loses_nothing", async |seed| {
        let world = World::new(seed, Faults::storm(), Destination::Sink, true).await;
        let committed = world.live().await;
        world.check(&committed).await;
    });
}

#[test]
fn stops_and_newcomers_repeat_nothing() {
    for_each_seed("stops_and_newcomers", async |seed| {
        let world = World::new(seed, Faults::slow(), Destination::Sink, false).await;
        let committed = world.live().await;
        world.check(&committed).await;
        let all: usize = committed.values().map(Vec::len).sum();
        assert_eq!(world.arrivals().len(), all, "an event arrived twice");
    });
}

#[test]
fn outages_burn_no_attempts() {
    for_each_seed("outages_burn", async |seed| {
        let world = World::new(seed, Faults::outages(), Destination::Sink, false).await;
        let committed = world.live().await;
        world.check(&committed).await;
        assert!(world.arrivals().iter().all(|arrival| arrival.attempt == 1), "an outage cost an attempt");
        assert!(world.ids_in(State::Dead).await.is_empty());
    });
}

#[test]
fn applied_effects_happen_exactly_once() {
    for_each_seed("applied_effects", async |seed| {
        let world = World::new(seed, Faults::storm(), Destination::Apply, true).await;
        let committed = world.live().await;
        world.check(&committed).await;
        let effects = world.arrivals();
        let distinct: BTreeSet<i64> = effects.iter().map(|effect| effect.number).collect();
        assert_eq!(effects.len(), distinct.len(), "an effect happened twice");
    });
}
