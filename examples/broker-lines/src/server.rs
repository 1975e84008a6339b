//! The server, for the proof and the tests: accepts events, and answers as configured.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use postbox::contract::lock;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// An event as received by the server.
#[derive(Debug, Clone)]
pub struct Received {
    /// Its head, as JSON.
    pub head: Value,
    /// Its payload.
    pub payload: Vec<u8>,
    /// The server's answer; `None` if it hangs.
    pub answer: Option<&'static str>,
}

/// Chooses the answer to an event.
pub type Answer = dyn Fn(&Value) -> Option<&'static str> + Send + Sync;

/// A server that records every event it receives.
pub struct Server {
    received: Arc<Mutex<Vec<Received>>>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Server {
    /// Serves on the caller's listener.
    pub fn start(listener: TcpListener, answer: Arc<Answer>) -> Self {
        let received = Arc::new(Mutex::new(Vec::new()));
        let (noted, stop) = (Arc::clone(&received), CancellationToken::new());
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Some(Ok((stream, _))) = stopped.run_until_cancelled(listener.accept()).await {
                let (noted, answer) = (Arc::clone(&noted), Arc::clone(&answer));
                connections.spawn(async move { drop(serve(stream, &noted, &*answer).await) });
            }
            connections.shutdown().await;
        });
        Self { received, stop, task }
    }

    /// Closes the listener and every connection.
    pub async fn stop(self) -> Vec<Received> {
        self.stop.cancel();
        let _ = self.task.await;
        lock(&self.received).clone()
    }

    /// Everything it received, in order of arrival.
    pub fn received(&self) -> Vec<Received> {
        lock(&self.received).clone()
    }
}

async fn serve(stream: TcpStream, noted: &Mutex<Vec<Received>>, answer: &Answer) -> anyhow::Result<()> {
    let mut stream = BufStream::new(stream);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let head: Value = serde_json::from_str(&line)?;
        let mut payload = vec![0; usize::try_from(head["bytes"].as_u64().unwrap_or_default())?];
        stream.read_exact(&mut payload).await?;
        let answer = answer(&head);
        lock(noted).push(Received { head, payload, answer });
        match answer {
            Some(word) => stream.write_all(format!("{word}\n").as_bytes()).await?,
            None => std::future::pending().await,
        }
        stream.flush().await?;
    }
}

/// A listener on a free loopback port, and its address.
pub async fn listen() -> anyhow::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}
