//! `rediss://`, against Redis 7 (the wheel's Valkey has no TLS).

use std::fs;
use std::path::PathBuf;

use postbox_config::TlsTable;
use postbox_core::Result;
use postbox_redis::{RedisSink, RedisSinkConfig};
use postbox_testkit::servers::{PrivateRedis, RedisKind, listen_anywhere};
use postbox_testkit::tls::self_signed;

use super::support::LOOK;
use super::{PATIENCE, codes, deliver, numbered};

/// Starts a server that asks clients for this certificate. Returns the port for TLS, too.
async fn server([cert_file, key_file]: &[PathBuf; 2]) -> (PrivateRedis, u16) {
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
    (PrivateRedis::launch_with(RedisKind::Redis7, &arguments).await, port)
}

fn sink_to(port: u16, tls: TlsTable) -> Result<RedisSink> {
    let url = format!("rediss://localhost:{port}");
    let config = RedisSinkConfig { url, tls: Some(tls), ..RedisSinkConfig::default() };
    RedisSink::new(&config, PATIENCE, 1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_server_with_a_trusted_certificate_gets_events() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = self_signed(folder.path());
    let (_server, port) = server(&files).await;
    let [cert_file, key_file] = files;
    let sink = |tls: TlsTable| sink_to(port, tls);
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewed_files_are_used_by_the_next_connection() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = self_signed(folder.path());
    let (mut server, port) = server(&files).await;
    let [cert, key] = files.map(Some);
    let sink = sink_to(port, TlsTable { ca_file: cert.clone(), client_cert: cert, client_key: key }).expect("a sink");
    let outcome = async || codes(&deliver(&sink, &numbered(1)).await);
    assert_eq!(outcome().await, ["delivered"]);
    server.kill();
    while sink.is_connected() {
        tokio::time::sleep(LOOK).await;
    }
    let [_, key_file] = self_signed(folder.path());
    fs::write(&key_file, "half of it").expect("written");
    assert_eq!(outcome().await, ["unavailable tls_invalid"]);
    self_signed(folder.path());
    server.start().await;
    assert_eq!(outcome().await, ["delivered"]);
}
