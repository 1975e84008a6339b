//! Writes to SQLite.

use std::time::Duration;

use postbox_core::{NewEvent, Postbox};
use postbox_crash_checker::ledger::{Event, Fate};
use postbox_sqlite::Sqlite;
use rand::Rng as _;
use rand::rngs::SmallRng;
use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use super::{Draft, End, Job, Ledger, Pace, Part, Shape, key_name, payload};

const INSERT: &str = "INSERT INTO postbox_outbox (topic, key, payload, version) VALUES (?1, ?2, ?3, ?4)";
/// Longest wait for a lock; others hold theirs for a second at most.
const BUSY: Duration = Duration::from_secs(5);
/// Longest time a transaction is held open: there is one writer at a time, so it holds up all
/// others.
const HELD_MAX: Duration = Duration::from_millis(300);

pub(super) fn write(job: &Job, mut ledger: Ledger, mut random: SmallRng, mut pace: Pace) -> anyhow::Result<()> {
    let mut connection = None;
    let mut count = 0;
    while !pace.is_over() {
        let Some(connected) = &mut connection else {
            match connect(&job.store) {
                Ok(connected) => connection = Some(connected),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
            continue;
        };
        count += 1;
        let tx = format!("{}-{count}", job.name);
        let shape = Shape::draw(&mut random);
        let mut attempt = Attempt { tx: &tx, rust: job.rust, draft: Draft::default(), noted: false };
        match attempt.run(connected, &shape, &mut ledger, &mut random) {
            Ok(fate) => {
                ledger.end(&tx, fate)?;
                if fate == Fate::Committed {
                    std::thread::sleep(pace.committed(attempt.draft.kept.len()));
                }
            }
            Err(_) => {
                if attempt.noted {
                    ledger.end(&tx, Fate::Unknown)?;
                }
                connection = None;
            }
        }
    }
    Ok(())
}

fn connect(path: &str) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY)?;
    // The weakest setting that a producer may use: commits are visible before they are on disk.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    Ok(connection)
}

struct Attempt<'a> {
    tx: &'a str,
    rust: bool,
    draft: Draft,
    noted: bool,
}

impl Attempt<'_> {
    fn run(
        &mut self,
        connection: &mut Connection,
        shape: &Shape,
        ledger: &mut Ledger,
        random: &mut SmallRng,
    ) -> anyhow::Result<Fate> {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        tx.execute("INSERT INTO crash_mark (tx) VALUES (?1)", params![self.tx])?;
        for part in &shape.appends {
            self.append(&tx, part, random)?;
        }
        if let Some(wait) = shape.held {
            std::thread::sleep(wait.min(HELD_MAX));
        }
        ledger.events(self.tx, &self.draft)?;
        self.noted = true;
        if shape.end == End::Rollback {
            tx.rollback()?;
            return Ok(Fate::RolledBack);
        }
        tx.commit()?;
        Ok(Fate::Committed)
    }

    fn append(&mut self, tx: &Transaction<'_>, part: &Part, random: &mut SmallRng) -> anyhow::Result<()> {
        if part.savepoint.is_some() {
            tx.execute_batch("SAVEPOINT s")?;
        }
        let key = key_name(part.key);
        let lock = "UPDATE crash_aggregate SET version = version + ?2 WHERE key = ?1 RETURNING version";
        let last: i64 = tx.query_row(lock, params![key, part.count], |row| row.get(0))?;
        let events = self.draft.next(part, last, random);
        self.insert(tx, &key, &events, random)?;
        match part.savepoint {
            Some(true) => tx.execute_batch("ROLLBACK TO s; RELEASE s")?,
            Some(false) => tx.execute_batch("RELEASE s")?,
            None => {}
        }
        let list = if part.savepoint == Some(true) { &mut self.draft.back } else { &mut self.draft.kept };
        list.extend(events);
        Ok(())
    }

    fn insert(&self, tx: &Transaction<'_>, key: &str, events: &[Event], random: &mut SmallRng) -> anyhow::Result<()> {
        if self.rust && random.random_bool(0.8) {
            let new =
                |event: &Event| NewEvent::json(event.topic.as_str(), payload(self.tx, event)).key(key).version(event.v);
            Postbox::new(Sqlite).append(&mut &*tx, events.iter().map(new))?;
            return Ok(());
        }
        let mut insert = tx.prepare_cached(INSERT)?;
        for event in events {
            insert.execute(params![event.topic, key, payload(self.tx, event), event.v])?;
        }
        Ok(())
    }
}
