//! The cost of an append inside the caller's transaction.

mod peers;

use std::hint::black_box;
use std::time::{Duration, Instant};

use clap::Args;
use deadpool_postgres::{Manager, Pool, Transaction};
use postbox_core::kit::in_context;
use postbox_core::{NewEvent, Postbox};
use postbox_postgres::Postgres;
use postbox_sqlite::Sqlite;
use tokio_postgres::{NoTls, Statement};
use uuid::Uuid;

use crate::bed::{Bed, Place, Stores, at_once, event};
use crate::figure::{Figure, Table};
use crate::machine;

const KEYS: usize = 10_000;
/// Turns of each side, so that other load on the machine affects all of them.
const ROUNDS: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Ours,
    /// With a statement cached in the connection.
    Prepared,
    Bare,
}

/// The same facts in a table that promises nothing: no checks, no second index, no transaction id,
/// no slot.
const POSTGRES_BARE: &str = "CREATE TABLE bare (seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id uuid NOT NULL, topic text NOT NULL, \
     key text, payload text, occurred_at timestamptz NOT NULL DEFAULT clock_timestamp(), created_at timestamptz NOT NULL DEFAULT clock_timestamp())";
/// Any number of rows in one round trip. Locks only its own rows.
const POSTGRES_INSERT: &str =
    "INSERT INTO bare (id, topic, key, payload) SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[])";

/// The same for SQLite, with the pragma of a service that uses WAL. A commit is not flushed, so
/// both sides measure processor time.
const SQLITE_BARE: &str = "CREATE TABLE bare (seq INTEGER PRIMARY KEY, id BLOB NOT NULL, topic TEXT NOT NULL, key TEXT, payload BLOB, \
     occurred_at INTEGER NOT NULL DEFAULT (unixepoch()), created_at INTEGER NOT NULL DEFAULT (unixepoch())); \
     PRAGMA synchronous = NORMAL";
const SQLITE_INSERT: &str = "INSERT INTO bare (id, topic, key, payload) VALUES (?1, ?2, ?3, ?4)";

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Events per transaction.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100])]
    batch: Vec<usize>,
    /// Writers at once (Postgres).
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8])]
    writers: Vec<usize>,
    /// How long each figure is measured, in seconds.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Which stores.
    #[arg(long, value_enum, default_value_t = Stores::Both)]
    store: Stores,
    /// Instead, compare one event per transaction with pgmq, outbox-core and River's client for
    /// Rust.
    #[arg(long, conflicts_with_all = ["batch", "store"])]
    peers: bool,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    if options.peers {
        return peers::run(options).await;
    }
    for mut bed in options.store.beds().await? {
        let columns = ["events a transaction", "writers", "append", "bare INSERT", "ratio"];
        let (mut table, writers) = match &mut bed.place {
            Place::Postgres(client, _) => {
                client.batch_execute(POSTGRES_BARE).await?;
                let title = "append: Postgres 15, fsync on, in the caller's deadpool-postgres transaction";
                let more = ["prepared", "ratio", "WAL B/event", "bare's"];
                (Table::new(title, &[&columns[..], &more].concat()), &options.writers[..])
            }
            Place::Sqlite(file) => {
                file.execute_batch(SQLITE_BARE)?;
                let title = "append: SQLite, WAL, synchronous = NORMAL, in the caller's rusqlite transaction";
                let columns = [&columns[..1], &columns[2..], &["written B/event", "bare's"]].concat();
                (Table::new(title, &columns), &[1][..])
            }
        };
        let mut fastest = 0_f64;
        for batch in &options.batch {
            for writers in writers {
                let is_postgres = matches!(bed.place, Place::Postgres(..));
                let (mut ours, mut bare, mut prepared) = (Figure::default(), Figure::default(), Figure::default());
                for _ in 0..ROUNDS {
                    let mut more = async |side| measure(&mut bed, *batch, *writers, options.round(), side).await;
                    ours = ours.plus(more(Side::Ours).await?);
                    bare = bare.plus(more(Side::Bare).await?);
                    if is_postgres {
                        prepared = prepared.plus(more(Side::Prepared).await?);
                    }
                }
                fastest = fastest.max(ours.per_second() / *batch as f64);
                let at_once = is_postgres.then(|| writers.to_string());
                let bytes = [ours, bare].map(|figure| format!("{:.0}", figure.bytes_each()));
                let speed = [ours.rate(), bare.rate(), ours.ratio(bare)];
                let prepared = is_postgres.then(|| [prepared.rate(), prepared.ratio(bare)]);
                let row = [batch.to_string()].into_iter().chain(at_once).chain(speed);
                table.row(row.chain(prepared.into_iter().flatten()).chain(bytes));
            }
        }
        table.print();
        let asked = asked_in_vain();
        let part = 100.0 * asked * fastest;
        println!(
            "  no context and traces off: {:.1} ns of each append, {part:.4} % of the time of the fastest",
            1e9 * asked
        );
        if matches!(bed.place, Place::Postgres(..)) {
            println!(
                "  the bare table has a primary key and nothing else: no unique event id, no checks, no transaction id, no slot"
            );
        }
        println!("  peak memory of all writers in one process: {:.0} MiB", machine::memory_peak_mib()?);
    }
    Ok(())
}

impl Options {
    fn round(&self) -> Duration {
        Duration::from_secs(self.seconds) / ROUNDS
    }
}

/// Seconds per append spent to find that no context is to be propagated and tracing is off.
fn asked_in_vain() -> f64 {
    const TIMES: u32 = 1_000_000;
    let events = [event(0, KEYS)];
    let start = Instant::now();
    for _ in 0..TIMES {
        black_box(in_context(black_box(&events[..])));
    }
    start.elapsed().as_secs_f64() / f64::from(TIMES)
}

async fn measure(bed: &mut Bed, batch: usize, writers: usize, time: Duration, side: Side) -> anyhow::Result<Figure> {
    match &mut bed.place {
        Place::Postgres(client, _) => {
            client.batch_execute("CHECKPOINT").await?;
            let until = Instant::now() + time;
            let write = |number| write_postgres(bed.store.clone(), number, batch, until, side);
            bed.measure(at_once(writers, write)).await
        }
        Place::Sqlite(file) => {
            let (written, start) = (machine::written_bytes()?, Instant::now());
            let count = write_sqlite(file, batch, start + time, side)?;
            let bytes = machine::written_bytes()? - written;
            Ok(Figure { count, seconds: start.elapsed().as_secs_f64(), bytes, ..Figure::default() })
        }
    }
}

async fn write_postgres(url: String, number: usize, batch: usize, until: Instant, side: Side) -> anyhow::Result<usize> {
    let pool = Pool::builder(Manager::new(url.parse()?, NoTls)).max_size(1).build()?;
    let mut client = pool.get().await?;
    let insert = client.prepare(POSTGRES_INSERT).await?;
    let postbox = Postbox::new(Postgres { prepared: side == Side::Prepared, ..Postgres::default() });
    let mut count = 0;
    while Instant::now() < until {
        let events: Vec<_> = (0..batch).map(|n| event(number * 1_000_003 + count + n, KEYS)).collect();
        let mut transaction = client.transaction().await?;
        if side == Side::Bare {
            insert_bare(&transaction, &insert, &events).await?;
        } else {
            postbox.append(&mut transaction, events).await?;
        }
        transaction.commit().await?;
        count += batch;
    }
    Ok(count)
}

async fn insert_bare(transaction: &Transaction<'_>, insert: &Statement, events: &[NewEvent]) -> anyhow::Result<()> {
    let ids: Vec<Uuid> = events.iter().map(|_| Uuid::now_v7()).collect();
    let topics: Vec<&str> = events.iter().map(|event| event.topic.as_str()).collect();
    let keys: Vec<Option<&str>> = events.iter().map(|event| event.key.as_deref()).collect();
    let payloads = events.iter().map(|event| std::str::from_utf8(&event.payload)).collect::<Result<Vec<_>, _>>()?;
    transaction.execute(insert, &[&ids, &topics, &keys, &payloads]).await?;
    Ok(())
}

fn write_sqlite(file: &mut rusqlite::Connection, batch: usize, until: Instant, side: Side) -> anyhow::Result<usize> {
    let mut count = 0;
    while Instant::now() < until {
        let events: Vec<_> = (0..batch).map(|n| event(count + n, KEYS)).collect();
        let mut transaction = file.transaction()?;
        if side == Side::Bare {
            let mut insert = transaction.prepare_cached(SQLITE_INSERT)?;
            for event in &events {
                insert.execute((Uuid::now_v7().as_bytes(), &event.topic, &event.key, &event.payload[..]))?;
            }
        } else {
            Postbox::new(Sqlite).append(&mut transaction, events)?;
        }
        transaction.commit()?;
        count += batch;
    }
    Ok(count)
}
