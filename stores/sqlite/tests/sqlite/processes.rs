//! Another process writes with weaker durability and is killed; relays come and go. The counts come
//! from ledgers outside the store and its tables.

#![allow(clippy::print_stdout, reason = "a child process talks to its parent, and a seed must be seen")]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use postbox_core::{
    BatchLimit, EventId, Lease, Log, LogName, NewEvent, OwnerId, Postbox, Settlement, Subscription, SubscriptionName,
};
use postbox_sqlite::Sqlite;
use postbox_testkit::ledger::{Fate, Ledger};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rusqlite::{Connection, TransactionBehavior};

use crate::common::{self, Fixture, fixture};

const KEYS: i64 = 20;
const TRANSACTIONS: usize = 400;
/// Number of commits after which the first writer is killed.
const KILLED_AFTER: usize = 150;
/// If nothing is written or read for this long, the test hangs. The total time depends on the disk.
const STANDSTILL_MAX: Duration = Duration::from_secs(60);

/// The writer, in its own process. Prints what it is about to do before it does it, and the result
/// afterwards.
#[test]
fn child_writer() {
    let Ok(path) = std::env::var("POSTBOX_TEST_WRITE") else { return };
    let seed: u64 = std::env::var("POSTBOX_SEED").expect("set").parse().expect("a number");
    let mut random = SmallRng::seed_from_u64(seed);
    let mut connection = Connection::open(path).expect("opened");
    connection.busy_timeout(common::PATIENCE).expect("set");
    connection.pragma_update(None, "synchronous", "NORMAL").expect("set");
    let say = |line: String| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "\nledger {line}").expect("heard");
        out.flush().expect("heard");
    };
    for _ in 0..TRANSACTIONS {
        let mut tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("locked");
        say("begin".into());
        for _ in 0..random.random_range(1..6) {
            let key = random.random_range(0..KEYS);
            let version: i64 = tx
                .query_row("UPDATE orders SET version = version + 1 WHERE id = ?1 RETURNING version", [key], |row| {
                    row.get(0)
                })
                .expect("updated");
            let id = EventId::now_v7();
            say(format!("append {id} {key} {version}"));
            let event = NewEvent::json("order.changed", format!("{version}")).id(id).key(key.to_string());
            Postbox::new(Sqlite).append(&mut tx, event).expect("appended");
        }
        if random.random_bool(0.2) {
            tx.rollback().expect("rolled back");
            say("aborted".into());
        } else {
            tx.commit().expect("committed");
            say("committed".into());
        }
    }
}

/// Records what a writer prints until it ends. Kills it after `kill_after` commits.
fn listen(mut child: Child, ledger: &Ledger, kill_after: Option<usize>) {
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let mut commits = 0;
    let mut transaction = None;
    for line in lines {
        let Some(line) = line.strip_prefix("ledger ") else { continue };
        let words: Vec<&str> = line.split(' ').collect();
        match (words.as_slice(), transaction) {
            (["begin"], _) => transaction = Some(ledger.begin()),
            (["append", id, key, version], Some(transaction)) => {
                let version = version.parse().expect("a number");
                ledger.append(transaction, id.parse().expect("an id"), Some(key), version);
            }
            (["aborted"], Some(transaction)) => ledger.end(transaction, Fate::Aborted),
            (["committed"], Some(transaction)) => {
                ledger.end(transaction, Fate::Committed);
                commits += 1;
                if kill_after == Some(commits) {
                    child.kill().expect("killed");
                }
            }
            other => panic!("unexpected: {other:?}"),
        }
    }
    let status = child.wait().expect("ended");
    assert_eq!(status.success(), kill_after.is_none(), "{status}");
}

async fn take(fixture: &Fixture, name: &SubscriptionName, owner: &str) -> Lease {
    let owner = OwnerId::new(owner).expect("valid");
    fixture.store.acquire(name, &owner, &[], common::LONG).await.expect("asked").lease.expect("free")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_when_another_process_writes_and_is_killed() {
    let seed: u64 = std::env::var("POSTBOX_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| SmallRng::from_os_rng().random());
    println!("replay the choices with POSTBOX_SEED={seed}");
    let fixture = fixture().await;
    let setup = fixture.connect();
    setup
        .execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY, version INTEGER NOT NULL DEFAULT 0)")
        .expect("made");
    for key in 0..KEYS {
        setup.execute("INSERT INTO orders (id) VALUES (?1)", [key]).expect("inserted");
    }
    let ledger = Arc::new(Ledger::default());
    let writing = Arc::new(AtomicUsize::new(3));
    // One writer is killed in the middle, one continues where it stopped, one runs beside both.
    let plans = [vec![Some(KILLED_AFTER), None], vec![None]];
    for (n, plan) in plans.into_iter().enumerate() {
        let (ledger, writing) = (ledger.clone(), writing.clone());
        let path = fixture.path();
        std::thread::spawn(move || {
            for (m, kill) in plan.into_iter().enumerate() {
                listen(spawn(&path, seed.wrapping_add((n * 10 + m) as u64)), &ledger, kill);
                writing.fetch_sub(1, Ordering::SeqCst);
            }
        });
    }
    let name = SubscriptionName::new("reader").expect("valid");
    fixture
        .store
        .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");
    let mut random = SmallRng::seed_from_u64(seed);
    let mut lease = take(&fixture, &name, "relay-0").await;
    let mut relays = 0;
    let mut repeated = 0;
    let mut moved = Instant::now();
    loop {
        assert!(moved.elapsed() < STANDSTILL_MAX, "seed {seed}: nothing moves");
        let over = writing.load(Ordering::SeqCst) == 0;
        let limit = BatchLimit { events: random.random_range(1..100), ..BatchLimit::default() };
        let batch = fixture.store.next_batch(&lease, limit).await.expect("read");
        if batch.is_empty() {
            if over {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        moved = Instant::now();
        for delivery in &batch.deliveries {
            ledger.arrive(delivery.event.id);
        }
        if random.random_bool(0.05) {
            // A relay dies between publishing and settling.
            repeated += batch.deliveries.len();
            relays += 1;
            fixture.store.release(&lease).await.expect("released");
            lease = take(&fixture, &name, &format!("relay-{relays}")).await;
            continue;
        }
        let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
        fixture.store.settle(&lease, settlement).await.expect("settled");
    }
    let report = ledger.check();
    println!("{report}");
    assert!(report.is_at_least_once(), "seed {seed}:\n{report}");
    assert!(report.duplicates <= repeated, "seed {seed}: more repeats than crashes explain\n{report}");
    assert!(report.committed > 2 * TRANSACTIONS && report.aborted > 0, "the writers did write\n{report}");
}

fn spawn(path: &Path, seed: u64) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "processes::child_writer", "--nocapture"])
        .env("POSTBOX_TEST_WRITE", path)
        .env("POSTBOX_SEED", seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawned")
}
