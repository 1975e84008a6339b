//! One measured process: only what is measured runs in it, so that its peak memory and processor
//! time are that thing's.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use async_trait::async_trait;
use clap::{Args, ValueEnum};
use postbox_core::{BatchLimit, Capabilities, Delivery, LogName, Outcome, Sink, Store, Subscription};
use postbox_engine::{Relay, RelaySettings};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_sqlite::{SqliteConfig, SqliteStore};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::{machine, plain};

/// How long an idle relay is watched.
const IDLE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Task {
    /// The real relay to a sink that does nothing.
    Relay,
    /// The plain paged SELECT.
    Plain,
    /// A relay with nothing to do.
    Idle,
}

impl Task {
    fn word(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Plain => "plain",
            Self::Idle => "idle",
        }
    }
}

/// What a child does.
#[derive(Debug, Args)]
pub(crate) struct Job {
    #[arg(value_enum)]
    pub(crate) task: Task,
    /// `postgres://…` or the path of a SQLite file.
    #[arg(long)]
    pub(crate) store: String,
    #[arg(long, default_value = "bench")]
    pub(crate) subscription: String,
    #[arg(long, default_value_t = 1_000)]
    pub(crate) batch: usize,
}

/// What came of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figure {
    pub(crate) events: usize,
    pub(crate) seconds: f64,
    pub(crate) memory_mib: f64,
    pub(crate) processor_seconds: f64,
    /// What the process wrote, to files and sockets.
    pub(crate) written_bytes: f64,
}

impl Job {
    /// Runs it in a process of its own.
    pub(crate) async fn in_child(&self) -> anyhow::Result<Figure> {
        let output = tokio::process::Command::new(std::env::current_exe()?)
            .args(["child", self.task.word(), "--store", &self.store, "--subscription", &self.subscription])
            .args(["--batch", &self.batch.to_string()])
            .stderr(Stdio::inherit())
            .output()
            .await?;
        ensure!(output.status.success(), "the {} process failed", self.task.word());
        let figure: serde_json::Value = serde_json::from_slice(&output.stdout).context("the child's figures")?;
        let number = |name: &str| figure[name].as_f64().with_context(|| format!("no {name}"));
        Ok(Figure {
            events: number("events")? as usize,
            seconds: number("seconds")?,
            memory_mib: number("memory_mib")?,
            processor_seconds: number("processor_seconds")?,
            written_bytes: number("written_bytes")?,
        })
    }

    /// Runs it here and prints the figures.
    pub(crate) async fn run(&self) -> anyhow::Result<()> {
        let (events, seconds, processor_seconds) = match self.task {
            Task::Relay => self.relay().await?,
            Task::Plain => self.plain().await?,
            Task::Idle => self.idle().await?,
        };
        let memory_mib = machine::memory_peak_mib()?;
        let figure = json!({
            "events": events, "seconds": seconds, "memory_mib": memory_mib, "processor_seconds": processor_seconds,
            "written_bytes": machine::written_bytes()?,
        });
        println!("{figure}");
        Ok(())
    }

    async fn relay(&self) -> anyhow::Result<(usize, f64, f64)> {
        let relay = self.build().await?;
        let start = Instant::now();
        let drained = relay.drain(None).await?;
        let seconds = start.elapsed().as_secs_f64();
        Ok((usize::try_from(drained.delivered)?, seconds, machine::processor_seconds()?))
    }

    async fn plain(&self) -> anyhow::Result<(usize, f64, f64)> {
        let start = Instant::now();
        let events = if self.store.contains("://") {
            plain::postgres(&self.store, self.batch).await?
        } else {
            plain::sqlite(&self.store, self.batch)?
        };
        Ok((events, start.elapsed().as_secs_f64(), machine::processor_seconds()?))
    }

    async fn idle(&self) -> anyhow::Result<(usize, f64, f64)> {
        let relay = self.build().await?;
        let stop = CancellationToken::new();
        let watch = async {
            // It takes a moment to find that there is nothing to do.
            tokio::time::sleep(Duration::from_secs(1)).await;
            let before = machine::processor_seconds()?;
            tokio::time::sleep(IDLE).await;
            let used = machine::processor_seconds()? - before;
            stop.cancel();
            anyhow::Ok(used)
        };
        let (ran, used) = tokio::join!(relay.run(stop.clone()), watch);
        ran?;
        Ok((0, IDLE.as_secs_f64(), used?))
    }

    async fn build(&self) -> anyhow::Result<Relay> {
        let store = open(&self.store).await?;
        let subscription = Subscription::new(self.subscription.parse()?, LogName::outbox());
        let batch = BatchLimit { events: self.batch, ..BatchLimit::default() };
        let settings = RelaySettings { batch, ..RelaySettings::default() };
        Ok(Relay::builder(store, subscription).sink(Arc::new(NullSink)).settings(settings).build()?)
    }
}

/// The store behind a URL or a path.
pub(crate) async fn open(store: &str) -> anyhow::Result<Arc<dyn Store>> {
    Ok(if store.contains("://") {
        Arc::new(PostgresStore::connect(PostgresConfig::new(store)).await?)
    } else {
        Arc::new(SqliteStore::open(SqliteConfig::new(store)).await?)
    })
}

/// Takes everything and does nothing.
struct NullSink;

#[async_trait]
impl Sink for NullSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: 10_000, concurrency: 4, prefix: true }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        deliveries.iter().map(|_| Outcome::DELIVERED).collect()
    }
}
