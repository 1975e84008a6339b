//! The sinks this program knows, and `sink = { … }`, which names one.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use postbox_config::{
    Kind, Path, Place, Section, Shape, SinkConfig, SinkContext, SinkType, Table, may_be_secret, required, suggestion,
    table,
};
use postbox_core::{Result, Sink};
use postbox_engine::JsonLines;
use postbox_http::HttpSinkTable;

/// Every kind of sink. A new one is one row here.
pub(crate) const SINKS: &[SinkType] = &[
    SinkType::new::<HttpSinkTable>(
        "http",
        r#"{ type = "http", url = "https://example.org/hook", secret = "env:HOOK_SECRET" }"#,
    ),
    SinkType::new::<FileTable>("file", r#"{ type = "file", path = "events.jsonl" }"#),
    SinkType::new::<StdoutTable>("stdout", r#"{ type = "stdout" }"#),
    SinkType::new::<NoneTable>(NONE, r#"{ type = "none" }"#),
];

/// The sink of a subscription that has none.
const NONE: &str = "none";

/// Brokers of the plan that this program does not have yet, as sinks and as sources.
const BROKERS_PLANNED: [&str; 5] = ["nats", "redis", "kafka", "amqp", "sqs"];

/// Where the events of a subscription go.
#[derive(Debug, Clone)]
pub struct SinkChoice {
    type_name: &'static str,
    config: Arc<dyn SinkConfig>,
}

impl Default for SinkChoice {
    fn default() -> Self {
        Self { type_name: NONE, config: Arc::new(NoneTable::default()) }
    }
}

impl SinkChoice {
    /// The word after `type =`.
    pub fn type_name(&self) -> &'static str {
        self.type_name
    }

    /// Nowhere yet: the relay stays idle and events stay pending, so nothing is lost.
    pub fn is_none(&self) -> bool {
        self.type_name == NONE
    }

    /// Builds the sink, if there is one.
    pub(crate) async fn build(&self, context: &SinkContext) -> Result<Option<Arc<dyn Sink>>> {
        if self.is_none() { Ok(None) } else { self.config.build(context).await.map(Some) }
    }
}

/// Reads `{ type = "…", … }`.
pub(crate) struct AnySink;

impl Kind for AnySink {
    type Value = SinkChoice;

    fn shape(&self) -> Shape {
        Shape::Tagged(SINKS.iter().map(SinkType::variant).collect(), Vec::new())
    }

    fn read(&self, place: &Place<'_>) -> Option<SinkChoice> {
        let section = place.section()?;
        let names: Vec<_> = SINKS.iter().map(|sink| sink.name).collect();
        let sink = &SINKS[read_type(&section, "sink", &names)?];
        let config = sink.read(&section);
        section.finish();
        Some(SinkChoice { type_name: sink.name, config })
    }
}

/// Which of `names` stands after `type =`, by its place among them.
pub(crate) fn read_type(section: &Section<'_>, what: &str, names: &[&str]) -> Option<usize> {
    let Some(place) = section.place("type") else {
        section.fault("type", format!("{} has no type; write type = {:?}", section.path, names[0]));
        return None;
    };
    let word = place.text()?;
    let found = names.iter().position(|name| *name == word);
    if found.is_none() && BROKERS_PLANNED.contains(&word) {
        let names = names.join(", ");
        return place.fault(format!("{}: {what}s of type {word:?} are not in this release; use {names}", place.name));
    }
    found.or_else(|| {
        let shown = if may_be_secret(word) { "what is written there".to_owned() } else { format!("{word:?}") };
        place.fault(format!("{}: {shown} is no {what}; {}", place.name, suggestion(word, names)))
    })
}

table! {
    /// One JSON object a line, at the end of a file.
    struct FileTable {
        /// The file; made if it is missing.
        path: PathBuf = Path, required(r#""events.jsonl""#);
    }
}

impl Table for FileTable {}

#[async_trait]
impl SinkConfig for FileTable {
    async fn build(&self, _: &SinkContext) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(JsonLines::file(&self.path).await?))
    }
}

table! {
    /// One JSON object a line, on standard output.
    struct StdoutTable {}
}

impl Table for StdoutTable {}

#[async_trait]
impl SinkConfig for StdoutTable {
    async fn build(&self, _: &SinkContext) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(JsonLines::stdout()))
    }
}

table! {
    /// Nowhere yet: events stay pending, nothing is lost.
    struct NoneTable {}
}

impl Table for NoneTable {}

#[async_trait]
impl SinkConfig for NoneTable {
    async fn build(&self, _: &SinkContext) -> Result<Arc<dyn Sink>> {
        Err(postbox_core::Error::invalid("configure", "sink_missing", "the subscription has no sink"))
    }
}
