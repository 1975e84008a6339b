//! The command line options.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::json;

use crate::store::StoreKind;

/// Where events go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SinkKind {
    /// An endpoint that refuses, breaks and hangs now and then.
    Http,
    /// One file that all replicas append to.
    File,
}

/// A run.
#[derive(Debug, Clone, Args)]
pub(crate) struct Options {
    /// Least number of committed events
    #[arg(long, default_value_t = 100_000)]
    pub(crate) events: u64,
    /// Least number of faults
    #[arg(long, default_value_t = 100)]
    pub(crate) faults: u64,
    /// The seed of all random choices
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    #[arg(long, value_enum, default_value = "postgres")]
    pub(crate) store: StoreKind,
    #[arg(long, value_enum, default_value = "http")]
    pub(crate) sink: SinkKind,
    /// Events per round. A round ends after these and its share of the faults, and is judged; the
    /// next one begins with an empty store
    #[arg(long, default_value_t = 100_000)]
    pub(crate) round: u64,
    /// Events that all writers together append per second
    #[arg(long, default_value_t = 2_500.0)]
    pub(crate) rate: f64,
    /// Start no further round after this time; `--resume` continues
    #[arg(long)]
    pub(crate) minutes: Option<f64>,
    /// Continue the run in this folder, with the options it began with
    #[arg(long)]
    pub(crate) resume: Option<PathBuf>,
    /// Where the run's folder is created
    #[arg(long, default_value = "target/crash")]
    pub(crate) folder: PathBuf,
    /// The program under test
    #[arg(long)]
    pub(crate) binary: PathBuf,
    /// Only these kinds of fault
    #[arg(long, value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// Not these kinds of fault
    #[arg(long, value_delimiter = ',')]
    pub(crate) without: Vec<String>,
    /// Continue after a round with a violation
    #[arg(long)]
    pub(crate) keep_going: bool,
}

impl Options {
    /// The number of rounds.
    pub(crate) fn rounds(&self) -> u64 {
        self.events.div_ceil(self.round.max(1)).max(1)
    }

    /// The command that repeats the run.
    pub(crate) fn command(&self) -> String {
        let Self { events, faults, seed, round, rate, .. } = self;
        let list = |name: &str, kinds: &[String]| {
            if kinds.is_empty() { String::new() } else { format!(" --{name} '{}'", kinds.join(",")) }
        };
        let sink = if self.sink == SinkKind::Http { "http" } else { "file" };
        format!(
            "cargo xtask crash --events {events} --faults {faults} --seed {seed} --store {} --sink {sink} --round {round} --rate {rate}{}{}",
            self.store.name(),
            list("only", &self.only),
            list("without", &self.without)
        )
    }

    /// The options that `--resume` needs.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        json!({
            "events": self.events, "faults": self.faults, "seed": self.seed, "round": self.round, "rate": self.rate,
            "store": self.store.name(), "file": self.sink == SinkKind::File, "only": self.only, "without": self.without,
        })
    }

    /// Replaces these options by those the run began with.
    pub(crate) fn resumed(mut self, value: &serde_json::Value) -> Option<Self> {
        let kinds = |name: &str| -> Option<Vec<String>> {
            value[name].as_array()?.iter().map(|kind| kind.as_str().map(str::to_owned)).collect()
        };
        self.events = value["events"].as_u64()?;
        self.faults = value["faults"].as_u64()?;
        self.seed = value["seed"].as_u64()?;
        self.round = value["round"].as_u64()?;
        self.rate = value["rate"].as_f64()?;
        self.store = StoreKind::from_str(value["store"].as_str()?, true).ok()?;
        self.sink = if value["file"].as_bool()? { SinkKind::File } else { SinkKind::Http };
        self.only = kinds("only")?;
        self.without = kinds("without")?;
        Some(self)
    }
}
