//! How fast a backlog is delivered to a destination that costs nothing.

use clap::Args;
use postbox_core::Postbox;
use postbox_postgres::Postgres;

use crate::bed::{Bed, PAYLOAD_BYTES, Place, Shape, Stores, connect, event};
use crate::child::{Job, Task};
use crate::figure::{Figure, Table, percent, thousands};

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

/// Each line drains the same log with a new subscription, so that the log is filled only once.
pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    for mut bed in options.store.beds().await? {
        let is_server = matches!(bed.place, Place::Postgres(..));
        let mut table = options.table(is_server);
        let shape = Shape { keys: options.keys, transaction: options.transaction };
        let mut filled = 0;
        for rows in &options.rows {
            bed.fill(filled, *rows, shape).await?;
            filled = *rows;
            let label = format!("{} events", thousands(*rows as f64));
            options.line(&bed, &format!("free-{rows}"), label, &mut table).await?;
        }
        if is_server {
            options.held_open(&mut bed, filled, &mut table).await?;
        }
        table.print();
        println!(
            "  {}",
            match is_server {
                true =>
                    "wanted: ratio ≥ 70 %, the same rate ± 15 % in every line, ≤ 5 WAL bytes per event, ≤ 64 MiB; CPU: client and server together",
                false => "written: the write-ahead log and its checkpoints",
            }
        );
    }
    Ok(())
}

impl Options {
    fn table(&self, is_server: bool) -> Table {
        let (store, written) = match is_server {
            true => ("Postgres 15, fsync on, one durable commit per batch", "WAL B/event"),
            false => ("SQLite", "written B/event"),
        };
        let title = format!(
            "drain: {store}, payload {PAYLOAD_BYTES} B, batch {}, key order on, {} keys, a sink that does nothing",
            self.batch,
            thousands(self.keys as f64)
        );
        let speed = ["backlog", "relay", "plain SELECT", "ratio", "CPU/event", "plain's", "CPU ratio"];
        Table::new(title, &[&speed[..], &[written, "peak memory", "plain's"]].concat())
    }

    /// Holds a transaction open whose id is older than everything that follows, with an event that
    /// stays invisible.
    async fn held_open(&self, bed: &mut Bed, filled: usize, table: &mut Table) -> anyhow::Result<()> {
        let mut writer = connect(&bed.store).await?;
        let mut held = writer.transaction().await?;
        Postbox::new(Postgres::default()).append(&mut held, event(filled, 1)).await?;
        let more = self.rows.first().copied().unwrap_or(0);
        bed.fill(filled, filled + more, Shape { keys: 1_000_000, transaction: more }).await?;
        let label = format!("+ {} in one transaction, 1,000,000 keys", thousands(more as f64));
        self.line(bed, "held", format!("{label}, another held open"), table).await?;
        held.rollback().await?;
        bed.settle_down().await?;
        self.line(bed, "released", label, table).await
    }

    async fn line(&self, bed: &Bed, subscription: &str, label: String, table: &mut Table) -> anyhow::Result<()> {
        let job =
            |task| Job { task, store: bed.store.clone(), subscription: subscription.to_owned(), batch: self.batch };
        let before = bed.in_child(&job(Task::Plain)).await?;
        let relay = bed.in_child(&job(Task::Relay)).await?;
        let after = bed.in_child(&job(Task::Plain)).await?;
        // The limit is the better of one run before and one after ours, so that a warm cache does
        // not flatter our figure.
        let plain = Figure {
            seconds: before.seconds.min(after.seconds),
            processor_seconds: before.processor_seconds.min(after.processor_seconds),
            ..before
        };
        anyhow::ensure!(relay.count == plain.count, "the relay delivered {} of {}", relay.count, plain.count);
        let digits = if matches!(bed.place, Place::Postgres(..)) { 2 } else { 1 };
        let micros = |figure: Figure| format!("{:.2} µs", figure.micros());
        let memory = |figure: Figure| format!("{:.0} MiB", figure.memory_mib);
        table.row([
            label,
            relay.rate(),
            plain.rate(),
            relay.ratio(plain),
            micros(relay),
            micros(plain),
            percent(plain.processor_seconds, relay.processor_seconds),
            format!("{:.digits$}", relay.bytes_each()),
            memory(relay),
            memory(plain),
        ]);
        Ok(())
    }
}
