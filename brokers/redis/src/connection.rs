//! Connections to the server: opening them, checking the server, and noticing when they are lost.

use std::path::Path;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postbox_config::{Secret, TlsTable};
use postbox_core::{Error, ErrorKind, Result};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, FromRedisValue, IntoConnectionInfo, Pipeline,
    ProtocolVersion, PushInfo, PushKind, RedisConnectionInfo, RedisResult, TlsCertificates, Value,
};
use tokio::time::timeout;
use tracing::warn;

use crate::address::{self, Address};
use crate::classify;

/// The largest value that a server takes by default (`proto-max-bulk-len`).
const BULK_BYTES_MAX: usize = 512 * 1024 * 1024;

/// A server, and how to connect to it.
#[derive(Debug)]
pub(crate) struct Server {
    /// The URLs of the server, or of the Sentinels that know it.
    urls: Vec<String>,
    /// The primary's name in the Sentinels; `None` without Sentinels.
    primary: Option<String>,
    /// For the URLs.
    first: Settings,
    /// For the primary that a Sentinel names.
    settings: Settings,
    timeout: Duration,
    /// Whether warnings about the server were logged already.
    warned: AtomicBool,
}

/// The settings of a connection, except its address.
#[derive(Debug)]
struct Settings {
    redis: RedisConnectionInfo,
    tls: Option<TlsTable>,
}

impl Server {
    /// Parses the URL, and reads the certificates to see that they are usable. Does not connect.
    pub(crate) fn new(
        url: &str,
        user: Option<&str>,
        password: Option<&Secret>,
        tls: Option<&TlsTable>,
        timeout: Duration,
    ) -> Result<Self> {
        let Address { urls, primary, database } = address::parse(url).map_err(invalid)?;
        // RESP3, because only with it the client reports a lost connection at once, and the answer
        // to wrong credentials has an error code.
        let plain = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_lib_name("postbox", env!("CARGO_PKG_VERSION"));
        let mut redis = plain.clone().set_db(database);
        if let Some(user) = user {
            redis = redis.set_username(user);
        }
        if let Some(password) = password {
            redis = redis.set_password(password.expose());
        }
        // Sentinels have their own users and no databases, so they are not sent ours.
        let first = Settings { redis: if primary.is_some() { plain } else { redis.clone() }, tls: tls.cloned() };
        let settings = Settings { redis, tls: tls.cloned() };
        let server = Self { urls, primary, first, settings, timeout, warned: AtomicBool::new(false) };
        server.clients().map(|_| server)
    }

    fn clients(&self) -> Result<Vec<Client>> {
        self.urls.iter().map(|url| self.first.client(url)).collect()
    }

    /// Suppresses warnings about lost data, for a server that stores nothing of value.
    pub(crate) fn without_warnings(self) -> Self {
        Self { warned: AtomicBool::new(true), ..self }
    }

    /// Returns the longest wait for an answer.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Opens a connection to a server that accepts writes. The certificates are read again, because
    /// they may have been renewed.
    pub(crate) async fn connect(&self) -> Result<Connection> {
        let connecting = async {
            let clients = self.clients()?;
            in_time(self.timeout, &clients, self.try_connect(&clients)).await
        };
        connecting.await.map_err(|error| match error.code() {
            // Files that are being replaced may be usable in a moment.
            code @ "tls_invalid" => Error::new(ErrorKind::Unavailable, "connect", code.to_owned(), error.message()),
            _ => error,
        })
    }

    /// Asks the Sentinels one after the other, until one names a server that is a primary. A
    /// Sentinel that is cut off from the others keeps naming the former primary.
    async fn try_connect(&self, clients: &[Client]) -> Result<Connection> {
        let mut failed = invalid("no server is named".to_owned());
        for client in clients {
            let Some(primary) = &self.primary else { return self.connect_to(client).await };
            let via = async { self.connect_to(&self.settings.named(client, primary).await?).await };
            let limit = self.timeout / (clients.len() as u32 + 1);
            match in_time(limit, slice::from_ref(client), via).await {
                Ok(connection) => return Ok(connection),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    async fn connect_to(&self, client: &Client) -> Result<Connection> {
        let lost = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&lost);
        let note = move |push: PushInfo| -> Result<(), ()> {
            noted.fetch_or(push.kind == PushKind::Disconnection, Ordering::SeqCst);
            Ok(())
        };
        let connection =
            client.get_multiplexed_async_connection_with_config(&one_deadline().set_push_sender(note)).await;
        let failed = |error| classify::connecting(client.get_connection_info().addr(), error);
        let mut connection = connection.map_err(failed)?;
        let asked = Asked::of(&mut connection).await.map_err(failed)?;
        let refused = match asked.role.as_str() {
            "" | "master" => None,
            "sentinel" => {
                Some(("redis_is_sentinel", "this is a Sentinel; write redis+sentinel://HOST:PORT,HOST:PORT/NAME"))
            }
            _ => Some((
                "redis_readonly",
                "the server is a replica, which takes no writes; the url must lead to the primary",
            )),
        };
        if let Some((code, text)) = refused {
            return Err(Error::new(ErrorKind::Unavailable, "connect", code, text));
        }
        if !self.warned.swap(true, Ordering::SeqCst) {
            asked.warn();
        }
        Ok(Connection { inner: connection, lost, bulk_bytes_max: asked.bulk_bytes_max })
    }
}

/// Disables the client's own timeouts: one deadline covers all of connecting, and each call has its
/// own.
fn one_deadline() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None)
}

async fn in_time<T>(limit: Duration, asked: &[Client], connecting: impl Future<Output = Result<T>>) -> Result<T> {
    timeout(limit, connecting).await.unwrap_or_else(|_| {
        let addresses = asked.iter().map(|client| client.get_connection_info().addr().to_string());
        let addresses = addresses.collect::<Vec<_>>().join(", ");
        let text = format!("no connection to {addresses}: {}", classify::SILENT);
        Err(Error::new(ErrorKind::Unavailable, "connect", "redis_connect_timeout", text))
    })
}

fn invalid(text: String) -> Error {
    Error::invalid("configure", "redis_config_invalid", text)
}

impl Settings {
    fn client(&self, url: &str) -> Result<Client> {
        // Our own text, because the client's may repeat the URL.
        let info = url.into_connection_info();
        let info = info.map_err(|_| invalid("the url does not lead to a server".to_owned()))?;
        let info =
            info.set_redis_settings(self.redis.clone()).set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let Some(tls) = &self.tls else {
            return Client::open(info).map_err(|error| classify::failure("configure", error));
        };
        let wrong =
            |error| Error::invalid("configure", "tls_invalid", format!("the certificates are unusable: {error}"));
        Client::build_with_tls(info, certificates(tls)?).map_err(wrong)
    }

    /// Asks a Sentinel for the address of the primary.
    async fn named(&self, sentinel: &Client, primary: &str) -> Result<Client> {
        let failed = |error| {
            let error = classify::connecting(sentinel.get_connection_info().addr(), error);
            Error::new(error.kind(), "connect", error.code().to_owned(), format!("a Sentinel: {}", error.message()))
        };
        let connection = sentinel.get_multiplexed_async_connection_with_config(&one_deadline()).await;
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(primary);
        let answer = question.query_async(&mut connection.map_err(failed)?).await.map_err(failed)?;
        let Some((host, port)): Option<(String, u16)> = answer else {
            let text = format!("a Sentinel knows no primary {primary}; correct the name in the url");
            return Err(Error::new(ErrorKind::Unavailable, "connect", "redis_primary_unknown", text));
        };
        let scheme = if matches!(sentinel.get_connection_info().addr(), ConnectionAddr::TcpTls { .. }) {
            "rediss"
        } else {
            "redis"
        };
        self.client(&if host.contains(':') {
            format!("{scheme}://[{host}]:{port}")
        } else {
            format!("{scheme}://{host}:{port}")
        })
    }
}

fn certificates(tls: &TlsTable) -> Result<TlsCertificates> {
    let wrong = |text: String| Error::invalid("configure", "tls_invalid", text);
    let read = |key: &str, path: &Path| {
        std::fs::read(path).map_err(|error| wrong(format!("{key} {} is unusable: {error}", path.display())))
    };
    let client_tls = match tls.client_cert() {
        Some((cert, key)) => {
            Some(ClientTlsConfig { client_cert: read("client_cert", cert)?, client_key: read("client_key", key)? })
        }
        None => None,
    };
    let root_cert = tls.ca_file.as_deref().map(|path| read("ca_file", path)).transpose()?;
    Ok(TlsCertificates { client_tls, root_cert })
}

/// A connection that all calls share. It never sends anything twice, and never reconnects.
#[derive(Debug, Clone)]
pub(crate) struct Connection {
    inner: MultiplexedConnection,
    /// Set when the connection is lost, by the task that reads from it.
    lost: Arc<AtomicBool>,
    /// The largest value that this server accepts, in bytes.
    pub(crate) bulk_bytes_max: usize,
}

impl Connection {
    /// Returns whether the connection is open, as far as is known.
    pub(crate) fn is_open(&self) -> bool {
        !self.lost.load(Ordering::SeqCst)
    }

    /// Sends commands in one pipeline. Returns an answer or an error for each. Cancel-safe: the
    /// answers to a dropped call are discarded.
    pub(crate) async fn send<T: FromRedisValue>(&mut self, pipeline: &Pipeline) -> RedisResult<Vec<RedisResult<T>>> {
        pipeline.query_async(&mut self.inner).await
    }

    /// Sends one command.
    pub(crate) async fn ask(&mut self, command: &redis::Cmd) -> RedisResult<Value> {
        command.query_async(&mut self.inner).await
    }
}

/// What a server reports about itself, as far as we may ask.
#[derive(Debug, Default)]
struct Asked {
    /// `master`, `slave` or `sentinel`; empty if we may not ask.
    role: String,
    bulk_bytes_max: usize,
    policy: Option<String>,
    appendonly: Option<String>,
    save: Option<String>,
}

impl Asked {
    async fn of(connection: &mut MultiplexedConnection) -> RedisResult<Self> {
        let mut pipeline = redis::pipe();
        pipeline.ignore_errors().cmd("ROLE");
        for name in ["proto-max-bulk-len", "maxmemory-policy", "appendonly", "save"] {
            pipeline.cmd("CONFIG").arg("GET").arg(name);
        }
        let answers: Vec<RedisResult<Value>> = pipeline.query_async(connection).await?;
        let mut answers = answers.into_iter().map(Result::ok);
        let role = answers.next().flatten();
        let mut setting = || {
            let pairs: Vec<(String, String)> = redis::from_redis_value(answers.next()??).ok()?;
            pairs.into_iter().next().map(|(_, value)| value)
        };
        let role = match role {
            Some(Value::Array(role)) => role.into_iter().next().and_then(|word| redis::from_redis_value(word).ok()),
            _ => None,
        };
        let bulk_bytes_max = setting().and_then(|bytes| bytes.parse().ok()).unwrap_or(BULK_BYTES_MAX);
        Ok(Self {
            role: role.unwrap_or_default(),
            bulk_bytes_max,
            policy: setting(),
            appendonly: setting(),
            save: setting(),
        })
    }

    /// Warns of settings with which the server may lose entries that it has accepted.
    fn warn(&self) {
        if let Some(policy) = self.policy.as_deref().filter(|policy| policy.starts_with("allkeys")) {
            warn!(policy, cure = "set maxmemory-policy noeviction", "redis may evict streams");
        }
        if self.appendonly.as_deref() == Some("no") && self.save.as_deref() == Some("") {
            warn!(cure = "set appendonly yes, or a restart loses every stream", "redis keeps nothing on disk");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_secret_prints() {
        let password = Secret::new("canary");
        let second = Duration::from_secs(1);
        let server = Server::new("redis://h", Some("u"), Some(&password), None, second).expect("a server");
        assert!(!format!("{server:?}").contains("canary"));
    }
}
