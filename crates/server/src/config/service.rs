//! `[server]`, `[retention]` and `[log]`: what there is once.

use std::net::SocketAddr;
use std::time::Duration;

use postbox_config::{
    Integer, Kind, Place, Secret, SecretText, Section, Shape, Span, Table, Text, Words, default, suggestion, table,
    unset,
};
use postbox_listen::ServeLimits;

use super::subscription::CRON;
use crate::cron::Cron;

/// Most connections that may be allowed: what a machine can hold open when it is told to.
const CONNECTIONS_MAX: usize = 65_536;
/// Shortest status token: nobody guesses 16 characters of a random one.
const TOKEN_BYTES_MIN: usize = 16;
/// Shortest of the times.
const TIMEOUT_MIN: Duration = Duration::from_millis(100);

const ADDRESS: Text<SocketAddr> = Text {
    what: "address",
    parse: |text| text.parse().map_err(|_| format!("{text:?} is no address; write IP:PORT, e.g. \"127.0.0.1:8600\"")),
};

table! {
    /// The HTTP side.
    pub struct ServerConfig {
        /// Address and port of `/healthz`, `/readyz`, `/metrics` and `/in/SOURCE`.
        ///
        /// HTTP/1.1, behind the proxy that ends TLS. `0.0.0.0` and `[::]` are warned of where there
        /// is no `status_token`.
        listen: SocketAddr = ADDRESS, default("127.0.0.1:8600");
        /// Most connections at once.
        ///
        /// When all are taken, the one that owes us a request for the longest time makes room.
        connections: usize = Integer(1..=CONNECTIONS_MAX), default(512);
        /// How long a connection may go without a whole request head.
        header_timeout: Duration = Span(TIMEOUT_MIN), default("10s");
        /// The longest a stop may take.
        ///
        /// It waits for what is being delivered and for requests that are wholly here, not for
        /// bodies that do not end.
        stop_timeout: Duration = Span(TIMEOUT_MIN), default("20s");
        /// Who asks for `/metrics`, or for the reasons at `/readyz`, must send `authorization:
        /// Bearer TOKEN`.
        ///
        /// 16 visible characters or more. Without it everybody who reaches the port may read them.
        /// `/healthz`, and whether it is ready, need none; `postbox doctor` sends it.
        status_token: Option<Secret> = StatusToken, unset("none", r#""env:POSTBOX_STATUS_TOKEN""#);
    }
}

impl Table for ServerConfig {
    fn validate(&self, section: &Section<'_>) {
        if let Some(risk) = self.risk() {
            section.warning("listen", format!("{}: {risk}", section.name("listen")));
        }
    }
}

impl ServerConfig {
    /// What is risky about where the service listens.
    pub fn risk(&self) -> Option<&'static str> {
        (self.listen.ip().is_unspecified() && self.status_token.is_none()).then_some(
            "it listens on every address of this machine, where everybody can read /metrics and /readyz; write the one \
             address that is needed, or set server.status_token",
        )
    }

    /// Most connections, and how long a head may take.
    pub(crate) fn limits(&self) -> ServeLimits {
        ServeLimits { connections: self.connections, header_timeout: self.header_timeout }
    }
}

/// Reads `None` where the token is unset for a command that does not need it.
struct StatusToken;

impl Kind for StatusToken {
    type Value = Option<Secret>;

    fn shape(&self) -> Shape {
        SecretText::Serving.shape()
    }

    fn read(&self, place: &Place<'_>) -> Option<Option<Secret>> {
        let token = SecretText::Serving.read(place)?;
        let text = token.expose();
        if text.is_empty() && place.text()?.starts_with("env:") {
            return Some(None);
        }
        if text.len() < TOKEN_BYTES_MIN || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return place.fault(format!(
                "{} must have {TOKEN_BYTES_MIN} visible ASCII characters or more, and no space; make one with: openssl \
                 rand -hex 32",
                place.name
            ));
        }
        Some(Some(token))
    }
}

table! {
    /// What is thrown away, and when.
    pub struct RetentionConfig {
        /// Dispatched events older than this are deleted; pending and dead ones never.
        older_than: Duration = Span(Duration::ZERO), default("7d");
        /// How long ids of received messages are remembered: 7 days at least, and as long as any
        /// sender repeats a message.
        ///
        /// Never shorter than a source's `retry_horizon`; both are checked.
        remember_ids: Duration = Span(Duration::ZERO), default("30d");
        /// When the sweep runs: second minute hour day month weekday, in UTC.
        schedule: Cron = CRON, default("0 0 3 * * *");
    }
}

impl Table for RetentionConfig {}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// What a log filter may begin with.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

const LEVEL: Text<String> = Text {
    what: "log filter",
    // A whole filter is checked by the subscriber that reads it; one word is checked here.
    parse: |text| match text.contains(['=', ',']) || LEVELS.contains(&text) {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is no level; {}", suggestion(text, &LEVELS))),
    },
};

table! {
    /// What the program says of itself, on standard error.
    pub struct LogConfig {
        /// error, warn, info, debug or trace; or a filter such as `info,postbox_engine=debug`.
        ///
        /// `--log-level` and `POSTBOX_LOG` win.
        level: String = LEVEL, default("info");
        /// `"json"` for machines.
        format: LogFormat = Words(&[("text", LogFormat::Text), ("json", LogFormat::Json)]), default("text");
    }
}

impl Table for LogConfig {}
