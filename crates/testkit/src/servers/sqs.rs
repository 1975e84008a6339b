//! SQS and SNS of one test's own: moto, which keeps everything in memory.

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

/// It starts in 1 s; more than this is a hang.
const START_SECONDS_MAX: u64 = 60;
/// How often a start is tried when somebody else took the port first.
const PORT_TRIES: usize = 5;

/// A server. Dropping it, or dying in any way, stops it. What it had is gone with its process.
#[derive(Debug)]
pub struct PrivateSqs {
    libraries: PathBuf,
    python: PathBuf,
    folder: PathBuf,
    port: u16,
    server: Option<Child>,
    guard: ProcessGuard,
}

impl PrivateSqs {
    /// Starts a server.
    ///
    /// # Panics
    ///
    /// If it is not installed or does not start; the message says what to do.
    pub async fn launch() -> Self {
        Self::try_launch().await.unwrap_or_else(|error| unavailable(&error))
    }

    async fn try_launch() -> anyhow::Result<Self> {
        let (libraries, python) = install::moto()?;
        let folder = process::scratch(None, "postbox-sqs-")?;
        let data = folder.join("data");
        let process = ServerProcess {
            pid_file: folder.join("pid"),
            working: data.clone(),
            signal: "KILL",
            remove: folder.clone(),
        };
        // The guard comes first: from here on whatever we make is removed.
        let guard = ProcessGuard::new(&process)?;
        process::own_folder(&data, 0o700)?;
        let mut sqs = Self { libraries, python, folder, port: 0, server: None, guard };
        for last in (0..PORT_TRIES).rev() {
            sqs.port = free_port()?;
            match sqs.try_start().await {
                Err(error) if last > 0 && format!("{error:#}").contains("in use") => {}
                started => {
                    started?;
                    break;
                }
            }
        }
        Ok(sqs)
    }

    /// `http://127.0.0.1:PORT`; the same after a restart.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// SIGKILL. All queues, topics and messages are gone.
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

    /// Freezes it: connections stay, nobody answers. When it returns, no thread of it runs.
    pub fn freeze(&self) {
        let server = self.server.as_ref().expect("the server is running: call start first");
        process::freeze(server.id()).expect("our own child can be frozen");
    }

    /// Ends [`Self::freeze`].
    pub fn thaw(&self) {
        self.signal("CONT");
    }

    /// Starts it again on the same port, empty, and waits until it answers.
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
        let mut command = process::command(&self.python, &data)?;
        command.args(["-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", &self.port.to_string()]);
        command.env("PYTHONPATH", &self.libraries).env("PYTHONDONTWRITEBYTECODE", "1").env("HOME", &data);
        let mut server = command.stderr(File::create(&log)?).spawn().context("python3")?;
        fs::write(self.folder.join("pid"), server.id().to_string())?;
        while !answers(self.port).await {
            let status = server.try_wait()?;
            if status.is_some() || Instant::now() > deadline {
                let _ = (server.kill(), server.wait());
                anyhow::bail!("moto does not start: {}", tail(&log));
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

impl Drop for PrivateSqs {
    fn drop(&mut self) {
        self.guard.stop(self.server.as_mut());
    }
}

/// Whether it serves.
async fn answers(port: u16) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(b"GET /moto-api/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await?;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    asked.await.is_ok_and(|answer| answer == *b"HTTP/1.1 200")
}
