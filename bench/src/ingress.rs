//! The cost of verifying and durably storing a webhook, compared with the same server that only
//! inserts: the row that Postbox stores, or a minimal one.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{SignKey, Signer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::bed::{Bed, PAYLOAD_BYTES, Place, at_once, event};
use crate::figure::{Figure, Table};
use crate::machine;
use crate::peer::{BARE, Role, SECRET};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Concurrent senders, each with one persistent connection.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    clients: Vec<usize>,
    /// How long each figure is measured, in seconds.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
}

pub(crate) async fn run(options: &Options) -> anyhow::Result<()> {
    let bed = Bed::postgres().await?;
    if let Place::Postgres(client, _) = &bed.place {
        client.batch_execute(BARE).await?;
    }
    let mut table = Table::new(
        format!(
            "ingress: Postgres 15, fsync on, body {PAYLOAD_BYTES} B, verified and stored once, against the same server that only inserts"
        ),
        &["clients", "ingress", "the same row", "ratio", "a bare row", "ratio", "CPU/request", "row's", "bare's"],
    );
    for clients in &options.clients {
        let mut figures = Vec::new();
        for role in [Role::Ingress, Role::Row, Role::Bare] {
            figures.push(measure(&bed.store, role, *clients, options.seconds).await?);
        }
        let (ours, row, bare) = (figures[0], figures[1], figures[2]);
        let speed = [ours.rate(), row.rate(), ours.ratio(row), bare.rate(), ours.ratio(bare)];
        let effort = figures.iter().map(|figure| format!("{:.0} µs", figure.micros()));
        table.row([clients.to_string()].into_iter().chain(speed).chain(effort));
    }
    table.print();
    println!("  wanted: ≥ 70 % of the same row; the senders share the machine with both");
    println!("  a bare row is an id, a body and a time under one index: what one would write without Postbox");
    Ok(())
}

/// Measures one role; processor time is that of the serving process.
async fn measure(url: &str, role: Role, clients: usize, seconds: u64) -> anyhow::Result<Figure> {
    let (peer, address) = role.start(url).await?;
    let pid = peer.id().context("it has ended")?;
    let prefix = format!("{role:?}-{clients}").to_lowercase();
    // The first requests open connections and warm up plans.
    send(&address, &format!("{prefix}-warm"), clients, Duration::from_millis(500)).await?;
    let before = machine::processor_seconds_of_family(pid)?;
    let start = Instant::now();
    let sent = send(&address, &prefix, clients, Duration::from_secs(seconds)).await?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(Figure { seconds, processor_seconds: machine::processor_seconds_of_family(pid)? - before, ..sent })
}

async fn send(address: &str, prefix: &str, clients: usize, time: Duration) -> anyhow::Result<Figure> {
    let until = Instant::now() + time;
    at_once(clients, |client| send_one_by_one(address.to_owned(), format!("{prefix}-{client}"), until)).await
}

async fn send_one_by_one(address: String, prefix: String, until: Instant) -> anyhow::Result<usize> {
    let signer = Signer::new([SignKey::parse(SECRET)?])?;
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut count = 0;
    let mut answer = Vec::with_capacity(1_024);
    while Instant::now() < until {
        let body = event(count, 10_000).payload;
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

/// Reads one answer and returns its status.
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
