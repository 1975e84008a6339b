//! One connection at a time, replaced when it is lost.
//!
//! The client could recover a connection by itself and would then send what was in its queue: an
//! old publish would be sent after its outcome was reported. So each connection is used once. It
//! ends with its socket, which we hold, and what was not written by then is discarded.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex as StdMutex, OnceLock};
use std::time::Duration;

use futures::StreamExt as _;
use lapin::options::{ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::tcp::{AMQPUriTcpExt as _, AsyncTcpStream, RustlsConnector, RustlsConnectorConfig, TLSConfig};
use lapin::types::{FieldTable, ShortString};
use lapin::uri::{AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{Channel, Connection as Client, ConnectionProperties, Event, ExchangeKind};
use postbox_config::{Secret, TlsTable};
use postbox_core::{Down, ErrorKind, lock};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::classify::connecting;

/// The longest wait for one server, TLS and credentials included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait for the server's answer when closing.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// The heartbeat interval in seconds. A server that is silent for twice as long is lost. Shorter
/// intervals are not recommended, because both sides may be busy.
const HEARTBEAT_S: u16 = 5;
/// The largest frame, in bytes: RabbitMQ's default. The client takes the server's if that is
/// smaller. It reserves 64 frames, so a server without a limit must not decide their size.
const FRAME_BYTES_MAX: u32 = 131_072;
/// How many channels are kept open for later calls.
const IDLE_MAX: usize = 32;

/// The servers and the credentials.
#[derive(Debug, Clone, Default)]
pub(crate) struct Servers {
    pub(crate) urls: Vec<String>,
    pub(crate) user: Option<(String, Secret)>,
    pub(crate) tls: TlsTable,
    /// The name of the connection, as the server shows it.
    pub(crate) name: String,
    /// Which address is tried first. An attempt may be dropped while one address does not answer,
    /// and the next attempt must not begin with it again.
    pub(crate) first: Arc<AtomicUsize>,
}

impl Servers {
    /// Connects to the first server that accepts us. Each is tried once.
    ///
    /// Cancel-safety: if dropped, there is no connection.
    pub(crate) async fn connect(&self) -> Result<Connection, Down> {
        let mut down = Down::new(ErrorKind::Mismatch, "connect_failed", "there is no server to connect to");
        let first = self.first.load(Ordering::Relaxed);
        for place in first..first + self.urls.len() {
            self.first.store(place + 1, Ordering::Relaxed);
            match self.connect_to(&self.urls[place % self.urls.len()]).await {
                Ok(connection) => {
                    self.first.store(place, Ordering::Relaxed);
                    return Ok(connection);
                }
                Err(failed) => down = failed,
            }
        }
        Err(down)
    }

    async fn connect_to(&self, url: &str) -> Result<Connection, Down> {
        let invalid = |why: String| Down::new(ErrorKind::Mismatch, "rabbitmq_config_invalid", why);
        let mut uri: AMQPUri = url.parse().map_err(invalid)?;
        uri.query.heartbeat = Some(HEARTBEAT_S);
        uri.query.frame_max = Some(FRAME_BYTES_MAX);
        if let Some((username, password)) = &self.user {
            uri.authority.userinfo =
                AMQPUserInfo { username: username.clone(), password: password.expose().to_owned() };
        }
        let tls = match uri.scheme {
            AMQPScheme::AMQP => None,
            AMQPScheme::AMQPS => Some(connector(&self.tls).map_err(|error| invalid(format!("TLS: {error}")))?),
        };
        let runtime = lapin::runtime::default_runtime().map_err(|error| connecting(url, &error))?;
        let socket = Arc::new(Socket::default());
        let kept = Arc::downgrade(&socket);
        let properties = ConnectionProperties::default().with_connection_name(self.name.as_str().into());
        let open = Client::connector(
            uri,
            runtime,
            async move |uri, runtime| {
                let plain = AMQPUri { scheme: AMQPScheme::AMQP, ..uri.clone() };
                let opened = timeout(CONNECT_TIMEOUT, plain.connect_with_config_async(TLSConfig::default(), &runtime));
                let stream = opened.await.map_err(io::Error::from)??;
                if let AsyncTcpStream::Plain(stream) = &stream {
                    let gone = || io::Error::from(io::ErrorKind::ConnectionAborted);
                    let socket = kept.upgrade().ok_or_else(gone)?;
                    let _ = socket.0.set(stream.get_ref().as_fd().try_clone_to_owned()?.into());
                }
                match &tls {
                    None => Ok(stream),
                    Some(tls) => Ok(stream.into_rustls(tls, &uri.authority.host).await?),
                }
            },
            properties,
        );
        let client = timeout(CONNECT_TIMEOUT, open).await;
        match client {
            Ok(Ok(client)) => Ok(Connection::new(client, socket)),
            Ok(Err(error)) => Err(connecting(url, &error)),
            Err(_) => {
                let text = format!("no connection to {url}: no answer within {CONNECT_TIMEOUT:?}");
                Err(Down::new(ErrorKind::Unavailable, "connect_timeout", text))
            }
        }
    }
}

/// Makes the TLS connector. The files are read at each connection, so that they may be renewed.
fn connector(tls: &TlsTable) -> io::Result<RustlsConnector> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let certificates = |path: &Path| -> io::Result<Vec<CertificateDer<'static>>> {
        let certificates = CertificateDer::pem_file_iter(path).map_err(|error| invalid(error.to_string()))?;
        certificates.collect::<Result<_, _>>().map_err(|error| invalid(error.to_string()))
    };
    let config = match &tls.ca_file {
        Some(path) => RustlsConnectorConfig::default().with_parsable_certificates(certificates(path)?),
        None => RustlsConnectorConfig::new_with_native_certs()?,
    };
    match tls.client_cert() {
        None => config.connector_with_no_client_auth(),
        Some((cert, key)) => {
            let key = PrivateKeyDer::from_pem_file(key).map_err(|error| invalid(error.to_string()))?;
            config.connector_with_single_cert(certificates(cert)?, key)
        }
    }
}

/// Our handle on a connection. When it is dropped, nothing is sent any more, and the client's
/// thread ends.
#[derive(Default)]
struct Socket(OnceLock<TcpStream>);

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(stream) = self.0.get() {
            // An error means that it is shut down already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// A connection to a server. Dropping it ends it at once.
pub(crate) struct Connection {
    // The first field is dropped first, so that nothing of the others is sent.
    _socket: Arc<Socket>,
    client: Client,
    /// Why the server accepts nothing, while it is blocked.
    blocked: Arc<StdMutex<String>>,
    lost: CancellationToken,
    /// Unused channels, each for one exchange.
    idle: StdMutex<Vec<(ShortString, Channel)>>,
    /// Channels with unwritten publishes. Closing one would send the close before them.
    stuck: StdMutex<Vec<Channel>>,
    given_up: AtomicBool,
    _events: AbortOnDropHandle<()>,
}

impl Connection {
    fn new(client: Client, socket: Arc<Socket>) -> Self {
        let blocked = Arc::new(StdMutex::new(String::new()));
        let mut events = Box::pin(client.events_listener());
        let lost = CancellationToken::new();
        let (reason, status, ended) = (Arc::clone(&blocked), client.status().clone(), lost.clone());
        let listen = async move {
            while let Some(event) = events.next().await {
                match event {
                    Event::ConnectionBlocked(why) => *lock(&reason) = why,
                    Event::Error(_) if !status.connected() => ended.cancel(),
                    _ => {}
                }
            }
        };
        let _events = AbortOnDropHandle::new(tokio::spawn(listen));
        let (idle, stuck, given_up) = (StdMutex::default(), StdMutex::default(), AtomicBool::new(false));
        Self { _socket: socket, client, blocked, lost, idle, stuck, given_up, _events }
    }

    /// Whether the connection seems to work.
    fn is_alive(&self) -> bool {
        self.client.status().connected() && !self.lost.is_cancelled()
    }

    /// Why the server accepts no messages from us now. It reports this at the first publish.
    pub(crate) fn blocked(&self) -> Option<String> {
        self.client.status().blocked().then(|| match lock(&self.blocked).as_str() {
            "" => "the server is short of memory or disk".to_owned(),
            reason => reason.to_owned(),
        })
    }

    /// The largest frame, in bytes.
    pub(crate) fn frame_bytes_max(&self) -> usize {
        usize::try_from(self.client.configuration().frame_max()).unwrap_or(usize::MAX)
    }

    /// Opens a channel. The client never answers if the connection is lost meanwhile, so that is
    /// watched too.
    pub(crate) async fn channel(&self) -> lapin::Result<Channel> {
        tokio::select! {
            biased;
            () = self.lost.cancelled() => Err(io::Error::from(io::ErrorKind::ConnectionAborted).into()),
            channel = self.client.create_channel() => channel,
        }
    }

    /// Returns a channel in confirm mode for an existing exchange, on which nobody else publishes.
    ///
    /// A missing exchange ends the channel. If publishes were in the client's queue by then, it
    /// would end the connection, because they would be sent on a closed channel. So the exchange is
    /// checked first.
    pub(crate) async fn lease(&self, exchange: &ShortString) -> lapin::Result<Lease<'_>> {
        let idle = {
            let mut idle = lock(&self.idle);
            idle.retain(|(_, channel)| channel.status().connected());
            let place = idle.iter().rposition(|(its, _)| its == exchange);
            place.map(|place| idle.swap_remove(place).1)
        };
        let channel = match idle {
            Some(channel) => channel,
            None => {
                let channel = self.channel().await?;
                channel.confirm_select(ConfirmSelectOptions::default()).await?;
                // The default exchange cannot be checked; it always exists.
                if !exchange.as_str().is_empty() {
                    declare_passively(&channel, exchange.clone()).await?;
                }
                channel
            }
        };
        let exchange = exchange.clone();
        Ok(Lease { connection: self, exchange, channel: Some(channel), unwritten: AtomicUsize::new(0) })
    }

    /// Marks the connection for replacement: it does not answer, or something is left in its queue.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Closes the connection properly, so that the server requeues unsettled messages at once.
    pub(crate) async fn close(&self) {
        // A server that does not answer is not waited for.
        let _ = timeout(CLOSE_TIMEOUT, self.client.close(200, "closed".into())).await;
    }
}

/// A channel that one call publishes on.
pub(crate) struct Lease<'a> {
    connection: &'a Connection,
    exchange: ShortString,
    channel: Option<Channel>,
    /// The number of publishes in the client's queue. The client hands over a message as a whole or
    /// not at all.
    pub(crate) unwritten: AtomicUsize,
}

impl Lease<'_> {
    pub(crate) fn channel(&self) -> &Channel {
        self.channel.as_ref().expect("it is there until it is given back")
    }

    /// Returns the channel for the next call. Every confirm must have arrived.
    pub(crate) fn give_back(mut self) {
        let mut idle = lock(&self.connection.idle);
        if idle.len() < IDLE_MAX {
            idle.extend(self.channel.take().map(|channel| (self.exchange.clone(), channel)));
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if *self.unwritten.get_mut() > 0 {
            // A late publish must not follow the one that replaces it, neither on this connection,
            // whose channel nobody else gets, nor on another.
            lock(&self.connection.stuck).extend(self.channel.take());
            self.connection.give_up();
        }
    }
}

/// The connection to the servers, shared by calls.
pub(crate) struct Link {
    servers: Servers,
    current: Mutex<Current>,
    failures: AtomicU64,
}

#[derive(Default)]
struct Current {
    connection: Option<Arc<Connection>>,
    failure: Option<Down>,
}

impl Link {
    pub(crate) fn new(servers: Servers) -> Self {
        Self { servers, current: Mutex::default(), failures: AtomicU64::new(0) }
    }

    /// Returns the connection, and makes one if there is none. Callers that waited for an attempt
    /// that failed make none of their own. A connection that was given up is kept while the server
    /// blocks it: another would be blocked as well, and would learn of it only after sending
    /// something.
    ///
    /// Cancel-safety: if dropped, there may be no connection.
    pub(crate) async fn connection(&self) -> Result<Arc<Connection>, Down> {
        let failures = self.failures.load(Ordering::Relaxed);
        let mut current = self.current.lock().await;
        let is_good = |connection: &&Arc<Connection>| {
            let given_up = connection.given_up.load(Ordering::Relaxed);
            connection.is_alive() && (!given_up || connection.blocked().is_some())
        };
        if let Some(connection) = current.connection.as_ref().filter(is_good) {
            return Ok(Arc::clone(connection));
        }
        current.connection = None;
        if let Some(failure) = &current.failure
            && self.failures.load(Ordering::Relaxed) != failures
        {
            return Err(failure.clone());
        }
        match self.servers.connect().await {
            Ok(connection) => {
                let connection = Arc::new(connection);
                *current = Current { connection: Some(Arc::clone(&connection)), failure: None };
                Ok(connection)
            }
            Err(down) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                current.failure = Some(down.clone());
                Err(down)
            }
        }
    }

    pub(crate) async fn close(&self) {
        let connection = self.current.lock().await.connection.take();
        if let Some(connection) = connection {
            connection.close().await;
        }
    }
}

/// Checks that an exchange exists; changes nothing.
pub(crate) async fn declare_passively(channel: &Channel, exchange: ShortString) -> lapin::Result<()> {
    let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    // The kind is ignored.
    channel.exchange_declare(exchange, ExchangeKind::Topic, options, FieldTable::default()).await
}
