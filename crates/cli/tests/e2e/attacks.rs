//! Attacks on the ingress without a key: genuine messages still get through, and memory, log and
//! stop time stay bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::future::join_all;
use jiff::Timestamp;
use postbox_webhook::UnixSeconds;
use postbox_webhook::plain::{self, Layout};
use postbox_webhook::standard::{SignKey, Signer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::env::{DEADLINE, Kind, Served, TestEnv, cases, get, until};
use crate::sender::{SECRET, partner};

const MIB: usize = 1024 * 1024;
/// Memory that an attack may cost beyond an idle service.
const MEMORY_MAX: usize = 64 * MIB;
/// A genuine message that waited for strangers takes longer: they are closed after 10 s, the
/// default of `header_timeout` and of `body_timeout`. Less would time the machine.
const KEPT_OUT: Duration = Duration::from_secs(5);
const TEXT_SECRET: &str = "0123456789abcdef0123456789abcdef";
const WELL_FORMED_HEX: &str = "sha256=00000000000000000000000000000000000000000000000000000000000000ff";

/// A Standard Webhooks source with the defaults, and a GitHub source as in the guide.
fn sources() -> String {
    let github = format!(
        "[sources.github]\ntype = \"webhook\"\nscheme = \"github\"\nsecrets = [\"{TEXT_SECRET}\"]\nbody_max = \"8MiB\"\n"
    );
    github + &partner()
}

/// Resident memory of a process, in bytes.
fn memory_bytes(pid: u32) -> Result<usize> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm"))?;
    Ok(statm.split(' ').nth(1).context("no resident pages")?.parse::<usize>()? * 4_096)
}

/// Well-formed headers that anybody can write, with the current time.
fn plausible(source: &str) -> String {
    match source {
        "github" => format!("x-hub-signature-256: {WELL_FORMED_HEX}\r\n"),
        _ => {
            let now = Timestamp::now().as_second();
            let signature = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
            format!("webhook-id: m\r\nwebhook-timestamp: {now}\r\nwebhook-signature: v1,{signature}\r\n")
        }
    }
}

fn head(source: &str, headers: &str, length: usize) -> String {
    format!("POST /in/{source} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{headers}\r\n")
}

/// Posts a genuine message on a new connection. Returns the status and the time it took.
async fn genuine(address: &str, source: &str, n: usize) -> Result<(u16, Duration)> {
    let body = format!("{{\"type\":\"a.b\",\"n\":{n},\"text\":\"{}\"}}", "x".repeat(2_000));
    let now = UnixSeconds(Timestamp::now().as_second());
    let headers: String = match source {
        "github" => {
            let layout = Layout { prefix: "sha256=".into(), ..Layout::new("x-hub-signature-256") };
            let signer = plain::Signer::new(plain::Secret::new(TEXT_SECRET)?, layout)?;
            let signed = signer.sign(now, body.as_bytes())?;
            let fields = signed.iter().map(|(name, value)| format!("{name}: {value}\r\n"));
            fields.chain(["x-github-event: push\r\n".to_owned()]).collect()
        }
        _ => {
            let signed = Signer::new([SignKey::parse(SECRET)?])?.sign(&format!("msg_{n}"), now, body.as_bytes())?;
            signed.headers().iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect()
        }
    };
    let began = Instant::now();
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all((head(source, &headers, body.len()) + &body).as_bytes()).await?;
    let mut line = [0; 12];
    timeout(DEADLINE, stream.read_exact(&mut line)).await.context("no answer")??;
    Ok((std::str::from_utf8(&line[9..])?.parse()?, began.elapsed()))
}

/// Starts a service that has stored some genuine messages, and measures its memory.
async fn started(source: &str) -> Result<(TestEnv, Served, usize)> {
    let env = TestEnv::with(Kind::Sqlite, &sources()).await?;
    let served = env.serve().await?;
    for n in 1..=20 {
        let (status, _) = genuine(&served.address, source, n).await?;
        ensure!(status == 202, "{status}");
    }
    let idle = memory_bytes(served.pid()?)?;
    Ok((env, served, idle))
}

/// Checks the memory limit of all these attacks.
fn ensure_bounded(served: &Served, idle: usize) -> Result<()> {
    let now = memory_bytes(served.pid()?)?;
    ensure!(now <= idle + MEMORY_MAX, "{} MiB more than idle", (now - idle) / MIB);
    Ok(())
}

/// Opens a connection, sends these bytes and keeps it open.
async fn send_and_stay(address: &str, bytes: &[u8]) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let _ = stream.write_all(bytes).await;
    Ok(stream)
}

/// Sends all but the last byte of a body and keeps the connection open; starts again when it is
/// closed.
async fn withhold(address: String, source: &str, length: usize, there: &AtomicUsize) {
    let body = vec![b'x'; length - 1];
    let mut first = true;
    loop {
        if let Ok(mut stream) = TcpStream::connect(&address).await {
            let _ = stream.write_all(head(source, &plausible(source), length).as_bytes()).await;
            let _ = stream.write_all(&body).await;
            if std::mem::take(&mut first) {
                there.fetch_add(1, Ordering::Relaxed);
            }
            let _ = stream.read(&mut [0; 64]).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Attacks with one more body than the buffer holds, each one byte short of its end.
async fn bodies_are_withheld(source: &'static str, strangers: usize, length: usize) -> Result<()> {
    let (_env, served, idle) = started(source).await?;
    let there = Arc::new(AtomicUsize::new(0));
    let attack: Vec<_> = (0..strangers)
        .map(|_| {
            let (address, there) = (served.address.clone(), Arc::clone(&there));
            tokio::spawn(async move { withhold(address, source, length, &there).await })
        })
        .collect();
    until("the strangers", async || Ok((there.load(Ordering::Relaxed) >= strangers).then_some(()))).await?;
    let mut late = Vec::new();
    for n in 100..300 {
        let (status, took) = genuine(&served.address, source, n).await?;
        ensure_bounded(&served, idle)?;
        if status != 202 || took >= KEPT_OUT {
            late.push((status, took));
        }
    }
    attack.iter().for_each(tokio::task::JoinHandle::abort);
    ensure!(late.len() <= 2, "{} of 200 were kept out: {late:?}", late.len());
    let page = get(&served.address, "/metrics", "").await?;
    let counted = page.lines().find(|line| line.contains(source) && line.contains("body_pushed_out"));
    ensure!(counted.is_some_and(|line| !line.ends_with(" 0")), "{page}");
    let log = served.terminate().await?;
    let logged = log.iter().filter(|line| line.contains("body_pushed_out")).count();
    ensure!((1..=20).contains(&logged) && log.len() < 60, "{logged} lines of {}", log.len());
    Ok(())
}

cases! {
    bodies_that_do_not_end_keep_no_genuine_message_out => bodies_are_withheld("partner", 36, MIB);
    few_large_bodies_keep_no_genuine_message_out => bodies_are_withheld("github", 5, 8 * MIB);
}

/// All allowed connections, each with a head of the largest size that never ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_that_do_not_end_are_bounded_together() -> Result<()> {
    let (_env, served, idle) = started("partner").await?;
    let head = format!("POST /in/partner HTTP/1.1\r\nx-long: {}", "x".repeat(63 * 1024));
    let attack = (0..520).map(|_| send_and_stay(&served.address, head.as_bytes()));
    let strangers = join_all(attack).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    for n in 21..41 {
        let (status, took) = genuine(&served.address, "partner", n).await?;
        ensure!(status == 202 && took < KEPT_OUT, "{status} after {took:?}");
    }
    ensure_bounded(&served, idle)?;
    drop(strangers);
    // A head with too many fields is refused as such.
    let mut stream = TcpStream::connect(&served.address).await?;
    let fields: String = (0..101).map(|n| format!("x-{n}: y\r\n")).collect();
    stream.write_all(format!("POST /in/partner HTTP/1.1\r\n{fields}\r\n").as_bytes()).await?;
    let mut line = [0; 12];
    timeout(DEADLINE, stream.read_exact(&mut line)).await.context("no answer")??;
    ensure!(&line == b"HTTP/1.1 431", "{}", String::from_utf8_lossy(&line));
    served.terminate().await?;
    Ok(())
}

/// Fewer open files are allowed than connections, so the limit on connections is never reached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_strangers_that_use_up_the_open_files_keep_nobody_out() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, &sources()).await?;
    let served = env.serve_with_files("100:128").await?;
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", served.pid()?))?;
    let files = limits.lines().find(|line| line.starts_with("Max open files")).context("no such limit")?;
    ensure!(files.split_whitespace().skip(3).take(2).eq(["128", "128"]), "it takes all it may have: {files}");
    genuine(&served.address, "partner", 0).await?;
    let strangers = join_all((0..200).map(|_| send_and_stay(&served.address, b""))).await;
    let strangers = strangers.into_iter().collect::<Result<Vec<_>, _>>()?;
    for n in 1..21 {
        let (status, took) = genuine(&served.address, "partner", n).await?;
        ensure!(status == 202 && took < KEPT_OUT, "{status} after {took:?}");
    }
    drop(strangers);
    let log = served.terminate().await?;
    let failed = log.iter().filter(|line| line.contains("accept failed")).count();
    ensure!((1..=5).contains(&failed) && log.len() < 60, "{failed} lines of {}", log.len());
    Ok(())
}

#[tokio::test]
async fn refused_requests_by_the_thousand_are_not_logged() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, &partner()).await?;
    let served = env.serve().await?;
    let mut stream = TcpStream::connect(&served.address).await?;
    let origin = "OPTIONS /in/partner HTTP/1.1\r\nhost: x\r\nwebhook-request-origin: evil.example\r\n\r\n";
    for (ask, end) in [
        (origin.to_owned(), "origin_refused"),
        (head("partner", "", 2) + "{}", "unverified"),
        (head("nobody", "", 2) + "{}", "source_unknown"),
    ] {
        for _ in 0..200 {
            stream.write_all(ask.as_bytes()).await?;
            let mut answer = Vec::new();
            while !answer.ends_with(end.as_bytes()) {
                answer.push(timeout(DEADLINE, stream.read_u8()).await.context("no answer")??);
            }
        }
    }
    drop(stream);
    let log = served.terminate().await?;
    ensure!(log.len() < 10, "{} lines: {}", log.len(), log[0]);
    Ok(())
}
