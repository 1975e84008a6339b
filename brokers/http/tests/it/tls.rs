//! HTTPS with a private authority, without any process-wide provider.

use std::io::Write;
use std::sync::Arc;

use postbox_http::{Guard, HttpSink, HttpSinkConfig};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::stand::{StillClock, config, plain, send, short};

/// A server with a certificate for `name`, made by an authority whose certificate is in the file. Gives its port.
async fn tls_target(name: &str) -> (u16, tempfile::NamedTempFile) {
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority_certificate = authority.self_signed(&authority_key).unwrap();
    let issuer = rcgen::Issuer::new(authority, authority_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();

    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(authority_certificate.pem().as_bytes()).unwrap();

    let server = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![certificate.der().clone()],
            PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
        )
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(server));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(b"HTTP/1.1 204 No\r\nconnection: close\r\n\r\n").await;
                let _ = stream.shutdown().await;
            });
        }
    });
    (port, file)
}

fn https(host: &str, port: u16, ca: Option<&tempfile::NamedTempFile>) -> HttpSinkConfig {
    // The guard is on: the name must be kept for TLS although the connection goes to a checked address.
    let allow = ["127.0.0.0/8", "::1/128"].map(|net| net.parse().unwrap()).to_vec();
    HttpSinkConfig {
        ca_file: ca.map(|file| file.path().to_owned()),
        guard: Guard::PublicOnly { allow },
        ..config(format!("https://{host}:{port}/hook"))
    }
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
        // A machine without any certificates says so when the sink is made.
        Err(error) => assert_eq!(error.code(), "tls_roots_missing"),
    }
}

#[tokio::test]
async fn a_plain_answer_to_a_tls_greeting_is_a_tls_failure() {
    let (url, _) = crate::stand::raw_target(|_| async {}).await;
    let port = url.rsplit(':').next().unwrap().parse().unwrap();
    let (_, ca) = tls_target("localhost").await;
    // The server waits for a head that never comes until the client gives up.
    let config = HttpSinkConfig {
        connect_timeout: std::time::Duration::from_millis(300),
        ..https("localhost", port, Some(&ca))
    };
    assert_eq!(outcome(config).await.0, "unavailable");
}
