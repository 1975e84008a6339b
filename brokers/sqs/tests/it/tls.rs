//! Connections over `https://`.

use std::sync::Arc;
use std::time::Duration;

use postbox_config::SinkConfig as _;
use postbox_sqs::SqsSinkTable;
use postbox_testkit::sending::{context, deliver, numbered, table};
use postbox_testkit::servers::listen_anywhere;
use rustls::pki_types::PrivateKeyDer;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use crate::support::{Broker, queue_keys, said, sink, unique};

/// Starts TLS in front of the server. Returns its port.
fn tls(server: &str, certificate: &rcgen::Certificate, key: &rcgen::KeyPair) -> (u16, AbortOnDropHandle<()>) {
    let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .expect("they fit");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::from_std(listen_anywhere().expect("a port")).expect("listening");
    let port = listener.local_addr().expect("an address").port();
    let upstream = server.trim_start_matches("http://").to_owned();
    let serve = async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, upstream) = (acceptor.clone(), upstream.clone());
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let Ok(mut server) = TcpStream::connect(upstream).await else { return };
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut server).await;
            });
        }
    };
    (port, AbortOnDropHandle::new(tokio::spawn(serve)))
}

#[tokio::test]
async fn only_a_server_with_a_trusted_certificate_gets_events() {
    let broker = Broker::shared().await;
    let queue = broker.queue(&unique("events")).await;
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(["localhost".to_owned()]).expect("a name");
    let certificate = params.self_signed(&key).expect("a certificate");
    let (port, _serving) = tls(&broker.url, &certificate, &key);
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path
    };
    let keys = queue_keys(&queue, &format!("https://localhost:{port}"));
    let with = |path: &std::path::Path| keys.replace("aws = { ", &format!("aws = {{ ca_file = {path:?}, "));
    let trusting = with(&file("ca.pem", &certificate.pem()));
    assert_eq!(said(&deliver(&sink(&trusting).await, &numbered(2)).await), ["delivered"; 2]);
    let refused = deliver(&sink(&keys).await, &numbered(2)).await;
    assert_eq!(said(&refused), ["unavailable tls_failed"; 2], "{refused:?}");
    assert_eq!(broker.remaining(&queue).await, 2);
    for path in [
        file("empty.pem", ""),
        file("broken.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        "/nonexistent/ca.pem".into(),
    ] {
        let wrong = with(&path);
        let error = table::<SqsSinkTable>(&wrong).build(&context(Duration::from_secs(5))).await.err().expect("a fault");
        assert_eq!(error.code(), "ca_file_invalid", "{path:?}");
    }
}
