//! What a configuration says, once it is known to be whole.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use postbox_core::limits::PAYLOAD_BYTES_MAX;
use postbox_core::{BatchLimit, LogName, RetryPolicy, SourceName, Subscription};

use crate::schedule::Schedule;
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

/// What happens to a key when one of its events dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDead {
    /// The next event of the key goes out.
    #[default]
    Continue,
    /// The key waits for a person.
    Halt,
}

/// `[subscriptions.NAME]`: who reads which log, and where it goes.
#[derive(Debug, Clone, PartialEq)]
pub struct SubscriptionConfig {
    /// Name, log, filter, ordering, lanes, start.
    pub subscription: Subscription,
    /// Bounds of one read.
    pub batch: BatchLimit,
    /// When to try again.
    pub retry: RetryPolicy,
    /// What happens to a key when one of its events dies.
    pub on_dead: OnDead,
    /// Longest time one delivery may take.
    pub timeout: Duration,
    /// Most deliveries at once; `None`: what the sink thinks right.
    pub concurrency: Option<usize>,
    /// Longest wait between two looks at an idle log.
    pub poll_interval: Duration,
    /// How long a lane stays with a relay that says nothing.
    pub lease: Duration,
    /// Deliver only at these times, all that is there, instead of always.
    pub schedule: Option<Schedule>,
    /// Where the events go.
    pub sink: SinkConfig,
}

impl SubscriptionConfig {
    /// A subscription with everything else at its default.
    pub fn new(subscription: Subscription, sink: SinkConfig) -> Self {
        Self {
            subscription,
            batch: BatchLimit::default(),
            retry: RetryPolicy::default(),
            on_dead: OnDead::default(),
            timeout: Duration::from_secs(30),
            concurrency: None,
            poll_interval: Duration::from_secs(1),
            lease: Duration::from_secs(15),
            schedule: None,
            sink,
        }
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
    /// Keys to sign with; several while one rotates. None: not signed.
    pub secrets: Vec<Secret>,
    /// Fixed headers on every request.
    pub headers: Vec<(String, Secret)>,
    /// Whether loopback, private and link-local addresses may be called.
    pub allow_private: bool,
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
    /// Live keys; several while one rotates. At least one.
    pub secrets: Vec<Secret>,
    /// How far the sender's clock may be off.
    pub tolerance: Duration,
    /// Largest body.
    pub body_max: usize,
    /// Where topic, key and tenant of the stored event come from.
    pub mapping: Mapping,
}

/// The signature schemes of this release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Standard Webhooks 1.0, `v1` and `v1a`.
    Standard,
}

/// Where the fields of an inbound event come from. Each is a literal text, `header:NAME` or `json:/POINTER` into the body.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mapping {
    /// The sender's id of the message. Default: the scheme's own.
    pub id: Option<Origin>,
    /// The topic. Default: the name of the source.
    pub topic: Option<Origin>,
    /// The ordering key. Default: none.
    pub key: Option<Origin>,
    /// The tenant. Default: none.
    pub tenant: Option<Origin>,
}

/// One place in an inbound message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Always this text.
    Literal(String),
    /// This request header.
    Header(String),
    /// This place in the JSON body (RFC 6901).
    Json(String),
}

/// `[server]`: the HTTP side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Address and port.
    pub listen: SocketAddr,
    /// Longest time a stop may take.
    pub stop_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 8600)), stop_timeout: Duration::from_secs(20) }
    }
}

/// `[retention]`: what is thrown away, and when.
#[derive(Debug, Clone, PartialEq)]
pub struct RetentionConfig {
    /// Dispatched events older than this go. Pending and dead ones never.
    pub older_than: Duration,
    /// Ids of received messages older than this are forgotten: longer than any sender's retries.
    pub remember_ids: Duration,
    /// When the sweep runs.
    pub schedule: Schedule,
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

/// Largest body of an inbound message when nothing else is said: what GitHub sends at most is 25 MB, most senders stay below 1 MB.
pub(super) const BODY_BYTES_DEFAULT: usize = 1024 * 1024;
/// Largest body that may be allowed: the body becomes a payload.
pub(super) const BODY_BYTES_MAX: usize = PAYLOAD_BYTES_MAX;
