//! The relays: several processes of the binary on one store, as an operator runs them.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use postbox_crash_checker::faults::{RELAY_FAILED, RELAY_GAVE_UP};
use tokio::time::sleep;

use crate::process::{Process, faketime_library};

/// Length of a lease.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// Lanes of each subscription.
pub(crate) const LANES_MAIN: u64 = 4;
pub(crate) const LANES_PART: u64 = 2;
/// Events per read, and concurrent deliveries.
pub(crate) const BATCH: u64 = 200;
const CONCURRENCY: u64 = 32;
/// Most events in flight per lane: two batches of the stream (one is settled while the next is
/// sent), and as many due rows as may be sent at once.
pub(crate) const WINDOW: u64 = 2 * BATCH + CONCURRENCY / 2;
/// Longest start. On a loaded machine a start takes a second or two; this is a hang.
const START_MAX: Duration = Duration::from_secs(60);
/// Longest stop: its own limit of ten seconds, and a machine that is busy with much else.
const STOP_MAX: Duration = Duration::from_secs(90);
/// The number of the signal that asks for an orderly end.
const SIGTERM: i32 = 15;

/// One replica. Its processes are replaced, its files stay.
#[derive(Debug)]
pub(crate) struct Relay {
    binary: PathBuf,
    config: PathBuf,
    log: PathBuf,
    clock: PathBuf,
    process: Option<Process>,
    /// Length of the log when the process was started.
    log_from: usize,
    /// Position up to which the log was searched.
    log_seen: usize,
    /// The file lengths of a lease before that search. A fault may keep the next one waiting.
    pub(crate) places_seen: Vec<(String, u64)>,
    /// Whether the process was asked to end.
    asked: bool,
    /// Ends and log lines that are defects of the product, or may be: kind and detail.
    failures: Vec<(&'static str, String)>,
}

/// The values of a configuration.
pub(crate) struct Config<'a> {
    pub(crate) store: &'a str,
    /// An inline TOML table.
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
            places_seen: Vec::new(),
            asked: false,
            failures: Vec::new(),
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
        self.forget();
        self.asked = false;
        self.log_from = std::fs::metadata(&self.log).map_or(0, |log| usize::try_from(log.len()).unwrap_or(0));
        let mut command = Command::new(&self.binary);
        command.arg("run").arg("--config").arg(&self.config);
        if let Some(library) = faketime_library() {
            if !self.clock.is_file() {
                self.step_clock(0)?;
            }
            command.env("LD_PRELOAD", library).env("FAKETIME_TIMESTAMP_FILE", &self.clock);
            // Only the wall clock is moved: monotonic clocks do not jump.
            command
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
                .env("FAKETIME_CACHE_DURATION", "1")
                .env("NO_FAKE_STAT", "1");
        }
        self.process = Some(Process::start(&mut command, Stdio::null(), &self.log)?);
        Ok(())
    }

    /// Moves its clock by this many seconds, within a second; `false` if it was there already.
    pub(crate) fn step_clock(&self, seconds: i64) -> anyhow::Result<bool> {
        // Renamed into place, because half a file would not be a valid time.
        let (new, time) = (self.clock.with_extension("new"), format!("{seconds:+}s\n"));
        let before = std::fs::read_to_string(&self.clock).unwrap_or_default();
        std::fs::write(&new, &time)?;
        std::fs::rename(&new, &self.clock)?;
        Ok(before != time)
    }

    pub(crate) fn runs(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| process.ended().is_none())
    }

    /// The exit code if it ended by itself; the process is forgotten then.
    pub(crate) fn has_ended(&mut self) -> Option<Option<i32>> {
        if self.runs() {
            return None;
        }
        Some(self.forget()?.code())
    }

    pub(crate) fn kill(&mut self) {
        self.forget();
    }

    /// Forgets the process, and kills it unless it has ended by itself. Then its status must be 0
    /// if it was asked to end, or 1, which it returns when its store is down; the checker knows
    /// whether it was. If it was asked before it could catch signals, the signal ends it.
    fn forget(&mut self) -> Option<ExitStatus> {
        let status = self.process.take()?.ended()?;
        let is_clean = self.asked && (status.success() || status.signal() == Some(SIGTERM));
        if !is_clean {
            let log = self.log();
            let last = log.lines().rev().find(|line| !line.is_empty()).unwrap_or_default();
            let kind = if status.code() == Some(1) { RELAY_GAVE_UP } else { RELAY_FAILED };
            self.failures.push((kind, format!("{status}: {last}")));
        }
        Some(status)
    }

    /// What failed since the last call.
    pub(crate) fn take_failures(&mut self) -> Vec<(&'static str, String)> {
        std::mem::take(&mut self.failures)
    }

    pub(crate) fn signal(&self, name: &str) {
        if let Some(process) = &self.process {
            process.signal(name);
        }
    }

    /// Sends SIGTERM and waits for the end. A process that was just started may not catch signals
    /// yet, so it waits until it serves.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        let serving = self.serving().await;
        self.asked = true;
        self.signal("TERM");
        let began = Instant::now();
        while self.runs() {
            if began.elapsed() > STOP_MAX {
                self.kill();
                self.failures.push((RELAY_FAILED, format!("it did not stop within {STOP_MAX:?}")));
                anyhow::bail!("a relay did not stop within {STOP_MAX:?}");
            }
            sleep(Duration::from_millis(20)).await;
        }
        self.forget();
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

    /// The log of the current process.
    pub(crate) fn log(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(log.get(self.log_from..).unwrap_or_default()).into_owned()
    }
}

impl Relay {
    /// The codes of the lost leases in its log since the last call. A panic is kept as a failure.
    pub(crate) fn leases_lost(&mut self) -> Vec<String> {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let new = String::from_utf8_lossy(log.get(self.log_seen..).unwrap_or_default()).into_owned();
        self.log_seen += new.rfind('\n').map_or(0, |end| end + 1);
        let new = &new[..new.rfind('\n').unwrap_or(0)];
        let panics = new.lines().filter(|line| line.contains("panicked"));
        self.failures.extend(panics.map(|line| (RELAY_FAILED, line.to_owned())));
        let code = |line: &str| line.split("code=\"").nth(1)?.split('"').next().map(str::to_owned);
        // A renewal that is refused because another has the lane says so in another line.
        let is_taken = |line: &str| line.contains("lease not renewed") && line.contains("code=\"stale_lease\"");
        let lost = new.lines().filter(|line| line.contains("lease lost") || is_taken(line));
        lost.map(|line| code(line).unwrap_or_default()).collect()
    }
}

/// Runs one operator command of the binary; returns its output, and whether it exited with 0.
pub(crate) async fn command(binary: &Path, store: &str, arguments: &[&str]) -> anyhow::Result<(bool, String)> {
    let mut command = tokio::process::Command::new(binary);
    command.args(arguments).args(["--store", store]).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(START_MAX, command.output()).await.context("a command hangs")??;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Ok((output.status.success(), text))
}
