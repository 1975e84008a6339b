//! What a second replica adds, with one lane for each, and a slow destination.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use clap::Args;
use postbox_core::{Capabilities, Delivery, LogName, Outcome, Postbox, Sink, Subscription};
use postbox_engine::Relay;
use postbox_postgres::Postgres;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::bed::{Bed, connect, event, open};
use crate::figure::{Figure, Table, thousands};

/// The default number of lanes, and the number of replicas.
const LANES: u16 = 2;
/// Time that the destination takes per event.
const TAKES: Duration = Duration::from_millis(1);
/// Concurrent deliveries of each replica: the default.
const CONCURRENCY: usize = 16;
/// Events per INSERT.
const EVENTS_PER_INSERT: usize = 1_000;
/// Interval of polls while waiting.
const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Events of each round.
    #[arg(long, default_value_t = 40_000)]
    rows: usize,
    /// Different keys among the events.
    #[arg(long, default_value_t = 10_000)]
    keys: usize,
    /// Rounds; the ratio is of their sums.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let title = format!(
        "replicas: {} events, a sink that takes 1 ms, {CONCURRENCY} at once, {LANES} lanes, key order on, Postgres 15",
        thousands(options.rows as f64)
    );
    let mut table = Table::new(title, &["round", "one replica", "two replicas", "two / one"]);
    let (mut bed, mut sums) = (Bed::postgres().await?, [Figure::default(); 2]);
    for round in 1..=options.rounds {
        let mut figures = [Figure::default(); 2];
        for ((figure, sum), replicas) in figures.iter_mut().zip(&mut sums).zip([1, 2]) {
            bed = bed.emptied().await?;
            *figure = options.round(&bed, replicas).await?;
            *sum = Figure { count: sum.count + figure.count, seconds: sum.seconds + figure.seconds, ..*sum };
        }
        let [one, two] = figures;
        table.row([round.to_string(), one.rate(), two.rate(), two.ratio(one)]);
    }
    let [one, two] = sums;
    table.row(["all".to_owned(), one.rate(), two.rate(), two.ratio(one)]);
    table.print();
    println!("  wanted: ≥ 180 %");
    Ok(())
}

impl Options {
    /// The replicas share the lanes before the events are committed, all at once.
    async fn round(&self, bed: &Bed, replicas: usize) -> anyhow::Result<Figure> {
        let (sink, stop) = (Arc::new(SlowSink::default()), CancellationToken::new());
        let subscription = Subscription::new("bench".parse()?, LogName::outbox());
        let (mut running, mut metrics) = (JoinSet::new(), Vec::new());
        for _ in 0..replicas {
            let relay = Relay::builder(open(&bed.store).await?, subscription.clone()).sink(sink.clone()).build()?;
            metrics.push(relay.metrics());
            let stop = stop.clone();
            running.spawn(async move { relay.run(stop).await });
        }
        let share = u64::from(LANES) / replicas as u64;
        while metrics.iter().any(|one| one.snapshot().lanes_held != share) {
            tokio::time::sleep(LOOK).await;
        }
        let mut writer = connect(&bed.store).await?;
        let mut transaction = writer.transaction().await?;
        for from in (0..self.rows).step_by(EVENTS_PER_INSERT) {
            let end = self.rows.min(from + EVENTS_PER_INSERT);
            let events = (from..end).map(|n| event(n, self.keys));
            Postbox::new(Postgres::default()).append(&mut transaction, events).await?;
        }
        let start = Instant::now();
        transaction.commit().await?;
        while sink.delivered.load(Ordering::Relaxed) < self.rows {
            tokio::time::sleep(LOOK).await;
        }
        let seconds = start.elapsed().as_secs_f64();
        stop.cancel();
        while let Some(ended) = running.join_next().await {
            ended??;
        }
        Ok(Figure { count: self.rows, seconds, ..Figure::default() })
    }
}

/// Takes a fixed time for each event.
#[derive(Debug, Default)]
struct SlowSink {
    delivered: AtomicUsize,
}

#[async_trait]
impl Sink for SlowSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: 1, concurrency: CONCURRENCY, prefix: false, system: None }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        tokio::time::sleep(TAKES).await;
        self.delivered.fetch_add(deliveries.len(), Ordering::Relaxed);
        deliveries.iter().map(|_| Outcome::DELIVERED).collect()
    }
}
