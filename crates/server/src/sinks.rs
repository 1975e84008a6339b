//! The sinks this program knows, and `sink = { … }`, which selects one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use postbox_config::{Adapter, Kind, SinkConfig, SinkContext, Table, adapter, envelope, event_source, path, table};
use postbox_core::{Envelope, Error, ErrorKind, Result, Sink};
use postbox_engine::JsonLines;
use postbox_http::HttpSinkTable;

use crate::bus::BusTable;

/// Every type of sink. A new one is one row here.
pub(crate) const SINKS: &[Adapter<dyn SinkConfig>] = &[
    Adapter::new::<HttpSinkTable>(
        "http",
        r#"{ type = "http", url = "https://example.org/hook", secret = "env:HOOK_SECRET" }"#,
        |keys| Arc::new(HttpSinkTable::read(keys)),
    ),
    #[cfg(feature = "kafka")]
    Adapter::new::<postbox_kafka::KafkaSinkTable>(
        "kafka",
        r#"{ type = "kafka", brokers = "127.0.0.1:9092", topic = "orders" }"#,
        |keys| Arc::new(postbox_kafka::KafkaSinkTable::read(keys)),
    ),
    #[cfg(feature = "mqtt")]
    Adapter::new::<postbox_mqtt::MqttSinkTable>(
        "mqtt",
        r#"{ type = "mqtt", url = "mqtt://127.0.0.1:1883", topic = "orders/{topic}" }"#,
        |keys| Arc::new(postbox_mqtt::MqttSinkTable::read(keys)),
    ),
    #[cfg(feature = "nats")]
    Adapter::new::<postbox_nats::NatsSinkTable>(
        "nats",
        r#"{ type = "nats", url = "nats://127.0.0.1:4222", subject = "orders.{topic}" }"#,
        |keys| Arc::new(postbox_nats::NatsSinkTable::read(keys)),
    ),
    #[cfg(feature = "rabbitmq")]
    Adapter::new::<postbox_rabbitmq::RabbitmqSinkTable>(
        "rabbitmq",
        r#"{ type = "rabbitmq", url = "amqp://127.0.0.1:5672", exchange = "amq.topic" }"#,
        |keys| Arc::new(postbox_rabbitmq::RabbitmqSinkTable::read(keys)),
    ),
    #[cfg(feature = "redis")]
    Adapter::new::<postbox_redis::RedisSinkConfig>(
        "redis",
        r#"{ type = "redis", url = "redis://127.0.0.1:6379" }"#,
        |keys| Arc::new(postbox_redis::RedisSinkConfig::read(keys)),
    ),
    #[cfg(feature = "sqs")]
    Adapter::new::<postbox_sqs::SqsSinkTable>(
        "sqs",
        r#"{ type = "sqs", queue_url = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders" }"#,
        |keys| Arc::new(postbox_sqs::SqsSinkTable::read(keys)),
    ),
    #[cfg(feature = "sqs")]
    Adapter::new::<postbox_sqs::SnsSinkTable>(
        "sns",
        r#"{ type = "sns", topic_arn = "arn:aws:sns:eu-west-1:123456789012:orders" }"#,
        |keys| Arc::new(postbox_sqs::SnsSinkTable::read(keys)),
    ),
    Adapter::new::<BusTable>("bus", r#"{ type = "bus", url = "env:OTHER_DATABASE_URL", log = "inbox" }"#, |keys| {
        Arc::new(BusTable::read(keys))
    }),
    Adapter::new::<FileTable>("file", r#"{ type = "file", path = "events.jsonl" }"#, |keys| {
        Arc::new(FileTable::read(keys))
    }),
    Adapter::new::<StdoutTable>("stdout", r#"{ type = "stdout" }"#, |keys| Arc::new(StdoutTable::read(keys))),
    Adapter::new::<NoneTable>(NONE, r#"{ type = "none" }"#, |keys| Arc::new(NoneTable::read(keys))),
];

/// The type of a subscription without a sink.
const NONE: &str = "none";

/// Sinks that may be compiled out.
const OPTIONAL: &[&str] = &["kafka", "mqtt", "nats", "rabbitmq", "redis", "sns", "sqs"];

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
    /// The value of `type`.
    pub fn type_name(&self) -> &'static str {
        self.type_name
    }

    /// Whether there is no sink yet: the relay stays idle and events stay pending, so nothing is
    /// lost.
    pub fn is_none(&self) -> bool {
        self.type_name == NONE
    }

    /// Whether the event's headers are sent with it.
    pub(crate) fn sends_headers(&self) -> bool {
        self.config.sends_headers()
    }

    /// Builds the sink, if there is one.
    pub(crate) async fn build(&self, context: &SinkContext) -> Result<Option<Arc<dyn Sink>>> {
        if self.is_none() { Ok(None) } else { self.config.build(context).await.map(Some) }
    }

    /// Tries to reach the destination and describes the result. Sends no event and creates nothing.
    pub(crate) async fn connect(&self, context: &SinkContext) -> Result<String> {
        self.config.connect(context).await
    }
}

/// `{ type = "…", … }`
pub(crate) fn sink() -> Kind<SinkChoice> {
    adapter("sink", SINKS, OPTIONAL).map(|(type_name, config)| SinkChoice { type_name, config })
}

table! {
    /// One JSON object per line, appended to a file.
    struct FileTable {
        /// The file; created if it is missing.
        path: PathBuf = path(), required(r#""events.jsonl""#);
        /// What a line holds.
        ///
        /// See [envelopes](envelopes.md).
        envelope: Envelope = envelope(Envelope::OBJECTS), default("json");
        /// The CloudEvents `source` of events that name none.
        source: String = event_source(), default("postbox");
    }
}

#[async_trait]
impl SinkConfig for FileTable {
    async fn build(&self, _: &SinkContext) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(JsonLines::file(&self.path).await?.envelope(self.envelope, self.source.as_str())))
    }

    fn sends_headers(&self) -> bool {
        self.envelope == Envelope::Json
    }

    /// The file is not opened if it is missing: that would create it.
    async fn connect(&self, _: &SinkContext) -> Result<String> {
        let shown = self.path.display();
        let fault = |why: String| {
            let text = format!("cannot append to {shown}: {why}; correct the path, or its permissions");
            Error::new(ErrorKind::Invalid, "connect", "file_not_writable", text)
        };
        if tokio::fs::try_exists(&self.path).await.map_err(|error| fault(error.to_string()))? {
            let file = tokio::fs::OpenOptions::new().append(true).open(&self.path).await;
            return file.map(|_| format!("{shown} can be written")).map_err(|error| fault(error.to_string()));
        }
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match tokio::fs::metadata(folder).await {
            Ok(folder) if folder.is_dir() => Ok(format!("{shown} does not exist yet; it is created at the start")),
            Ok(_) => Err(fault(format!("{} is not a folder", folder.display()))),
            Err(error) => Err(fault(format!("{}: {error}", folder.display()))),
        }
    }
}

table! {
    /// One JSON object per line, on standard output.
    struct StdoutTable {
        /// What a line holds.
        ///
        /// See [envelopes](envelopes.md).
        envelope: Envelope = envelope(Envelope::OBJECTS), default("json");
        /// The CloudEvents `source` of events that name none.
        source: String = event_source(), default("postbox");
    }
}

#[async_trait]
impl SinkConfig for StdoutTable {
    async fn build(&self, _: &SinkContext) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(JsonLines::stdout().envelope(self.envelope, self.source.as_str())))
    }

    fn sends_headers(&self) -> bool {
        self.envelope == Envelope::Json
    }
}

table! {
    /// Nowhere yet: events stay pending, nothing is lost.
    struct NoneTable {}
}

#[async_trait]
impl SinkConfig for NoneTable {
    async fn build(&self, _: &SinkContext) -> Result<Arc<dyn Sink>> {
        Err(Error::invalid("configure", "sink_missing", "the subscription has no sink"))
    }

    async fn connect(&self, _: &SinkContext) -> Result<String> {
        Ok("has no sink yet".to_owned())
    }
}
