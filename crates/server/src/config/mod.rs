//! The configuration: one TOML file, checked as a whole.
//!
//! [`Config::parse`] reports every fault at once, each as `postbox.toml:LINE: what, and how to fix
//! it`. Unknown keys are refused with the nearest known name, because a misspelt `max_atempts` that
//! is silently ignored is found in production.
//!
//! Secrets may be written as `env:NAME`; the file then holds nothing worth stealing.

mod document;
mod service;
mod subscription;
mod tree;

use std::path::{Path, PathBuf};

pub use document::{default_toml, guide_tables, json_schema};
use postbox_config::{
    Entry, Fault, Faults, Fields as _, Key, Nested, Place, ReadOptions, Reader, Section, Shape, Start, duration_text,
    unset,
};
use postbox_core::limits::MESSAGE_IDS_AGE_MIN;
pub use service::{LogConfig, LogFormat, RetentionConfig, ServerConfig};
pub use subscription::SubscriptionConfig;
use toml::de::DeTable;

use crate::sources::SourceConfig;
use crate::stores::StoreConfig;
use tree::Lines;

/// The name of the file when none is given.
pub const FILE_DEFAULT: &str = "postbox.toml";

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error(
        "{}: cannot be read: {source}; name another file with --config, or write one with `postbox init`",
        path.display()
    )]
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

/// A whole configuration.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// `[store]`
    pub store: StoreConfig,
    /// `[subscriptions.NAME]`, in the order of their names.
    pub subscriptions: Vec<SubscriptionConfig>,
    /// `[sources.NAME]`, in the order of their names.
    pub sources: Vec<SourceConfig>,
    /// `[server]`
    pub server: ServerConfig,
    /// `[retention]`
    pub retention: RetentionConfig,
    /// `[log]`
    pub log: LogConfig,
    /// What is allowed and still a risk, each at its line.
    pub warnings: Vec<Fault>,
}

impl Config {
    /// Reads a configuration, with secrets from the environment.
    pub fn parse(text: &str) -> Result<Self, Faults> {
        Self::parse_with(text, from_environment(FILE_DEFAULT))
    }

    /// Reads a configuration in another way.
    pub fn parse_with(text: &str, options: ReadOptions<'_>) -> Result<Self, Faults> {
        let (lines, reader) = (Lines(text), Reader::new(options));
        let (root, errors) = DeTable::parse_recoverable(text);
        for error in &errors {
            let line = error.span().map_or(0, |span| lines.line(span.start));
            let message: Vec<_> = error.message().split_whitespace().collect();
            reader.fault(line, format!("this is not TOML: {}", message.join(" ")));
        }
        let mut config = Self::default();
        // A tree with holes would only give faults that vanish once the syntax is right.
        if errors.is_empty() {
            let entries = lines.entries(root.get_ref());
            let root = Section::new(&reader, String::new(), 1, &entries);
            config.read(&root);
            root.finish();
        }
        let (faults, warnings) = reader.into_findings();
        config.warnings = warnings;
        if faults.is_empty() { Ok(config) } else { Err(Faults::new(options.file, faults)) }
    }

    /// Reads a file, and what it names if its secrets are needed. Faults begin with its name as
    /// given.
    pub fn load(path: &Path, secrets_needed: bool) -> Result<Self, LoadError> {
        let text = std::fs::read_to_string(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
        let file = path.display().to_string();
        let options = ReadOptions { secrets_needed, files: secrets_needed, ..from_environment(&file) };
        Ok(Self::parse_with(&text, options)?)
    }

    /// All sections, as keys of the whole file.
    fn keys() -> Vec<Key> {
        let table = |name, doc: String, keys| Key { name, doc, shape: Shape::Table(keys), start: Start::Unset("", "") };
        let named = |name, doc: &str, shape| Key {
            name,
            doc: doc.to_owned(),
            shape: Shape::Map(Box::new(shape)),
            start: Start::Unset("", ""),
        };
        vec![
            table("store", StoreConfig::doc(), StoreConfig::keys()),
            named(
                "subscriptions",
                "Who reads which log, and where the events go.",
                Shape::Table(SubscriptionConfig::keys()),
            ),
            named("sources", "Where messages come from.", SourceConfig::shape()),
            table("server", ServerConfig::doc(), ServerConfig::keys()),
            table("retention", RetentionConfig::doc(), RetentionConfig::keys()),
            table("log", LogConfig::doc(), LogConfig::keys()),
        ]
    }

    fn read(&mut self, root: &Section<'_>) {
        // So that they are known, in this order.
        for key in Self::keys() {
            root.place(key.name);
        }
        let absent = unset("", "");
        self.store = root.get("store", &Nested::<StoreConfig>::new(), &absent);
        self.server = root.get("server", &Nested::<ServerConfig>::new(), &absent);
        root.reader.set_listening(self.server.listen);
        self.retention = root.get("retention", &Nested::<RetentionConfig>::new(), &absent);
        self.log = root.get("log", &Nested::<LogConfig>::new(), &absent);
        self.subscriptions = named(root, "subscriptions", SubscriptionConfig::read);
        self.sources = named(root, "sources", SourceConfig::read);
        let retention = root.place("retention").and_then(|place| place.section());
        let written = retention.filter(|retention| retention.has("remember_ids"));
        self.check_memory(root.reader, written.map(|retention| retention.line_of("remember_ids")));
        self.check_freshness(root.reader);
    }

    /// An id that is forgotten while its sender still repeats it would be applied a second time.
    /// Nothing is remembered for less than 7 days, whatever a sender is said to do: a horizon is
    /// what its documents promise, and people send messages again by hand.
    fn check_memory(&self, reader: &Reader<'_>, line: Option<usize>) {
        let remembered = self.retention.remember_ids;
        let longest = self.sources.iter().max_by_key(|source| source.repeats_for().0);
        let longest = longest.map(|source| (source.repeats_for(), &source.name));
        match longest {
            Some(((horizon, source_line), source)) if remembered < horizon && horizon > MESSAGE_IDS_AGE_MIN => {
                let (remembered, horizon) = (duration_text(remembered), duration_text(horizon));
                let text = format!(
                    "retention.remember_ids is {remembered:?}, but the sender of sources.{source} repeats a message \
                     for {horizon:?}, and what is repeated after that would be applied twice; write remember_ids = \
                     {horizon:?} or longer, or sources.{source}.retry_horizon if it gives up sooner"
                );
                reader.fault(line.unwrap_or(source_line), text);
            }
            _ if remembered < MESSAGE_IDS_AGE_MIN => {
                let (remembered, least) = (duration_text(remembered), duration_text(MESSAGE_IDS_AGE_MIN));
                let text = format!(
                    "retention.remember_ids is {remembered:?}, and what is sent again after that would be applied \
                     twice; write remember_ids = {least:?}, the least, or longer"
                );
                reader.fault(line.unwrap_or_default(), text);
            }
            _ => {}
        }
    }

    /// A message whose id is forgotten must be too old to be taken again.
    fn check_freshness(&self, reader: &Reader<'_>) {
        let remembered = self.retention.remember_ids;
        for source in &self.sources {
            let Some((fresh, line)) = source.fresh_for().filter(|(fresh, _)| *fresh >= remembered) else { continue };
            let (name, fresh, remembered) = (&source.name, duration_text(fresh), duration_text(remembered));
            let text = format!(
                "sources.{name}.tolerance lets a message be sent again for up to {fresh:?} (twice the tolerance), but \
                 its id is remembered for {remembered:?} only, and what comes after that would be applied twice; write \
                 tolerance = \"5m\", or a longer retention.remember_ids"
            );
            reader.fault(line, text);
        }
    }
}

/// Secrets from the environment, all of them needed; named files are not read.
fn from_environment(file: &str) -> ReadOptions<'_> {
    ReadOptions { file, env: &|name| std::env::var(name).ok(), secrets_needed: true, files: false }
}

/// Reads every table of a section whose names the user chose.
fn named<T>(root: &Section<'_>, key: &'static str, read: fn(&Entry, Section<'_>) -> Option<T>) -> Vec<T> {
    let Some(sections) = root.place(key).and_then(|place| place.section()) else { return Vec::new() };
    let tables = sections.entries().iter().filter_map(|entry| {
        let place = Place::new(sections.reader, sections.name(&entry.key), &entry.node);
        let mut section = place.section()?;
        section.line = entry.line;
        read(entry, section)
    });
    tables.collect()
}

#[cfg(test)]
mod tests;
