//! Latency from the commit to the delivery.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use clap::Args;
use postbox_core::{Capabilities, Delivery, EventId, LogName, Outcome, Postbox, Sink, Subscription};
use postbox_engine::Relay;
use postbox_postgres::{Postgres, PostgresConfig, PostgresStore};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bed::{Bed, at_once, connect, event};
use crate::child::{Job, NullSink, Task};
use crate::figure::{Figure, Table, milliseconds};
use crate::machine;

/// Writers at steady rates: few enough that the machine is mostly idle.
const STEADY_WRITERS: usize = 8;
/// Longest time for deliveries after the last commit; then the run has failed.
const TAIL: Duration = Duration::from_secs(20);
const KEYS: usize = 10_000;
/// Events before the clock starts.
const WARM_UP: usize = 1;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Steady rates, in events (and commits) per second.
    #[arg(long, value_delimiter = ',', default_values_t = [500, 2_000])]
    rates: Vec<usize>,
    /// Writers that commit as fast as they can.
    #[arg(long, default_value_t = 32)]
    writers: usize,
    /// How long each line is measured, in seconds.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// The median and the 99th percentile of the time from the answer to a commit until this sink has
/// delivered the event.
pub(crate) async fn to_sink(
    bed: &Bed,
    rate: usize,
    seconds: u64,
    sink: Arc<dyn Sink>,
) -> anyhow::Result<(Duration, Duration)> {
    let load = Load { writers: STEADY_WRITERS, rate: Some(rate), seconds };
    let measured = measure_to(bed, load, Reader::Relay, sink).await?;
    Ok((measured.p50(), measured.p99()))
}

/// Who reads the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// Nobody: measures the writers alone.
    Nobody,
    /// Queries for new rows in a loop, and promises nothing: no position, no lease, no order across
    /// transactions.
    Plain,
    /// The real relay, polling.
    Relay,
    /// The real relay, with NOTIFY.
    Notified,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let bed = steady(Bed::postgres().await?, options).await?;
    let bed = saturated(bed, options).await?;
    println!("\n  peak memory of writers and relay in one process: {:.0} MiB", machine::memory_peak_mib()?);
    let bed = bed.emptied().await?;
    let job = Job { task: Task::Idle, store: bed.store.clone(), subscription: "idle".into(), batch: 500 };
    let idle = job.in_child().await?;
    let used = 100.0 * idle.processor_seconds / idle.seconds;
    println!("\n  an idle relay uses {used:.1} % of a core (wanted: ≤ 1 %)");
    Ok(())
}

async fn steady(mut bed: Bed, options: &Options) -> anyhow::Result<Bed> {
    let mut columns = vec!["load", "relay p50", "p99", "NOTIFY p50", "p99", "limit p50", "p99", "p50 / limit"];
    columns.extend(["WAL B/event", "NOTIFY's", "limit's"]);
    let title = "latency: Postgres 15, fsync on, one event per commit, from the commit's answer to the delivery";
    let mut table = Table::new(title, &columns);
    let mut unseen = 0;
    for rate in &options.rates {
        let load = Load { writers: STEADY_WRITERS, rate: Some(*rate), seconds: options.seconds };
        let mut measured = Vec::new();
        for reader in [Reader::Relay, Reader::Notified, Reader::Plain] {
            bed = bed.emptied().await?;
            measured.push(measure(&bed, load, reader).await?);
        }
        let best = measured[0].p50().min(measured[1].p50());
        let ratio = format!("{:.1}x", best.as_secs_f64() / measured[2].p50().as_secs_f64());
        let figures = measured.iter().flat_map(|it| [it.p50(), it.p99()]).map(milliseconds);
        let wal = measured.iter().map(|it| format!("{:.0}", it.writers.bytes_each()));
        table.row([format!("{rate} events/s")].into_iter().chain(figures).chain([ratio]).chain(wal));
        unseen += measured[2].writers.count - measured[2].latencies.len();
    }
    table.print();
    println!(
        "  limit: a reader that asks without pause and promises nothing; wanted at 500/s: p50 ≤ 3, p99 ≤ 10, NOTIFY p50 ≤ 1 ms"
    );
    println!("  WAL: the writers' and the relay's together; the limit writes none of its own");
    if unseen > 0 {
        println!("  the limit never saw {unseen} events, which committed behind others");
    }
    Ok(bed)
}

async fn saturated(mut bed: Bed, options: &Options) -> anyhow::Result<Bed> {
    let title = format!("latency: {} writers committing as fast as they can", options.writers);
    let mut table =
        Table::new(title, &["relay", "p50", "p99", "commits", "writers alone", "ratio", "WAL B/event", "alone"]);
    let load = Load { writers: options.writers, rate: None, seconds: options.seconds };
    bed = bed.emptied().await?;
    let alone = measure(&bed, load, Reader::Nobody).await?.writers;
    for (name, reader) in [("polling", Reader::Relay), ("NOTIFY", Reader::Notified)] {
        bed = bed.emptied().await?;
        let with = measure(&bed, load, reader).await?;
        let bytes = [with.writers, alone].map(|figure| format!("{:.0}", figure.bytes_each()));
        let latencies = [with.p50(), with.p99()].map(milliseconds);
        let rates = [with.writers.rate(), alone.rate(), with.writers.ratio(alone)];
        table.row([name.to_owned()].into_iter().chain(latencies).chain(rates).chain(bytes));
    }
    table.print();
    println!("  wanted: p99 ≤ 100 ms");
    Ok(bed)
}

#[derive(Debug, Clone, Copy)]
struct Load {
    writers: usize,
    /// Total events per second; `None`: as fast as the writers can.
    rate: Option<usize>,
    seconds: u64,
}

struct Measured {
    /// Sorted.
    latencies: Vec<Duration>,
    /// The writers' commits and their time. The bytes of WAL include the reader's.
    writers: Figure,
}

impl Measured {
    fn p50(&self) -> Duration {
        self.quantile(50)
    }

    fn p99(&self) -> Duration {
        self.quantile(99)
    }

    fn quantile(&self, percent: usize) -> Duration {
        let at = (self.latencies.len() * percent / 100).min(self.latencies.len().saturating_sub(1));
        self.latencies.get(at).copied().unwrap_or_default()
    }
}

/// When each event was committed and when it arrived.
#[derive(Default)]
struct Stamps {
    committed: Mutex<HashMap<EventId, Instant>>,
    arrived: Mutex<HashMap<EventId, Instant>>,
    arrivals: AtomicUsize,
}

impl Stamps {
    fn arrive(&self, ids: impl Iterator<Item = EventId>) {
        let now = Instant::now();
        let mut arrived = self.arrived.lock().expect("nobody panics while holding it");
        for id in ids {
            arrived.entry(id).or_insert(now);
        }
        self.arrivals.store(arrived.len(), Ordering::SeqCst);
    }

    /// An event that arrived before its producer got the answer to the commit counts as zero.
    fn latencies(&self) -> Vec<Duration> {
        let committed = self.committed.lock().expect("nobody panics while holding it");
        let arrived = self.arrived.lock().expect("nobody panics while holding it");
        let mut latencies: Vec<Duration> = committed
            .iter()
            .filter_map(|(id, at)| arrived.get(id).map(|arrival| arrival.saturating_duration_since(*at)))
            .collect();
        latencies.sort_unstable();
        latencies
    }
}

/// A sink that records arrivals.
struct Stopwatch {
    stamps: Arc<Stamps>,
    sink: Arc<dyn Sink>,
}

#[async_trait]
impl Sink for Stopwatch {
    fn capabilities(&self) -> Capabilities {
        self.sink.capabilities()
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let outcomes = self.sink.deliver(deliveries).await;
        let delivered = deliveries.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_delivered());
        self.stamps.arrive(delivered.map(|(delivery, _)| delivery.event.id));
        outcomes
    }
}

async fn measure(bed: &Bed, load: Load, reader: Reader) -> anyhow::Result<Measured> {
    measure_to(bed, load, reader, Arc::new(NullSink)).await
}

async fn measure_to(bed: &Bed, load: Load, reader: Reader, sink: Arc<dyn Sink>) -> anyhow::Result<Measured> {
    let url = bed.store.as_str();
    let stamps = Arc::new(Stamps::default());
    let stop = CancellationToken::new();
    let sink = Stopwatch { stamps: Arc::clone(&stamps), sink };
    let reading = tokio::spawn(read(reader, url.to_owned(), sink, stop.clone()));
    if reader != Reader::Nobody {
        warm_up(url, &stamps).await?;
    }
    connect(url).await?.batch_execute("CHECKPOINT").await?;
    let measured = bed.measure(async {
        let start = Instant::now();
        let write = |number| write(number, load, url.to_owned(), Arc::clone(&stamps));
        let writers = at_once(load.writers, write).await?;
        let writers = Figure { seconds: start.elapsed().as_secs_f64(), ..writers };
        let deadline = Instant::now() + TAIL;
        while reader != Reader::Nobody
            && stamps.arrivals.load(Ordering::SeqCst) < writers.count + WARM_UP
            && Instant::now() < deadline
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        stop.cancel();
        reading.await??;
        Ok(writers)
    });
    let measured = Measured { writers: measured.await?, latencies: stamps.latencies() };
    let commits = measured.writers.count;
    let missing = commits - measured.latencies.len();
    // The other readers promise nothing.
    let is_relay = matches!(reader, Reader::Relay | Reader::Notified);
    anyhow::ensure!(!is_relay || missing == 0, "{missing} of {commits} events did not arrive in time");
    Ok(measured)
}

/// Waits until the reader reads, because its start is not part of an event's latency. These events
/// are not counted.
async fn warm_up(url: &str, stamps: &Stamps) -> anyhow::Result<()> {
    let mut client = connect(url).await?;
    let mut transaction = client.transaction().await?;
    Postbox::new(Postgres::default()).append(&mut transaction, event(0, KEYS)).await?;
    transaction.commit().await?;
    let deadline = Instant::now() + TAIL;
    while stamps.arrivals.load(Ordering::SeqCst) < WARM_UP {
        anyhow::ensure!(Instant::now() < deadline, "the reader did not start in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Commits one event per transaction at its share of the rate; returns their number.
async fn write(number: usize, load: Load, url: String, stamps: Arc<Stamps>) -> anyhow::Result<usize> {
    let mut client = connect(&url).await?;
    let until = Instant::now() + Duration::from_secs(load.seconds);
    let pace = load.rate.map(|rate| Duration::from_secs_f64(load.writers as f64 / rate as f64));
    let mut ticks = tokio::time::interval(pace.unwrap_or(Duration::from_secs(1)));
    // Catches up late commits: the load must not adapt to what is measured.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut count = 0;
    while Instant::now() < until {
        if pace.is_some() {
            ticks.tick().await;
        }
        let id = EventId::now_v7();
        let appended = event(number + count * load.writers, KEYS).id(id);
        let mut transaction = client.transaction().await?;
        Postbox::new(Postgres::default()).append(&mut transaction, appended).await?;
        transaction.commit().await?;
        stamps.committed.lock().expect("nobody panics while holding it").insert(id, Instant::now());
        count += 1;
    }
    Ok(count)
}

async fn read(reader: Reader, url: String, sink: Stopwatch, stop: CancellationToken) -> anyhow::Result<()> {
    match reader {
        Reader::Nobody => Ok(()),
        Reader::Plain => read_plainly(&url, &sink.stamps, &stop).await,
        Reader::Relay | Reader::Notified => {
            let config = PostgresConfig { notify: reader == Reader::Notified, ..PostgresConfig::new(url.as_str()) };
            let store = Arc::new(PostgresStore::connect(config).await?);
            let subscription = Subscription::new("bench".parse()?, LogName::outbox());
            let relay = Relay::builder(store, subscription).sink(Arc::new(sink)).build()?;
            Ok(relay.run(stop).await?)
        }
    }
}

/// Such a reader misses rows that commit out of order, so it queries a little of the past again
/// each time.
async fn read_plainly(url: &str, stamps: &Stamps, stop: &CancellationToken) -> anyhow::Result<()> {
    const OVERLAP: i64 = 64;
    let client = connect(url).await?;
    let page = client.prepare("SELECT seq, id, payload FROM postbox.outbox WHERE seq > $1 ORDER BY seq").await?;
    let mut last = 0_i64;
    while !stop.is_cancelled() {
        let rows = client.query(&page, &[&(last - OVERLAP)]).await?;
        last = rows.last().map_or(last, |row| row.get(0));
        stamps.arrive(rows.iter().map(|row| EventId::from_uuid(row.get::<_, Uuid>(1))));
    }
    Ok(())
}
