//! What others on the machine and on the network may see.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::room::{Kind, Room};
use crate::sender::partner;

#[tokio::test]
async fn what_is_made_is_for_its_owner_alone() -> Result<()> {
    let room = Room::empty(Kind::Sqlite).await?;
    room.ok(&["init"])?;
    room.ok(&["migrate", "up"])?;
    let mode = |name: &str| Ok::<_, std::io::Error>(std::fs::metadata(room.path(name))?.permissions().mode() & 0o777);
    ensure!(mode("postbox.toml")? == 0o600, "{:o}", mode("postbox.toml")?);
    room.config("[subscriptions.out]\nsink = { type = \"file\", path = \"out.jsonl\" }\n")?;
    room.insert_three().await?;
    let served = room.serve().await?;
    for name in ["postbox.db", "postbox.db-wal", "postbox.db-shm"] {
        ensure!(mode(name)? == 0o600, "{name} {:o}", mode(name)?);
    }
    served.terminate().await?;
    room.dispatch(&[])?;
    ensure!(room.lines("out.jsonl")?.len() == 3 && mode("out.jsonl")? == 0o600, "{:o}", mode("out.jsonl")?);
    // What somebody has opened for others stays so.
    std::fs::set_permissions(room.path("out.jsonl"), std::fs::Permissions::from_mode(0o640))?;
    room.insert_three().await?;
    room.dispatch(&[])?;
    ensure!(room.lines("out.jsonl")?.len() == 6 && mode("out.jsonl")? == 0o640);
    Ok(())
}

async fn get(address: &str, path: &str, headers: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn with_a_status_token_strangers_learn_only_whether_it_is_ready() -> Result<()> {
    const TOKEN: &str = "5f1c9d2ab37e4860";
    let room = Room::migrated(Kind::Sqlite).await?;
    // A destination that is down, so that there is a reason to tell.
    room.config(
        "[subscriptions.out]\nsink = { type = \"http\", url = \"http://127.0.0.1:1/\", allow = [\"127.0.0.1\"] }\n\
         [server]\nlisten = \"127.0.0.1:0\"\nstatus_token = \"env:POSTBOX_STATUS_TOKEN\"\n",
    )?;
    room.insert_three().await?;
    let served = room.serve_with(&[("POSTBOX_STATUS_TOKEN", TOKEN)]).await?;
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
    ensure!(get(&served.address, "/readyz", &right).await?.contains("out: the breaker is open"));
    ensure!(get(&served.address, "/status", &right).await?.contains("\"subscription\":\"out\""));
    let log = served.terminate().await?;
    ensure!(log.iter().all(|line| !line.contains(TOKEN)), "{log:#?}");
    Ok(())
}

#[tokio::test]
async fn risks_are_warned_of_once_and_without_a_password() -> Result<()> {
    let room = Room::on(Kind::Postgres, "postgres://u:hunter2@db.invalid/d".into())?;
    room.config("")?;
    let output = room.output(&["run"])?;
    let told = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1) && !told.contains("hunter2"), "{told}");
    ensure!(told.matches("sslmode=verify-full").count() == 1 && told.contains("WARN"), "{told}");
    let checked = room.ok(&["check-config"])?;
    ensure!(checked.contains("postbox.toml:2: warning: ") && checked.contains("sslmode=verify-full"), "{checked}");
    ensure!(!checked.contains("hunter2"), "{checked}");

    let room = Room::migrated(Kind::Sqlite).await?;
    room.config(&partner().replace("127.0.0.1:0", "0.0.0.0:0"))?;
    let mut child = tokio::process::Command::from(room.command(&["run"]));
    let mut child = child.stderr(std::process::Stdio::piped()).kill_on_drop(true).spawn()?;
    let mut lines = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(child.stderr.take().expect("piped")));
    let mut warnings = 0;
    while let Some(line) = lines.next_line().await? {
        warnings += usize::from(line.contains("WARN") && line.contains("listens_everywhere"));
        if line.contains("postbox serves") {
            break;
        }
    }
    ensure!(warnings == 1, "{warnings}");
    ensure!(room.ok(&["check-config"])?.contains("warning: server.listen: "));
    child.kill().await?;
    Ok(())
}
