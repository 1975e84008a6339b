//! The relays: the binary as an operator runs it, several of them on one store.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::time::sleep;

use crate::process::{Process, faketime_library};

/// The length of a lease.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// Lanes of each subscription.
pub(crate) const LANES_MAIN: u64 = 4;
pub(crate) const LANES_PART: u64 = 2;
/// Events read at once, and deliveries at once.
pub(crate) const BATCH: u64 = 200;
const CONCURRENCY: u64 = 32;
/// What can be in flight in one lane: two batches of the stream, of which one is settled while the
/// next goes out, and as many of the due rows as may be sent at once.
pub(crate) const WINDOW: u64 = 2 * BATCH + CONCURRENCY / 2;
/// A start on a loaded machine takes a second or two; more than this is a hang.
const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(40);

/// One replica: its place stays, its processes come and go.
#[derive(Debug)]
pub(crate) struct Relay {
    binary: PathBuf,
    config: PathBuf,
    log: PathBuf,
    clock: PathBuf,
    process: Option<Process>,
    /// How long the log was when the process was started.
    log_from: usize,
    /// Up to where it was looked through.
    log_seen: usize,
}

/// What a configuration is made of.
pub(crate) struct Config<'a> {
    pub(crate) store: &'a str,
    /// A table of TOML.
    pub(crate) main_sink: &'a str,
    pub(crate) part_sink: &'a str,
    pub(crate) part_topics: &'a [String],
}

impl Config<'_> {
    fn render(&self) -> String {
        let Self { store, main_sink, part_sink, part_topics } = self;
        let common = format!(
            "batch = {BATCH}\nlease = \"{}s\"\nconcurrency = {CONCURRENCY}\ntimeout = \"3s\"\n\
             retry = {{ max_attempts = 30, base = \"20ms\", max = \"300ms\" }}\nbreaker = {{ base = \"50ms\", max = \"400ms\" }}\n",
            LEASE.as_secs()
        );
        format!(
            "[store]\nurl = \"{store}\"\nstatement_timeout = \"5s\"\n\
             [subscriptions.main]\ntopics = [\"crash.*\"]\nlanes = {LANES_MAIN}\n{common}sink = {main_sink}\n\
             [subscriptions.part]\ntopics = {part_topics:?}\nlanes = {LANES_PART}\n{common}sink = {part_sink}\n\
             [server]\nlisten = \"127.0.0.1:0\"\n"
        )
    }
}

impl Relay {
    pub(crate) fn new(binary: &Path, folder: &Path, number: usize) -> Self {
        Self {
            binary: binary.to_owned(),
            config: folder.join(format!("relay-{number}.toml")),
            log: folder.join(format!("relay-{number}.log")),
            clock: folder.join(format!("relay-{number}.clock")),
            process: None,
            log_from: 0,
            log_seen: 0,
        }
    }

    pub(crate) fn configure(&self, config: &Config<'_>) -> anyhow::Result<()> {
        Ok(std::fs::write(&self.config, config.render())?)
    }

    /// Starts it, unless it runs.
    pub(crate) fn start(&mut self) -> anyhow::Result<()> {
        if self.runs() {
            return Ok(());
        }
        self.log_from = std::fs::metadata(&self.log).map_or(0, |log| usize::try_from(log.len()).unwrap_or(0));
        let mut command = Command::new(&self.binary);
        command.arg("run").arg("--config").arg(&self.config);
        if let Some(library) = faketime_library() {
            if !self.clock.is_file() {
                self.step_clock(0)?;
            }
            command.env("LD_PRELOAD", library).env("FAKETIME_TIMESTAMP_FILE", &self.clock);
            // Only what clocks on a wall show: timers of a machine do not jump.
            command
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
                .env("FAKETIME_CACHE_DURATION", "1")
                .env("NO_FAKE_STAT", "1");
        }
        self.process = Some(Process::start(&mut command, Stdio::null(), &self.log)?);
        Ok(())
    }

    /// Its clock shows so many seconds more, within a second.
    pub(crate) fn step_clock(&self, seconds: i64) -> anyhow::Result<()> {
        // Renamed into place: half a file would be no time at all.
        let new = self.clock.with_extension("new");
        std::fs::write(&new, format!("{seconds:+}s\n"))?;
        Ok(std::fs::rename(&new, &self.clock)?)
    }

    pub(crate) fn runs(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| process.ended().is_none())
    }

    /// Whether it ended without our doing, and with which code. It is forgotten then.
    pub(crate) fn has_ended(&mut self) -> Option<Option<i32>> {
        let status = self.process.as_mut()?.ended()?;
        self.process = None;
        Some(status.code())
    }

    pub(crate) fn kill(&mut self) {
        self.process = None;
    }

    pub(crate) fn signal(&self, name: &str) {
        if let Some(process) = &self.process {
            process.signal(name);
        }
    }

    /// SIGTERM, and waits until it has ended. One that was started a moment ago may not catch
    /// signals yet: it says when it serves.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        let serving = self.serving().await;
        self.signal("TERM");
        let began = Instant::now();
        while self.runs() {
            if began.elapsed() > STOP_MAX {
                self.kill();
                anyhow::bail!("a relay did not stop within {STOP_MAX:?}");
            }
            sleep(Duration::from_millis(20)).await;
        }
        self.process = None;
        serving
    }

    /// Waits until it serves or has ended.
    pub(crate) async fn serving(&mut self) -> anyhow::Result<()> {
        let began = Instant::now();
        while self.runs() && !self.log().contains("postbox serves") {
            anyhow::ensure!(began.elapsed() < START_MAX, "a relay does not serve: {}", self.log());
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// What the present process has said.
    pub(crate) fn log(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(log.get(self.log_from..).unwrap_or_default()).into_owned()
    }
}

impl Relay {
    /// How many leases it said that it lost, since it was last asked.
    pub(crate) fn leases_lost(&mut self) -> usize {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let new = String::from_utf8_lossy(log.get(self.log_seen..).unwrap_or_default()).into_owned();
        self.log_seen += new.rfind('\n').map_or(0, |end| end + 1);
        new[..new.rfind('\n').unwrap_or(0)].matches("lease lost").count()
    }
}

/// One command of the binary, as an operator types it: what it printed, and whether it ended with
/// 0.
pub(crate) async fn command(binary: &Path, store: &str, arguments: &[&str]) -> anyhow::Result<(bool, String)> {
    let mut command = tokio::process::Command::new(binary);
    command.args(arguments).args(["--store", store]).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(START_MAX, command.output()).await.context("a command hangs")??;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Ok((output.status.success(), text))
}
