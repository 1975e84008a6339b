//! How fast old events are pruned, at two sizes of the log, and what that costs concurrent appends.

use std::time::{Duration, Instant};

use clap::Args;
use postbox_core::{LogName, Postbox, Prune, Store, Subscription};
use postbox_engine::step_pause;
use postbox_postgres::Postgres;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::bed::{Bed, connect, event, open};
use crate::figure::{Figure, Table, milliseconds, thousands};

const WRITERS: usize = 16;
/// One in this many events is dead, and stays.
const DEAD_OF: usize = 300;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Delivered events in the log.
    #[arg(long, value_delimiter = ',', default_values_t = [3_000_000, 10_000_000])]
    rows: Vec<usize>,
    /// Appends per second during the deletion, each in its own commit.
    #[arg(long, default_value_t = 2_000)]
    rate: usize,
    /// How long the appends are measured alone, in seconds.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let title = format!(
        "retention: Postgres 15, fsync on, one of {DEAD_OF} dead, {}/s appended meanwhile",
        thousands(options.rate as f64)
    );
    let mut table =
        Table::new(title, &["log", "deleted", "longest step", "append p99", "alone", "ratio", "WAL B/event"]);
    let mut bed = Bed::postgres().await?;
    for (nth, rows) in options.rows.iter().enumerate() {
        if nth > 0 {
            bed = bed.emptied().await?;
        }
        bed.fill_delivered(*rows, 1, DEAD_OF).await?;
        let store = open(&bed.store).await?;
        // Warms up statement plans and the pages they write.
        options.append(&bed.store, async || tokio::time::sleep(Duration::from_secs(2)).await).await?;
        let alone = Duration::from_secs(options.seconds);
        let (alone, ()) = options.append(&bed.store, async || tokio::time::sleep(alone).await).await?;
        let mut beside = Duration::ZERO;
        let mut longest = Duration::ZERO;
        let figure = bed.measure(async {
            let (p99, pruned) = options.append(&bed.store, async || prune(store.as_ref()).await).await?;
            let (count, step) = pruned?;
            (beside, longest) = (p99, step);
            Ok(Figure { count, ..Figure::default() })
        });
        let figure = figure.await?;
        let wanted = rows - rows / DEAD_OF;
        anyhow::ensure!(figure.count == wanted, "{} of {wanted} events were deleted", figure.count);
        table.row([
            format!("{} events", thousands(*rows as f64)),
            figure.rate(),
            milliseconds(longest),
            milliseconds(beside),
            milliseconds(alone),
            format!("{:.1}x", beside.as_secs_f64() / alone.as_secs_f64()),
            format!("{:.0}", figure.bytes_each()),
        ]);
    }
    table.print();
    println!("  wanted: ≥ 100,000/s, the same ± 15 % in every line, ratio ≤ 1.5x; the WAL is the appends' too");
    Ok(())
}

/// Prunes as `postbox prune` and the sweeper do. Returns the number of events, and the longest
/// step.
async fn prune(store: &dyn Store) -> anyhow::Result<(usize, Duration)> {
    let (mut count, mut longest, mut after) = (0, Duration::ZERO, None);
    loop {
        let start = Instant::now();
        let step = store.prune(&LogName::outbox(), &Prune { after, ..Prune::default() }).await?;
        let took = start.elapsed();
        longest = longest.max(took);
        count += usize::try_from(step.count)?;
        after = step.next;
        if after.is_none() {
            return Ok((count, longest));
        }
        tokio::time::sleep(step_pause(took)).await;
    }
}

impl Options {
    /// Appends at the rate while `work` runs; returns the 99th percentile from an append's due time
    /// to its commit.
    async fn append<T>(&self, url: &str, work: impl AsyncFnOnce() -> T) -> anyhow::Result<(Duration, T)> {
        let stop = CancellationToken::new();
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| {
                let pace = Duration::from_secs_f64(WRITERS as f64 / self.rate as f64);
                tokio::spawn(write(number, pace, url.to_owned(), stop.clone()))
            })
            .collect();
        let done = work().await;
        stop.cancel();
        let mut latencies = Vec::new();
        for writer in writers {
            latencies.extend(writer.await??);
        }
        latencies.sort_unstable();
        let p99 = latencies.get(latencies.len() * 99 / 100).copied().unwrap_or_default();
        Ok((p99, done))
    }
}

async fn write(number: usize, pace: Duration, url: String, stop: CancellationToken) -> anyhow::Result<Vec<Duration>> {
    let mut client = connect(&url).await?;
    tokio::time::sleep(pace * number as u32 / WRITERS as u32).await;
    let mut ticks = tokio::time::interval(pace);
    // Catches up late commits: the load must not adapt to what is measured.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut latencies = Vec::new();
    while !stop.is_cancelled() {
        let due = ticks.tick().await;
        let mut transaction = client.transaction().await?;
        Postbox::new(Postgres::default()).append(&mut transaction, event(number, 10_000)).await?;
        transaction.commit().await?;
        latencies.push(due.elapsed());
    }
    Ok(latencies)
}

impl Bed {
    /// Fills the outbox with old events of 200 bytes that `readers` subscriptions have passed. One
    /// in `dead_of` is dead in the first.
    pub(crate) async fn fill_delivered(&mut self, rows: usize, readers: usize, dead_of: usize) -> anyhow::Result<()> {
        const CHUNK: usize = 250_000;
        let store = open(&self.store).await?;
        for reader in 0..readers {
            let name = format!("bench-{reader}").parse()?;
            store.subscribe(&Subscription { lanes: Some(4), ..Subscription::new(name, LogName::outbox()) }).await?;
        }
        let client = connect(&self.store).await?;
        // Speeds up the fill: the check held when the events were appended, long ago.
        client.batch_execute("ALTER TABLE postbox.outbox DROP CONSTRAINT event_invalid").await?;
        for from in (0..rows).step_by(CHUNK) {
            let to = rows.min(from + CHUNK) - 1;
            let fill = format!(
                "INSERT INTO postbox.outbox (topic, key, payload, created_at)
                 SELECT 'topic.' || n % 20, 'key-' || n % 10000, repeat('x', 200), now() - interval '1 day' FROM generate_series({from}, {to}) AS n"
            );
            client.batch_execute(&fill).await?;
        }
        let pass = format!(
            "SELECT postbox.guard_log('outbox');
             UPDATE postbox.lane SET from_snap = pg_current_snapshot(), to_snap = pg_current_snapshot(), low = 0, high = 0, last_seq = 0;
             INSERT INTO postbox.delivery (subscription, lane, seq, key, state, ordered)
             SELECT s.id, l.slot % s.lanes, l.seq, l.key, 'dead', true FROM postbox.outbox AS l, postbox.subscription AS s
             WHERE s.name = 'bench-0' AND l.seq % {dead_of} = 0;
             ANALYZE postbox.delivery"
        );
        client.batch_execute(&pass).await?;
        self.settle_down().await
    }
}
