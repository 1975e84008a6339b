//! `rediss://`, against Redis 7 (the wheel's Valkey has no TLS).

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use postbox_config::TlsTable;
use postbox_redis::{RedisSink, RedisSinkConfig};
use postbox_testkit::servers::{PrivateRedis, RedisKind, listen_anywhere};

use super::{PATIENCE, codes, deliver, numbered};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_server_with_a_trusted_certificate_gets_events() {
    let folder = tempfile::tempdir().expect("a folder");
    // The server runs as another user and must read the files.
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("ours");
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(["localhost".to_owned()]).expect("a name");
    let certificate = params.self_signed(&key).expect("a certificate");
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("ours");
        path
    };
    let (cert_file, key_file) = (file("cert.pem", certificate.pem()), file("key.pem", key.serialize_pem()));
    let port = listen_anywhere().and_then(|listener| Ok(listener.local_addr()?.port())).expect("a port");
    let arguments = [
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        cert_file.to_str().expect("text"),
        "--tls-key-file",
        key_file.to_str().expect("text"),
        "--tls-ca-cert-file",
        cert_file.to_str().expect("text"),
    ];
    let _server = PrivateRedis::launch_with(RedisKind::Redis7, &arguments).await;
    let sink = |tls: TlsTable| {
        let url = format!("rediss://localhost:{port}");
        let config = RedisSinkConfig { url, tls: Some(tls), ..RedisSinkConfig::default() };
        RedisSink::new(&config, PATIENCE, 1)
    };
    let trusting = TlsTable { ca_file: Some(cert_file.clone()), ..TlsTable::default() };
    let ours = TlsTable { client_cert: Some(cert_file), client_key: Some(key_file), ..trusting.clone() };
    let outcome = async |tls: TlsTable| deliver(&sink(tls).expect("a sink"), &numbered(2)).await;
    assert_eq!(codes(&outcome(ours.clone()).await), ["delivered"]);
    let refused = outcome(TlsTable { ca_file: None, ..ours }).await;
    assert_eq!(codes(&refused), ["unavailable redis_connect_failed"]);
    assert!(format!("{refused:?}").contains("UnknownIssuer"), "{refused:?}");
    let refused = outcome(trusting).await;
    assert!(codes(&refused)[0].starts_with("unavailable "), "the server asks who we are: {refused:?}");
    let error = sink(TlsTable { ca_file: Some("/nonexistent/ca.pem".into()), ..TlsTable::default() });
    assert_eq!(error.expect_err("no such file").code(), "tls_invalid");
}
