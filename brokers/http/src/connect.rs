//! Checks a target without a request: its name, address, port and certificate.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Error, ErrorKind, Result};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use url::{Host, Url};

use crate::classify::{cause, tls_failure};
use crate::config::HttpSinkConfig;
use crate::guard::{Guard, Lookup, SystemLookup};
use crate::tls;

/// How long to wait for a TLS 1.3 target to reject our certificate. It judges it when our side
/// considers the handshake complete, and most say nothing.
const VERDICT_WAIT: Duration = Duration::from_millis(300);

impl HttpSinkConfig {
    /// Connects to the target as the sink does, under the same address guard, up to the end of the
    /// TLS handshake, and hangs up. Sends no request. Returns where it connected to.
    ///
    /// The codes are those of the sink: `dns_failed`, `address_forbidden`, `connect_refused`,
    /// `connect_timeout`, `connect_failed`, `tls_failed`, `client_cert_required`,
    /// `client_cert_refused`.
    pub async fn connect(&self) -> Result<String> {
        self.connect_with(&SystemLookup).await
    }

    async fn connect_with(&self, lookup: &dyn Lookup) -> Result<String> {
        self.validate()?;
        let url = self.target().map_err(|fault| Error::invalid("connect", "http_sink_invalid", fault))?;
        let tls = match url.scheme() {
            "https" => Some(tls::client_config(true, self.ca_file.as_deref(), self.client_cert.as_ref())?),
            _ => None,
        };
        let addresses = addresses(&url, &self.guard(&url), lookup, self.connect_timeout).await?;
        let limit = self.connect_timeout;
        let mut last = None;
        for address in addresses {
            let (tls, host) = (tls.clone(), url.host_str().unwrap_or_default().to_owned());
            let tried = spawn_blocking(move || try_address(address, &host, tls, limit)).await;
            let tried = tried.map_err(|error| unreachable_target("connect_failed", error.to_string()))?;
            match tried {
                Ok(()) => {
                    let how = if url.scheme() == "https" { ", TLS" } else { "" };
                    return Ok(format!("{} is reached at {address}{how}", url.host_str().unwrap_or_default()));
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| unreachable_target("dns_failed", "the target's name has no address")))
    }
}

async fn addresses(url: &Url, guard: &Guard, lookup: &dyn Lookup, limit: Duration) -> Result<Vec<SocketAddr>> {
    let port = url.port_or_known_default().unwrap_or_default();
    let name = match url.host() {
        Some(Host::Ipv4(address)) => return Ok(vec![(address, port).into()]),
        Some(Host::Ipv6(address)) => return Ok(vec![(address, port).into()]),
        Some(Host::Domain(name)) => name,
        None => "",
    };
    let failed = |why: String| {
        let text = format!("{name} has no address: {why}; correct the url, or the name service of this machine");
        unreachable_target("dns_failed", text)
    };
    let found = timeout(limit, lookup.look_up(name)).await;
    let found = found.map_err(|_| failed(format!("no answer within {limit:?}")))?;
    let found = found.map_err(|error| failed(error.to_string()))?;
    let forbidden = guard.check(found.iter().map(SocketAddr::ip));
    forbidden.map_err(|forbidden| unreachable_target("address_forbidden", forbidden.to_string()))?;
    Ok(found.into_iter().map(|address| SocketAddr::new(address.ip(), port)).collect())
}

fn try_address(address: SocketAddr, host: &str, tls: Option<ClientConfig>, limit: Duration) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, limit).map_err(|error| {
        let (code, why) = match error.kind() {
            io::ErrorKind::ConnectionRefused => {
                ("connect_refused", "nobody listens there; start it, or correct the url")
            }
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                ("connect_timeout", "no answer in time; look for a firewall in between, or correct the url")
            }
            _ => ("connect_failed", "it cannot be reached; correct the url, or the network"),
        };
        unreachable_target(code, format!("{address}: {why} ({error})"))
    })?;
    let Some(tls) = tls else { return Ok(()) };
    handshake(&mut stream, host, tls, limit).map_err(|error| {
        let text = format!("{address}: {error}");
        match cause::<rustls::Error>(&error) {
            Some(error) => match tls_failure(error, text) {
                postbox_core::Outcome::Unavailable { code, error } if code == "tls_failed" => {
                    let cure = "correct the url, or name the CA of its certificate with ca_file";
                    Error::new(
                        ErrorKind::Unavailable,
                        "connect",
                        code,
                        format!("the TLS handshake failed: {error}; {cure}"),
                    )
                }
                postbox_core::Outcome::Unavailable { code, error } => {
                    Error::new(ErrorKind::Unavailable, "connect", code, error)
                }
                _ => unreachable_target("tls_failed", error.to_string()),
            },
            None => unreachable_target("tls_failed", format!("{text}; does that port speak TLS?")),
        }
    })
}

fn handshake(stream: &mut TcpStream, host: &str, tls: ClientConfig, limit: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let name = ServerName::try_from(host).map_err(io::Error::other)?;
    let mut tls = ClientConnection::new(Arc::new(tls), name).map_err(io::Error::other)?;
    while tls.is_handshaking() {
        if tls.complete_io(stream)? == (0, 0) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    stream.set_read_timeout(Some(VERDICT_WAIT))?;
    // If the target says nothing, it accepts us.
    if tls.read_tls(stream).is_ok() {
        tls.process_new_packets().map_err(io::Error::other)?;
    }
    tls.send_close_notify();
    // It does not matter whether this arrives.
    _ = tls.write_tls(stream);
    Ok(())
}

fn unreachable_target(code: &'static str, text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, "connect", code, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::Looking;

    /// A name service that answers with this machine.
    struct Home;

    impl Lookup for Home {
        fn look_up(&self, _: &str) -> Looking {
            Box::pin(async { Ok(vec![SocketAddr::from(([127, 0, 0, 1], 0))]) })
        }
    }

    #[tokio::test]
    async fn the_address_guard_holds_here_too() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("set");
        let port = listener.local_addr().expect("an address").port();
        let config = HttpSinkConfig::new(format!("http://customer.example:{port}/"));
        let error = config.connect_with(&Home).await.expect_err("refused");
        assert_eq!(error.code(), "address_forbidden");
        assert!(listener.accept().is_err(), "nobody came");
        let allowed = HttpSinkConfig { allow: vec!["127.0.0.1/32".parse().expect("a network")], ..config };
        assert!(allowed.connect_with(&Home).await.expect("reached").contains("customer.example"));
        assert!(listener.accept().is_ok());
    }
}
