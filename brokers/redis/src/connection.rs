//! Connections to the server: how they are made, what is asked of a new one, and whether they still
//! stand.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postbox_config::{Secret, TlsTable};
use postbox_core::{Error, ErrorKind, Result};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionInfo, FromRedisValue, IntoConnectionInfo, Pipeline,
    ProtocolVersion, PushInfo, PushKind, RedisResult, TlsCertificates, Value,
};
use tokio::time::timeout;
use tracing::warn;
use url::Url;

use crate::classify;

/// The largest value that a server takes by default (`proto-max-bulk-len`).
const BULK_BYTES_MAX: usize = 512 * 1024 * 1024;

/// A server, and how to connect to it.
#[derive(Debug)]
pub(crate) struct Server {
    client: Client,
    timeout: Duration,
    /// What is risky about the server was said.
    warned: AtomicBool,
}

impl Server {
    /// Reads the URL and the certificates. Connects to nothing.
    pub(crate) fn new(
        url: &str,
        user: Option<&str>,
        password: Option<&Secret>,
        tls: Option<&TlsTable>,
        timeout: Duration,
    ) -> Result<Self> {
        let wrong = |text: String| Error::invalid("configure", "redis_config_invalid", text);
        check_url(url).map_err(wrong)?;
        // Our own text: the client's may repeat the URL.
        let info = url.into_connection_info().map_err(|_| wrong("the url does not lead to a server".to_owned()))?;
        // RESP3, because only there the client tells at once that a connection is lost, and an
        // answer to wrong credentials has a code.
        let mut settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        settings = settings.set_lib_name("postbox", env!("CARGO_PKG_VERSION"));
        if let Some(user) = user {
            settings = settings.set_username(user);
        }
        if let Some(password) = password {
            settings = settings.set_password(password.expose());
        }
        let info = info.set_redis_settings(settings).set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let client = client(info, tls)?;
        Ok(Self { client, timeout, warned: AtomicBool::new(false) })
    }

    /// Longest wait for an answer.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A new connection to a server that takes writes.
    pub(crate) async fn connect(&self) -> Result<Connection> {
        match timeout(self.timeout, self.try_connect()).await {
            Ok(connected) => connected,
            Err(_) => Err(Error::new(ErrorKind::Unavailable, "connect", "redis_connect_timeout", classify::SILENT)),
        }
    }

    async fn try_connect(&self) -> Result<Connection> {
        let lost = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&lost);
        let note = move |push: PushInfo| -> Result<(), ()> {
            noted.fetch_or(push.kind == PushKind::Disconnection, Ordering::SeqCst);
            Ok(())
        };
        // One deadline is around all of it, and each call has its own.
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None).set_push_sender(note);
        let connection = self.client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = connection.map_err(|error| classify::failure("connect", error))?;
        let asked = Asked::of(&mut connection).await.map_err(|error| classify::failure("connect", error))?;
        if asked.is_replica {
            let text = "the server is a replica, which takes no writes; the url must lead to the primary";
            return Err(Error::new(ErrorKind::Unavailable, "connect", "redis_readonly", text));
        }
        if !self.warned.swap(true, Ordering::SeqCst) {
            asked.warn();
        }
        Ok(Connection { inner: connection, lost, bulk_bytes_max: asked.bulk_bytes_max })
    }
}

/// Checks the form of a URL. The message never repeats it: it may hold a password.
pub(crate) fn check_url(text: &str) -> Result<(), String> {
    let url = Url::parse(text).map_err(|error| format!("the url is none ({error}); write redis://HOST:PORT"))?;
    let database = url.path().trim_start_matches('/');
    if !matches!(url.scheme(), "redis" | "rediss") || url.host_str().is_none_or(str::is_empty) {
        return Err("the url must begin with redis:// or rediss:// (TLS) and name a host".into());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("the url holds a user name or password; give them as user and password".into());
    }
    if url.fragment().is_some() || url.query().is_some() {
        return Err("the url has a query or a fragment, which mean nothing here; leave them out".into());
    }
    if !database.is_empty() && database.parse::<u32>().is_err() {
        return Err("the url's path is no number of a database; write redis://HOST:PORT/0, or no path".into());
    }
    Ok(())
}

fn client(info: ConnectionInfo, tls: Option<&TlsTable>) -> Result<Client> {
    let Some(tls) = tls else { return Client::open(info).map_err(|error| classify::failure("configure", error)) };
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
    let certificates = TlsCertificates { client_tls, root_cert };
    Client::build_with_tls(info, certificates).map_err(|error| wrong(format!("the certificates are unusable: {error}")))
}

/// A connection that all calls share. It never sends anything twice, and never connects anew.
#[derive(Debug, Clone)]
pub(crate) struct Connection {
    inner: MultiplexedConnection,
    /// Set by the task that reads from it.
    lost: Arc<AtomicBool>,
    /// The largest value this server takes.
    pub(crate) bulk_bytes_max: usize,
}

impl Connection {
    /// Whether it still stands, as far as we heard.
    pub(crate) fn is_open(&self) -> bool {
        !self.lost.load(Ordering::SeqCst)
    }

    /// Sends commands at once; an answer or an error for each. Cancel-safe: the answers to a
    /// dropped call are thrown away.
    pub(crate) async fn send<T: FromRedisValue>(&mut self, pipeline: &Pipeline) -> RedisResult<Vec<RedisResult<T>>> {
        pipeline.query_async(&mut self.inner).await
    }

    /// Sends one command.
    pub(crate) async fn ask(&mut self, command: &redis::Cmd) -> RedisResult<Value> {
        command.query_async(&mut self.inner).await
    }
}

/// What a server says of itself, as far as we may ask.
#[derive(Debug, Default)]
struct Asked {
    is_replica: bool,
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
        let is_replica = match role {
            Some(Value::Array(role)) => matches!(role.first(), Some(Value::BulkString(word)) if word == b"slave"),
            _ => false,
        };
        let bulk_bytes_max = setting().and_then(|bytes| bytes.parse().ok()).unwrap_or(BULK_BYTES_MAX);
        Ok(Self { is_replica, bulk_bytes_max, policy: setting(), appendonly: setting(), save: setting() })
    }

    /// What may lose what this server has taken.
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
    fn urls_are_checked_and_never_repeated() {
        for url in ["redis://h", "redis://127.0.0.1:6379", "rediss://redis.example:6380/3", "redis://[::1]:1/0"] {
            assert_eq!(check_url(url), Ok(()), "{url}");
        }
        for url in [
            "",
            "127.0.0.1:6379",
            "http://h",
            "redis://",
            "redis://canary:canary@h",
            "redis://:canary@h",
            "rediss://h/#insecure",
            "redis://h/?protocol=resp2&canary",
            "redis://h/canary",
            "redis+unix:///canary",
        ] {
            let fault = check_url(url).expect_err(url);
            assert!(!fault.contains("canary"), "{fault}");
        }
    }

    #[test]
    fn no_secret_prints() {
        let password = Secret::new("canary");
        let second = Duration::from_secs(1);
        let server = Server::new("redis://h", Some("u"), Some(&password), None, second).expect("a server");
        assert!(!format!("{server:?}").contains("canary"));
    }
}
