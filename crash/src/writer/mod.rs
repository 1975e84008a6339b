//! A writer, in a separate process: does everything a program may do with a transaction, and
//! records it in a ledger before and after.

mod postgres;
mod sqlite;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use postbox_crash_checker::arrivals::Body;
use postbox_crash_checker::ledger::{Event, Fate, Line};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::json;

/// Number of keys: few enough that writers compete for them.
pub(crate) const KEYS: u32 = 1_000;
/// Topics. One subscription reads the last one only at times.
pub(crate) const TOPICS: [&str; 3] = ["crash.a", "crash.b", "crash.c"];
/// Events of the rare large append.
const LARGE: u32 = 500;

/// Microseconds of the machine's own clock.
pub(crate) fn now_micros() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// What a writer is given.
#[derive(Debug, Args)]
pub(crate) struct Job {
    /// `postgres://…` or the path of a SQLite file.
    #[arg(long)]
    store: String,
    /// Begins the names of its transactions; never given twice in a round.
    #[arg(long)]
    name: String,
    #[arg(long)]
    seed: u64,
    /// The ledger it makes.
    #[arg(long)]
    ledger: PathBuf,
    /// Appends through the library instead of plain SQL.
    #[arg(long)]
    rust: bool,
    /// Events a second.
    #[arg(long)]
    rate: f64,
}

impl Job {
    /// Writes until its standard input ends. Prints a line with the number of events for each
    /// committed transaction.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        std::thread::spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            asked.store(true, Ordering::SeqCst);
        });
        let ledger = Ledger::create(&self.ledger)?;
        let random = SmallRng::seed_from_u64(self.seed);
        let pace = Pace { began: Instant::now(), events: 0, rate: self.rate, stop };
        if self.store.contains("://") {
            postgres::write(self, ledger, random, pace).await
        } else {
            sqlite::write(&self, ledger, random, pace)
        }
    }
}

/// A ledger on disk.
struct Ledger {
    file: File,
}

impl Ledger {
    fn create(path: &Path) -> anyhow::Result<Self> {
        Ok(Self { file: File::options().create_new(true).append(true).open(path)? })
    }

    fn note(&mut self, line: &Line) -> anyhow::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)?;
        self.file.sync_data()?;
        Ok(())
    }

    fn events(&mut self, tx: &str, draft: &Draft) -> anyhow::Result<()> {
        let (kept, back) = (draft.kept.clone(), draft.back.clone());
        self.note(&Line::Events { tx: tx.to_owned(), at: now_micros(), kept, back })
    }

    fn end(&mut self, tx: &str, fate: Fate) -> anyhow::Result<()> {
        self.note(&Line::End { tx: tx.to_owned(), at: now_micros(), fate })
    }
}

/// How fast to write, and until when.
struct Pace {
    began: Instant,
    events: usize,
    rate: f64,
    stop: Arc<AtomicBool>,
}

impl Pace {
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Prints the number of events, and returns how long to wait to keep the rate. Time lost in an
    /// outage is not made up for: after two seconds the count starts again.
    fn committed(&mut self, events: usize) -> Duration {
        let _ = writeln!(std::io::stdout(), "{events}");
        self.events += events;
        let due = Duration::from_secs_f64(self.events as f64 / self.rate);
        let behind = self.began.elapsed().saturating_sub(due);
        if behind > Duration::from_secs(2) {
            (self.began, self.events) = (Instant::now(), 0);
        }
        due.saturating_sub(self.began.elapsed()).min(Duration::from_secs(1))
    }
}

/// The course of a transaction, drawn before it begins.
struct Shape {
    /// Commits asynchronously.
    asynchronous: bool,
    /// Gets its transaction id long before its first append.
    early: Option<Duration>,
    appends: Vec<Part>,
    /// Stays open for a while before it ends.
    held: Option<Duration>,
    end: End,
}

/// One append, to one key, perhaps in a savepoint.
struct Part {
    key: u32,
    count: u32,
    /// `Some(true)`: the savepoint is rolled back.
    savepoint: Option<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Commit,
    Rollback,
    /// Prepared, and ended after this many more transactions: committed, or rolled back.
    Prepare(u32, bool),
}

impl Shape {
    fn draw(random: &mut SmallRng) -> Self {
        let millis = |random: &mut SmallRng, most| Duration::from_millis(random.random_range(0..most));
        let held = match random.random_range(0..200) {
            0 => Some(millis(random, 4_000)),
            1..=20 => Some(millis(random, 60)),
            _ => None,
        };
        let parts = random.random_range(1..=3);
        Self {
            asynchronous: random.random_bool(0.2),
            early: random.random_bool(0.2).then(|| millis(random, 40)),
            appends: (0..parts).map(|_| Part::draw(random)).collect(),
            held,
            end: match random.random_range(0..100) {
                0..=7 => End::Rollback,
                8..=10 => End::Prepare(random.random_range(0..30), random.random_bool(0.7)),
                _ => End::Commit,
            },
        }
    }
}

impl Part {
    fn draw(random: &mut SmallRng) -> Self {
        let count = match random.random_range(0..200) {
            0 => LARGE,
            1..=80 => random.random_range(1..=4),
            _ => random.random_range(5..=60),
        };
        let savepoint = random.random_bool(0.2).then(|| random.random_bool(0.5));
        Self { key: random.random_range(0..KEYS), count, savepoint }
    }
}

/// What a transaction has appended so far.
#[derive(Default)]
struct Draft {
    kept: Vec<Event>,
    back: Vec<Event>,
}

impl Draft {
    /// The events of one append, which locked its key and got the numbers up to `last`.
    fn next(&self, part: &Part, last: i64, random: &mut SmallRng) -> Vec<Event> {
        let from = u32::try_from(self.kept.len() + self.back.len()).unwrap_or(u32::MAX);
        let event = |at: u32| Event {
            n: from + at,
            key: key_name(part.key),
            v: last - i64::from(part.count) + 1 + i64::from(at),
            topic: TOPICS[[0, 0, 0, 0, 0, 0, 1, 1, 1, 2][random.random_range(0..10)]].to_owned(),
        };
        (0..part.count).map(event).collect()
    }
}

pub(crate) fn key_name(key: u32) -> String {
    format!("k{key}")
}

/// An event's payload.
fn payload(tx: &str, event: &Event) -> String {
    json!({ "tx": tx, "n": event.n, "key": event.key, "v": event.v, "pad": Body::pad(event.n) }).to_string()
}
