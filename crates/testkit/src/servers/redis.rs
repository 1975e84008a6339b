//! A Redis or Valkey for a single test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::private_server::{PrivateServer, Program};
use super::{install, process};

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedisKind {
    /// Redis 7, the distribution's.
    Redis7,
    /// Valkey 9, from a wheel.
    Valkey9,
}

/// A server with an append-only file.
pub type PrivateRedis = PrivateServer<Redis>;

/// How Redis is started.
#[derive(Debug)]
pub struct Redis {
    program: PathBuf,
    arguments: Vec<String>,
}

impl PrivateServer<Redis> {
    /// Starts a server.
    pub async fn launch(kind: RedisKind) -> Self {
        Self::launch_with(kind, &[]).await
    }

    /// Starts a server with more arguments, e.g. `["--replicaof", "127.0.0.1 6379"]`. The last one
    /// of a name wins.
    pub async fn launch_with(kind: RedisKind, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        Self::of(install::redis(kind).map(|program| Redis { program, arguments })).await
    }

    /// Returns `redis://127.0.0.1:PORT`; the same after a restart.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }
}

impl Program for Redis {
    const NAME: &'static str = "redis";

    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command> {
        let data = folder.join("data");
        let mut command = process::command(&self.program, &data)?;
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--appendonly", "yes", "--save", ""]);
        command.arg("--dir").arg(&data).args(&self.arguments);
        Ok(command)
    }

    async fn answers(port: u16) -> bool {
        answers(port).await
    }
}

/// A Sentinel that watches a primary called `main`.
pub type PrivateSentinel = PrivateServer<Sentinel>;

/// How a Sentinel is started.
#[derive(Debug)]
pub struct Sentinel {
    program: PathBuf,
    primary: u16,
}

impl PrivateServer<Sentinel> {
    /// Starts one of three, of which two must agree that the primary is gone after a second.
    ///
    /// Only once the replica follows: a Sentinel asks the primary for its replicas every ten
    /// seconds, and knows nobody to promote before.
    pub async fn launch(kind: RedisKind, primary: &PrivateRedis) -> Self {
        let primary = primary.port();
        Self::of(install::redis(kind).map(|program| Sentinel { program, primary })).await
    }
}

impl Program for Sentinel {
    const NAME: &'static str = "sentinel";

    /// It keeps what it knows in its configuration.
    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command> {
        let (data, primary) = (folder.join("data"), self.primary);
        let file = data.join("sentinel.conf");
        if !file.exists() {
            let text = format!(
                "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor main 127.0.0.1 {primary} 2\n\
                 sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 5000\n",
                data.display()
            );
            fs::write(&file, text)?;
            process::own(&file, 0o600)?;
        }
        let mut command = process::command(&self.program, &data)?;
        command.arg(&file).arg("--sentinel");
        Ok(command)
    }

    async fn answers(port: u16) -> bool {
        answers(port).await
    }
}

/// Whether it has read its data and takes commands; a password that we do not have is an answer,
/// too.
async fn answers(port: u16) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(b"PING\r\n").await?;
        let mut answer = [0; 7];
        stream.read_exact(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    asked.await.is_ok_and(|answer| answer == *b"+PONG\r\n" || answer.starts_with(b"-NOAUTH"))
}
