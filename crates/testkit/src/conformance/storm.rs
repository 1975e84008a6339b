//! Random writers against a small random relay: nothing lost, no phantom, every key in order.
//! `POSTBOX_SEED=n` replays the choices of a run, not its interleaving.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use postbox_core::{Batch, Delivery, Entry, EventId, Key, Settlement, Subscription};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::Mutex;

use super::StoreFixture;
use super::harness::*;

const KEYS: usize = 8;
const LANES: u16 = 2;
const TRANSACTIONS_PER_WRITER: usize = 25;
/// Maximum steps of the relay after the last commit until everything must be out.
const STEPS_MAX: usize = 5_000;

/// Savepoints, rollbacks, one long transaction; retries, partial settlements, takeovers.
pub async fn under_random_writers_nothing_is_lost_and_every_key_stays_in_order(fixture: &dyn StoreFixture) {
    let seed = std::env::var("POSTBOX_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| SmallRng::from_os_rng().random());
    let concurrent = fixture.capabilities().concurrent_transactions;
    let storm = Storm::default();
    let mut relay = Relay::new(fixture, seed).await;
    let writing = async {
        let mut open = None;
        if concurrent {
            let mut transaction = fixture.begin().await;
            let ids = transaction.append(&outbox(), &[event("open all the while")]).await.expect("appended");
            open = Some((transaction, ids));
        }
        let writers = (0..if concurrent { 4 } else { 1 }).map(|n| storm.write(fixture, seed.wrapping_add(n)));
        futures::future::join_all(writers).await;
        if let Some((transaction, ids)) = open {
            transaction.commit().await;
            storm.committed.lock().await.extend(ids);
        }
    };
    let written = AtomicBool::new(false);
    let writing = async {
        writing.await;
        written.store(true, Relaxed);
    };
    let relaying = async {
        // A step is never dropped midway, or it would be unknown what was settled.
        while !written.load(Relaxed) {
            relay.step().await;
            tokio::task::yield_now().await;
        }
    };
    futures::join!(writing, relaying);
    relay.finish().await;
    storm.check(&relay.arrived, seed).await;
    let stats = stats(&relay.lanes[0].store).await;
    assert_eq!((stats.pending, stats.dead), (0, 0), "seed {seed}");
    assert_eq!(stats.dispatched as usize, relay.arrived.len(), "seed {seed}");
}

/// What the writers know for certain.
#[derive(Default)]
struct Storm {
    /// The version of each key, locked across the commit as an aggregate's row would be.
    versions: [Mutex<u64>; KEYS],
    committed: Mutex<BTreeSet<EventId>>,
}

impl Storm {
    async fn write(&self, fixture: &dyn StoreFixture, seed: u64) {
        let mut random = SmallRng::seed_from_u64(seed);
        for _ in 0..TRANSACTIONS_PER_WRITER {
            let mut open = fixture.begin().await;
            let mut ids = Vec::new();
            if random.random_bool(0.5) {
                ids.extend(open.append(&outbox(), &[event("early")]).await.expect("appended"));
                linger(&mut random).await;
            }
            // Locked in a fixed order, so that writers cannot deadlock.
            let keys: BTreeSet<usize> = (0..random.random_range(1..4)).map(|_| random.random_range(0..KEYS)).collect();
            let mut held = Vec::new();
            for key in keys {
                held.push((key, self.versions[key].lock().await));
            }
            let mut versions: Vec<u64> = held.iter().map(|(_, version)| **version).collect();
            for (index, (key, _)) in held.iter().enumerate() {
                if random.random_bool(0.2) {
                    open.savepoint().await;
                    open.append(&outbox(), &[keyed(&format!("k{key}"), "phantom")]).await.expect("appended");
                    open.rollback_to_savepoint().await;
                }
                for _ in 0..random.random_range(1..4) {
                    versions[index] += 1;
                    let event = keyed(&format!("k{key}"), &versions[index].to_string());
                    ids.extend(open.append(&outbox(), &[event]).await.expect("appended"));
                }
            }
            linger(&mut random).await;
            if random.random_bool(0.2) {
                open.rollback().await;
                continue;
            }
            open.commit().await;
            self.committed.lock().await.extend(ids);
            for ((_, version), reached) in held.iter_mut().zip(versions) {
                **version = reached;
            }
        }
    }

    async fn check(&self, arrived: &[Delivery], seed: u64) {
        let committed = self.committed.lock().await;
        let ids: BTreeSet<EventId> = arrived.iter().map(|delivery| delivery.event.id).collect();
        assert_eq!(ids.len(), arrived.len(), "settled as delivered twice, seed {seed}");
        assert_eq!(committed.difference(&ids).count(), 0, "lost, seed {seed}");
        assert_eq!(ids.difference(&committed).count(), 0, "phantoms, seed {seed}");
        let mut reached: BTreeMap<&Key, u64> = BTreeMap::new();
        for delivery in arrived {
            let Some(key) = &delivery.event.key else { continue };
            let version = payloads(std::slice::from_ref(delivery))[0].parse().expect("a version");
            let before = reached.insert(key, version).unwrap_or_default();
            assert_eq!(version, before + 1, "key {key} is out of order, seed {seed}");
        }
    }
}

/// A minimal relay with bad luck.
struct Relay {
    lanes: Vec<Lane>,
    arrived: Vec<Delivery>,
    random: SmallRng,
    /// Probability of a failure.
    trouble: f64,
}

impl Relay {
    async fn new(fixture: &dyn StoreFixture, seed: u64) -> Self {
        let store = fixture.store();
        store.subscribe(&Subscription { lanes: Some(LANES), ..reader() }).await.expect("new");
        let mut lanes = Vec::new();
        for _ in 0..LANES {
            lanes.push(Lane::take(&store, "reader", "one").await);
        }
        Self { lanes, arrived: Vec::new(), random: SmallRng::seed_from_u64(!seed), trouble: 0.1 }
    }

    async fn finish(&mut self) {
        for _ in 0..STEPS_MAX {
            let before = self.arrived.len();
            self.trouble *= 0.9;
            self.step().await;
            let mut idle = self.arrived.len() == before;
            for lane in &self.lanes {
                idle &= lane.next(1).await.is_empty() && lane.due(1).await.deliveries.is_empty();
                lane.rewind(None).await;
            }
            if idle {
                return;
            }
        }
        panic!("the backlog never ends");
    }

    /// Reads once and looks once for due rows, on every lane.
    async fn step(&mut self) {
        for index in 0..self.lanes.len() {
            let lane = &self.lanes[index];
            let batch = lane.next(self.random.random_range(1..20)).await;
            if self.random.random_bool(self.trouble) {
                // A crash between reading and settling.
                lane.store.release(&lane.lease).await.expect("given back");
                self.lanes[index] = Lane::take(&lane.store, "reader", "another").await;
            } else if !batch.is_empty() {
                self.deliver(index, batch).await;
            }
            let limit = self.random.random_range(1..10);
            let due = self.lanes[index].due(limit).await;
            if !due.is_empty() {
                self.deliver(index, due).await;
            }
        }
    }

    async fn deliver(&mut self, index: usize, batch: Batch) {
        let mut count = batch.deliveries.len();
        if batch.end.is_some() && count > 1 && self.random.random_bool(self.trouble) {
            count = self.random.random_range(1..count);
        }
        let partial = count < batch.deliveries.len();
        let mut failed: HashSet<Key> = batch.held.clone();
        let mut entries = Vec::new();
        let mut went_out = Vec::new();
        for delivery in &batch.deliveries[..count] {
            let key = delivery.event.key.as_ref();
            let disposition = if key.is_some_and(|key| failed.contains(key)) {
                Block
            } else if self.random.random_bool(self.trouble) {
                failed.extend(key.cloned());
                retry_now()
            } else {
                went_out.push(delivery.clone());
                Delivered
            };
            if batch.end.is_none() || disposition != Delivered {
                entries.push(Entry { delivery, disposition });
            }
        }
        let position = if partial { Some(batch.deliveries[count - 1].seq) } else { batch.end };
        self.lanes[index].write(Settlement { position, entries, rewind: partial, hold_keys: true }).await;
        self.arrived.extend(went_out);
    }
}

/// Lets other tasks go first, now and then.
async fn linger(random: &mut SmallRng) {
    for _ in 0..random.random_range(0..5) {
        tokio::task::yield_now().await;
    }
}
