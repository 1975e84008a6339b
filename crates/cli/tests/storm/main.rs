//! The storm: the real binary between a real Postgres and a real endpoint, with writers that do everything writers do,
//! relays that are killed and a database that crashes. Counted by a ledger that is independent of the product.
//!
//! Faults: SIGKILL of either of two relays at random moments; immediate stops of the database (unflushed commits of the
//! `synchronous_commit = off` writers vanish). Writers: early transaction ids with late writes, savepoints, rollbacks, a
//! transaction that stays open for the whole run.
//!
//! Replay: `POSTBOX_SEED=… cargo nextest run --workspace --all-features -E 'test(storm)'`.

#![allow(clippy::print_stderr, reason = "a test that prints its seed and its counts")]

mod endpoint;
mod relay;
mod writer;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use postbox_testkit::ledger::{Fate, Ledger};
use postbox_testkit::servers::{PrivatePostgres, Settings, Version};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::endpoint::Endpoint;
use crate::relay::Relays;
use crate::writer::Storm;

/// Events the writers must have committed, at least.
const EVENTS: usize = 100_000;
const WRITERS: u64 = 8;
/// Immediate stops of the database in the middle.
const CRASHES: usize = 2;
/// Nothing arrives for so long: it is lost. How long the whole backlog takes is the machine's affair.
const STANDSTILL_MAX: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_invented_or_reordered_while_relays_and_the_database_die() {
    let seed = std::env::var("POSTBOX_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| SmallRng::from_os_rng().random());
    eprintln!("storm seed {seed}; replay with POSTBOX_SEED={seed}");
    let mut random = SmallRng::seed_from_u64(seed);

    // Commits that do not wait for the disk stay in memory for up to 10 s: an immediate stop takes them back.
    let settings = Settings::durable().with("wal_writer_delay", "10s");
    let mut postgres = PrivatePostgres::launch(Version::V15, settings).await;
    let url = postgres.fresh_database().await;
    relay::migrate(&url);
    writer::prepare(&url).await;

    let ledger = Arc::new(Ledger::default());
    let endpoint = Endpoint::start(ledger.clone()).await;
    let mut relays = Relays::start(&url, &endpoint.url(), 2);

    let storm = Arc::new(Storm { url: url.clone(), ledger: ledger.clone(), enough: AtomicUsize::new(EVENTS) });
    let open = writer::stay_open(storm.clone()).await;
    let writers: Vec<_> = (0..WRITERS)
        .map(|n| tokio::spawn(writer::write_until_enough(storm.clone(), seed.wrapping_add(n + 1))))
        .collect();

    let mut crashes = 0;
    while writers.iter().any(|writer| !writer.is_finished()) {
        tokio::time::sleep(Duration::from_millis(random.random_range(200..1_500))).await;
        relays.kill_one(&mut random);
        let due = EVENTS * (crashes + 1) / (CRASHES + 1);
        if crashes < CRASHES && ledger.committed() >= due {
            postgres.stop_immediate();
            tokio::time::sleep(Duration::from_millis(random.random_range(0..500))).await;
            postgres.start().await;
            crashes += 1;
        }
    }
    for writer in writers {
        writer.await.expect("a writer panicked");
    }
    open.commit().await;

    let arrived = wait_until_drained(&ledger).await;
    if arrived {
        relay::settled(&url).await;
    }
    let stats = relay::stats(&url);
    let kills = relays.kills();
    relays.stop().await;
    let report = ledger.check();
    eprintln!("{report}relay kills={kills} database crashes={crashes}\n{stats}");

    assert!(arrived, "nothing arrived for {STANDSTILL_MAX:?}: {report}\n{stats}");
    assert!(report.committed >= EVENTS, "the storm was too small to count: {report}");
    assert!(crashes == CRASHES && kills > 0, "the faults did not happen: kills={kills} crashes={crashes}");
    report.assert_at_least_once();
    assert_eq!(
        writer::missing_in_database(&url, &endpoint.arrived()).await,
        0,
        "phantoms: sent, but not in the database"
    );
    let in_flight_max = relay::BATCH * 2 * relay::LANES;
    assert!(
        report.duplicates <= (kills + crashes * 2) * in_flight_max,
        "more repeats than the batches in flight at {kills} kills and {crashes} crashes: {report}"
    );
}

/// Waits until every committed event has arrived; `false` when nothing comes any more.
async fn wait_until_drained(ledger: &Ledger) -> bool {
    let (mut moved, mut before) = (Instant::now(), usize::MAX);
    loop {
        let outstanding = ledger.outstanding();
        if outstanding == 0 {
            return true;
        }
        if outstanding != before {
            (moved, before) = (Instant::now(), outstanding);
        }
        if moved.elapsed() > STANDSTILL_MAX {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// What the fate of a transaction is whose commit did not wait for the disk.
const UNFLUSHED: Fate = Fate::Unknown;

impl Storm {
    /// Whether this many committed events are still wanted; counts them.
    fn want_more(&self, events: usize) -> bool {
        self.enough
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(events)))
            .is_ok_and(|left| left > 0)
    }
}
