//! Relays with lanes that are leased in Redis too, while Redis loses its keys, stops and restarts.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postbox_core::{Append as _, Capabilities, Delivery, Log as _, LogName, NewEvent, Outcome, Sink, Subscription};
use postbox_engine::{Metrics, Relay, RelaySettings, TokioClock};
use postbox_memory::MemoryStore;
use postbox_redis::{RedisLeaseConfig, RedisLeases};
use postbox_testkit::servers::RedisKind;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::support::{Broker, LOOK};
use super::{SERVERS, until};

/// Renewed every second. The margin before it expires is longer than a stall of a busy machine.
const TTL: Duration = Duration::from_secs(3);
const KEY: &str = "postbox:lease:{outbox:out:0}";
/// The keys of the events.
const KEYS: i64 = 8;

/// A log in memory, and the events that its relays sent.
struct World {
    broker: Broker,
    store: Arc<MemoryStore>,
    sent: Arc<Sent>,
    appended: AtomicUsize,
}

#[derive(Default)]
struct Sent {
    /// The versions of the events in the order of arrival.
    arrived: Mutex<Vec<i64>>,
    events: AtomicUsize,
    /// When each call began, and which relay made it.
    calls: Mutex<Vec<(Instant, &'static str)>>,
}

impl Sent {
    fn last_call(&self) -> (Instant, &'static str) {
        *self.calls.lock().expect("no panic").last().expect("a call")
    }
}

/// The sink of one relay.
struct By(&'static str, Arc<Sent>);

#[async_trait]
impl Sink for By {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: 5, concurrency: 4, prefix: false, system: None }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        self.1.calls.lock().expect("no panic").push((Instant::now(), self.0));
        let versions = deliveries.iter().filter_map(|delivery| delivery.event.version);
        self.1.arrived.lock().expect("no panic").extend(versions);
        tokio::time::sleep(LOOK).await;
        self.1.events.fetch_add(deliveries.len(), Ordering::Relaxed);
        vec![Outcome::DELIVERED; deliveries.len()]
    }
}

/// A running relay. If dropped, it ends like a killed process and releases nothing.
struct Working {
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Drop for Working {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl World {
    async fn start(kind: RedisKind) -> Self {
        let store = Arc::new(MemoryStore::new(Arc::new(TokioClock::new())));
        store.subscribe(&subscription()).await.expect("subscribed");
        Self { broker: Broker::start(kind).await, store, sent: Arc::default(), appended: AtomicUsize::new(0) }
    }

    fn relay(&self, name: &'static str) -> Working {
        let config = RedisLeaseConfig { url: self.broker.url(), ..RedisLeaseConfig::default() };
        let log = Arc::new(RedisLeases::new(&config).expect("right")).on(self.store.clone(), None);
        let settings = RelaySettings { lease_ttl: TTL, ..RelaySettings::default() };
        let relay = Relay::builder(log, subscription()).settings(settings).sink(Arc::new(By(name, self.sent.clone())));
        let relay = relay.owner(name.parse().expect("a name")).build().expect("right");
        let stop = CancellationToken::new();
        let (metrics, stopped) = (relay.metrics(), stop.clone());
        let task = tokio::spawn(async move { relay.run(stopped).await.expect("it runs") });
        Working { metrics, stop, task }
    }

    /// Appends `count` events whose versions rise, and waits until nearly all are sent.
    async fn work(&self, count: usize) {
        for _ in 0..count {
            let n = self.appended.fetch_add(1, Ordering::Relaxed);
            let version = n as i64;
            let event = NewEvent::json("t", "{}").key((version % KEYS).to_string()).version(version);
            self.store.append(&LogName::outbox(), &[event]).await.expect("appended");
            until("most are sent", async || self.sent() + 100 > n).await;
        }
    }

    fn sent(&self) -> usize {
        self.sent.events.load(Ordering::Relaxed)
    }

    async fn holder(&self) -> Option<String> {
        self.broker.ask(&format!("GET {KEY}")).await
    }

    /// The versions in the order of their first arrivals.
    fn first_arrivals(&self) -> Vec<i64> {
        let mut seen = HashSet::new();
        let arrived = self.sent.arrived.lock().expect("no panic");
        arrived.iter().copied().filter(|version| seen.insert(*version)).collect()
    }

    async fn all_arrive_in_order(&self) {
        let all = self.appended.load(Ordering::Relaxed);
        until("all are sent", async || self.first_arrivals().len() == all).await;
        let arrived = self.first_arrivals();
        for key in 0..KEYS {
            let of_key: Vec<i64> = arrived.iter().copied().filter(|version| version % KEYS == key).collect();
            assert!(of_key.is_sorted(), "key {key}: {of_key:?}");
        }
    }
}

fn subscription() -> Subscription {
    Subscription { lanes: Some(1), ..Subscription::new("out".parse().expect("a name"), LogName::outbox()) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_relay_works_and_another_takes_over_after_the_lease() {
    for kind in SERVERS {
        let world = World::start(kind).await;
        let one = world.relay("one");
        until("one holds the lane", async || one.metrics.lanes_held() == 1).await;
        let two = world.relay("two");
        world.work(200).await;
        assert!(world.sent.calls.lock().expect("no panic").iter().all(|(_, by)| *by == "one"));
        until("it is renewed", async || one.metrics.renewals_ok() > 0).await;
        assert!(world.holder().await.is_some_and(|held| held.starts_with("one ")));
        drop(one);
        let vanished = Instant::now();
        until("two holds the lane", async || two.metrics.lanes_held() == 1).await;
        assert!(vanished.elapsed() > TTL / 2, "before the lease had ended");
        world.work(200).await;
        assert_eq!(world.sent.last_call().1, "two");
        // A relay that stops releases its lane at once, in both.
        two.stop.cancel();
        until("nobody holds it", async || world.holder().await.is_none()).await;
        let three = world.relay("three");
        until("three holds the lane", async || three.metrics.lanes_held() == 1).await;
        assert!(three.metrics.lane_takeovers() == 0 && world.broker.ask::<i64>(&format!("GET {KEY}:fence")).await >= 3);
        world.all_arrive_in_order().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flushed_redis_hands_lanes_over_and_harms_nothing() {
    for kind in SERVERS {
        let world = World::start(kind).await;
        let relays = [world.relay("one"), world.relay("two")];
        let count = |of: fn(&Metrics) -> u64| relays.iter().map(|relay| of(&relay.metrics)).sum::<u64>();
        for round in 1..=3 {
            world.work(300).await;
            let () = world.broker.ask("FLUSHALL").await;
            let lost = async || count(Metrics::leases_lost) >= round;
            let working = async || world.work(100).await;
            tokio::join!(until("the lease is lost", lost), working());
            until("it is held again", async || count(Metrics::lanes_held) == 1).await;
        }
        world.work(100).await;
        world.all_arrive_in_order().await;
    }
}

/// A killed server closes its connections at once. A frozen one does not answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_redis_nobody_sends_once_the_lease_is_over() {
    for (kind, frozen) in SERVERS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let world = World::start(kind).await;
        let relays = [world.relay("one"), world.relay("two")];
        let count = |of: fn(&Metrics) -> u64| relays.iter().map(|relay| of(&relay.metrics)).sum::<u64>();
        world.work(200).await;
        let mut server = world.broker.server.lock().await;
        if frozen {
            server.freeze()
        } else {
            server.kill()
        }
        let away = Instant::now();
        // Events are sent for as long as the lease lasts.
        world.work(100).await;
        until("the lease is lost", async || count(Metrics::leases_lost) == 1).await;
        let event = NewEvent::json("t", "{}");
        world.store.append(&LogName::outbox(), &[event]).await.expect("the store is there");
        let (sent, errors) = (world.sent(), count(Metrics::store_errors));
        until("the lane is asked for in vain", async || count(Metrics::store_errors) > errors + 5).await;
        assert!(world.sent.last_call().0 < away + TTL, "sent {:?} after", world.sent.last_call().0 - away);
        assert_eq!((world.sent(), count(Metrics::lanes_held)), (sent, 0));
        assert!(count(Metrics::renewals_failed) > 0);
        if frozen {
            server.thaw();
        } else {
            server.start().await;
        }
        until("it goes on", async || world.sent() > sent).await;
        world.work(100).await;
        world.all_arrive_in_order().await;
    }
}
