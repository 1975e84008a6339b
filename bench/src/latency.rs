//! From the commit to the delivery.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use clap::Args;
use postbox_core::{Capabilities, Delivery, EventId, LogName, Outcome, Sink, Subscription};
use postbox_engine::Relay;
use postbox_postgres::{PostgresConfig, PostgresStore};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::child::{Job, Task};
use crate::table::{Table, milliseconds, percent, rate};
use crate::{child, fill, machine, server};

/// Writers of the steady rates: few enough to leave the machine idle most of the time.
const STEADY_WRITERS: usize = 8;
/// After the last commit, how long deliveries may take before the run counts as failed.
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
    /// How long each line is measured.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// Who reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// Nobody: how fast the writers are alone.
    Nobody,
    /// Asks for new rows without pause, and promises nothing: no position, no lease, no order
    /// across transactions.
    Plain,
    /// The real relay, polling.
    Relay,
    /// The real relay, with NOTIFY.
    Notified,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let server = server::start().await;
    let mut table = Table::new(
        "latency: Postgres 15, fsync on, one event per commit, from the commit's answer to the delivery",
        &[
            "load",
            "relay p50",
            "p99",
            "NOTIFY p50",
            "p99",
            "limit p50",
            "p99",
            "p50 / limit",
            "WAL B/event",
            "NOTIFY's",
            "limit's",
        ],
    );
    for rate in &options.rates {
        let load = Load { writers: STEADY_WRITERS, rate: Some(*rate), seconds: options.seconds };
        let relay = measure(&server, load, Reader::Relay).await?;
        let notified = measure(&server, load, Reader::Notified).await?;
        let limit = measure(&server, load, Reader::Plain).await?;
        let best = relay.p50().min(notified.p50());
        let ratio = format!("{:.1}x", best.as_secs_f64() / limit.p50().as_secs_f64());
        let figures = [&relay, &notified, &limit].into_iter().flat_map(|it| [it.p50(), it.p99()]).map(milliseconds);
        let wal = [&relay, &notified, &limit].map(|it| format!("{:.0}", it.wal_per_event));
        table.row([format!("{rate} events/s")].into_iter().chain(figures).chain([ratio]).chain(wal));
    }
    table.print();
    println!(
        "  limit: a reader that asks without pause and promises nothing; wanted at 500/s: p50 ≤ 3, p99 ≤ 10, NOTIFY p50 ≤ 1 ms"
    );
    println!("  WAL: the writers' and the relay's together; the limit writes none of its own");
    saturated(&server, options).await?;
    println!("\n  peak memory of writers and relay in one process: {:.0} MiB", machine::memory_peak_mib()?);
    idle(&server).await
}

async fn saturated(server: &postbox_testkit::servers::PrivatePostgres, options: &Options) -> anyhow::Result<()> {
    let title = format!("latency: {} writers committing as fast as they can", options.writers);
    let mut table =
        Table::new(title, &["relay", "p50", "p99", "commits", "writers alone", "ratio", "WAL B/event", "alone"]);
    let load = Load { writers: options.writers, rate: None, seconds: options.seconds };
    let alone = measure(server, load, Reader::Nobody).await?;
    for (name, reader) in [("polling", Reader::Relay), ("NOTIFY", Reader::Notified)] {
        let with = measure(server, load, reader).await?;
        table.row([
            name.to_owned(),
            milliseconds(with.p50()),
            milliseconds(with.p99()),
            rate(with.commits, with.seconds),
            rate(alone.commits, alone.seconds),
            percent(with.commits as f64 / with.seconds, alone.commits as f64 / alone.seconds),
            format!("{:.0}", with.wal_per_event),
            format!("{:.0}", alone.wal_per_event),
        ]);
    }
    table.print();
    println!("  wanted: p99 ≤ 100 ms");
    Ok(())
}

async fn idle(server: &postbox_testkit::servers::PrivatePostgres) -> anyhow::Result<()> {
    let url = server.fresh_database().await;
    child::open(&url).await?.up().await?;
    let job = Job { task: Task::Idle, store: url, subscription: "idle".into(), batch: 500 };
    let idle = job.in_child().await?;
    let used = 100.0 * idle.processor_seconds / idle.seconds;
    println!("\n  an idle relay uses {used:.1} % of a core (wanted: ≤ 1 %)");
    Ok(())
}

#[derive(Debug, Clone, Copy)]
struct Load {
    writers: usize,
    /// Events per second together; `None`: as fast as they can.
    rate: Option<usize>,
    seconds: u64,
}

struct Measured {
    /// Sorted.
    latencies: Vec<Duration>,
    commits: usize,
    seconds: f64,
    wal_per_event: f64,
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

    /// An event seen before its producer heard of the commit took no time at all.
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

struct Stopwatch(Arc<Stamps>);

#[async_trait]
impl Sink for Stopwatch {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: 10_000, concurrency: 4, prefix: true }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        self.0.arrive(deliveries.iter().map(|delivery| delivery.event.id));
        deliveries.iter().map(|_| Outcome::DELIVERED).collect()
    }
}

async fn measure(
    server: &postbox_testkit::servers::PrivatePostgres,
    load: Load,
    reader: Reader,
) -> anyhow::Result<Measured> {
    let url = server.fresh_database().await;
    child::open(&url).await?.up().await?;
    let stamps = Arc::new(Stamps::default());
    let stop = CancellationToken::new();
    let reading = tokio::spawn(read(reader, url.clone(), Arc::clone(&stamps), stop.clone()));
    if reader != Reader::Nobody {
        warm_up(&url, &stamps).await?;
    }
    let client = server::connect(&url).await?;
    client.batch_execute("CHECKPOINT").await?;
    let wal = server::wal_bytes(&client).await?;
    let start = Instant::now();
    let writing = (0..load.writers).map(|number| tokio::spawn(write(number, load, url.clone(), Arc::clone(&stamps))));
    let mut commits = 0;
    for writer in futures::future::join_all(writing).await {
        commits += writer??;
    }
    let seconds = start.elapsed().as_secs_f64();
    let deadline = Instant::now() + TAIL;
    while reader != Reader::Nobody
        && stamps.arrivals.load(Ordering::SeqCst) < commits + WARM_UP
        && Instant::now() < deadline
    {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stop.cancel();
    reading.await??;
    let latencies = stamps.latencies();
    let missing = commits - latencies.len();
    anyhow::ensure!(reader == Reader::Nobody || missing == 0, "{missing} of {commits} events did not arrive in time");
    let wal_per_event = (server::wal_bytes(&client).await? - wal) as f64 / commits.max(1) as f64;
    Ok(Measured { latencies, commits, seconds, wal_per_event })
}

/// Waits until the reader reads: how long it takes to start is not how long an event takes. Not
/// among the commits.
async fn warm_up(url: &str, stamps: &Stamps) -> anyhow::Result<()> {
    let mut client = server::connect(url).await?;
    let transaction = client.transaction().await?;
    postbox_postgres::append_in(&transaction, &fill::schema(), &LogName::outbox(), &[fill::event(0, KEYS)]).await?;
    transaction.commit().await?;
    let deadline = Instant::now() + TAIL;
    while stamps.arrivals.load(Ordering::SeqCst) < WARM_UP {
        anyhow::ensure!(Instant::now() < deadline, "the reader did not start in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Commits one event per transaction at its share of the rate; returns how many.
async fn write(number: usize, load: Load, url: String, stamps: Arc<Stamps>) -> anyhow::Result<usize> {
    let mut client = server::connect(&url).await?;
    let until = Instant::now() + Duration::from_secs(load.seconds);
    let pace = load.rate.map(|rate| Duration::from_secs_f64(load.writers as f64 / rate as f64));
    let mut ticks = tokio::time::interval(pace.unwrap_or(Duration::from_secs(1)));
    // Late commits are caught up with: the load does not bend to what is measured.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut count = 0;
    while Instant::now() < until {
        if pace.is_some() {
            ticks.tick().await;
        }
        let id = EventId::now_v7();
        let event = fill::event(number + count * load.writers, KEYS).id(id);
        let transaction = client.transaction().await?;
        postbox_postgres::append_in(&transaction, &fill::schema(), &LogName::outbox(), &[event]).await?;
        transaction.commit().await?;
        stamps.committed.lock().expect("nobody panics while holding it").insert(id, Instant::now());
        count += 1;
    }
    Ok(count)
}

async fn read(reader: Reader, url: String, stamps: Arc<Stamps>, stop: CancellationToken) -> anyhow::Result<()> {
    match reader {
        Reader::Nobody => Ok(()),
        Reader::Plain => read_plainly(&url, &stamps, &stop).await,
        Reader::Relay | Reader::Notified => {
            let config = PostgresConfig::new(url.as_str()).notify(reader == Reader::Notified);
            let store = Arc::new(PostgresStore::connect(config).await?);
            let subscription = Subscription::new("bench".parse()?, LogName::outbox());
            let relay = Relay::builder(store, subscription).sink(Arc::new(Stopwatch(stamps))).build()?;
            Ok(relay.run(stop).await?)
        }
    }
}

/// Rows that commit out of order are missed by a reader like this, so it asks for a little of the
/// past again each time.
async fn read_plainly(url: &str, stamps: &Stamps, stop: &CancellationToken) -> anyhow::Result<()> {
    const OVERLAP: i64 = 64;
    let client = server::connect(url).await?;
    let page = client.prepare("SELECT seq, id, payload FROM postbox.outbox WHERE seq > $1 ORDER BY seq").await?;
    let mut last = 0_i64;
    while !stop.is_cancelled() {
        let rows = client.query(&page, &[&(last - OVERLAP)]).await?;
        last = rows.last().map_or(last, |row| row.get(0));
        stamps.arrive(rows.iter().map(|row| EventId::from_uuid(row.get::<_, Uuid>(1))));
    }
    Ok(())
}
