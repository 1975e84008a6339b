//! Logging to standard error, so that standard output is free for results.
//!
//! Levels: info for lifecycle, debug per batch, warn for what recovers by itself, error for what
//! needs a person.
//!
//! A separate thread writes the lines, and nothing waits for it: even if the reader of standard
//! error closes it, runs out of disk or stops reading, events are delivered.

use std::io::{self, IsTerminal as _, Write};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use postbox_core::trace::TARGET;
use postbox_server::text::is_hostile;
use postbox_server::{LogConfig, LogFormat};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::prelude::*;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

use crate::failure::Failure;
use crate::telemetry::Traces;

/// Most lines that wait to be written, some 200 bytes each; more are lost. Enough for a slow reader
/// to catch up.
const LINES_MAX: usize = 4_096;
/// Longest wait for the last lines at exit.
const FLUSH_MAX: Duration = Duration::from_secs(1);

static LINES: OnceLock<Lines> = OnceLock::new();

/// Returns the filter of a log level, or why it is none.
pub(crate) fn filter(level: &str) -> Result<EnvFilter, Failure> {
    // These clients' own log lines would repeat an outcome or error at a higher level, or contain
    // whole messages. Their spans do not belong in a log. krafka's fetcher is heard: nothing else
    // tells of messages that were deleted unread, or of a partition that a broker refuses. It waits
    // up to 30 s between two failures, except those to decode, which the source reports.
    let quiet = "async_nats=off,aws=off,deadpool=off,krafka=off,krafka::consumer::fetcher=warn,\
        krafka::consumer::fetcher::decode=off,lapin=off";
    let no_level = |part: &&str| !part.contains('=') && part.trim().parse::<LevelFilter>().is_err();
    if let Some(part) = level.split(',').find(no_level) {
        return Err(Failure::usage(format!(
            "log level {part:?} is none of error, warn, info, debug, trace and off; for one part: TARGET=LEVEL, e.g. info,postbox_engine=debug"
        )));
    }
    EnvFilter::try_new(format!("{quiet},{TARGET}=off,{level}")).map_err(|error| {
        Failure::usage(format!(
            "log level {level:?} is not a valid filter: {error}; e.g. info or info,postbox_engine=debug"
        ))
    })
}

/// Starts logging, and tracing if configured. Called once, when the configuration is known.
pub(crate) fn start(config: &LogConfig, traces: Option<Traces>) -> Result<(), Failure> {
    let filter = filter(&config.level)?;
    let failed = |error: &dyn std::fmt::Display| Failure::failed(format!("cannot start logging: {error}"));
    let (sender, queue) = sync_channel(LINES_MAX);
    std::thread::Builder::new().name("log".into()).spawn(|| write(queue)).map_err(|error| failed(&error))?;
    let lines = LINES.get_or_init(|| Lines(sender)).clone();
    let written = fmt::layer().with_writer(move || lines.clone());
    let log = match config.format {
        LogFormat::Json => written.json().flatten_event(true).with_filter(filter).boxed(),
        LogFormat::Text => written.with_target(false).with_ansi(io::stderr().is_terminal()).with_filter(filter).boxed(),
    };
    let started = Registry::default().with(traces).with(log).try_init();
    started.map_err(|error| failed(&error))
}

/// Waits until the queued lines are written, if they can be.
pub(crate) fn flush() {
    let Some(Lines(lines)) = LINES.get() else { return };
    let (written, waiting) = sync_channel(1);
    if lines.try_send(Entry::Flush(written)).is_ok() {
        let _ = waiting.recv_timeout(FLUSH_MAX);
    }
}

enum Entry {
    Line(Vec<u8>),
    Flush(SyncSender<()>),
}

fn write(queue: Receiver<Entry>) {
    for entry in queue {
        match entry {
            // If standard error is closed or full, nothing can be done; the next line may fit.
            Entry::Line(line) => drop(io::stderr().write_all(&line)),
            Entry::Flush(written) => drop(written.send(())),
        }
    }
}

/// The queue of the writer thread. Receives whole lines.
#[derive(Clone)]
struct Lines(SyncSender<Entry>);

impl Write for Lines {
    /// Never fails: the subscriber would report an error on standard error, and panic there.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = self.0.try_send(Entry::Line(neutralise(line)));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Escapes characters that hide or reorder text. Those below U+007F are left to the subscriber,
/// which escapes them and colours with them. Each escape is one that JSON reads as the same
/// character and that shows a person its number.
fn neutralise(line: &[u8]) -> Vec<u8> {
    let hostile = |c: char| c >= '\u{7f}' && is_hostile(c);
    match std::str::from_utf8(line) {
        Ok(text) if text.contains(hostile) => {
            let written = text.chars().map(|c| if hostile(c) { format!("\\u{:04x}", u32::from(c)) } else { c.into() });
            written.collect::<String>().into_bytes()
        }
        _ => line.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_kafka_client_only_its_fetcher_is_heard() {
        let (sender, queue) = sync_channel(LINES_MAX);
        let written = fmt::layer().with_writer(move || Lines(sender.clone()));
        let log = Registry::default().with(written.with_filter(filter("debug").expect("a filter")));
        tracing::subscriber::with_default(log, || {
            tracing::warn!(target: "krafka::consumer::fetcher", "Offset 3 out of range for orders-0; resetting");
            tracing::info!(target: "krafka::consumer::fetcher", "no");
            tracing::error!(target: "krafka::consumer::fetcher::decode", "no");
            tracing::error!(target: "krafka::consumer", "no");
        });
        assert_eq!(queue.try_iter().count(), 1);
    }

    #[test]
    fn a_line_reads_from_left_to_right() {
        let plain = "{\"a\":\"żółć 日本 🦀\\n\"}\n\x1b[2m";
        assert_eq!(neutralise(plain.as_bytes()), plain.as_bytes());
        let turned = neutralise("{\"a\":\"x\u{202e}y\u{9b}\u{2066}\u{61c}\"}".as_bytes());
        assert_eq!(turned, b"{\"a\":\"x\\u202ey\\u009b\\u2066\\u061c\"}");
        let value: serde_json::Value = serde_json::from_slice(&turned).expect("JSON");
        assert_eq!(value["a"], "x\u{202e}y\u{9b}\u{2066}\u{61c}");
    }
}
