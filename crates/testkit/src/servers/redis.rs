//! A Redis or Valkey for a single test.

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
    ///
    /// # Panics
    ///
    /// If it is not installed or does not start; the message says what to do.
    pub async fn launch(kind: RedisKind) -> Self {
        Self::launch_with(kind, &[]).await
    }

    /// Starts a server with more arguments, e.g. `["--replicaof", "127.0.0.1 6379"]`. The last one
    /// of a name wins.
    ///
    /// # Panics
    ///
    /// As [`Self::launch`].
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

    /// Returns whether it has read its data and accepts commands. A request for a password also
    /// counts as an answer.
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
}
