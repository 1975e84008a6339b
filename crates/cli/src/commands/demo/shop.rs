//! The shop: every change of an order and the event about it commit in one transaction of the shop's own database.
//!
//! Beside it the shop keeps notes in a plain file, written after each commit and each rollback: what the proof at the end
//! compares everything with. The notes know nothing of Postbox.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use postbox_core::{EventId, LogName, NewEvent};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rusqlite::{Connection, TransactionBehavior, params};

/// What happens to an order, one after the other.
const STEPS: [&str; 3] = ["order.placed", "order.paid", "order.shipped"];
/// Of a hundred transactions, so many are rolled back on purpose.
const ROLLBACK_PERCENT: u32 = 10;
/// Least time between two customers. SQLite has one write lock and no queue for it: a shop that took it again at once would
/// keep the relay out.
const BREATH: Duration = Duration::from_micros(500);
/// Longest time between two customers, so that a small shop does not stand empty.
const PACE_MAX: Duration = Duration::from_millis(5);
/// Orders in progress at once.
const OPEN_MAX: usize = 50;

const SHOP_SCHEMA: &str =
    "CREATE TABLE orders (id TEXT PRIMARY KEY, version INTEGER NOT NULL, cents INTEGER NOT NULL) WITHOUT ROWID";
/// By primary key; takes the database's one write lock.
const ORDER_PLACE: &str = "INSERT INTO orders (id, version, cents) VALUES (?1, ?2, ?3)";
/// By primary key; takes the database's one write lock.
const ORDER_ADVANCE: &str = "UPDATE orders SET version = ?2 WHERE id = ?1";

/// What the shop has done so far, for the progress display only.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) committed: AtomicU64,
    pub(super) rolled_back: AtomicU64,
}

/// Steps that `orders` orders take.
pub(super) fn steps(orders: u64) -> u64 {
    orders * STEPS.len() as u64
}

struct Order {
    number: u64,
    cents: u64,
    version: usize,
}

/// The shop at work. Runs on a thread of its own: the connection is a plain blocking one, as any program would have it.
pub(super) struct Shop {
    connection: Connection,
    notes: BufWriter<File>,
    random: SmallRng,
    orders: u64,
    pace: Duration,
}

impl Shop {
    /// Opens the shop's database; `steps` are spread over about `spread`.
    pub(super) fn open(
        database: &Path,
        notes: &Path,
        seed: u64,
        orders: u64,
        spread: Duration,
    ) -> anyhow::Result<Self> {
        let connection = Connection::open(database)?;
        connection.busy_timeout(Duration::from_secs(10))?;
        // A commit survives the death of the process, which is what is played here; no flush for each customer.
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        connection.execute(SHOP_SCHEMA, [])?;
        let pace = (spread / u32::try_from(steps(orders)).unwrap_or(u32::MAX)).min(PACE_MAX);
        let notes = BufWriter::new(File::create_new(notes)?);
        Ok(Self { connection, notes, random: SmallRng::seed_from_u64(seed), orders, pace })
    }

    /// Takes every order through all its steps.
    pub(super) fn work(mut self, progress: &Arc<Progress>, stop: &AtomicBool) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut open: Vec<Order> = Vec::new();
        let mut placed = 0;
        let mut done = 0;
        while (placed < self.orders || !open.is_empty()) && !stop.load(Ordering::Relaxed) {
            if placed < self.orders && (open.is_empty() || (open.len() < OPEN_MAX && self.random.random_bool(0.4))) {
                placed += 1;
                open.push(Order { number: placed, cents: self.random.random_range(100..50_000), version: 0 });
            }
            let at = self.random.random_range(0..open.len());
            let rolled_back = self.random.random_range(0..100) < ROLLBACK_PERCENT;
            let id = EventId::from_uuid(uuid::Builder::from_random_bytes(self.random.random()).into_uuid());
            self.step(&open[at], id, rolled_back)?;
            if rolled_back {
                progress.rolled_back.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            progress.committed.fetch_add(1, Ordering::Relaxed);
            open[at].version += 1;
            if open[at].version == STEPS.len() {
                open.swap_remove(at);
            }
            done += 1;
            // The pace of customers, not a wait for anything.
            std::thread::sleep((self.pace * done).saturating_sub(began.elapsed()).max(BREATH));
        }
        self.notes.flush()?;
        self.notes.get_ref().sync_all()?;
        Ok(())
    }

    /// One transaction: the order's change and its event, or neither.
    fn step(&mut self, order: &Order, id: EventId, rolled_back: bool) -> anyhow::Result<()> {
        let name = format!("A-{:05}", order.number);
        let version = order.version + 1;
        let topic = STEPS[order.version];
        let payload = format!(r#"{{"event":"{id}","order":"{name}","version":{version},"cents":{}}}"#, order.cents);
        let event = NewEvent::json(topic, payload)
            .id(id)
            .key(name.as_str())
            .aggregate("order")
            .version(version as i64)
            .source("shop");

        let tx = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        match version {
            1 => tx.execute(ORDER_PLACE, params![name, version as i64, order.cents as i64])?,
            _ => tx.execute(ORDER_ADVANCE, params![name, version as i64])?,
        };
        postbox_sqlite::append_in(&tx, &LogName::outbox(), &[event])?;
        let outcome = if rolled_back {
            tx.rollback()?;
            "rolled_back"
        } else {
            tx.commit()?;
            "committed"
        };
        writeln!(self.notes, "{outcome}\t{id}\t{name}\t{version}\t{}", order.cents)?;
        Ok(())
    }
}
