//! HTTPS with a private certificate authority, without any process-wide provider.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use postbox_http::{ClientCert, HttpSink, HttpSinkConfig};
use postbox_testkit::clock::ManualClock;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::stand::{StillClock, config, plain, send, short};

/// A certificate authority.
struct Authority {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    /// Its certificate as a file.
    file: tempfile::NamedTempFile,
    der: CertificateDer<'static>,
}

impl Authority {
    fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        let file = file_of(&certificate.pem());
        Self { issuer: rcgen::Issuer::new(params, key), file, der: certificate.der().clone() }
    }

    fn certify(&self, name: &str) -> (rcgen::Certificate, rcgen::KeyPair) {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }

    /// Returns a certificate and its key as files.
    fn client_cert(&self) -> (ClientCert, [tempfile::NamedTempFile; 2]) {
        let (certificate, key) = self.certify("postbox");
        let files = [file_of(&certificate.pem()), file_of(&key.serialize_pem())];
        let [cert_file, key_file] = [&files[0], &files[1]].map(|file| file.path().to_owned());
        (ClientCert { cert_file, key_file }, files)
    }

    /// Returns a server's settings with a certificate for `name`. With `clients`, only clients that
    /// it certified may connect.
    fn server(&self, name: &str, clients: Option<&Self>) -> ServerConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let builder = match clients {
            None => builder.unwrap().with_no_client_auth(),
            Some(authority) => {
                let mut roots = RootCertStore::empty();
                roots.add(authority.der.clone()).unwrap();
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
                builder.unwrap().with_client_cert_verifier(verifier)
            }
        };
        let (certificate, key) = self.certify(name);
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        builder.with_single_cert(vec![certificate.der().clone()], key).unwrap()
    }
}

fn file_of(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

/// Serves one raw answer per connection on loopback. Returns the port.
async fn raw_server(config: ServerConfig) -> u16 {
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut stream = match acceptor.accept(stream).into_fallible().await {
                    Ok(stream) => stream,
                    Err((_, mut refused)) => {
                        // If it were closed with unread bytes, the connection would be reset and
                        // the alert lost.
                        let _ = refused.shutdown().await;
                        let _ = tokio::io::copy(&mut refused, &mut tokio::io::sink()).await;
                        return;
                    }
                };
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(b"HTTP/1.1 204 No\r\nconnection: close\r\n\r\n").await;
                let _ = stream.shutdown().await;
            });
        }
    });
    port
}

/// Starts a server with a certificate for `name`. Returns its port, and the authority's certificate
/// as a file.
async fn tls_target(name: &str) -> (u16, tempfile::NamedTempFile) {
    let authority = Authority::new();
    (raw_server(authority.server(name, None)).await, authority.file)
}

fn https(host: &str, port: u16, ca: Option<&tempfile::NamedTempFile>) -> HttpSinkConfig {
    // TLS must still use the name, although the connection goes to a checked address.
    HttpSinkConfig { ca_file: ca.map(|file| file.path().to_owned()), ..config(format!("https://{host}:{port}/hook")) }
}

async fn outcome(config: HttpSinkConfig) -> (String, String) {
    let outcome = send(&HttpSink::new(config, Arc::new(StillClock)).unwrap(), &plain(1)).await;
    let (kind, code) = short(&outcome);
    (kind.to_owned(), code.to_owned())
}

#[tokio::test]
async fn a_private_authority_is_trusted_when_it_is_given_and_only_for_its_names() {
    assert!(rustls::crypto::CryptoProvider::get_default().is_none());
    let (port, ca) = tls_target("localhost").await;
    assert_eq!(outcome(https("localhost", port, Some(&ca))).await.0, "delivered");
    let refused = ("unavailable".to_owned(), "tls_failed".to_owned());
    // The certificate is for the name, not for the address.
    assert_eq!(outcome(https("127.0.0.1", port, Some(&ca))).await, refused);
    let (_, other) = tls_target("localhost").await;
    assert_eq!(outcome(https("localhost", port, Some(&other))).await, refused);
    assert!(rustls::crypto::CryptoProvider::get_default().is_none(), "nobody installed a provider");
}

#[tokio::test]
async fn without_the_authority_s_certificate_nothing_is_sent() {
    let (port, _) = tls_target("localhost").await;
    match HttpSink::new(https("localhost", port, None), Arc::new(StillClock)) {
        Ok(sink) => assert_eq!(short(&send(&sink, &plain(1)).await), ("unavailable", "tls_failed")),
        // A machine without any certificates reports this when the sink is built.
        Err(error) => assert_eq!(error.code(), "tls_roots_missing"),
    }
}

#[tokio::test]
async fn a_plain_answer_to_a_tls_greeting_is_a_tls_failure() {
    let (url, _) = crate::stand::raw_target(|_| async {}).await;
    let port = url.rsplit(':').next().unwrap().parse().unwrap();
    let (_, ca) = tls_target("localhost").await;
    // The server waits for a head that never comes until the client gives up.
    let config = HttpSinkConfig { connect_timeout: Duration::from_millis(300), ..https("localhost", port, Some(&ca)) };
    assert_eq!(outcome(config).await.0, "unavailable");
}

#[tokio::test]
async fn a_target_that_asks_for_a_client_certificate_gets_ours() {
    let (authority, of_clients) = (Authority::new(), Authority::new());
    let port = raw_server(authority.server("localhost", Some(&of_clients))).await;
    let target = https("localhost", port, Some(&authority.file));
    let (ours, _files) = of_clients.client_cert();
    let known = HttpSinkConfig { client_cert: Some(ours.clone()), ..target.clone() };
    known.check_files().expect("they fit");
    assert_eq!(outcome(known).await.0, "delivered");
    // No certificate, and one from another authority.
    let (strange, _files) = Authority::new().client_cert();
    for (client_cert, code) in [(None, "client_cert_required"), (Some(strange), "client_cert_refused")] {
        let sink = HttpSink::new(HttpSinkConfig { client_cert, ..target.clone() }, Arc::new(StillClock)).unwrap();
        let outcome = send(&sink, &plain(1)).await;
        assert_eq!(short(&outcome), ("unavailable", code), "{outcome:?}");
    }
    // Files that do not belong together, are missing or contain no key are reported by name when
    // the sink is built.
    let (other, _files) = of_clients.client_cert();
    let ClientCert { cert_file, key_file } = ours;
    for wrong in [
        ClientCert { cert_file: cert_file.clone(), key_file: other.key_file },
        ClientCert { cert_file: cert_file.clone(), key_file: "/nonexistent/key.pem".into() },
        ClientCert { cert_file: cert_file.clone(), key_file: cert_file.clone() },
        ClientCert { cert_file: key_file.clone(), key_file },
    ] {
        let config = HttpSinkConfig { client_cert: Some(wrong.clone()), ..target.clone() };
        let early = config.check_files().expect_err("refused without a sink too");
        let error = HttpSink::new(config, Arc::new(StillClock)).err().expect("refused");
        assert_eq!((error.code(), error.message()), ("client_cert_invalid", early.message()));
        let named = [&wrong.cert_file, &wrong.key_file].map(|file| file.display().to_string());
        assert!(named.iter().any(|file| error.message().contains(file)), "{}", error.message());
        assert!(!error.message().contains("PRIVATE KEY"));
    }
}

#[tokio::test]
async fn renewed_files_are_used_without_a_restart() {
    let (authority, of_clients) = (Authority::new(), Authority::new());
    let port = raw_server(authority.server("localhost", Some(&of_clients))).await;
    let (ours, files) = Authority::new().client_cert();
    let (renewed, _renewed_files) = of_clients.client_cert();
    let target = https("localhost", port, Some(&authority.file));
    let clock = Arc::new(ManualClock::default());
    let sink = HttpSink::new(HttpSinkConfig { client_cert: Some(ours), ..target }, clock.clone()).unwrap();
    let refused = ("unavailable", "client_cert_refused");
    let renew = |file: &tempfile::NamedTempFile, from: &std::path::Path| {
        std::fs::copy(from, file.path()).unwrap();
        // A fast machine writes both versions within one tick of the file system's clock.
        file.as_file().set_modified(SystemTime::now() + Duration::from_secs(60)).unwrap();
    };
    assert_eq!(short(&send(&sink, &plain(1)).await), refused);
    // A certificate without its key is unusable, and the old pair stays in use.
    renew(&files[0], &renewed.cert_file);
    clock.advance(Duration::from_secs(10));
    assert_eq!(short(&send(&sink, &plain(1)).await), refused);
    renew(&files[1], &renewed.key_file);
    clock.advance(Duration::from_secs(9));
    assert_eq!(short(&send(&sink, &plain(1)).await), refused, "too early to look again");
    clock.advance(Duration::from_secs(1));
    assert_eq!(short(&send(&sink, &plain(1)).await), ("delivered", ""));
}

/// Over HTTP/2 the connection would stay in use, and every later request would go to the same peer
/// that does not answer.
#[tokio::test]
async fn http_1_is_spoken_and_a_request_without_answer_ends_its_connection() {
    let authority = Authority::new();
    let mut server = authority.server("localhost", None);
    server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(server));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        for connection in 0.. {
            let mut stream = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
            tokio::spawn(async move {
                let (mut read, mut heads) = ([0; 4_096], 0);
                loop {
                    let bytes = match stream.read(&mut read).await {
                        Ok(length @ 1..) => &read[..length],
                        _ => return,
                    };
                    let is_head = bytes.windows(4).any(|four| four == b"\r\n\r\n");
                    heads += usize::from(is_head);
                    // The first connection answers once.
                    if is_head && (connection > 0 || heads == 1) {
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
                    }
                }
            });
        }
    });
    let config = HttpSinkConfig { timeout: Duration::from_secs(1), ..https("localhost", port, Some(&authority.file)) };
    let sink = HttpSink::new(config, Arc::new(StillClock)).unwrap();
    assert_eq!(short(&send(&sink, &plain(1)).await).0, "delivered");
    assert_eq!(short(&send(&sink, &plain(2)).await), ("ambiguous", "timeout"));
    assert_eq!(short(&send(&sink, &plain(2)).await).0, "delivered");
}

#[tokio::test]
async fn connecting_says_what_would_be_in_the_way() {
    let (authority, of_clients) = (Authority::new(), Authority::new());
    let port = raw_server(authority.server("localhost", None)).await;
    let right = https("localhost", port, Some(&authority.file));
    let found = right.connect().await.expect("reached");
    assert!(found.starts_with("localhost is reached at") && found.ends_with("TLS"), "{found}");
    let wants_ours = raw_server(authority.server("localhost", Some(&of_clients))).await;
    let wants_ours = https("localhost", wants_ours, Some(&authority.file));
    let (ours, _files) = of_clients.client_cert();
    let (strange, _other_files) = Authority::new().client_cert();
    HttpSinkConfig { client_cert: Some(ours), ..wants_ours.clone() }.connect().await.expect("reached");
    let (plain, _) = crate::stand::raw_target(|_| async {}).await;
    let plain = plain.rsplit(':').next().unwrap().parse().unwrap();
    let short = Duration::from_millis(300);
    for (config, code, cure) in [
        (https("localhost", port, Some(&of_clients.file)), "tls_failed", "ca_file"),
        (https("127.0.0.1", port, Some(&authority.file)), "tls_failed", "correct the url"),
        (
            HttpSinkConfig { connect_timeout: short, ..https("localhost", plain, Some(&authority.file)) },
            "tls_failed",
            "does that port speak TLS",
        ),
        (wants_ours.clone(), "client_cert_required", "set client_cert"),
        (
            HttpSinkConfig { client_cert: Some(strange), ..wants_ours },
            "client_cert_refused",
            "refuses the client certificate",
        ),
        (config("http://nobody.invalid/"), "dns_failed", "correct the url"),
        (HttpSinkConfig { allow: Vec::new(), ..right }, "http_sink_invalid", "allow = "),
    ] {
        let error = config.connect().await.expect_err(code);
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(cure), "{error}");
    }
}
