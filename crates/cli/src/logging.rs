//! Logs go to standard error, so that standard output stays for results.
//!
//! Levels: info for lifecycle, debug per batch, warn for what is recoverable, error for what needs
//! a person.
//!
//! A line is written by a thread of its own, and nobody waits for it: whoever has standard error
//! may close it, let its disk run full, or stop reading, and events are delivered all the same.

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

/// Most lines that wait to be written, some 200 bytes each; beyond it they are lost. A reader that
/// is merely slow catches up.
const LINES_MAX: usize = 4_096;
/// Longest wait for the last lines at the end of the program.
const FLUSH_MAX: Duration = Duration::from_secs(1);

static LINES: OnceLock<Lines> = OnceLock::new();

/// Starts logging, and takes spans where there is something for them. Called once, after the
/// configuration is known.
pub(crate) fn start(config: &LogConfig, traces: Option<Traces>) -> Result<(), Failure> {
    // These clients' own lines would say again, and louder, what an outcome or an error says, or
    // repeat whole messages; and spans are no log.
    let quiet = "async_nats=off,aws=off,krafka=off,lapin=off";
    let no_level = |part: &&str| !part.contains('=') && part.trim().parse::<LevelFilter>().is_err();
    if let Some(part) = config.level.split(',').find(no_level) {
        return Err(Failure::usage(format!(
            "log level {part:?} is none of error, warn, info, debug, trace and off; of a part: TARGET=LEVEL, e.g. info,postbox_engine=debug"
        )));
    }
    let filter = EnvFilter::try_new(format!("{quiet},{TARGET}=off,{}", config.level)).map_err(|error| {
        Failure::usage(format!(
            "log level {:?} is no filter: {error}; e.g. info or info,postbox_engine=debug",
            config.level
        ))
    })?;
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

/// Waits until what was logged is written, if somebody takes it.
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
            // Nobody to tell when standard error is closed or full; the next line may fit.
            Entry::Line(line) => drop(io::stderr().write_all(&line)),
            Entry::Flush(written) => drop(written.send(())),
        }
    }
}

/// The way to the thread. Gets whole lines.
#[derive(Clone)]
struct Lines(SyncSender<Entry>);

impl Write for Lines {
    /// Never fails: the subscriber would tell of it on standard error, and panic there.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = self.0.try_send(Entry::Line(neutralise(line)));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Without characters that hide or reorder text. Those below are the subscriber's business: it
/// escapes them, and colours with them. Each becomes what JSON reads as the same character, and a
/// person as its number.
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
    fn a_line_reads_from_left_to_right() {
        let plain = "{\"a\":\"żółć 日本 🦀\\n\"}\n\x1b[2m";
        assert_eq!(neutralise(plain.as_bytes()), plain.as_bytes());
        let turned = neutralise("{\"a\":\"x\u{202e}y\u{9b}\u{2066}\u{61c}\"}".as_bytes());
        assert_eq!(turned, b"{\"a\":\"x\\u202ey\\u009b\\u2066\\u061c\"}");
        let value: serde_json::Value = serde_json::from_slice(&turned).expect("JSON");
        assert_eq!(value["a"], "x\u{202e}y\u{9b}\u{2066}\u{61c}");
    }
}
