//! A server that speaks Kafka's protocol, of one test's own: Tansu.

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::net::TcpStream;

use super::ports::free_port;
use super::private::tail;
use super::process::{self, ProcessGuard, ServerProcess};
use super::{install, unavailable};

/// It starts in 50 ms; more than this is a hang.
const START_SECONDS_MAX: u64 = 20;
/// How often a start is tried when somebody else took the port first.
const PORT_TRIES: usize = 5;

/// A server with one broker, which keeps everything in memory: stopped, it forgets topics and
/// offsets. Dropping it, or dying in any way, stops it.
#[derive(Debug)]
pub struct PrivateKafka {
    program: PathBuf,
    folder: PathBuf,
    port: u16,
    /// Where it sends its clients.
    advertised: SocketAddr,
    server: Option<Child>,
    guard: ProcessGuard,
}

impl PrivateKafka {
    /// Starts a server.
    ///
    /// # Panics
    ///
    /// If it is not installed or does not start; the message says what to do.
    pub async fn launch() -> Self {
        Self::launch_behind(async |address| address).await
    }

    /// Starts a server that sends its clients to whatever address is given for its own: a
    /// proxy's. A Kafka client goes where the broker says, whatever address it was given first.
    ///
    /// # Panics
    ///
    /// As [`Self::launch`].
    pub async fn launch_behind(advertise: impl AsyncFnMut(SocketAddr) -> SocketAddr) -> Self {
        Self::try_launch(advertise).await.unwrap_or_else(|error| unavailable(&error))
    }

    async fn try_launch(mut advertise: impl AsyncFnMut(SocketAddr) -> SocketAddr) -> anyhow::Result<Self> {
        let program = install::kafka()?;
        let folder = process::scratch(None, "postbox-kafka-")?;
        let data = folder.join("data");
        let process =
            ServerProcess { pid_file: data.join("pid"), working: data.clone(), signal: "KILL", remove: folder.clone() };
        // The guard comes first: from here on whatever we make is removed.
        let guard = ProcessGuard::new(&process)?;
        process::own_folder(&data, 0o700)?;
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut kafka = Self { program, folder, port: 0, advertised: nowhere, server: None, guard };
        for last in (0..PORT_TRIES).rev() {
            kafka.port = free_port()?;
            kafka.advertised = advertise(([127, 0, 0, 1], kafka.port).into()).await;
            match kafka.try_start().await {
                Err(error) if last > 0 && format!("{error:#}").contains("in use") => {}
                started => {
                    started?;
                    break;
                }
            }
        }
        Ok(kafka)
    }

    /// `127.0.0.1:PORT`, where it sends its clients; the same after a restart.
    pub fn brokers(&self) -> String {
        self.advertised.to_string()
    }

    /// SIGKILL. It forgets everything.
    pub fn kill(&mut self) {
        self.signal("KILL");
        if let Some(mut server) = self.server.take() {
            server.wait().expect("our own child can be waited for");
        }
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
        let mut command = process::command(&self.program, &data)?;
        command.args(["broker", "--storage-engine", "memory://tansu/"]);
        command.arg("--listener-url").arg(format!("tcp://127.0.0.1:{}", self.port));
        command.arg("--advertised-listener-url").arg(format!("tcp://{}", self.advertised));
        let output = File::create(&log)?;
        let mut server = command.stdout(output.try_clone()?).stderr(output).spawn().context("tansu")?;
        // It writes none itself.
        std::fs::write(data.join("pid"), server.id().to_string())?;
        while TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            let status = server.try_wait()?;
            if status.is_some() || Instant::now() > deadline {
                let _ = (server.kill(), server.wait());
                anyhow::bail!("tansu does not start: {}", tail(&log));
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

impl Drop for PrivateKafka {
    fn drop(&mut self) {
        self.guard.stop(self.server.as_mut());
    }
}
