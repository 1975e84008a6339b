//! The shop: each change of an order and its event commit in one transaction of the shop's own
//! database.
//!
//! The shop also writes notes to a plain file, after each commit and each rollback. The proof
//! compares everything with them. The notes know nothing of Postbox.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use postbox_core::{EventId, NewEvent, Postbox};
use postbox_sqlite::Sqlite;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rusqlite::{Connection, TransactionBehavior, params};

/// The steps of an order, one after the other.
const STEPS: [&str; 3] = ["order.placed", "order.paid", "order.shipped"];
/// Percentage of transactions that are rolled back on purpose.
const ROLLBACK_PERCENT: u32 = 10;
/// Time over which the orders are spread; the rest of 8 seconds is for crash, recovery and proof.
const SPREAD: Duration = Duration::from_secs(5);
/// Least pause between two steps. SQLite has one write lock and no queue for it: a shop that took
/// it again at once would keep the relay out.
const PACE_MIN: Duration = Duration::from_micros(500);
/// Longest pause between two steps, so that a small demo does not idle.
const PACE_MAX: Duration = Duration::from_millis(5);
/// Most orders in progress at once.
const OPEN_MAX: usize = 50;

const SHOP_SCHEMA: &str =
    "CREATE TABLE orders (id TEXT PRIMARY KEY, version INTEGER NOT NULL, cents INTEGER NOT NULL) WITHOUT ROWID";
/// By primary key; takes the database's one write lock.
const ORDER_WRITE: &str =
    "INSERT INTO orders (id, version, cents) VALUES (?1, ?2, ?3) ON CONFLICT (id) DO UPDATE SET version = ?2";

/// The shop's progress, for display, and the flag that stops it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) committed: AtomicU64,
    pub(super) rolled_back: AtomicU64,
    pub(super) stop: AtomicBool,
}

/// Number of steps that `orders` orders take.
pub(super) fn steps(orders: u64) -> u64 {
    orders * STEPS.len() as u64
}

struct Order {
    number: u64,
    cents: i64,
    version: usize,
}

/// Takes every order through all its steps. Blocks: the connection is a plain one, as in any
/// program.
pub(super) fn work(folder: &Path, seed: u64, orders: u64, progress: &Progress) -> anyhow::Result<()> {
    let mut connection = Connection::open(folder.join("shop.db"))?;
    connection.busy_timeout(Duration::from_secs(10))?;
    // A commit survives the death of the process, which is what the demo shows, without a flush for
    // each commit.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.execute(SHOP_SCHEMA, [])?;
    let mut notes = BufWriter::new(File::create_new(folder.join("notes.tsv"))?);
    let mut random = SmallRng::seed_from_u64(seed);
    let pace = (SPREAD / u32::try_from(steps(orders)).unwrap_or(u32::MAX)).min(PACE_MAX);
    let began = Instant::now();
    let mut open: Vec<Order> = Vec::new();
    let (mut placed, mut done) = (0, 0);
    while (placed < orders || !open.is_empty()) && !progress.stop.load(Ordering::Relaxed) {
        if placed < orders && (open.is_empty() || (open.len() < OPEN_MAX && random.random_bool(0.4))) {
            placed += 1;
            open.push(Order { number: placed, cents: random.random_range(100..50_000), version: 0 });
        }
        let at = random.random_range(0..open.len());
        let rolls_back = random.random_range(0..100) < ROLLBACK_PERCENT;
        let id = EventId::from_uuid(uuid::Builder::from_random_bytes(random.random()).into_uuid());
        writeln!(notes, "{}", step(&mut connection, &open[at], id, rolls_back)?)?;
        if rolls_back {
            progress.rolled_back.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        progress.committed.fetch_add(1, Ordering::Relaxed);
        open[at].version += 1;
        if open[at].version == STEPS.len() {
            open.swap_remove(at);
        }
        done += 1;
        // The pace of the customers, not a wait for anything.
        std::thread::sleep((pace * done).saturating_sub(began.elapsed()).max(PACE_MIN));
    }
    notes.flush()?;
    Ok(notes.get_ref().sync_all()?)
}

/// One transaction: the order's change and its event, or neither. Returns its note.
fn step(connection: &mut Connection, order: &Order, id: EventId, rolls_back: bool) -> anyhow::Result<String> {
    let (name, version, cents) = (format!("A-{:05}", order.number), order.version as i64 + 1, order.cents);
    let payload = format!(r#"{{"event":"{id}","order":"{name}","version":{version},"cents":{cents}}}"#);
    let event = NewEvent::json(STEPS[order.version], payload)
        .id(id)
        .key(name.as_str())
        .aggregate("order")
        .version(version)
        .source("shop");
    let mut tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute(ORDER_WRITE, params![name, version, cents])?;
    Postbox::new(Sqlite).append(&mut tx, event)?;
    let outcome = if rolls_back {
        tx.rollback()?;
        "rolled_back"
    } else {
        tx.commit()?;
        "committed"
    };
    Ok(format!("{outcome}\t{id}\t{name}\t{version}\t{cents}"))
}
