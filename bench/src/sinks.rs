//! A backlog to a real broker: the relay compared with the broker's own client publishing the same
//! messages from memory; and the latency from the commit to the broker's answer.

use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::{Args, ValueEnum as _};
use postbox_core::{BatchLimit, LogName, Subscription};
use postbox_engine::{Relay, RelaySettings};

use crate::bed::{Bed, PAYLOAD_BYTES, Shape, open};
use crate::broker::{Broker, Kind, deliveries, timed};
use crate::figure::{Figure, Table, milliseconds, percent, thousands};
use crate::{latency, machine};

const KEYS: usize = 10_000;
/// A server may confirm messages before its own count includes them.
const COUNTED_WITHIN: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Which brokers.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Kind::value_variants().to_vec())]
    brokers: Vec<Kind>,
    /// Events per round; a fiftieth of it to the emulator of SQS.
    #[arg(long, default_value_t = 100_000)]
    rows: usize,
    /// Events per batch.
    #[arg(long, default_value_t = 1_000)]
    batch: usize,
    /// Numbers of lanes that one relay works on concurrently; one line for each.
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    lanes: Vec<u16>,
    /// Rounds; in each, the client and the relay run one after the other.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Events (and commits) per second while latency is measured.
    #[arg(long, default_value_t = 500)]
    rate: usize,
    /// How long latency is measured, in seconds; 0: not at all.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let title = format!(
        "sinks: {} events of {PAYLOAD_BYTES} B, {} keys, key order on, batch {}, Postgres 15; {} rounds by turns",
        thousands(options.rows as f64),
        thousands(KEYS as f64),
        options.batch,
        options.rounds
    );
    let speed = ["broker", "lanes", "client alone", "Postbox", "ratio", "of rounds", "wanted"];
    let effort = ["CPU/event: client", "its server", "relay", "Postgres", "its server"];
    let mut table = Table::new(title, &[&speed[..], &effort].concat());
    for kind in &options.brokers {
        for lanes in &options.lanes {
            options.line(*kind, *lanes, &mut table).await?;
        }
    }
    table.print();
    println!("  client alone: the broker's own client, with everything prepared in memory; CPU is that of processes");
    options.latencies().await
}

/// One side of a round: its process, and the work of the broker's and the store's servers.
struct Measured {
    figure: Figure,
    broker_seconds: f64,
    store_seconds: f64,
}

impl Options {
    async fn line(&self, kind: Kind, lanes: u16, table: &mut Table) -> anyhow::Result<()> {
        let rows = kind.rows(self.rows);
        let mut bed = Bed::postgres().await?;
        bed.fill(0, rows, Shape { keys: KEYS, transaction: 1_000 }).await?;
        let broker = kind.start().await?;
        let (mut alone, mut ours) = (Vec::new(), Vec::new());
        for round in 0..self.rounds {
            let (raw, out) = (format!("raw{round}"), format!("out{round}"));
            let messages = deliveries(rows, KEYS);
            alone.push(into(&bed, &*broker, &raw, rows, broker.publish(&raw, &messages)).await?);
            drop(messages);
            ours.push(into(&bed, &*broker, &out, rows, self.relay(&bed, lanes, &*broker, &out)).await?);
        }
        let ratio = |ours: f64, alone: f64| percent(ours, alone);
        let rates = |side: &[Measured]| side.iter().map(|it| it.figure.per_second()).collect::<Vec<_>>();
        let mut rounds: Vec<f64> = rates(&ours).iter().zip(rates(&alone)).map(|(ours, alone)| ours / alone).collect();
        rounds.sort_by(f64::total_cmp);
        let micros = |side: &[Measured], seconds: fn(&Measured) -> f64| {
            let seconds: f64 = side.iter().map(seconds).sum();
            format!("{:.1} µs", 1e6 * seconds / (rows * self.rounds) as f64)
        };
        let (alone_sum, ours_sum) = (together(&alone), together(&ours));
        table.row([
            kind.name().to_owned(),
            lanes.to_string(),
            alone_sum.rate(),
            ours_sum.rate(),
            ratio(ours_sum.per_second(), alone_sum.per_second()),
            format!("{} – {}", ratio(rounds[0], 1.0), ratio(rounds[rounds.len() - 1], 1.0)),
            kind.wanted().to_owned(),
            micros(&alone, |it| it.figure.processor_seconds),
            micros(&alone, |it| it.broker_seconds),
            micros(&ours, |it| it.figure.processor_seconds),
            micros(&ours, |it| it.store_seconds),
            micros(&ours, |it| it.broker_seconds),
        ]);
        Ok(())
    }

    /// Delivers the whole backlog with a new subscription.
    async fn relay(&self, bed: &Bed, lanes: u16, broker: &dyn Broker, place: &str) -> anyhow::Result<Figure> {
        let subscription = Subscription { lanes: Some(lanes), ..Subscription::new(place.parse()?, LogName::outbox()) };
        let batch = BatchLimit { events: self.batch, ..BatchLimit::default() };
        let settings = RelaySettings { batch, ..RelaySettings::default() };
        let builder = Relay::builder(open(&bed.store).await? as _, subscription);
        let relay = builder.sink(broker.sink(place).await).settings(settings).build()?;
        let mut delivered = 0;
        let drain = async {
            delivered = relay.drain(None).await?.delivered;
            Ok(())
        };
        let figure = timed(0, drain).await?;
        Ok(Figure { count: usize::try_from(delivered)?, ..figure })
    }

    /// Latency from the commit's answer to the broker's, at a rate that leaves the machine mostly
    /// idle.
    async fn latencies(&self) -> anyhow::Result<()> {
        if self.seconds == 0 {
            return Ok(());
        }
        let title = format!("sinks: from the commit's answer to the broker's, {} events/s, polling", self.rate);
        let mut table = Table::new(title, &["broker", "p50", "p99"]);
        let mut bed = Bed::postgres().await?;
        for kind in self.brokers.iter().filter(|kind| matches!(kind, Kind::Redis | Kind::Nats)) {
            let broker = kind.start().await?;
            broker.make("latency").await?;
            bed = bed.emptied().await?;
            let (p50, p99) = latency::to_sink(&bed, self.rate, self.seconds, broker.sink("latency").await).await?;
            table.row([kind.name().to_owned(), milliseconds(p50), milliseconds(p99)]);
        }
        table.print();
        println!("  wanted: p99 ≤ 10 ms");
        Ok(())
    }
}

/// Publishes into a new place, and checks that everything arrived.
async fn into(
    bed: &Bed,
    broker: &dyn Broker,
    place: &str,
    rows: usize,
    publish: impl Future<Output = anyhow::Result<Figure>>,
) -> anyhow::Result<Measured> {
    broker.make(place).await?;
    bed.settle_down().await?;
    let seconds = || anyhow::Ok((machine::processor_seconds_of_family(broker.pid())?, bed.server_seconds()?));
    let before = seconds()?;
    let figure = publish.await?;
    let after = seconds()?;
    ensure!(figure.count == rows, "{place}: {} of {rows} were sent", figure.count);
    let deadline = Instant::now() + COUNTED_WITHIN;
    loop {
        let count = broker.count(place).await?;
        if count == rows {
            break;
        }
        ensure!(count < rows && Instant::now() < deadline, "{place}: {count} of {rows} arrived");
        tokio::time::sleep(COUNTED_WITHIN / 100).await;
    }
    broker.remove(place).await?;
    Ok(Measured { figure, broker_seconds: after.0 - before.0, store_seconds: after.1 - before.1 })
}

fn together(side: &[Measured]) -> Figure {
    side.iter().fold(Figure::default(), |sum, it| sum.plus(it.figure))
}
