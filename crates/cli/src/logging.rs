//! Logs go to standard error, so that standard output stays for results.
//!
//! Levels: info for lifecycle, debug per batch, warn for what is recoverable, error for what needs a person.

use std::io::IsTerminal as _;

use postbox_server::{LogConfig, LogFormat};
use tracing_subscriber::EnvFilter;

use crate::failure::Failure;

/// Starts logging. Called once, after the configuration is known.
pub(crate) fn start(config: &LogConfig) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(&config.level).map_err(|error| {
        Failure::usage(format!(
            "log level {:?} is no filter: {error}; e.g. info or info,postbox_engine=debug",
            config.level
        ))
    })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match config.format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Text => builder.with_target(false).with_ansi(std::io::stderr().is_terminal()).try_init(),
    };
    started.map_err(|error| Failure::failed(format!("cannot start logging: {error}")))
}
