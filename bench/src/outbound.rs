//! Delivery over HTTP: the relay compared with the same client posting from memory, and what a
//! hanging target costs the others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::Args;
use futures::StreamExt as _;
use postbox_core::{BatchLimit, Delivery, EventId, LogName, Seq, Sink, Store, Subscription};
use postbox_engine::{Relay, RelaySettings, TokioClock};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_webhook::standard::SignKey;

use crate::bed::{Bed, PAYLOAD_BYTES, Shape, event, open};
use crate::figure::{Figure, Table, thousands};
use crate::peer::{Role, SECRET};

const KEYS: usize = 10_000;
/// Answering targets in the second table.
const OTHERS: usize = 3;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Events of each line.
    #[arg(long, default_value_t = 20_000)]
    rows: usize,
    /// Connections to a target.
    #[arg(long, default_value_t = 64)]
    connections: usize,
    /// Events per batch.
    #[arg(long, default_value_t = 1_000)]
    batch: usize,
    /// Rounds; the second table sums them up, with and without the hanging target alternately.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let mut bed = Bed::postgres().await?;
    let store = open(&bed.store).await?;
    bed.fill(0, options.rows, Shape { keys: KEYS, transaction: 1_000 }).await?;

    let (_target, address) = Role::Target.start("").await?;
    let title = format!(
        "outbound: {} events of {} B, signed, {} connections, key order on, Postgres 15",
        thousands(options.rows as f64),
        PAYLOAD_BYTES,
        options.connections
    );
    let mut table = Table::new(title, &["round", "relay", "from memory", "ratio"]);
    for round in 0..options.rounds {
        let relay = options.relay(&store, &address, &format!("round-{round}")).await?;
        let start = Instant::now();
        let drained = relay.drain(None).await?;
        let ours = start.elapsed();
        ensure!(drained.delivered as usize == options.rows, "{drained:?}");
        let [ours, memory] = [ours, options.post_from_memory(&address).await?].map(|time| figure(options.rows, time));
        table.row([(round + 1).to_string(), ours.rate(), memory.rate(), ours.ratio(memory)]);
    }
    table.print();
    println!("  wanted: ratio ≥ 60 %");
    options.with_a_target_that_hangs(&store, &address).await
}

fn figure(count: usize, time: Duration) -> Figure {
    Figure { count, seconds: time.as_secs_f64(), ..Figure::default() }
}

impl Options {
    fn sink(&self, address: &str) -> anyhow::Result<Arc<HttpSink>> {
        let config = HttpSinkConfig {
            keys: vec![SignKey::parse(SECRET)?],
            concurrency: self.connections,
            allow: vec!["127.0.0.1/32".parse()?],
            ..HttpSinkConfig::new(format!("http://{address}/hook"))
        };
        Ok(Arc::new(HttpSink::new(config, Arc::new(TokioClock::new()))?))
    }

    async fn relay(&self, store: &Arc<dyn Store>, address: &str, name: &str) -> anyhow::Result<Relay> {
        let batch = BatchLimit { events: self.batch, ..BatchLimit::default() };
        let settings = RelaySettings { batch, ..RelaySettings::default() };
        let builder = Relay::builder(Arc::clone(store) as _, Subscription::new(name.parse()?, LogName::outbox()));
        Ok(builder.sink(self.sink(address)?).settings(settings).build()?)
    }

    /// Posts with the same client, signatures included, from memory and without recording anything.
    async fn post_from_memory(&self, address: &str) -> anyhow::Result<Duration> {
        let sink = self.sink(address)?;
        let now = jiff::Timestamp::now();
        let deliveries: Vec<Delivery> = (0..self.rows)
            .map(|n| {
                let event = event(n, KEYS).into_event(EventId::now_v7(), now);
                Delivery { event, seq: Seq(n as i64), attempt: 1, replay: 0, trace: None }
            })
            .collect();
        let start = Instant::now();
        let posting = futures::stream::iter(&deliveries).map(|delivery| async {
            let outcomes = sink.deliver(&[delivery]).await;
            outcomes.iter().all(postbox_core::Outcome::is_delivered)
        });
        let delivered =
            posting.buffer_unordered(self.connections).filter(|fine| std::future::ready(*fine)).count().await;
        ensure!(delivered == self.rows, "{delivered} of {}", self.rows);
        Ok(start.elapsed())
    }

    async fn with_a_target_that_hangs(&self, store: &Arc<dyn Store>, address: &str) -> anyhow::Result<()> {
        let (_hanging, nowhere) = Role::Hangs.start("").await?;
        let mut together = [Duration::ZERO; 2];
        for round in 0..self.rounds {
            for (which, total) in together.iter_mut().enumerate() {
                let name = |target: &str| format!("hang-{round}-{which}-{target}");
                let mut others = Vec::new();
                for other in 0..OTHERS {
                    others.push(self.relay(store, address, &name(&other.to_string())).await?);
                }
                let hanging = self.relay(store, &nowhere, &name("hanging")).await?;
                let hang = async {
                    match which {
                        0 => std::future::pending().await,
                        _ => hanging.drain(None).await.map(drop),
                    }
                };
                let start = Instant::now();
                let drains = futures::future::try_join_all(others.iter().map(|relay| relay.drain(None)));
                tokio::select! {
                    drained = drains => drop(drained?),
                    ended = hang => anyhow::bail!("the target that hangs ended the run: {ended:?}"),
                }
                *total += start.elapsed();
            }
        }
        let events = self.rows * OTHERS * self.rounds;
        let [without, with] = together.map(|time| figure(events, time));
        let mut table = Table::new(
            format!("outbound: {OTHERS} targets that answer, and one that never does"),
            &["targets", "rate of those that answer", "cost"],
        );
        table.row([format!("{OTHERS}"), without.rate(), String::new()]);
        let cost = format!("{:.1} %", 100.0 * (1.0 - without.seconds / with.seconds));
        table.row([format!("{OTHERS} and one that hangs"), with.rate(), cost]);
        table.print();
        println!("  wanted: cost ≤ 5 %");
        Ok(())
    }
}
