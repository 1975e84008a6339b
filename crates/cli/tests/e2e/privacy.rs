//! What other users of the machine and the network may see.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::env::{FILE_SINK, Kind, TestEnv, get, get_as, http_sink};
use crate::sender::partner;

#[tokio::test]
async fn what_is_made_is_for_its_owner_alone() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    env.ok(&["init"])?;
    env.ok(&["migrate", "up"])?;
    let mode = |name: &str| Ok::<_, std::io::Error>(std::fs::metadata(env.path(name))?.permissions().mode() & 0o777);
    ensure!(mode("postbox.toml")? == 0o600, "{:o}", mode("postbox.toml")?);
    env.config(FILE_SINK)?;
    env.insert_three().await?;
    let served = env.serve().await?;
    for name in ["postbox.db", "postbox.db-wal", "postbox.db-shm"] {
        ensure!(mode(name)? == 0o600, "{name} {:o}", mode(name)?);
    }
    served.terminate().await?;
    env.dispatch(&[])?;
    ensure!(env.lines("out.jsonl")?.len() == 3 && mode("out.jsonl")? == 0o600, "{:o}", mode("out.jsonl")?);
    // A file that its owner opened for others stays so.
    std::fs::set_permissions(env.path("out.jsonl"), std::fs::Permissions::from_mode(0o640))?;
    env.insert_three().await?;
    env.dispatch(&[])?;
    ensure!(env.lines("out.jsonl")?.len() == 6 && mode("out.jsonl")? == 0o640);
    Ok(())
}

#[tokio::test]
async fn with_a_status_token_strangers_learn_only_whether_it_is_ready() -> Result<()> {
    const TOKEN: &str = "5f1c9d2ab37e4860";
    // A destination that is down, so that there is a reason to hide.
    let server = "[server]\nlisten = \"127.0.0.1:0\"\nstatus_token = \"env:POSTBOX_STATUS_TOKEN\"\n";
    let env =
        TestEnv::with(Kind::Sqlite, &format!("[subscriptions.out]\n{}{server}", http_sink("http://127.0.0.1:1/")))
            .await?;
    env.insert_three().await?;
    let served = env.serve_with(&[("POSTBOX_STATUS_TOKEN", TOKEN)]).await?;
    served.logged("connect_refused", 1).await?;
    let right = format!("authorization: Bearer {TOKEN}\r\n");
    let wrong = [
        String::new(),
        "authorization: Bearer \r\n".into(),
        format!("authorization: Bearer {TOKEN}0\r\n"),
        format!("authorization: Bearer {}\r\n", &TOKEN[1..]),
        format!("authorization: Basic {TOKEN}\r\n"),
    ];
    for wrong in &wrong {
        for path in ["/metrics", "/status"] {
            let page = get(&served.address, path, wrong).await?;
            ensure!(page.starts_with("HTTP/1.1 401") && page.contains("www-authenticate: Bearer"), "{page}");
            ensure!(!page.contains("postbox_") && !page.contains("breaker"), "{page}");
        }
        let ready = get(&served.address, "/readyz", wrong).await?;
        ensure!(ready.starts_with("HTTP/1.1 503") && !ready.contains("breaker") && !ready.contains("out"), "{ready}");
        ensure!(get(&served.address, "/healthz", wrong).await?.ends_with("ok\n"));
    }
    ensure!(get(&served.address, "/metrics", &right).await?.contains("postbox_delivered_total"));
    ensure!(get(&served.address, "/readyz", &right).await?.contains("out: the breaker has been open"));
    ensure!(get(&served.address, "/status", &right).await?.contains("\"subscription\":\"out\""));
    // Without the token, a person must not take what is not known for what is well.
    let here = server.replace("127.0.0.1:0", &served.address);
    env.config(&format!("[subscriptions.out]\n{}{here}", http_sink("http://127.0.0.1:1/")))?;
    let doctor = env.output(&["doctor"])?;
    let said = String::from_utf8(doctor.stdout)?;
    ensure!(doctor.status.code() == Some(1) && said.contains("refuses to say how it is"), "{said}");
    let log = served.terminate().await?;
    ensure!(log.iter().all(|line| !line.contains(TOKEN)), "{log:#?}");
    Ok(())
}

/// A page in the operator's browser can have its name lead to this machine, and asks under it.
#[tokio::test]
async fn without_a_token_web_pages_learn_only_whether_it_is_ready() -> Result<()> {
    for address in ["127.0.0.1", "[::ffff:127.0.0.1]"] {
        learns_only_whether_it_is_ready(address).await.context(address)?;
    }
    Ok(())
}

async fn learns_only_whether_it_is_ready(address: &'static str) -> Result<()> {
    let server = format!("[server]\nlisten = \"{address}:0\"\n");
    let http = http_sink("http://127.0.0.1:1/");
    let env = TestEnv::with(Kind::Sqlite, &format!("[subscriptions.out]\n{http}{server}")).await?;
    env.insert_three().await?;
    let served = env.serve_with(&[]).await?;
    served.logged("connect_refused", 1).await?;
    for path in ["/metrics", "/status", "/high-water-marks"] {
        let page = get_as("rebound.example:8600", &served.address, path, "").await?;
        ensure!(page.starts_with("HTTP/1.1 421") && page.contains("set server.status_token"), "{page}");
        for host in ["127.0.0.1:8600", "[::1]:8600", "LOCALHOST"] {
            ensure!(get_as(host, &served.address, path, "").await?.starts_with("HTTP/1.1 200"), "{host}{path}");
        }
    }
    let ready = get_as("rebound.example", &served.address, "/readyz", "").await?;
    ensure!(ready.starts_with("HTTP/1.1 503") && !ready.contains("breaker"), "{ready}");
    ensure!(get_as("rebound.example", &served.address, "/healthz", "").await?.ends_with("ok\n"));
    served.terminate().await?;
    Ok(())
}

#[tokio::test]
async fn risks_are_warned_of_once_and_without_a_password() -> Result<()> {
    let env = TestEnv::on(Kind::Postgres, "postgres://u:hunter2@db.invalid/d".into())?;
    env.config("")?;
    let output = env.output(&["dispatch"])?;
    let printed = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1) && !printed.contains("hunter2"), "{printed}");
    ensure!(printed.matches("sslmode=verify-full").count() == 1 && printed.contains("WARN"), "{printed}");
    let checked = env.ok(&["check-config"])?;
    ensure!(checked.contains("postbox.toml:2: warning: ") && checked.contains("sslmode=verify-full"), "{checked}");
    ensure!(!checked.contains("hunter2"), "{checked}");

    for address in ["0.0.0.0", "[::ffff:0.0.0.0]"] {
        warns_that_it_is_open_to_all(address).await.context(address)?;
    }
    Ok(())
}

async fn warns_that_it_is_open_to_all(address: &'static str) -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, &format!("{}[server]\nlisten = \"{address}:0\"\n", partner())).await?;
    let mut child = env.spawn(&["run"])?;
    let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    let mut warnings = 0;
    while let Some(line) = lines.next_line().await? {
        warnings += usize::from(line.contains("WARN") && line.contains("listens_everywhere"));
        if line.contains("postbox serves") {
            let store = env.path("postbox.db");
            ensure!(line.contains(&store.display().to_string()), "it does not name its store: {line}");
            break;
        }
    }
    ensure!(warnings == 1, "{warnings}");
    ensure!(env.ok(&["check-config"])?.contains("warning: server.listen: "));
    child.kill().await?;
    Ok(())
}
