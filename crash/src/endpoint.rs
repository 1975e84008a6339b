//! The endpoint, in a separate process: a small HTTP server that records every arrival before it
//! answers, and sometimes answers with a failure.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// Largest head and largest body of a request, in bytes.
const REQUEST_MAX: usize = 64 * 1024;
/// Longer than a relay waits for an answer.
const HANG: Duration = Duration::from_secs(10);

/// A command to an endpoint.
#[derive(Debug, Args)]
pub(crate) struct Job {
    /// Where arrivals are written.
    #[arg(long)]
    log: PathBuf,
    #[arg(long)]
    seed: u64,
}

struct Shared {
    log: Mutex<File>,
    seed: u64,
    /// Number of arrivals of each body.
    attempts: Mutex<HashMap<u64, u32>>,
    /// Whether the endpoint serves nobody now.
    down: AtomicBool,
}

impl Job {
    /// Serves until its standard input ends. Its port is the first line of standard output.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        let shared =
            Shared { log: log.into(), seed: self.seed, attempts: Mutex::default(), down: AtomicBool::new(false) };
        let shared = Arc::new(shared);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        writeln!(std::io::stdout(), "{}", listener.local_addr()?.port())?;
        tokio::spawn(be_down_now_and_then(Arc::clone(&shared)));
        let mut stdin = tokio::io::stdin();
        let mut nothing = Vec::new();
        tokio::select! {
            accepted = accept(listener, shared) => accepted,
            _ = stdin.read_to_end(&mut nothing) => Ok(()),
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) -> anyhow::Result<()> {
    loop {
        let (client, _) = listener.accept().await?;
        let shared = Arc::clone(&shared);
        // An error is normal: a relay that is killed leaves half a request behind.
        tokio::spawn(async move { serve(client, &shared).await });
    }
}

async fn be_down_now_and_then(shared: Arc<Shared>) {
    let mut random = SmallRng::seed_from_u64(shared.seed);
    loop {
        sleep(Duration::from_millis(random.random_range(3_000..10_000))).await;
        shared.down.store(true, Ordering::SeqCst);
        sleep(Duration::from_millis(random.random_range(50..400))).await;
        shared.down.store(false, Ordering::SeqCst);
    }
}

async fn serve(mut client: TcpStream, shared: &Shared) -> anyhow::Result<()> {
    client.set_nodelay(true)?;
    let mut buffer = Vec::new();
    loop {
        let body = request(&mut client, &mut buffer).await?;
        let status = shared.answer(&body);
        shared.write(status, &body)?;
        if status == 0 {
            sleep(HANG).await;
            return Ok(());
        }
        client.write_all(format!("HTTP/1.1 {status} so\r\ncontent-length: 0\r\n\r\n").as_bytes()).await?;
    }
}

/// Reads the body of the next request; what follows stays in the buffer.
async fn request(client: &mut TcpStream, buffer: &mut Vec<u8>) -> anyhow::Result<Vec<u8>> {
    loop {
        if let Some(head) = buffer.windows(4).position(|end| end == b"\r\n\r\n") {
            let text = std::str::from_utf8(&buffer[..head])?.to_ascii_lowercase();
            let length = text.lines().find_map(|line| line.strip_prefix("content-length:")).context("no length")?;
            let end = head + 4 + length.trim().parse::<usize>()?;
            if buffer.len() >= end {
                let body = buffer[head + 4..end].to_vec();
                buffer.drain(..end);
                return Ok(body);
            }
        }
        ensure!(buffer.len() < REQUEST_MAX, "too large");
        if client.read_buf(buffer).await? == 0 {
            bail!("closed");
        }
    }
}

impl Shared {
    /// Chooses the status by the seed, the body and the number of its arrivals; 0: never answers.
    fn answer(&self, body: &[u8]) -> u16 {
        let mut hasher = DefaultHasher::new();
        (self.seed, body).hash(&mut hasher);
        let hash = hasher.finish();
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        let attempt = attempts.entry(hash).or_default();
        if self.down.load(Ordering::SeqCst) {
            return 503;
        }
        *attempt += 1;
        let stubborn = 1 + (hash >> 32) as u32 % 3;
        match hash % 10_000 {
            _ if *attempt > stubborn => 204,
            0 => 0,
            1..=20 => 422,
            21..=35 => 500,
            36..=38 => 503,
            _ => 204,
        }
    }

    fn write(&self, status: u16, body: &[u8]) -> anyhow::Result<()> {
        let mut line = format!("{status:03} ").into_bytes();
        line.extend(body.iter().map(|byte| if *byte == b'\n' { b' ' } else { *byte }));
        line.push(b'\n');
        Ok(self.log.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line)?)
    }
}
