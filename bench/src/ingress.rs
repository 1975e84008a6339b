//! What verifying and storing a webhook durably costs, against the same server that only inserts:
//! the row that we store, or the least that one could.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{SignKey, Signer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::peer::{BARE, Role, SECRET};
use crate::server::{self, connect};
use crate::table::{Table, percent, rate};
use crate::{child, fill, machine};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Senders at once, each with a connection that it keeps.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    clients: Vec<usize>,
    /// How long each figure is measured.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
}

struct Figure {
    requests: usize,
    seconds: f64,
    /// Processor time of the server.
    processor_seconds: f64,
}

impl Figure {
    fn per_second(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    fn micros(&self) -> f64 {
        1e6 * self.processor_seconds / self.requests.max(1) as f64
    }
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let server = server::start().await;
    let url = server.fresh_database().await;
    child::open(&url).await?.up().await?;
    connect(&url).await?.batch_execute(BARE).await?;
    let mut table = Table::new(
        format!(
            "ingress: Postgres 15, fsync on, body {} B, verified and stored once, against the same server that only inserts",
            fill::PAYLOAD_BYTES
        ),
        &["clients", "ingress", "the same row", "ratio", "a bare row", "ratio", "CPU/request", "row's", "bare's"],
    );
    for clients in &options.clients {
        let ours = measure(&url, Role::Ingress, *clients, options.seconds).await?;
        let row = measure(&url, Role::Row, *clients, options.seconds).await?;
        let bare = measure(&url, Role::Bare, *clients, options.seconds).await?;
        table.row([
            clients.to_string(),
            rate(ours.requests, ours.seconds),
            rate(row.requests, row.seconds),
            percent(ours.per_second(), row.per_second()),
            rate(bare.requests, bare.seconds),
            percent(ours.per_second(), bare.per_second()),
            format!("{:.0} µs", ours.micros()),
            format!("{:.0} µs", row.micros()),
            format!("{:.0} µs", bare.micros()),
        ]);
    }
    table.print();
    println!("  wanted: ≥ 70 % of the same row; the senders share the machine with both");
    println!("  a bare row is an id, a body and a time under one index: what one would write without Postbox");
    Ok(())
}

async fn measure(url: &str, role: Role, clients: usize, seconds: u64) -> anyhow::Result<Figure> {
    let (peer, address) = role.start(url).await?;
    let pid = peer.id().context("it has ended")?;
    let prefix = format!("{role:?}-{clients}").to_lowercase();
    // The first requests open connections and warm plans.
    send(&address, &format!("{prefix}-warm"), clients, Duration::from_millis(500)).await?;
    let before = machine::processor_seconds_of_family(pid)?;
    let start = Instant::now();
    let requests = send(&address, &prefix, clients, Duration::from_secs(seconds)).await?;
    let seconds = start.elapsed().as_secs_f64();
    let processor_seconds = machine::processor_seconds_of_family(pid)? - before;
    Ok(Figure { requests, seconds, processor_seconds })
}

async fn send(address: &str, prefix: &str, clients: usize, time: Duration) -> anyhow::Result<usize> {
    let until = Instant::now() + time;
    let sending = (0..clients).map(|client| {
        let (address, prefix) = (address.to_owned(), format!("{prefix}-{client}"));
        tokio::spawn(async move { send_one_by_one(&address, &prefix, until).await })
    });
    let mut requests = 0;
    for client in futures::future::join_all(sending).await {
        requests += client??;
    }
    Ok(requests)
}

async fn send_one_by_one(address: &str, prefix: &str, until: Instant) -> anyhow::Result<usize> {
    let signer = Signer::new([SignKey::parse(SECRET)?])?;
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut count = 0;
    let mut answer = Vec::with_capacity(1_024);
    while Instant::now() < until {
        let body = fill::event(count, 10_000).payload;
        let now = UnixSeconds(jiff::Timestamp::now().as_second());
        let signed = signer.sign(&format!("{prefix}-{count}"), now, &body)?;
        let mut request = format!(
            "POST /in/bench HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {}\r\n",
            body.len()
        );
        for (name, value) in signed.headers() {
            request += &format!("{name}: {value}\r\n");
        }
        let mut request = (request + "\r\n").into_bytes();
        request.extend_from_slice(&body);
        stream.write_all(&request).await?;
        let status = read_answer(&mut stream, &mut answer).await?;
        ensure!(status == 202, "{status}");
        count += 1;
    }
    Ok(count)
}

/// Reads one answer and gives its status.
async fn read_answer(stream: &mut TcpStream, answer: &mut Vec<u8>) -> anyhow::Result<u16> {
    answer.clear();
    loop {
        ensure!(stream.read_buf(answer).await? > 0, "the server hung up");
        let Some(head) = answer.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let text = std::str::from_utf8(&answer[..head])?.to_ascii_lowercase();
        let length = text.split("\r\n").find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.map_or(Ok(0), str::parse)?;
        while answer.len() < head + 4 + length {
            ensure!(stream.read_buf(answer).await? > 0, "the server hung up");
        }
        return Ok(text.split(' ').nth(1).context("no status")?.parse()?);
    }
}
