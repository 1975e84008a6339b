//! How fast a backlog goes out when the destination costs nothing.

use anyhow::Context as _;
use clap::Args;
use postbox_core::LogName;
use postbox_testkit::servers::PrivatePostgres;

use crate::Stores;
use crate::child::{self, Figure, Job, Task};
use crate::fill::{self, Shape};
use crate::machine;
use crate::server::{self, connect, wal_bytes};
use crate::table::{Table, per_second, percent, rate, thousands};

/// What we want of these figures.
const RATIO_WANTED: &str =
    "wanted: ratio ≥ 70 %, the same rate ± 15 % in every line, ≤ 5 WAL bytes per event, ≤ 64 MiB";

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Sizes of the backlog, growing.
    #[arg(long, value_delimiter = ',', default_values_t = [200_000, 1_000_000])]
    rows: Vec<usize>,
    /// Events per batch.
    #[arg(long, default_value_t = 1_000)]
    batch: usize,
    /// Different keys among the events.
    #[arg(long, default_value_t = 10_000)]
    keys: usize,
    /// Events per transaction of the producer.
    #[arg(long, default_value_t = 1_000)]
    transaction: usize,
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

impl Options {
    fn shape(&self) -> Shape {
        Shape { keys: self.keys, transaction: self.transaction }
    }

    fn job(&self, task: Task, store: &str, subscription: &str) -> Job {
        Job { task, store: store.to_owned(), subscription: subscription.to_owned(), batch: self.batch }
    }

    /// `written`: what of the relay's writes is counted.
    fn table(&self, store: &str, written: &'static str) -> Table {
        let title = format!(
            "drain: {store}, payload {} B, batch {}, key order on, {} keys, a sink that does nothing",
            fill::PAYLOAD_BYTES,
            self.batch,
            thousands(self.keys as f64)
        );
        Table::new(
            title,
            &[
                "backlog",
                "relay",
                "plain SELECT",
                "ratio",
                "CPU/event",
                "plain's",
                "CPU ratio",
                written,
                "peak memory",
                "plain's",
            ],
        )
    }
}

/// Every line drains the same log with a subscription of its own, so that nothing has to be filled
/// twice.
async fn postgres(options: &Options) -> anyhow::Result<()> {
    let server = server::start().await;
    let url = server.fresh_database().await;
    child::open(&url).await?.up().await?;
    let mut client = connect(&url).await?;
    let mut table = options.table("Postgres 15, fsync on, one durable commit per batch", "WAL B/event");
    let mut filled = 0;
    for rows in &options.rows {
        fill::postgres(&mut client, filled, *rows, options.shape()).await?;
        filled = *rows;
        settle_down(&client).await?;
        let label = format!("{} events", thousands(*rows as f64));
        measure_postgres(options, &server, &url, &format!("free-{rows}"), label, &mut table).await?;
    }
    // An id below everything that follows, in every snapshot, with an event of its own that stays
    // invisible.
    let mut writer = connect(&url).await?;
    let held = writer.transaction().await?;
    postbox_postgres::append_in(&held, &fill::schema(), &LogName::outbox(), &[fill::event(filled, 1)]).await?;
    let more = options.rows.first().copied().unwrap_or(0);
    let in_one = Shape { keys: 1_000_000, transaction: more };
    fill::postgres(&mut client, filled, filled + more, in_one).await?;
    settle_down(&client).await?;
    let label = format!("+ {} in one transaction, 1,000,000 keys", thousands(more as f64));
    measure_postgres(options, &server, &url, "held", format!("{label}, another held open"), &mut table).await?;
    held.rollback().await?;
    settle_down(&client).await?;
    measure_postgres(options, &server, &url, "released", label, &mut table).await?;
    table.print();
    println!("  {RATIO_WANTED}; CPU: client and server together");
    Ok(())
}

/// What a server does in its own time is done before, so that it lands in nobody's figures.
async fn settle_down(client: &tokio_postgres::Client) -> anyhow::Result<()> {
    client.batch_execute("VACUUM ANALYZE postbox.outbox").await?;
    Ok(client.batch_execute("CHECKPOINT").await?)
}

async fn measure_postgres(
    options: &Options,
    server: &PrivatePostgres,
    url: &str,
    subscription: &str,
    label: String,
    table: &mut Table,
) -> anyhow::Result<()> {
    let client = connect(url).await?;
    let before = with_server(server, &options.job(Task::Plain, url, subscription)).await?;
    let wal = wal_bytes(&client).await?;
    let relay = with_server(server, &options.job(Task::Relay, url, subscription)).await?;
    let wal = (wal_bytes(&client).await? - wal) as f64 / relay.events.max(1) as f64;
    let after = with_server(server, &options.job(Task::Plain, url, subscription)).await?;
    line(table, label, relay, better(before, after), format!("{wal:.2}"))
}

/// A child's figure with the server's processor time added to its own.
async fn with_server(server: &PrivatePostgres, job: &Job) -> anyhow::Result<Figure> {
    let pid = server.pid().context("the server runs")?;
    let before = machine::processor_seconds_of_family(pid)?;
    let figure = job.in_child().await?;
    let used = machine::processor_seconds_of_family(pid)? - before;
    Ok(Figure { processor_seconds: figure.processor_seconds + used, ..figure })
}

async fn sqlite(options: &Options) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("bench.db").to_string_lossy().into_owned();
    child::open(&path).await?.up().await?;
    let mut connection = rusqlite::Connection::open(&path)?;
    let mut table = options.table("SQLite", "written B/event");
    let mut filled = 0;
    for rows in &options.rows {
        fill::sqlite(&mut connection, filled, *rows, options.shape())?;
        filled = *rows;
        let subscription = format!("free-{rows}");
        let before = options.job(Task::Plain, &path, &subscription).in_child().await?;
        let relay = options.job(Task::Relay, &path, &subscription).in_child().await?;
        let after = options.job(Task::Plain, &path, &subscription).in_child().await?;
        let written = format!("{:.1}", relay.written_bytes / relay.events.max(1) as f64);
        line(&mut table, format!("{} events", thousands(*rows as f64)), relay, better(before, after), written)?;
    }
    table.print();
    println!("  written: the write-ahead log and its checkpoints");
    Ok(())
}

/// The limit is the better of a run before and one after ours: a warm cache must not flatter us.
fn better(one: Figure, two: Figure) -> Figure {
    Figure {
        seconds: one.seconds.min(two.seconds),
        processor_seconds: one.processor_seconds.min(two.processor_seconds),
        ..one
    }
}

fn line(table: &mut Table, label: String, relay: Figure, plain: Figure, wal: String) -> anyhow::Result<()> {
    anyhow::ensure!(relay.events == plain.events, "the relay delivered {} of {}", relay.events, plain.events);
    let ratio = percent(per_second(relay.events, relay.seconds), per_second(plain.events, plain.seconds));
    let effort = percent(plain.processor_seconds, relay.processor_seconds);
    let micros = |figure: Figure| format!("{:.2} µs", 1e6 * figure.processor_seconds / figure.events.max(1) as f64);
    let memory = |figure: Figure| format!("{:.0} MiB", figure.memory_mib);
    let rates = [rate(relay.events, relay.seconds), rate(plain.events, plain.seconds)];
    let [ours, limit] = rates;
    let [ours_micros, limit_micros] = [micros(relay), micros(plain)];
    table.row([label, ours, limit, ratio, ours_micros, limit_micros, effort, wal, memory(relay), memory(plain)]);
    Ok(())
}
