//! The configuration: one TOML file, checked as a whole.
//!
//! [`Config::parse`] reports every fault at once, each as `postbox.toml:LINE: what, and how to fix it`. Unknown keys are
//! refused with the nearest known name, because a misspelt `max_atempts` that is silently ignored is found in production.
//!
//! Secrets may be written as `env:NAME`; the file then holds nothing worth stealing.

mod faults;
mod model;
mod parse;
mod reader;
mod risks;
mod values;

use std::path::{Path, PathBuf};

pub use faults::{Fault, Faults};
pub use model::*;
pub use values::{parse_duration, parse_size};

/// The name of the file when none is given.
pub const FILE_DEFAULT: &str = "postbox.toml";

/// The commented file that `postbox init` writes; every value in it is the default.
pub const DEFAULT_TOML: &str = include_str!("default.toml");

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}; name another file with --config, or write one with `postbox init`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file says something wrong.
    #[error("{0}")]
    Faults(#[from] Faults),
}

/// How a configuration is read.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// The name faults begin with.
    pub file: &'a str,
    /// Where `env:NAME` is looked up.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// Whether a missing variable for a sink or source is a fault. Commands that only look at the store do without.
    pub secrets_needed: bool,
    /// Whether the files that sinks name are read too, to find what does not fit. A text alone says nothing of them.
    pub files: bool,
}

impl Default for Reading<'_> {
    fn default() -> Self {
        Self { file: FILE_DEFAULT, env: &|name| std::env::var(name).ok(), secrets_needed: true, files: false }
    }
}

impl Config {
    /// Reads a configuration, with secrets from the environment.
    pub fn parse(text: &str) -> Result<Self, Faults> {
        Self::parse_with(text, Reading::default())
    }

    /// Reads a configuration in another way.
    pub fn parse_with(text: &str, reading: Reading<'_>) -> Result<Self, Faults> {
        parse::parse(text, &reading).map_err(|faults| Faults::new(reading.file, faults))
    }

    /// Reads a file, and what it names if its secrets are needed. Faults begin with its name as given.
    pub fn load(path: &Path, secrets_needed: bool) -> Result<Self, LoadError> {
        let text = std::fs::read_to_string(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
        let file = path.display().to_string();
        Ok(Self::parse_with(
            &text,
            Reading { file: &file, secrets_needed, files: secrets_needed, ..Reading::default() },
        )?)
    }
}

#[cfg(test)]
mod tests;
