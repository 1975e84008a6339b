//! What an append costs inside the caller's transaction.

use std::time::{Duration, Instant};

use clap::Args;
use postbox_core::LogName;
use tokio_postgres::Statement;
use uuid::Uuid;

use crate::server::{self, connect, wal_bytes};
use crate::table::{Table, percent, rate};
use crate::{Stores, child, fill, machine};

const KEYS: usize = 10_000;

/// The same facts in a table that promises nothing: no checks, no second index, no transaction id,
/// no slot.
const POSTGRES_BARE: &str = "CREATE TABLE bare (seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id uuid NOT NULL, topic text NOT NULL, \
     key text, payload text, occurred_at timestamptz NOT NULL DEFAULT clock_timestamp(), created_at timestamptz NOT NULL DEFAULT clock_timestamp())";
/// Any number of rows in one round trip. Row locks of its own rows only.
const POSTGRES_INSERT: &str =
    "INSERT INTO bare (id, topic, key, payload) SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[])";

const SQLITE_BARE: &str = "CREATE TABLE bare (seq INTEGER PRIMARY KEY, id BLOB NOT NULL, topic TEXT NOT NULL, key TEXT, payload BLOB, \
     occurred_at INTEGER NOT NULL DEFAULT (unixepoch()), created_at INTEGER NOT NULL DEFAULT (unixepoch()))";
const SQLITE_INSERT: &str = "INSERT INTO bare (id, topic, key, payload) VALUES (?1, ?2, ?3, ?4)";

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Events per transaction.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100])]
    batch: Vec<usize>,
    /// Writers at once (Postgres).
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8])]
    writers: Vec<usize>,
    /// How long each figure is measured.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Which stores.
    #[arg(long, value_enum, default_value_t = Stores::Both)]
    store: Stores,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    if options.store.postgres() {
        postgres(options).await?;
    }
    if options.store.sqlite() {
        sqlite(options).await?;
    }
    Ok(())
}

struct Figure {
    events: usize,
    seconds: f64,
    /// On Postgres of write-ahead log; on SQLite of all that was written, log and checkpoints.
    bytes_per_event: f64,
}

impl Figure {
    fn per_second(&self) -> f64 {
        self.events as f64 / self.seconds
    }
}

async fn postgres(options: &Options) -> anyhow::Result<()> {
    let server = server::start().await;
    let url = server.fresh_database().await;
    child::open(&url).await?.up().await?;
    let client = connect(&url).await?;
    client.batch_execute(POSTGRES_BARE).await?;
    let mut table = Table::new(
        "append: Postgres 15, fsync on, in the caller's tokio-postgres transaction",
        &["events a transaction", "writers", "append_in", "bare INSERT", "ratio", "WAL B/event", "bare's"],
    );
    for batch in &options.batch {
        for writers in &options.writers {
            let ours = measure_postgres(&url, *batch, *writers, options.seconds, false).await?;
            let bare = measure_postgres(&url, *batch, *writers, options.seconds, true).await?;
            table.row([
                batch.to_string(),
                writers.to_string(),
                rate(ours.events, ours.seconds),
                rate(bare.events, bare.seconds),
                percent(ours.per_second(), bare.per_second()),
                format!("{:.0}", ours.bytes_per_event),
                format!("{:.0}", bare.bytes_per_event),
            ]);
        }
    }
    table.print();
    println!(
        "  the bare table has a primary key and nothing else: no unique event id, no checks, no transaction id, no slot"
    );
    println!("  peak memory of all writers in one process: {:.0} MiB", machine::memory_peak_mib()?);
    Ok(())
}

async fn measure_postgres(url: &str, batch: usize, writers: usize, seconds: u64, bare: bool) -> anyhow::Result<Figure> {
    let client = connect(url).await?;
    client.batch_execute("CHECKPOINT").await?;
    let wal = wal_bytes(&client).await?;
    let start = Instant::now();
    let until = start + Duration::from_secs(seconds);
    let writing = (0..writers).map(|number| {
        let url = url.to_owned();
        tokio::spawn(async move { write_postgres(&url, number, batch, until, bare).await })
    });
    let mut events = 0;
    for writer in futures::future::join_all(writing).await {
        events += writer??;
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes_per_event = (wal_bytes(&client).await? - wal) as f64 / events.max(1) as f64;
    Ok(Figure { events, seconds, bytes_per_event })
}

async fn write_postgres(url: &str, number: usize, batch: usize, until: Instant, bare: bool) -> anyhow::Result<usize> {
    let mut client = connect(url).await?;
    let insert = client.prepare(POSTGRES_INSERT).await?;
    let mut count = 0;
    while Instant::now() < until {
        let events: Vec<_> = (0..batch).map(|n| fill::event(number * 1_000_003 + count + n, KEYS)).collect();
        let transaction = client.transaction().await?;
        if bare {
            insert_bare(&transaction, &insert, &events).await?;
        } else {
            postbox_postgres::append_in(&transaction, &fill::schema(), &LogName::outbox(), &events).await?;
        }
        transaction.commit().await?;
        count += batch;
    }
    Ok(count)
}

async fn insert_bare(
    transaction: &tokio_postgres::Transaction<'_>,
    insert: &Statement,
    events: &[postbox_core::NewEvent],
) -> anyhow::Result<()> {
    let ids: Vec<Uuid> = events.iter().map(|_| Uuid::now_v7()).collect();
    let topics: Vec<&str> = events.iter().map(|event| event.topic.as_str()).collect();
    let keys: Vec<Option<&str>> = events.iter().map(|event| event.key.as_deref()).collect();
    let payloads = events.iter().map(|event| std::str::from_utf8(&event.payload)).collect::<Result<Vec<_>, _>>()?;
    transaction.execute(insert, &[&ids, &topics, &keys, &payloads]).await?;
    Ok(())
}

async fn sqlite(options: &Options) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("bench.db").to_string_lossy().into_owned();
    child::open(&path).await?.up().await?;
    let mut connection = rusqlite::Connection::open(&path)?;
    connection.execute_batch(SQLITE_BARE)?;
    // What a service that uses WAL sets; a commit is not flushed, so both sides measure processor
    // time.
    connection.execute_batch("PRAGMA synchronous = NORMAL")?;
    let mut table = Table::new(
        "append: SQLite, WAL, synchronous = NORMAL, in the caller's rusqlite transaction",
        &["events a transaction", "append_in", "bare INSERT", "ratio", "written B/event", "bare's"],
    );
    for batch in &options.batch {
        let ours = measure_sqlite(&mut connection, *batch, options.seconds, false)?;
        let bare = measure_sqlite(&mut connection, *batch, options.seconds, true)?;
        table.row([
            batch.to_string(),
            rate(ours.events, ours.seconds),
            rate(bare.events, bare.seconds),
            percent(ours.per_second(), bare.per_second()),
            format!("{:.0}", ours.bytes_per_event),
            format!("{:.0}", bare.bytes_per_event),
        ]);
    }
    table.print();
    println!("  peak memory: {:.0} MiB", machine::memory_peak_mib()?);
    Ok(())
}

fn measure_sqlite(
    connection: &mut rusqlite::Connection,
    batch: usize,
    seconds: u64,
    bare: bool,
) -> anyhow::Result<Figure> {
    let written = machine::written_bytes()?;
    let start = Instant::now();
    let until = start + Duration::from_secs(seconds);
    let mut count = 0;
    while Instant::now() < until {
        let events: Vec<_> = (0..batch).map(|n| fill::event(count + n, KEYS)).collect();
        let transaction = connection.transaction()?;
        if bare {
            let mut insert = transaction.prepare_cached(SQLITE_INSERT)?;
            for event in &events {
                insert.execute((Uuid::now_v7().as_bytes(), &event.topic, &event.key, &event.payload[..]))?;
            }
        } else {
            postbox_sqlite::append_in(&transaction, &LogName::outbox(), &events)?;
        }
        transaction.commit()?;
        count += batch;
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes_per_event = (machine::written_bytes()? - written) / count.max(1) as f64;
    Ok(Figure { events: count, seconds, bytes_per_event })
}
