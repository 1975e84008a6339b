//! Turns a URL into a pool of connections.

use std::error::Error as _;
use std::net::IpAddr;
use std::path::Path;
use std::str::FromStr as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime, Timeouts};
use postbox_core::{Error, ErrorKind, Result, lock};
use rustls::ClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres::Socket;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres_rustls::MakeRustlsConnect;
use tracing::{info, warn};

use crate::config::PostgresConfig;
use crate::servers::{Servers, names};

/// Where systems keep their trusted certificates, in the order we try.
const ROOT_FILES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// How to connect: the driver's settings, and the servers that they name.
#[derive(Clone)]
pub(crate) struct Target {
    settings: tokio_postgres::Config,
    pub(crate) servers: Servers,
}

impl Target {
    /// Parses the URL. Contacts nothing.
    pub(crate) fn parse(config: &PostgresConfig) -> Result<Self> {
        let (mut settings, tls_options) = parse_url(&config.url).map_err(|text| {
            let text = format!("the store URL is invalid: {text}");
            Error::new(ErrorKind::Mismatch, "connect", "store_url_invalid", text)
        })?;
        let limit = settings.get_connect_timeout().copied().unwrap_or(config.connect_timeout);
        settings.connect_timeout(limit).keepalives_idle(Duration::from_secs(15));
        // A network that drops packets silently must not hold a call longer than its own timeout.
        settings.tcp_user_timeout(config.statement_timeout);
        if settings.get_application_name().is_none() {
            settings.application_name("postbox");
        }
        if tls_options.verify {
            settings.ssl_mode(SslMode::Require);
        }
        let servers = Servers::new(&settings, Tls::new(tls_options)?, limit);
        Ok(Self { settings, servers })
    }

    /// Describes the database, the server and the user, without the password.
    pub(crate) fn address(&self) -> String {
        address(&self.settings)
    }

    /// Returns a pool that opens connections when they are needed.
    pub(crate) fn pool(&self, config: &PostgresConfig, size: usize) -> Result<Pool> {
        // Fast recycling notices a closed connection without a round trip. A connection that broke
        // silently fails its call as unavailable, and is dropped.
        let manager_config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_connect(self.settings.clone(), self.servers.clone(), manager_config);
        let timeouts = Timeouts {
            wait: Some(config.pool_timeout),
            create: Some(self.servers.pool_limit()),
            recycle: Some(config.connect_timeout),
        };
        Pool::builder(manager).max_size(size.max(1)).runtime(Runtime::Tokio1).timeouts(timeouts).build().map_err(
            |error| {
                Error::new(ErrorKind::Internal, "connect", "pool", "the connection pool could not be created")
                    .with_source(error)
            },
        )
    }
}

type TlsStream = <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream;

/// TLS for new connections. It is set up again when the file of authorities has changed, so that a
/// renewed authority needs no restart.
#[derive(Clone)]
pub(crate) struct Tls {
    options: Arc<TlsOptions>,
    built: Arc<Mutex<Built>>,
}

/// What was built, and the state of the file that it was built from.
struct Built {
    connect: MakeRustlsConnect,
    file: Stamp,
}

/// When a file was changed, and its length. None if it is not needed, or that cannot be read.
type Stamp = Option<(SystemTime, u64)>;

impl Tls {
    fn new(options: TlsOptions) -> Result<Self> {
        let built = Arc::new(Mutex::new(options.build(options.stamp())?));
        Ok(Self { options: Arc::new(options), built })
    }
}

impl MakeTlsConnect<Socket> for Tls {
    type Stream = TlsStream;
    type TlsConnect = <MakeRustlsConnect as MakeTlsConnect<Socket>>::TlsConnect;
    type Error = <MakeRustlsConnect as MakeTlsConnect<Socket>>::Error;

    /// Connections are opened rarely, so the file is looked at for each. While it is unusable, for
    /// example half written, the old authorities stay in use.
    fn make_tls_connect(&mut self, domain: &str) -> Result<Self::TlsConnect, Self::Error> {
        let mut built = lock(&self.built);
        let file = self.options.stamp();
        if file != built.file {
            match self.options.build(file) {
                Ok(renewed) => {
                    info!(file = self.options.file(), "changed certificate file of the database's authorities read");
                    *built = renewed;
                }
                Err(error) => {
                    let cure = "the old authorities stay in use; correct the file, each new connection reads it again";
                    warn!(code = error.code(), why = error.message(), cure, "changed certificate file unusable");
                }
            }
        }
        MakeTlsConnect::<Socket>::make_tls_connect(&mut built.connect, domain)
    }
}

/// Options of libpq that the driver does not know.
const LIBPQ_ONLY: &[&str] = &["sslcert", "sslkey", "sslcrl", "passfile", "service", "gssencmode", "krbsrvname"];

/// Parses a URL or a `key=value` string. The message never repeats it, because it may hold a
/// password.
fn parse_url(url: &str) -> Result<(tokio_postgres::Config, TlsOptions), String> {
    let (url, tls_options) = TlsOptions::take_from(url);
    let settings = tokio_postgres::Config::from_str(&url).map_err(|error| {
        let cause = error.source().map(ToString::to_string).unwrap_or_default();
        let part = match cause.as_str() {
            known if known.starts_with("invalid value for option") => known,
            // Another name may be part of a password that is not escaped.
            other if LIBPQ_ONLY.iter().any(|name| other == format!("unknown option `{name}`")) => other,
            other if other.starts_with("unknown option") => "unknown option",
            _ => "wrong form",
        };
        format!("{part}; expected postgres://user@host:port/database")
    })?;
    // libpq would look for a socket in a folder of its own; the driver fails at every connection.
    if settings.get_hosts().is_empty() && settings.get_hostaddrs().is_empty() {
        return Err(
            "it names no host; write postgres://USER@HOST/DATABASE, or add ?host=/FOLDER for a socket".to_owned()
        );
    }
    // The driver ends a password at the first @, and the rest of it would be printed, and looked
    // up, as the host or the database.
    let before_options = url.split_once("://").map_or("", |(_, rest)| rest.split('?').next().unwrap_or_default());
    match before_options.matches('@').count() > 1 {
        true => Err("there is more than one @ in it; write an @ in a password as %40".to_owned()),
        false => Ok((settings, tls_options)),
    }
}

fn address(settings: &tokio_postgres::Config) -> String {
    let user = settings.get_user();
    let database = settings.get_dbname().or(user).unwrap_or_default();
    let by = user.map(|user| format!(" as {user}")).unwrap_or_default();
    format!("the database {database} at {}{by}", names(settings).join(","))
}

/// As [`Target::address`], for a URL.
pub(crate) fn address_of_url(url: &str) -> String {
    parse_url(url).map_or_else(|wrong| wrong, |(settings, _)| address(&settings))
}

/// Checks a URL without contacting anything. The message never repeats it.
pub(crate) fn check_url(url: &str) -> Result<(), String> {
    parse_url(url).map(drop)
}

/// Whether the server's identity is not checked; see `PostgresConfig::is_unverified`.
pub(crate) fn is_unverified(url: &str) -> bool {
    let Ok((settings, wish)) = parse_url(url) else { return false };
    // A certificate file alone is not enough: `prefer` continues without TLS if the server offers
    // none.
    let verified = wish.verify || (wish.root_file.is_some() && settings.get_ssl_mode() == SslMode::Require);
    let is_local = |host: &Host| match host {
        Host::Tcp(name) => name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()),
        #[cfg(unix)]
        Host::Unix(_) => true,
    };
    let local = match settings.get_hostaddrs() {
        [] => settings.get_hosts().iter().all(is_local),
        addresses => addresses.iter().all(IpAddr::is_loopback),
    };
    !verified && !local
}

/// TLS settings of the URL that the driver does not understand.
#[derive(Default)]
struct TlsOptions {
    verify: bool,
    root_file: Option<String>,
}

impl TlsOptions {
    /// Removes `sslmode=verify-*` and `sslrootcert` from a URL or a `key=value` string.
    fn take_from(url: &str) -> (String, Self) {
        let mut wish = Self::default();
        let mut keep = |pair: &str| match pair.split_once('=') {
            Some(("sslmode", "verify-full" | "verify-ca")) => {
                wish.verify = true;
                false
            }
            Some(("sslrootcert", file)) => {
                wish.root_file = Some(file.replace("%2F", "/").replace("%2f", "/"));
                false
            }
            _ => true,
        };
        let url = match url.split_once('?') {
            Some((base, query)) if base.contains("://") => {
                let kept: Vec<&str> = query.split('&').filter(|pair| keep(pair)).collect();
                if kept.is_empty() { base.to_owned() } else { format!("{base}?{}", kept.join("&")) }
            }
            _ if url.contains("://") => url.to_owned(),
            _ => url.split(' ').filter(|pair| keep(pair)).collect::<Vec<_>>().join(" "),
        };
        (url, wish)
    }

    /// The file's state is taken before it is read: a change in between is seen at the next look.
    fn build(&self, file: Stamp) -> Result<Built> {
        Ok(Built { connect: MakeRustlsConnect::new(self.client_config()?), file })
    }

    /// Whether the server's certificate is checked.
    fn is_checked(&self) -> bool {
        self.verify || self.root_file.is_some()
    }

    /// The file of authorities: the one that the URL names, or the system's.
    fn file(&self) -> Option<&str> {
        self.root_file.as_deref().or_else(|| ROOT_FILES.into_iter().find(|file| Path::new(file).exists()))
    }

    fn stamp(&self) -> Stamp {
        let file = self.is_checked().then(|| self.file())??;
        let file = std::fs::metadata(file).ok()?;
        Some((file.modified().ok()?, file.len()))
    }

    fn client_config(&self) -> Result<ClientConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder =
            ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().map_err(
                |error| Error::new(ErrorKind::Internal, "connect", "tls", "TLS could not be set up").with_source(error),
            )?;
        if self.is_checked() {
            return Ok(builder.with_root_certificates(self.roots()?).with_no_client_auth());
        }
        // What libpq means by `prefer` and `require`: encrypt, and accept any certificate.
        Ok(builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
            .with_no_client_auth())
    }

    fn roots(&self) -> Result<RootCertStore> {
        let fault = |message: String| Error::new(ErrorKind::Mismatch, "connect", "tls_roots", message);
        let file = self.file().ok_or_else(|| {
            fault("no certificates found to verify the server by; name a file with sslrootcert".to_owned())
        })?;
        let mut roots = RootCertStore::empty();
        let certificates = CertificateDer::pem_file_iter(file)
            .map_err(|error| fault(format!("{file} cannot be read as PEM certificates")).with_source(error))?;
        roots.add_parsable_certificates(certificates.flatten());
        if roots.is_empty() {
            return Err(fault(format!("{file} holds no certificate")));
        }
        Ok(roots)
    }
}

/// Accepts any certificate, but still checks that the peer holds its key.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verification_is_taken_out_of_the_url() {
        let (url, wish) =
            TlsOptions::take_from("postgres://h/d?sslmode=verify-full&sslrootcert=%2Fca.pem&connect_timeout=3");
        assert_eq!(url, "postgres://h/d?connect_timeout=3");
        assert!(wish.verify);
        assert_eq!(wish.root_file.as_deref(), Some("/ca.pem"));
        let (url, wish) = TlsOptions::take_from("host=h sslmode=verify-full dbname=d");
        assert_eq!((url.as_str(), wish.verify), ("host=h dbname=d", true));
    }

    #[test]
    fn a_bad_url_is_a_mismatch_without_the_password() {
        let error = Target::parse(&PostgresConfig::new("postgres://u:hunter2@h:port/d")).err().expect("refused");
        assert_eq!(error.code(), "store_url_invalid");
        assert!(!format!("{error} {error:?}").contains("hunter2"));
        let error = Target::parse(&PostgresConfig::new("postgres://u:se@hunter2@h/d")).err().expect("refused");
        assert!(error.message().contains("%40") && !format!("{error} {error:?}").contains("hunter2"), "{error}");
    }
}
