//! From a broker's stream into the inbox, each message stored durably once; compared with the
//! broker's own client, which consumes and acknowledges the same messages and keeps none.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use postbox_config::SourceContext;
use postbox_core::{LogName, RawMessage, SourceName};
use postbox_engine::TokioClock;
use postbox_receiver::{Receiver, ReceiverSettings};
use tokio_util::sync::CancellationToken;

use crate::bed::{Bed, PAYLOAD_BYTES, open};
use crate::broker::{Broker, Kind, deliveries, timed};
use crate::figure::{Figure, Table, percent, thousands};
use crate::machine;

const KEYS: usize = 10_000;
/// Interval of polls for the end.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Which brokers: those whose client is measured here.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Kind::Redis, Kind::Nats])]
    brokers: Vec<Kind>,
    /// Messages of a round.
    #[arg(long, default_value_t = 100_000)]
    rows: usize,
    /// Rounds; in each, the client and the receiver run one after the other.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The source's `in_flight`.
    #[arg(long, default_value_t = 512)]
    in_flight: usize,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let title = format!(
        "sources: {} messages of {PAYLOAD_BYTES} B into the inbox, each once; Postgres 15, fsync on; {} rounds by turns",
        thousands(options.rows as f64),
        options.rounds
    );
    let speed = ["broker", "client alone", "Postbox", "ratio"];
    let effort = ["CPU/message: client", "receiver", "Postgres", "broker's server", "WAL B/message"];
    let mut table = Table::new(title, &[&speed[..], &effort].concat());
    for kind in &options.brokers {
        options.line(*kind, &mut table).await?;
    }
    table.print();
    println!("  wanted: ≥ 20,000/s, ratio ≥ 50 %; client alone: takes, acknowledges and keeps none");
    Ok(())
}

/// Sums over the rounds.
#[derive(Default)]
struct Sums {
    alone: Figure,
    ours: Figure,
    store_seconds: f64,
    broker_seconds: f64,
}

impl Options {
    async fn line(&self, kind: Kind, table: &mut Table) -> anyhow::Result<()> {
        let bed = Bed::postgres().await?;
        let broker = kind.start().await?;
        let mut sums = Sums::default();
        for round in 0..self.rounds {
            let place = format!("in{round}");
            broker.make(&place).await?;
            broker.publish(&place, &deliveries(self.rows, KEYS)).await?;
            sums.alone = sums.alone.plus(broker.consume(&place, self.rows).await?);
            bed.settle_down().await?;
            let seconds = || anyhow::Ok((bed.server_seconds()?, machine::processor_seconds_of_family(broker.pid())?));
            let (before, written) = (seconds()?, bed.written().await?);
            let received = self.receive(&bed, &*broker, &place).await?;
            let (after, bytes) = (seconds()?, bed.written().await? - written);
            sums.ours = sums.ours.plus(Figure { bytes, ..received });
            sums.store_seconds += after.0 - before.0;
            sums.broker_seconds += after.1 - before.1;
            broker.remove(&place).await?;
        }
        let Sums { alone, ours, store_seconds, broker_seconds } = sums;
        let micros = |seconds: f64| format!("{:.1} µs", 1e6 * seconds / ours.count as f64);
        table.row([
            kind.name().to_owned(),
            alone.rate(),
            ours.rate(),
            percent(ours.per_second(), alone.per_second()),
            micros(alone.processor_seconds),
            micros(ours.processor_seconds),
            micros(store_seconds),
            micros(broker_seconds),
            format!("{:.0}", ours.bytes_each()),
        ]);
        Ok(())
    }

    /// Receives as the service does, until everything is stored and acknowledged.
    async fn receive(&self, bed: &Bed, broker: &dyn Broker, place: &str) -> anyhow::Result<Figure> {
        let table = broker.source(place, self.in_flight).context("a broker with a source here")?;
        let name: SourceName = place.parse()?;
        let source = table.build(&SourceContext { name: name.clone(), clock: Arc::new(TokioClock::new()) }).await?;
        let settings = ReceiverSettings { in_flight_max: self.in_flight, ..ReceiverSettings::default() };
        let clock = Arc::new(TokioClock::new());
        let receiver = Receiver::builder(open(&bed.store).await? as _, name.clone(), LogName::inbox(), clock)
            .settings(settings)
            .pull(source)
            .decode(move |message: &RawMessage| table.decode(&name, message))
            .build()?;
        let (metrics, stop) = (receiver.metrics(), CancellationToken::new());
        let stored = async {
            while metrics.snapshot().accepted < self.rows as u64 {
                tokio::time::sleep(LOOK).await;
            }
            stop.cancel();
        };
        let receive = async {
            tokio::join!(receiver.run(stop.clone()), stored);
            Ok(())
        };
        let figure = timed(self.rows, receive).await?;
        let counted = metrics.snapshot();
        ensure!(counted.accepted == self.rows as u64 && counted.poison == 0, "{counted:?}");
        Ok(figure)
    }
}
