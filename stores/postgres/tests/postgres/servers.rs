//! Several servers in one URL: one that says nothing does not hide the others.

use std::net::TcpListener;
use std::time::Duration;

use postbox_core::{Append as _, ErrorKind, LogName, NewEvent};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::servers::{Postgres, Version};
use tokio::time::timeout;

use crate::support;

/// Far longer than five seconds, in which a connection is made or given up, and far shorter than
/// the time that a silent server would take with [`patient`].
const LIMIT: Duration = Duration::from_secs(60);

/// A server that accepts connections, as its kernel does by itself, and never answers.
fn silent() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    (listener, port)
}

/// The URL with a server before, and one behind, the one that it names.
fn among(before: u16, url: &str, behind: u16) -> String {
    let (user, rest) = url.split_once('@').expect("a user");
    let (server, database) = rest.split_once('/').expect("a database");
    format!("{user}@127.0.0.1:{before},{server},127.0.0.1:{behind}/{database}")
}

fn patient(url: &str) -> PostgresConfig {
    PostgresConfig { connect_timeout: 10 * LIMIT, ..PostgresConfig::new(url) }
}

async fn connected(config: PostgresConfig) -> PostgresStore {
    timeout(LIMIT, PostgresStore::connect(config)).await.expect("no long wait").expect("a store")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_does_not_hide_the_next_one() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    support::migrated(PostgresConfig::new(&url)).await;
    let ((_before, before), (_behind, behind)) = (silent(), silent());
    let listed = among(before, &url, behind);
    let store = connected(patient(&listed)).await;
    store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect("appended");
    for options in ["?target_session_attrs=read-write", "?load_balance_hosts=random"] {
        connected(patient(&format!("{listed}{options}"))).await;
    }
    // The connection that listens is none of the pool's.
    let listening = PostgresConfig { notify: true, listen_url: Some(listed), ..PostgresConfig::new(&url) };
    let store = connected(listening).await;
    let client = support::client(&url).await;
    let _lease = support::leased(&store, "reader").await;
    support::until_listening(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_says_what_each_server_did() {
    let ((_first, first), (_last, last)) = (silent(), silent());
    let config = PostgresConfig::new(among(first, "postgres://u:hunter2@127.0.0.1:1/d", last));
    let error = timeout(LIMIT, PostgresStore::connect(PostgresConfig { connect_timeout: LIMIT / 60, ..config }));
    let error = error.await.expect("bounded").expect_err("nobody answers");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "store_unreachable"), "{error}");
    let (what, cure) = error.message().split_once("; ").expect("a cure");
    let silent = |port: u16| format!("127.0.0.1:{port}: no answer in time");
    assert!(what.ends_with(&format!(", {}]", silent(last))) && what.contains(&silent(first)), "{what}");
    assert!(what.contains(", 127.0.0.1:1: Connection refused") && !format!("{error:?}").contains("hunter2"), "{what}");
    assert!(cure.contains("is it running"), "{cure}");
}

/// A standby beside a primary that is down: the reason that nobody accepts writes is shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_writes_does_not_hide_that_another_is_down() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let (user, rest) = url.split_once('@').expect("a user");
    let url = format!("{user}@127.0.0.1:1,{rest}");
    let url = format!("{url}?target_session_attrs=read-write&options=-c%20default_transaction_read_only%3Don");
    let error = timeout(LIMIT, PostgresStore::connect(PostgresConfig::new(url))).await.expect("bounded");
    let error = error.expect_err("refused");
    assert_eq!(error.code(), "store_read_only", "{error}");
    let (what, cure) = error.message().split_once("; ").expect("a cure");
    assert!(what.contains("[127.0.0.1:1: Connection refused") && what.contains("does not allow writes]"), "{what}");
    assert!(cure.starts_with("the primary may be down or restarting"), "{cure}");
}

/// A server that is being rebuilt beside a primary that is away: nobody has to create a database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_the_database_does_not_hide_that_another_is_away() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let (_server, port) = silent();
    for away in [port, 1] {
        let config = PostgresConfig::new(format!("{}_missing", among(away, &url, away)));
        let error = timeout(LIMIT, PostgresStore::connect(PostgresConfig { connect_timeout: LIMIT / 60, ..config }));
        let error = error.await.expect("bounded").expect_err("no database");
        assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "store_unreachable"), "{error}");
        assert!(error.message().contains("does not exist"), "{error}");
    }
    let error = PostgresStore::connect(PostgresConfig::new(format!("{url}_missing"))).await.expect_err("no database");
    assert_eq!(error.code(), "database_missing", "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_url_may_say_how_long_a_connection_may_take() {
    let (_server, port) = silent();
    let url = format!("postgres://u@127.0.0.1:{port}/d?connect_timeout=1");
    let error = timeout(LIMIT, PostgresStore::connect(patient(&url))).await.expect("a second, not ten minutes");
    assert_eq!(error.expect_err("no answer").code(), "store_unreachable");
}
