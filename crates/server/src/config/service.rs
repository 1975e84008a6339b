//! `[server]`, `[retention]` and `[log]`: the sections that exist once.

use std::net::SocketAddr;
use std::str::FromStr as _;
use std::time::Duration;

use postbox_config::{
    LISTEN_DEFAULT, Secret, Section, duration, from_core, integer, secret, suggestion, table, text, words,
};
use postbox_core::OwnerId;
use postbox_core::limits::{DEAD_AGE_MIN, NAME_BYTES_MAX};
use postbox_listen::ServeLimits;

use crate::cron::Cron;

/// Upper limit of `connections`: about what a machine tuned for it can hold open.
const CONNECTIONS_MAX: usize = 65_536;
/// Shortest status token, in bytes: 16 random characters cannot be guessed.
const TOKEN_BYTES_MIN: usize = 16;
/// Longest name of a replica: what a relay adds for itself must fit into its name, too.
const REPLICA_BYTES_MAX: usize = NAME_BYTES_MAX - 17;
/// Shortest allowed timeout.
const TIMEOUT_MIN: Duration = Duration::from_millis(100);

fn address(text: &str) -> Result<SocketAddr, String> {
    let mut address: SocketAddr =
        text.parse().map_err(|_| format!("{text:?} is not a valid address; write IP:PORT, e.g. \"127.0.0.1:8600\""))?;
    // An IPv4 address written as IPv6 (`::ffff:127.0.0.1`) would count as neither loopback nor
    // unspecified.
    address.set_ip(address.ip().to_canonical());
    Ok(address)
}

table! {
    /// The HTTP server.
    #[derive(PartialEq)]
    #[check(check)]
    pub struct ServerConfig {
        /// Address and port of `/healthz`, `/readyz`, `/metrics` and `/in/SOURCE`.
        ///
        /// HTTP/1.1; a proxy in front ends TLS. `0.0.0.0` and `[::]` without a `status_token` give
        /// a warning.
        listen: SocketAddr = text(address), default(LISTEN_DEFAULT.to_string());
        /// Most connections at once.
        ///
        /// When the limit is reached, the longest idle connection is closed. Requests being stored
        /// may use half of the connections for one store, and 1/(N+1) each for N stores, shared by
        /// all sources of the store; beyond that the sender gets 503.
        connections: usize = integer(1..=CONNECTIONS_MAX), default(512);
        /// How long a new connection may stay open without sending a complete request head.
        ///
        /// After an answer it has 75 s, or this if it is longer.
        header_timeout: Duration = duration(TIMEOUT_MIN), default("10s");
        /// The longest a stop may take.
        ///
        /// It waits for deliveries in progress and for completely received requests; unfinished
        /// bodies are cut off.
        stop_timeout: Duration = duration(TIMEOUT_MIN), default("20s");
        /// Requests for `/metrics`, and for the reasons at `/readyz`, must send `authorization:
        /// Bearer TOKEN`.
        ///
        /// At least 16 visible characters. Without it everybody who reaches the port may read them;
        /// on loopback only if they name the host by address or as `localhost`, which no web page
        /// can.
        /// `/healthz` and the status of `/readyz` need no token; `postbox doctor` sends it.
        status_token: Option<Secret> = secret().check(visible), unset("none", r#""env:POSTBOX_STATUS_TOKEN""#);
        /// What this replica is called where relays are named, e.g. by `subscription show`.
        ///
        /// Letters, digits, dot, underscore and hyphen. Each relay adds a random part, so several
        /// replicas may have one name.
        name: Option<String> = text(replica), unset("`$HOSTNAME`, or the host's name", r#""shop-1""#);
    }
}

impl ServerConfig {
    fn check(&self, section: &Section<'_>) {
        // A wrong address has its own fault: no sink calls port 0.
        let is_right = section.is_right(&["listen"]);
        section.reader.listening.set(if is_right { self.listen } else { SocketAddr::new(self.listen.ip(), 0) });
        if let Some(risk) = self.risk() {
            section.warning("listen", format!("{}: {risk}", section.name("listen")));
        }
    }

    /// Returns what is risky about the listen address, if anything.
    pub fn risk(&self) -> Option<&'static str> {
        (self.listen.ip().is_unspecified() && self.status_token.is_none()).then_some(
            "it listens on every address of this machine, so everybody who reaches it can read /metrics and /readyz; \
             listen on one address, or set server.status_token",
        )
    }

    /// Returns what the names of this process's relays begin with.
    pub(crate) fn replica(&self) -> String {
        let host = || std::env::var("HOSTNAME").ok().filter(|host| !host.is_empty());
        let kernel = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        self.name.clone().unwrap_or_else(|| of_host(&host().or_else(kernel).unwrap_or_default()))
    }

    /// Returns the connection limit and the time limit of a request head.
    pub(crate) fn limits(&self) -> ServeLimits {
        ServeLimits { connections: self.connections, header_timeout: self.header_timeout }
    }
}

fn replica(name: &str) -> Result<String, String> {
    from_core::<OwnerId>(name)?;
    match name.len() {
        ..=REPLICA_BYTES_MAX => Ok(name.to_owned()),
        bytes => Err(format!("the name has {bytes} bytes; at most {REPLICA_BYTES_MAX} are allowed")),
    }
}

/// The name of a host, as far as a replica can have it.
fn of_host(host: &str) -> String {
    let fitting = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let name: String = host.trim().chars().map(fitting).take(REPLICA_BYTES_MAX).collect();
    if name.is_empty() { "relay".to_owned() } else { name }
}

fn visible(token: &Secret) -> Result<(), String> {
    let token = token.expose();
    if token.len() >= TOKEN_BYTES_MIN && token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err(format!(
        "it must have {TOKEN_BYTES_MIN} visible ASCII characters or more, and no space; make one with: openssl rand \
         -hex 32"
    ))
}

table! {
    /// What is deleted, and when.
    #[derive(PartialEq)]
    pub struct RetentionConfig {
        /// Dispatched and discarded events older than this are deleted; pending and dead ones
        /// never.
        older_than: Duration = duration(Duration::ZERO), default("7d");
        /// Events that have been dead for longer than this are discarded; retention then deletes
        /// them like other discarded events. At least a day.
        ///
        /// Not with `on_dead = "halt"`, where a person has to decide before the key continues.
        dead: Option<Duration> = duration(DEAD_AGE_MIN), unset("never", r#""30d""#);
        /// How long the ids of received messages are remembered; at least 7 days.
        ///
        /// At least as long as the `retry_horizon` of every source; both are checked.
        remember_ids: Duration = duration(Duration::ZERO), default("30d");
        /// When retention runs: second minute hour day month weekday, in UTC.
        schedule: Cron = text(Cron::from_str), default("0 0 3 * * *");
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

/// What a log filter may begin with.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// Checks a single word, or the levels of a filter.
fn level(text: &str) -> Result<String, String> {
    let mut words = text.split(',').map(|part| part.rsplit_once('=').map_or(part, |(_, word)| word.trim()));
    match words.find(|word| !LEVELS.contains(&word.to_ascii_lowercase().as_str())) {
        None => Ok(text.to_owned()),
        Some(wrong) => Err(format!("{wrong:?} is not a log level; {}", suggestion(wrong, &LEVELS))),
    }
}

table! {
    /// The program's log, on standard error.
    #[derive(PartialEq)]
    pub struct LogConfig {
        /// error, warn, info, debug or trace; or a filter such as `info,postbox_engine=debug`.
        ///
        /// `--log-level` and `POSTBOX_LOG` override it.
        level: String = text(level), default("info");
        /// `"json"`: one JSON object per line.
        format: LogFormat = words([("text", LogFormat::Text), ("json", LogFormat::Json)]), default("text");
    }
}
