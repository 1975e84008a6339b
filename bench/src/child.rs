//! One measured process. Nothing else runs in it, so its peak memory and processor time are those
//! of the measured work.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use async_trait::async_trait;
use clap::{Args, ValueEnum};
use postbox_core::{BatchLimit, Capabilities, Delivery, LogName, Outcome, Sink, Subscription};
use postbox_engine::{Relay, RelaySettings};
use tokio_util::sync::CancellationToken;

use crate::bed::open;
use crate::figure::Figure;
use crate::{machine, plain};

/// How long an idle relay is measured.
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

/// The name of a choice on the command line.
pub(crate) fn word(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

impl Job {
    /// Runs the job in a separate process.
    pub(crate) async fn in_child(&self) -> anyhow::Result<Figure> {
        let output = tokio::process::Command::new(std::env::current_exe()?)
            .args(["child", &word(self.task), "--store", &self.store, "--subscription", &self.subscription])
            .args(["--batch", &self.batch.to_string()])
            .stderr(Stdio::inherit())
            .output()
            .await?;
        ensure!(output.status.success(), "the {:?} process failed", self.task);
        serde_json::from_slice(&output.stdout).context("the child's figures")
    }

    /// Runs the job here and prints the figures.
    pub(crate) async fn run(&self) -> anyhow::Result<()> {
        let (count, seconds, processor_seconds) = match self.task {
            Task::Relay => {
                let relay = self.build().await?;
                let start = Instant::now();
                let delivered = relay.drain(None).await?.delivered;
                (usize::try_from(delivered)?, start.elapsed().as_secs_f64(), machine::processor_seconds()?)
            }
            Task::Plain => {
                let start = Instant::now();
                let count = match self.store.contains("://") {
                    true => plain::postgres(&self.store, self.batch).await?,
                    false => plain::sqlite(&self.store, self.batch)?,
                };
                (count, start.elapsed().as_secs_f64(), machine::processor_seconds()?)
            }
            Task::Idle => (0, IDLE.as_secs_f64(), self.idle().await?),
        };
        let (bytes, memory_mib) = (machine::written_bytes()?, machine::memory_peak_mib()?);
        let figure = Figure { count, seconds, processor_seconds, bytes, memory_mib };
        println!("{}", serde_json::to_string(&figure)?);
        Ok(())
    }

    async fn idle(&self) -> anyhow::Result<f64> {
        let relay = self.build().await?;
        let stop = CancellationToken::new();
        let watch = async {
            // A moment for the relay to find that there is nothing to do.
            tokio::time::sleep(Duration::from_secs(1)).await;
            let before = machine::processor_seconds()?;
            tokio::time::sleep(IDLE).await;
            let used = machine::processor_seconds()? - before;
            stop.cancel();
            anyhow::Ok(used)
        };
        let (ran, used) = tokio::join!(relay.run(stop.clone()), watch);
        ran?;
        used
    }

    async fn build(&self) -> anyhow::Result<Relay> {
        let store = open(&self.store).await?;
        let subscription = Subscription::new(self.subscription.parse()?, LogName::outbox());
        let batch = BatchLimit { events: self.batch, ..BatchLimit::default() };
        let settings = RelaySettings { batch, ..RelaySettings::default() };
        Ok(Relay::builder(store, subscription).sink(Arc::new(NullSink)).settings(settings).build()?)
    }
}

/// Accepts everything and does nothing.
pub(crate) struct NullSink;

#[async_trait]
impl Sink for NullSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: 10_000, concurrency: 4, prefix: true, system: None }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        deliveries.iter().map(|_| Outcome::DELIVERED).collect()
    }
}
