//! Connecting: address, credentials, TLS.
//!
//! The client could reconnect by itself and would then send what it had not sent before: an old
//! publish would be sent after its outcome was reported. So a connection is used once, and ends
//! with its first failure.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use postbox_config::{Secret, TlsTable};
use postbox_core::Down;
use rumqttc::v5::mqttbytes::v5::{ConnAck, Packet};
use rumqttc::v5::{AsyncClient, Event, EventLoop, MqttOptions};
use rumqttc::{NetworkOptions, TlsConfiguration, Transport};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::Verifier;
use url::Url;

use crate::classify::{self, connecting};

/// The longest wait for a server, including TLS and its answer to CONNECT.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The keep-alive interval. A server that is silent for twice as long is lost.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The largest packet of the protocol, in bytes. With a lower limit, a server would discard larger
/// packets silently.
const PACKET_BYTES_MAX: u32 = 268_435_455;

/// The server and the credentials.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) url: String,
    pub(crate) user: Option<(String, Secret)>,
    pub(crate) tls: TlsTable,
    /// If empty, the server chooses one, without a session.
    pub(crate) client_id: String,
}

/// Parses an address. The error never repeats it: it may hold a password.
pub(crate) fn address(text: &str) -> Result<Url, String> {
    let fault = match Url::parse(text) {
        Ok(url) if !["mqtt", "mqtts"].contains(&url.scheme()) => "begins with mqtt:// or mqtts://",
        Ok(url) if !url.username().is_empty() || url.password().is_some() => {
            "holds a user name or password; give them in user and password"
        }
        Ok(url)
            if url.host_str().is_some_and(|host| !host.is_empty())
                && ["", "/"].contains(&url.path())
                && url.query().is_none()
                && url.fragment().is_none() =>
        {
            return Ok(url);
        }
        _ => "is not a valid address; write mqtt://HOST:PORT",
    };
    Err(fault.to_owned())
}

impl Server {
    /// Connects once. The event loop has handled nothing but the connection.
    ///
    /// Cancel-safety: if dropped, there is no connection.
    pub(crate) async fn connect(
        &self,
        room: usize,
        change: impl FnOnce(&mut MqttOptions),
    ) -> Result<(AsyncClient, EventLoop, ConnAck), Down> {
        let mut options = self.options().map_err(|fault| classify::mismatch("mqtt_config_invalid", fault))?;
        change(&mut options);
        let (client, mut events) = AsyncClient::new(options, room);
        match events.poll().await {
            Ok(Event::Incoming(Packet::ConnAck(answer))) => {
                // If the server wants no keep-alive, the client would ping it without a pause.
                if events.options.keep_alive().is_zero() {
                    events.options.set_keep_alive(KEEP_ALIVE);
                }
                Ok((client, events, answer))
            }
            Ok(other) => {
                Err(classify::mismatch("mqtt_refused", format!("{} answers with {other:?} to CONNECT", self.url)))
            }
            Err(error) => Err(connecting(&self.url, &error)),
        }
    }

    fn options(&self) -> Result<MqttOptions, String> {
        let url = address(&self.url)?;
        let is_tls = url.scheme() == "mqtts";
        let port = url.port().unwrap_or(if is_tls { 8883 } else { 1883 });
        let mut options = MqttOptions::new(&self.client_id, url.host_str().unwrap_or_default(), port);
        let mut network = NetworkOptions::new();
        network.set_tcp_nodelay(true);
        options
            .set_network_options(network)
            .set_connection_timeout(CONNECT_TIMEOUT.as_secs())
            .set_keep_alive(KEEP_ALIVE)
            .set_max_packet_size(Some(PACKET_BYTES_MAX));
        if let Some((user, password)) = &self.user {
            options.set_credentials(user, password.expose());
        }
        if is_tls {
            let config = TlsConfiguration::Rustls(Arc::new(config(&self.tls)?));
            options.set_transport(Transport::tls_with_config(config));
        }
        Ok(options)
    }
}

/// Makes the TLS configuration. The files are read at each connection, so that they may be renewed.
fn config(tls: &TlsTable) -> Result<ClientConfig, String> {
    let provider = Arc::new(ring::default_provider());
    let fault = |error: rustls::Error| format!("TLS: {error}");
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(fault)?;
    let builder = match &tls.ca_file {
        Some(path) => {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(certificates("ca_file", path)?);
            builder.with_root_certificates(roots)
        }
        None => {
            let verifier = Verifier::new(provider).map_err(fault)?;
            builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
        }
    };
    let Some((cert, key)) = tls.client_cert() else { return Ok(builder.with_no_client_auth()) };
    let shown = key.display();
    let key = PrivateKeyDer::from_pem_file(key).map_err(|error| format!("client_key {shown}: {error}"))?;
    builder.with_client_auth_cert(certificates("client_cert", cert)?, key).map_err(fault)
}

fn certificates(key: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(format!("{key} {} holds no certificate (PEM)", path.display())),
        Err(error) => Err(format!("{key} {}: {error}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use postbox_testkit::servers::listen_anywhere;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_server_that_wants_no_keep_alive_is_asked_at_our_pace() {
        let listener = TcpListener::from_std(listen_anywhere().expect("a port")).expect("listening");
        let url = format!("mqtt://{}", listener.local_addr().expect("an address"));
        let server = Server { url, user: None, tls: TlsTable::default(), client_id: String::new() };
        let answering = async {
            let (mut client, _) = listener.accept().await.expect("a client");
            // CONNACK with the property Server Keep Alive.
            client.write_all(b"\x20\x06\0\0\x03\x13\0\0").await.expect("written");
            client
        };
        let (connected, _client) = tokio::join!(server.connect(1, |_| ()), answering);
        let (_, events, answer) = connected.expect("connected");
        assert_eq!(answer.properties.and_then(|properties| properties.server_keep_alive), Some(0));
        assert_eq!(events.options.keep_alive(), KEEP_ALIVE);
    }
}
