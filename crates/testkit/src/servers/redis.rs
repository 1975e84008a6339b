//! A Redis or Valkey of one test's own.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::ports::free_port;
use super::private::tail;
use super::process::{self, ProcessGuard, ServerProcess};
use super::{install, unavailable};

/// It starts in 80 ms; more than this is a hang.
const START_SECONDS_MAX: u64 = 20;
/// How often a start is tried when somebody else took the port first.
const PORT_TRIES: usize = 5;

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedisKind {
    /// Redis 7, the distribution's.
    Redis7,
    /// Valkey 9, from a wheel.
    Valkey9,
}

/// A server with an append-only file. Dropping it, or dying in any way, stops it and removes its
/// data.
#[derive(Debug)]
pub struct PrivateRedis {
    program: PathBuf,
    arguments: Vec<String>,
    folder: PathBuf,
    port: u16,
    server: Option<Child>,
    guard: ProcessGuard,
}

impl PrivateRedis {
    /// Starts a server.
    ///
    /// # Panics
    ///
    /// If it is not installed or does not start; the message says what to do.
    pub async fn launch(kind: RedisKind) -> Self {
        Self::launch_with(kind, &[]).await
    }

    /// Starts a server with more arguments, e.g. `["--replicaof", "127.0.0.1 6379"]`. The last of a
    /// name wins.
    ///
    /// # Panics
    ///
    /// As [`Self::launch`].
    pub async fn launch_with(kind: RedisKind, arguments: &[&str]) -> Self {
        Self::try_launch(kind, arguments).await.unwrap_or_else(|error| unavailable(&error))
    }

    async fn try_launch(kind: RedisKind, arguments: &[&str]) -> anyhow::Result<Self> {
        let program = install::redis(kind)?;
        let folder = process::scratch(None, "postbox-redis-")?;
        let data = folder.join("data");
        let process =
            ServerProcess { pid_file: data.join("pid"), working: data.clone(), signal: "KILL", remove: folder.clone() };
        // The guard comes first: from here on whatever we make is removed.
        let guard = ProcessGuard::new(&process)?;
        process::own_folder(&data, 0o700)?;
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let mut redis = Self { program, arguments, folder, port: 0, server: None, guard };
        for last in (0..PORT_TRIES).rev() {
            redis.port = free_port()?;
            match redis.try_start().await {
                Err(error) if last > 0 && format!("{error:#}").contains("in use") => {}
                started => {
                    started?;
                    break;
                }
            }
        }
        Ok(redis)
    }

    /// `redis://127.0.0.1:PORT`; the same after a restart.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// SIGKILL. What was acknowledged is in the file, as long as the machine lives.
    pub fn kill(&mut self) {
        self.signal("KILL");
        if let Some(mut server) = self.server.take() {
            server.wait().expect("our own child can be waited for");
        }
    }

    /// Whether it was started and not killed.
    pub fn is_running(&self) -> bool {
        self.server.is_some()
    }

    /// Removes its data, while it is stopped.
    ///
    /// # Panics
    ///
    /// If it cannot be removed.
    pub fn empty(&self) {
        let data = self.folder.join("data");
        fs::remove_dir_all(&data).expect("our own folder");
        process::own_folder(&data, 0o700).expect("our own folder");
    }

    /// Freezes it: connections stay, nobody answers. When it returns, no thread of it runs.
    pub fn freeze(&self) {
        let server = self.server.as_ref().expect("the server is running: call start first");
        process::freeze(server.id()).expect("our own child can be frozen");
    }

    /// Ends [`Self::freeze`].
    pub fn thaw(&self) {
        self.signal("CONT");
    }

    /// Starts it again on the same port with the same data, and waits until it answers.
    ///
    /// # Panics
    ///
    /// If it does not come up.
    pub async fn start(&mut self) {
        self.try_start().await.expect("it starts again");
    }

    async fn try_start(&mut self) -> anyhow::Result<()> {
        let (data, log) = (self.folder.join("data"), self.folder.join("log"));
        let deadline = Instant::now() + Duration::from_secs(START_SECONDS_MAX);
        let mut command = process::command(&self.program, &data)?;
        command.args(["--bind", "127.0.0.1", "--port", &self.port.to_string(), "--appendonly", "yes", "--save", ""]);
        command.arg("--dir").arg(&data).arg("--pidfile").arg(data.join("pid")).args(&self.arguments);
        let mut server = command.stdout(File::create(&log)?).spawn().context("the server's program")?;
        while !answers(self.port).await {
            let status = server.try_wait()?;
            if status.is_some() || Instant::now() > deadline {
                let _ = (server.kill(), server.wait());
                anyhow::bail!("{} does not start: {}", self.program.display(), tail(&log));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.server = Some(server);
        Ok(())
    }

    fn signal(&self, signal: &str) {
        let server = self.server.as_ref().expect("the server is running: call start first");
        process::signal(server.id(), signal).expect("our own child can be signalled");
    }
}

impl Drop for PrivateRedis {
    fn drop(&mut self) {
        self.guard.stop(self.server.as_mut());
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
