//! A server whose certificate is checked.

use std::time::Duration;

use postbox_core::Migrate as _;
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::servers::{PrivatePostgres, Settings, Version};
use tokio_postgres::Client;

use crate::support;

/// Returns the certificate of a new authority.
async fn certified(client: &Client) -> String {
    let [key, of_server] = [(); 2].map(|()| rcgen::KeyPair::generate().expect("a key"));
    let mut params = rcgen::CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = params.self_signed(&key).expect("signed").pem();
    let issuer = rcgen::Issuer::new(params, key);
    let params = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).expect("a name");
    let certificate = params.signed_by(&of_server, &issuer).expect("signed").pem();
    for (file, pem) in [("server.crt", certificate), ("server.key", of_server.serialize_pem())] {
        // The server accepts only a key of its own user.
        let copy = format!(
            "COPY (SELECT unnest(string_to_array($pem${pem}$pem$, chr(10)))) TO PROGRAM 'umask 077; cat > {file}'"
        );
        client.batch_execute(&copy).await.expect("written");
    }
    for sql in ["ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()"] {
        client.batch_execute(sql).await.expect("read again");
    }
    authority
}

/// Waits until the store's new connections end with this code; `""` if they are made.
async fn until(client: &Client, store: &PostgresStore, code: &str) {
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'postbox'";
    let mut said = String::new();
    let wait = async {
        loop {
            client.batch_execute(end).await.expect("closed");
            said = store.validate().await.map_or_else(|error| error.code().to_owned(), |_| String::new());
            if said == code {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), wait).await;
    assert!(waited.is_ok(), "not {code:?}, but {said:?}");
}

/// A service runs longer than an authority's certificate is valid.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_authority_needs_no_restart() {
    let postgres = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let url = postgres.fresh_database().await;
    support::migrated(PostgresConfig::new(&url)).await;
    let client = support::client(&url).await;
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), certified(&client).await).expect("written");
    let config = PostgresConfig::new(format!("{url}?sslmode=verify-full&sslrootcert={}", file.path().display()));
    let store = PostgresStore::new(config).expect("a store");
    until(&client, &store, "").await;
    let renewed = certified(&client).await;
    until(&client, &store, "store_certificate_invalid").await;
    std::fs::write(file.path(), renewed).expect("written");
    until(&client, &store, "").await;
    // The old authorities stay in use.
    std::fs::write(file.path(), "half of a fi").expect("written");
    until(&client, &store, "").await;
}
