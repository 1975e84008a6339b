//! Webhooks in: the configured sources on the ingress, and what became of their messages.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use postbox_config::{Entry, Fields, Key, Section, Shape, Table, Text, Variant, default, from_core, table};
use postbox_core::{Clock, LogName, Result, SourceName, Store};
use postbox_ingress::{Count, Ingress, WebhookSource, WebhookTable};

use crate::sinks::read_type;

/// One row of the table of sources.
struct SourceType {
    /// The word after `type =`.
    name: &'static str,
    example: &'static str,
    doc: fn() -> String,
    keys: fn() -> Vec<Key>,
    read: fn(&Section<'_>) -> Arc<dyn SourceTable>,
}

/// Every kind of source. A new one is one row here.
const SOURCES: &[SourceType] = &[SourceType {
    name: "webhook",
    example: r#"{ type = "webhook", scheme = "standard-webhooks", secret = "env:PARTNER_SECRET" }"#,
    doc: WebhookTable::doc,
    keys: WebhookTable::keys,
    read: |section| Arc::new(WebhookTable::read(section)),
}];

/// The keys of a source, and the source built from them.
trait SourceTable: fmt::Debug + Send + Sync {
    /// How long the sender goes on sending a message that was not answered (`retry_horizon`).
    fn repeats_for(&self) -> Duration;
    /// How long a message that was captured could be sent again (`tolerance`), where it is written.
    fn fresh_for(&self) -> Option<Duration>;
    fn build(&self, name: SourceName, log: LogName) -> Result<WebhookSource>;
}

impl SourceTable for WebhookTable {
    fn repeats_for(&self) -> Duration {
        self.repeats_for()
    }

    /// Signed as far ahead as is allowed, a message is young for twice the tolerance.
    fn fresh_for(&self) -> Option<Duration> {
        self.tolerance.map(|tolerance| tolerance.saturating_mul(2))
    }

    fn build(&self, name: SourceName, log: LogName) -> Result<WebhookSource> {
        self.source(name, log)
    }
}

table! {
    /// What every source has.
    struct CommonTable {
        /// The log where messages are stored.
        log: LogName = Text { what: "log", parse: from_core::<LogName> }, default("inbox");
    }
}

impl Table for CommonTable {}

/// `[sources.NAME]`: where messages come from.
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// Its name, and its path: `POST /in/NAME`.
    pub name: SourceName,
    /// The log it stores into.
    pub log: LogName,
    table: Arc<dyn SourceTable>,
    /// The lines of its name, and of `tolerance`.
    line: usize,
    tolerance_line: usize,
}

impl SourceConfig {
    /// `None` after a fault that leaves nothing to look at.
    pub(crate) fn read(entry: &Entry, section: Section<'_>) -> Option<Self> {
        let name = match SourceName::new(entry.key.as_str()) {
            Ok(name) => name,
            Err(error) => {
                let text = format!("[{}]: {}", section.path, error.message());
                section.reader.refuse(entry.line, &entry.key, text);
                return None;
            }
        };
        let names: Vec<_> = SOURCES.iter().map(|source| source.name).collect();
        let source = &SOURCES[read_type(&section, "source", &names)?];
        let CommonTable { log } = CommonTable::read(&section);
        let table = (source.read)(&section);
        let tolerance_line = section.line_of("tolerance");
        section.finish();
        Some(Self { name, log, table, line: entry.line, tolerance_line })
    }

    /// For documents.
    pub(crate) fn shape() -> Shape {
        let variants = SOURCES.iter().map(|source| Variant {
            name: source.name,
            doc: (source.doc)(),
            keys: (source.keys)(),
            example: source.example,
        });
        Shape::Tagged(variants.collect(), CommonTable::keys())
    }

    /// How long its sender goes on sending a message that was not answered, and the line to say so.
    pub(crate) fn repeats_for(&self) -> (Duration, usize) {
        (self.table.repeats_for(), self.line)
    }

    /// How long a captured message could be sent again, where it is written, and the line to say
    /// so.
    pub(crate) fn fresh_for(&self) -> Option<(Duration, usize)> {
        self.table.fresh_for().map(|fresh| (fresh, self.tolerance_line))
    }
}

/// Every configured source, ready to be served.
pub(crate) struct Sources {
    ingress: Arc<Ingress>,
    /// Which log each stores into.
    logs: Vec<(SourceName, LogName)>,
}

impl Sources {
    pub(crate) fn build(configs: &[SourceConfig], store: &Arc<dyn Store>, clock: &Arc<dyn Clock>) -> Result<Self> {
        let sources = configs
            .iter()
            .map(|config| config.table.build(config.name.clone(), config.log.clone()))
            .collect::<Result<Vec<_>>>()?;
        let logs = configs.iter().map(|config| (config.name.clone(), config.log.clone())).collect();
        Ok(Self { ingress: Ingress::new(sources, Arc::clone(store) as _, Arc::clone(clock))?, logs })
    }

    /// `POST /in/{source}`.
    pub(crate) fn router(&self) -> Router {
        postbox_ingress::router(Arc::clone(&self.ingress))
    }

    /// The sources that store into a log.
    pub(crate) fn of_log(&self, log: &LogName) -> impl Iterator<Item = &SourceName> {
        self.logs.iter().filter(move |(_, its)| its == log).map(|(source, _)| source)
    }

    /// How many headers of each source's messages an event had no room for.
    pub(crate) fn headers_dropped(&self) -> Vec<(SourceName, u64)> {
        self.ingress.headers_dropped()
    }

    /// How often each source gave each answer.
    pub(crate) fn counts(&self) -> Vec<Count> {
        self.ingress.counts()
    }
}
