//! What a configuration says, once it is known to be whole.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use postbox_core::{LogName, SourceName, Subscription};
use postbox_engine::RelaySettings;
use postbox_http::{ClientCert, IpNet};
use postbox_ingress::{Origin, SourceLimits};
use postbox_listen::ServeLimits;
use postbox_webhook::sns::TopicArn;
use postbox_webhook::{Scheme, Settings};

use super::faults::Fault;
use crate::cron::Cron;
use crate::secret::Secret;

/// A whole configuration.
#[derive(Debug, Clone, PartialEq, Default)]
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

/// `[store]`: where the logs are.
#[derive(Debug, Clone, PartialEq)]
pub struct StoreConfig {
    /// `postgres://…`, `sqlite:PATH` or `memory:`. A secret, because it may hold a password.
    pub url: Secret,
    /// The schema that holds Postbox's tables (Postgres only).
    pub schema: String,
    /// Wake relays by NOTIFY (Postgres only).
    pub notify: bool,
    /// Connections kept (Postgres only).
    pub pool: usize,
    /// Longest time one statement may take.
    pub statement_timeout: Duration,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            url: Secret::new("sqlite:postbox.db"),
            schema: "postbox".into(),
            notify: false,
            pool: 8,
            statement_timeout: Duration::from_secs(30),
        }
    }
}

/// `[subscriptions.NAME]`: who reads which log, and where it goes.
#[derive(Debug, Clone, PartialEq)]
pub struct SubscriptionConfig {
    /// Name, log, filter, ordering, lanes, start.
    pub subscription: Subscription,
    /// Batches, retries, timeouts, polling, lease.
    pub settings: RelaySettings,
    /// Deliver only at these times, all that is there, instead of always.
    pub schedule: Option<Cron>,
    /// Where the events go.
    pub sink: SinkConfig,
}

impl SubscriptionConfig {
    /// A subscription with everything else at its default.
    pub fn new(subscription: Subscription, sink: SinkConfig) -> Self {
        Self { subscription, settings: RelaySettings::default(), schedule: None, sink }
    }
}

/// Where events go.
#[derive(Debug, Clone, PartialEq)]
pub enum SinkConfig {
    /// Nowhere yet: the relay stays idle and events stay pending, so nothing is lost.
    None,
    /// One JSON object a line on standard output.
    Stdout,
    /// One JSON object a line at the end of a file.
    File {
        /// The file; made if it is missing.
        path: PathBuf,
    },
    /// A signed POST to a URL.
    Http(HttpConfig),
}

impl SinkConfig {
    /// The word after `type =`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Stdout => "stdout",
            Self::File { .. } => "file",
            Self::Http(_) => "http",
        }
    }
}

/// `sink = { type = "http", … }`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpConfig {
    /// Where to.
    pub url: String,
    /// Keys to sign with; several while one rotates, and at least one of them without an end. None: not signed.
    pub secrets: Vec<LiveSecret>,
    /// Fixed headers on every request.
    pub headers: Vec<(String, Secret)>,
    /// Networks that may be called although they are not public.
    pub allow: Vec<IpNet>,
    /// Certificates (PEM) to trust beside the system's.
    pub ca_file: Option<PathBuf>,
    /// What to show a target that asks for a client certificate.
    pub client_cert: Option<ClientCert>,
    /// `ce-source` of events that name no source.
    pub source: Option<String>,
}

/// `[sources.NAME]`: where messages come from.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceConfig {
    /// Its name, and its path: `POST /in/NAME`.
    pub name: SourceName,
    /// The log it stores into.
    pub log: LogName,
    /// How its messages are signed.
    pub scheme: Scheme,
    /// Live keys; several while one rotates. At least one, but for SNS.
    pub secrets: Vec<LiveSecret>,
    /// What SNS has instead of keys.
    pub sns: Option<SnsConfig>,
    /// What the scheme needs beside its secrets.
    pub settings: Settings,
    /// How long its sender goes on sending a message that was not answered: ids are remembered longer.
    pub retry_horizon: Duration,
    /// What it may cost.
    pub limits: SourceLimits,
    /// CloudEvents: who gets consent by the handshake.
    pub allowed_origins: Vec<String>,
    /// Where topic, key and tenant of the stored event come from.
    pub mapping: MappingConfig,
}

/// A key of a source or of a sink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveSecret {
    /// The key.
    pub secret: Secret,
    /// The last second at which it verifies or signs; `None`: as long as it is here.
    pub until: Option<Timestamp>,
}

/// A source of AWS SNS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnsConfig {
    /// The topics whose messages are taken.
    pub topics: Vec<TopicArn>,
    /// Whether subscriptions to them are confirmed.
    pub confirm: bool,
}

/// Where the fields of an inbound event come from; `None`: what suits the scheme.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MappingConfig {
    /// The sender's id of the message.
    pub id: Option<Origin>,
    /// The topic.
    pub topic: Option<Origin>,
    /// The ordering key.
    pub key: Option<Origin>,
    /// The tenant; then every message must have one.
    pub tenant: Option<Origin>,
}

/// `[server]`: the HTTP side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Address and port.
    pub listen: SocketAddr,
    /// Most connections, and how long a head may take.
    pub limits: ServeLimits,
    /// Longest time a stop may take.
    pub stop_timeout: Duration,
    /// What `/metrics` and the reasons at `/readyz` are told for; `None`: everybody.
    pub status_token: Option<Secret>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8600)),
            limits: ServeLimits::default(),
            stop_timeout: Duration::from_secs(20),
            status_token: None,
        }
    }
}

/// `[retention]`: what is thrown away, and when.
#[derive(Debug, Clone, PartialEq)]
pub struct RetentionConfig {
    /// Dispatched events older than this go. Pending and dead ones never.
    pub older_than: Duration,
    /// Ids of received messages older than this are forgotten: 7 days or more, and as long as any sender repeats a message.
    pub remember_ids: Duration,
    /// When the sweep runs.
    pub schedule: Cron,
}

impl Default for RetentionConfig {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        Self {
            older_than: 7 * DAY,
            remember_ids: 30 * DAY,
            schedule: "0 0 3 * * *".parse().expect("the default schedule is well formed: a test parses it"),
        }
    }
}

/// `[log]`: what the program says of itself, on standard error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter such as `info,postbox_engine=debug`.
    pub level: String,
    /// Text or JSON.
    pub format: LogFormat,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Text }
    }
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}
