//! The cost of a scrape of `/metrics` and of `postbox doctor`, at two sizes of the log.

use std::time::{Duration, Instant};

use clap::Args;
use postbox_core::Store;
use postbox_server::status;

use crate::bed::{Bed, connect, open};
use crate::figure::{Table, milliseconds, thousands};

/// Number of dead events, the same in every log: only what is retained beside them grows. They are
/// as many as one look counts.
const DEAD: usize = 10_000;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Events in the log.
    #[arg(long, value_delimiter = ',', default_values_t = [100_000, 10_000_000])]
    rows: Vec<usize>,
    /// Number of subscriptions, compared with one.
    #[arg(long, default_value_t = 20)]
    subscriptions: usize,
    /// Queries per figure, which is their median.
    #[arg(long, default_value_t = 25)]
    looks: usize,
}

/// Positions of the subscriptions: the snapshots around their window, and how much of it is unread.
const STANDS: [(&str, &str, &str, usize); 3] = [
    ("all delivered", "pg_current_snapshot()", "pg_current_snapshot()", 0),
    ("5,000 unread", "'3:3:'", "pg_current_snapshot()", 5_000),
    ("all unread", "'3:3:'", "'3:3:'", 0),
];

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let many = format!("of {}", options.subscriptions);
    let mut table = Table::new(
        "status: Postgres 15, a scrape of one subscription and of several, and the doctor for several",
        &["log", "stands", "one", &many, "many / one", "doctor"],
    );
    let mut bed = Bed::postgres().await?;
    for (nth, rows) in options.rows.iter().enumerate() {
        if nth > 0 {
            bed = bed.emptied().await?;
        }
        bed.fill_delivered(*rows, options.subscriptions, (rows / DEAD).max(1)).await?;
        let client = connect(&bed.store).await?;
        let store = open(&bed.store).await?;
        for (stands, from, to, left) in STANDS {
            let set = format!(
                "UPDATE postbox.lane SET from_snap = {from}, to_snap = {to}, low = 0, high = log.last, last_seq = log.last - {left}
                 FROM (SELECT max(seq) AS last FROM postbox.outbox) AS log"
            );
            client.batch_execute(&set).await?;
            let one = options.median(async || scrape(store.as_ref(), 1).await).await?;
            let all = options.median(async || scrape(store.as_ref(), options.subscriptions).await).await?;
            let diagnosed = options.median(async || diagnose(store.as_ref()).await).await?;
            table.row([
                format!("{} events", thousands(*rows as f64)),
                stands.to_owned(),
                milliseconds(one),
                milliseconds(all),
                format!("{:.1}x", all.as_secs_f64() / one.as_secs_f64()),
                milliseconds(diagnosed),
            ]);
        }
    }
    table.print();
    println!("  wanted of a scrape: ≤ 50 ms, the largest log ≤ 2x the smallest");
    Ok(())
}

impl Options {
    async fn median(&self, look: impl AsyncFn() -> anyhow::Result<()>) -> anyhow::Result<Duration> {
        let mut times = Vec::with_capacity(self.looks);
        for _ in 0..=self.looks {
            let start = Instant::now();
            look().await?;
            times.push(start.elapsed());
        }
        // The first one warms up.
        times.remove(0);
        times.sort_unstable();
        Ok(times[times.len() / 2])
    }
}

/// The queries of a scrape.
async fn scrape(store: &dyn Store, subscriptions: usize) -> anyhow::Result<()> {
    let mut infos = store.subscriptions().await?;
    infos.truncate(subscriptions);
    let names: Vec<_> = infos.iter().map(|info| info.name.clone()).collect();
    for counted in store.stats_of(&names).await {
        counted?;
    }
    status::unrouted(store, &infos).await?;
    status::unread(store, &infos, None).await?;
    Ok(())
}

/// The queries of the doctor. It reports errors as findings; a count that takes too long costs
/// [`STATS_WAIT`](status::STATS_WAIT).
async fn diagnose(store: &dyn Store) -> anyhow::Result<()> {
    let infos = store.subscriptions().await?;
    status::diagnose(store, &infos, &[], None).await;
    Ok(())
}
