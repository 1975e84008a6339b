//! One connection at a time, replaced when it is lost.
//!
//! The client would reconnect by itself and then send what was in its queue: an old publish would
//! be sent after its outcome was reported. So each client serves a single connection and ends with
//! it. What it had not sent by then is discarded.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex as StdMutex};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, ConnectOptions, Event, ReconnectToServer, ServerAddr, ServerError};
use futures::future::BoxFuture;
use postbox_config::{Secret, TlsTable};
use postbox_core::{Down, ErrorKind, lock};
use tokio::sync::Mutex;

use crate::classify::{CONNECT_TOO_SLOW, connecting};
use crate::jetstream::API_TOO_SLOW;

/// The longest wait for one server, TLS and credentials included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a silent connection is pinged. After two pings without an answer it is lost, with all
/// that waits in its queue. That is before the longest wait for acks ends.
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// The address that a client which wants to reconnect is sent to: nothing listens there.
const NOWHERE: &str = "nats://127.0.0.1:0";

/// The most subjects remembered as refused. For others we only know that no answer came.
const REFUSED_MAX: usize = 1_000;

/// How we authenticate.
#[derive(Debug, Clone, Default)]
pub(crate) enum Auth {
    /// Without credentials.
    #[default]
    None,
    User(String, Secret),
    Token(Secret),
    /// The seed of an NKey.
    Nkey(Secret),
    /// A file with a JWT and a seed, read at each connection.
    Credentials(PathBuf),
}

/// The servers and the credentials.
#[derive(Debug, Clone, Default)]
pub(crate) struct Servers {
    pub(crate) urls: Vec<String>,
    pub(crate) auth: Auth,
    pub(crate) tls: Option<TlsTable>,
}

/// Subjects for which the server refused our publishes on the present connection. It reports this
/// to the connection; the publish itself gets no answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Refused(Arc<StdMutex<BTreeSet<String>>>);

impl Refused {
    /// Whether one of them begins with this text.
    pub(crate) fn any(&self, begin: &str) -> bool {
        self.first(begin).is_some()
    }

    /// Returns the first of them that begins with this text.
    pub(crate) fn first(&self, begin: &str) -> Option<String> {
        lock(&self.0).iter().find(|subject| subject.starts_with(begin)).cloned()
    }

    fn note(&self, event: &Event) {
        let Event::ServerError(ServerError::Other(text)) = event else { return };
        let subject = text.split_once("Violation for Publish to \"").and_then(|(_, rest)| rest.rsplit_once('"'));
        let mut refused = lock(&self.0);
        if let Some((subject, _)) = subject
            && refused.len() < REFUSED_MAX
        {
            refused.insert(subject.to_owned());
        }
    }
}

/// What is done on a new connection before it is used.
type Prepare = Box<dyn Fn(Client, Refused) -> BoxFuture<'static, Result<(), Down>> + Send + Sync>;

/// The connection to the servers.
pub(crate) struct Link {
    servers: Servers,
    prepare: Prepare,
    current: Mutex<Current>,
    failures: AtomicU64,
    /// Which server is tried first. An attempt may be dropped while one server does not answer, and
    /// the next attempt must not begin with it again.
    first: AtomicUsize,
    refused: Refused,
}

#[derive(Default)]
struct Current {
    client: Option<Client>,
    failure: Option<Down>,
}

impl Link {
    pub(crate) fn new(servers: Servers, prepare: Prepare) -> Self {
        let (failures, first) = (AtomicU64::new(0), AtomicUsize::new(0));
        Self { servers, prepare, current: Mutex::default(), failures, first, refused: Refused::default() }
    }

    /// Connects to any server that answers, without preparing the connection: for a check.
    pub(crate) async fn look(servers: Servers) -> Result<Client, Down> {
        let attempts = servers.urls.len();
        let link = Self::new(servers, Box::new(|_, _| Box::pin(async { Ok(()) })));
        let mut looked = link.client().await;
        for _ in 1..attempts {
            if looked.is_ok() {
                break;
            }
            looked = link.client().await;
        }
        looked
    }

    /// Returns the connection, and makes one if there is none. Callers that waited for an attempt
    /// that failed make none of their own.
    ///
    /// Cancel-safety: if dropped, there may be no connection.
    pub(crate) async fn client(&self) -> Result<Client, Down> {
        let failures = self.failures.load(Ordering::Relaxed);
        let mut current = self.current.lock().await;
        if let Some(client) = current.client.as_ref().filter(|client| is_alive(client)) {
            return Ok(client.clone());
        }
        current.client = None;
        if let Some(failure) = &current.failure
            && self.failures.load(Ordering::Relaxed) != failures
        {
            return Err(failure.clone());
        }
        match self.connect().await {
            Ok(client) => {
                *current = Current { client: Some(client.clone()), failure: None };
                Ok(client)
            }
            Err(down) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                current.failure = Some(down.clone());
                Err(down)
            }
        }
    }

    /// Whether the server has refused a publish to this subject.
    pub(crate) fn has_refused(&self, subject: &str) -> bool {
        lock(&self.refused.0).contains(subject)
    }

    /// Returns the subjects that the server has refused.
    pub(crate) fn refused(&self) -> &Refused {
        &self.refused
    }

    /// Whether the server has refused to let us read single messages of a stream.
    pub(crate) fn has_refused_looks(&self, stream: &str) -> bool {
        self.has_refused(&format!("$JS.API.STREAM.MSG.GET.{stream}"))
    }

    /// Drops this connection: it does not answer, or what was prepared on it is gone.
    pub(crate) async fn discard(&self, client: &Client) {
        let mut current = self.current.lock().await;
        let id = |client: &Client| {
            let info = client.server_info();
            (info.server_id, info.client_id)
        };
        if current.client.as_ref().is_some_and(|known| id(known) == id(client)) {
            current.client = None;
        }
    }

    pub(crate) async fn close(&self) {
        let client = self.current.lock().await.client.take();
        if let Some(client) = client {
            // An error means that it is closed already.
            let _ = client.drain().await;
        }
    }

    /// Tries each server once, until one does not answer in time: then the next attempt begins with
    /// the one after it. An attempt that waited for several would outlast the time for which a
    /// source counts as failing.
    async fn connect(&self) -> Result<Client, Down> {
        let mut down = Down::new(ErrorKind::Mismatch, "connect_failed", "there is no server to connect to");
        let (urls, first) = (&self.servers.urls, self.first.load(Ordering::Relaxed));
        for place in first..first + urls.len() {
            self.first.store(place + 1, Ordering::Relaxed);
            down = match self.connect_to(&urls[place % urls.len()]).await {
                Ok(client) => match (self.prepare)(client.clone(), self.refused.clone()).await {
                    Ok(()) => {
                        self.first.store(place, Ordering::Relaxed);
                        return Ok(client);
                    }
                    Err(down) => down,
                },
                Err(down) => down,
            };
            if matches!(down.code(), CONNECT_TOO_SLOW | API_TOO_SLOW) {
                break;
            }
        }
        Err(down)
    }

    async fn connect_to(&self, url: &str) -> Result<Client, Down> {
        let invalid = |error: std::io::Error| Down::new(ErrorKind::Mismatch, "nats_config_invalid", error.to_string());
        let pool = [url, NOWHERE].map(str::parse::<ServerAddr>).into_iter().collect::<Result<Vec<_>, _>>();
        lock(&self.refused.0).clear();
        let options = self.options().await.map_err(invalid)?;
        options.connect(pool.map_err(invalid)?).await.map_err(|error| connecting(url, &error))
    }

    async fn options(&self) -> std::io::Result<ConnectOptions> {
        let refused = self.refused.clone();
        let mut options = ConnectOptions::new()
            .name("postbox")
            .connection_timeout(CONNECT_TIMEOUT)
            .ping_interval(PING_INTERVAL)
            .request_timeout(None)
            .ignore_discovered_servers()
            .event_callback(move |event| {
                refused.note(&event);
                std::future::ready(())
            })
            // Connect to the server first, then to nowhere: the second failure ends the client.
            .max_reconnects(1)
            .reconnect_to_server_callback(|pool, _| async move {
                let lost = pool.iter().any(|server| server.did_connect);
                let server = if lost { pool.last() } else { pool.first() };
                server.map(|server| ReconnectToServer { addr: server.addr.clone(), delay: Some(Duration::ZERO) })
            });
        options = match &self.servers.auth {
            Auth::None => options,
            Auth::User(user, password) => options.user_and_password(user.clone(), password.expose().to_owned()),
            Auth::Token(token) => options.token(token.expose().to_owned()),
            Auth::Nkey(seed) => options.nkey(seed.expose().to_owned()),
            Auth::Credentials(path) => options.credentials_file(path).await?,
        };
        if let Some(tls) = &self.servers.tls {
            options = options.require_tls(true);
            if let Some(path) = &tls.ca_file {
                options = options.add_root_certificates(path.clone());
            }
            if let Some((cert, key)) = tls.client_cert() {
                options = options.add_client_certificate(cert.to_owned(), key.to_owned());
            }
        }
        Ok(options)
    }
}

/// Whether the connection seems to work.
pub(crate) fn is_alive(client: &Client) -> bool {
    client.connection_state() == State::Connected
}
