//! Tests of the fixtures: real servers start, stop, and never outlive us.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use postbox_testkit::servers::{PgBouncer, Postgres, PrivatePostgres, Settings, Version};
use tokio_postgres::{Client, NoTls};

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the server answers");
    tokio::spawn(connection);
    client
}

async fn setting(client: &Client, name: &str) -> String {
    client.query_one("SELECT current_setting($1)", &[&name]).await.expect("a setting").get(0)
}

#[tokio::test]
async fn both_versions_are_what_they_say() {
    for version in Version::ALL {
        let url = Postgres::shared(version).await.fresh_database().await;
        let number = setting(&connect(&url).await, "server_version_num").await;
        assert_eq!(number.parse::<u32>().expect("a number") / 10_000, version.number());
    }
}

#[tokio::test]
async fn the_pooler_shares_few_connections_among_many_clients() {
    let postgres = Postgres::shared(Version::V15).await;
    let database = postgres.fresh_database().await;
    let pooler = PgBouncer::start(&postgres).await;
    let clients = futures::future::join_all((0..20).map(|_| async {
        let (client, connection) = tokio_postgres::connect(&pooler.url(&database), NoTls).await.expect("a client");
        tokio::spawn(connection);
        let row = client.query_typed("SELECT pg_backend_pid()", &[]).await.expect("a pid");
        row[0].get::<_, i32>(0)
    }));
    let pids: std::collections::HashSet<i32> = clients.await.into_iter().collect();
    assert!(pids.len() <= 4, "{} server connections", pids.len());
}

#[tokio::test]
async fn dropping_stops_the_server_and_removes_its_data() {
    let server = PrivatePostgres::launch(Version::V15, Settings::durable()).await;
    let client = connect(&server.url()).await;
    assert_eq!(setting(&client, "fsync").await, "on");
    let data = PathBuf::from(setting(&client, "data_directory").await);
    assert!(data.exists());
    drop(server);
    assert!(!data.exists());
}

/// Not a real test: the next test starts and kills it.
#[tokio::test]
async fn a_process_that_waits_to_be_killed() {
    let Some(report) = std::env::var_os("POSTBOX_TESTKIT_VICTIM") else { return };
    let server = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let client = connect(&server.url()).await;
    let data = setting(&client, "data_directory").await;
    let partial = PathBuf::from(&report).with_extension("partial");
    std::fs::write(&partial, data).expect("written");
    std::fs::rename(&partial, &report).expect("reported");
    std::future::pending::<()>().await;
}

#[test]
fn killing_the_test_process_stops_its_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let report = folder.path().join("data");
    let mut victim = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "a_process_that_waits_to_be_killed"])
        .env("POSTBOX_TESTKIT_VICTIM", &report)
        .spawn()
        .expect("this test starts again");
    wait_until("the server to run", || report.exists());
    let data = PathBuf::from(std::fs::read_to_string(&report).expect("the report"));
    assert!(data.join("postmaster.pid").exists());
    victim.kill().expect("killed");
    victim.wait().expect("dead");
    wait_until("the server to be gone", || !data.exists());
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
