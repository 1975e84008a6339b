//! The sink: each call sends one event on one connection.

use std::io::{ErrorKind, Result};
use std::sync::Mutex;

use async_trait::async_trait;
use postbox::contract::{Capabilities, Sink, lock};
use postbox::{Delivery, Outcome};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::TcpStream;

use crate::{LinesConfig, classify};

/// The longest answer, in bytes. The protocol's answers are short, and a server must not fill our
/// memory.
const ANSWER_BYTES_MAX: u64 = 64;

/// Sends events as lines over TCP.
///
/// Cancel-safety: a dropped call drops its connection, too, so that its late answer is never taken
/// for that of another event.
#[derive(Debug)]
pub struct LinesSink {
    address: String,
    connections: usize,
    /// Connections not in use.
    idle: Mutex<Vec<BufStream<TcpStream>>>,
}

impl LinesSink {
    /// Creates a sink for one server. It connects when the first event is sent.
    pub fn new(config: &LinesConfig) -> Self {
        Self { address: config.address.clone(), connections: config.connections, idle: Mutex::default() }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<BufStream<TcpStream>>> {
        lock(&self.idle)
    }

    /// Takes an idle connection that the server has not closed: an open one has nothing to read.
    fn idle_connection(&self) -> Option<BufStream<TcpStream>> {
        let mut idle = self.idle();
        std::iter::from_fn(|| idle.pop()).find(|connection| {
            let said = connection.get_ref().try_read(&mut [0; 1]);
            said.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        })
    }

    async fn send(&self, delivery: &Delivery) -> Outcome {
        let mut connection = match self.idle_connection() {
            Some(connection) => connection,
            None => match TcpStream::connect(&self.address).await {
                Ok(stream) => BufStream::new(stream),
                Err(error) => return classify::connecting(&error),
            },
        };
        match exchange(&mut connection, delivery).await {
            Ok(line) => {
                if line.ends_with('\n') {
                    self.idle().push(connection);
                }
                classify::answer(&line)
            }
            Err(error) => {
                // The server may have stopped; then the idle connections are dead, too.
                self.idle().clear();
                classify::exchanging(&error)
            }
        }
    }
}

async fn exchange(connection: &mut BufStream<TcpStream>, delivery: &Delivery) -> Result<String> {
    let event = &delivery.event;
    let head = json!({
        "id": delivery.dedupe_id(),
        "topic": event.topic,
        "key": event.key,
        "headers": event.headers,
        "bytes": event.payload.len(),
    });
    connection.write_all(format!("{head}\n").as_bytes()).await?;
    connection.write_all(&event.payload).await?;
    connection.flush().await?;
    let mut line = String::new();
    connection.take(ANSWER_BYTES_MAX).read_line(&mut line).await?;
    Ok(line)
}

#[async_trait]
impl Sink for LinesSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: 1, concurrency: self.connections, prefix: false, system: Some("lines") }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(deliveries.len());
        for delivery in deliveries {
            outcomes.push(self.send(delivery).await);
        }
        outcomes
    }

    async fn close(&self) {
        self.idle().clear();
    }
}
