//! Webhooks in: stored by `run`, seen by the same commands, applied by an HTTP handler.

use anyhow::{Result, ensure};
use jiff::Timestamp;
use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{SignKey, Signer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::room::{Kind, Room};

/// The secret of the published Standard Webhooks vectors.
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

async fn post(address: &str, id: &str, body: &str) -> Result<String> {
    let now = UnixSeconds(Timestamp::now().as_second());
    let signed = Signer::new([SignKey::parse(SECRET)?])?.sign(id, now, body.as_bytes())?;
    let mut request = "POST /in/partner HTTP/1.1\r\nhost: test\r\nconnection: close\r\n".to_owned();
    for (name, value) in signed.headers() {
        request += &format!("{name}: {value}\r\n");
    }
    request += &format!("content-length: {}\r\n\r\n{body}", body.len());
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer.split(' ').nth(1).unwrap_or_default().to_owned())
}

async fn inbox_rows_work_with_the_same_commands(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    // No sink yet: messages are stored and stay pending.
    let source = format!(
        "[subscriptions.apply]\nlog = \"inbox\"\nSINK\n[sources.partner]\ntype = \"webhook\"\nscheme = \"standard-webhooks\"\nsecrets = [\"{SECRET}\"]\n[server]\nlisten = \"127.0.0.1:0\"\n"
    );
    room.config(&source.replace("SINK", ""))?;
    let served = room.serve().await?;
    ensure!(post(&served.address, "msg_1", "{\"type\":\"invoice.paid\"}").await? == "202");
    ensure!(post(&served.address, "msg_1", "{\"type\":\"invoice.paid\"}").await? == "200");
    ensure!(post(&served.address, "msg_2", "{\"type\":\"invoice.sent\"}").await? == "202");
    served.terminate().await?;

    ensure!(room.ok(&["stats", "--subscription", "apply"])? == "pending=2 dispatched=0 dead=0 total=2\n");
    let listed = room.ok(&["list", "--state", "pending", "--subscription", "apply", "--json"])?;
    ensure!(listed.contains("invoice.paid"), "{listed}");
    room.config(&source.replace("SINK", "sink = { type = \"file\", path = \"applied.jsonl\" }"))?;
    ensure!(room.ok(&["dispatch"])? == "fetched=2 dispatched=2 failed=0 dead=0\n");
    ensure!(room.lines("applied.jsonl")?.len() == 2);
    Ok(())
}

#[tokio::test]
async fn on_sqlite_inbox_rows_work_with_the_same_commands() -> Result<()> {
    inbox_rows_work_with_the_same_commands(Kind::Sqlite).await
}

#[tokio::test]
async fn on_postgres_inbox_rows_work_with_the_same_commands() -> Result<()> {
    inbox_rows_work_with_the_same_commands(Kind::Postgres).await
}
