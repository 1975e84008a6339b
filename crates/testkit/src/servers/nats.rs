//! A NATS server with JetStream of one test's own.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use super::ports::free_port;
use super::private::tail;
use super::process::{self, ProcessGuard, ServerProcess};
use super::{install, unavailable};

/// It starts in 50 ms; more than this is a hang.
const START_SECONDS_MAX: u64 = 20;
/// How often a start is tried when somebody else took the port first.
const PORT_TRIES: usize = 5;

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NatsVersion {
    /// 2.9, the distribution's.
    V2_9,
    /// 2.15, from a wheel.
    V2_15,
}

/// A server. Dropping it, or dying in any way, stops it and removes its data.
#[derive(Debug)]
pub struct PrivateNats {
    program: PathBuf,
    config: String,
    folder: PathBuf,
    port: u16,
    server: Option<Child>,
    guard: ProcessGuard,
}

impl PrivateNats {
    /// Starts a server.
    ///
    /// # Panics
    ///
    /// If it is not installed or does not start; the message says what to do.
    pub async fn launch(version: NatsVersion) -> Self {
        Self::launch_with(version, "").await
    }

    /// Starts a server with more lines in its configuration file.
    ///
    /// # Panics
    ///
    /// As [`Self::launch`].
    pub async fn launch_with(version: NatsVersion, config: &str) -> Self {
        Self::try_launch(version, config).await.unwrap_or_else(|error| unavailable(&error))
    }

    /// Starts three servers that are one cluster.
    ///
    /// # Panics
    ///
    /// As [`Self::launch`].
    pub async fn launch_cluster(version: NatsVersion) -> [Self; 3] {
        let ports = [(); 3].map(|()| free_port().unwrap_or_else(|error| unavailable(&error)));
        let routes = ports.map(|port| format!("nats://127.0.0.1:{port}")).join(", ");
        let config = |n: usize| {
            let port = ports[n];
            format!("server_name: n{n}\ncluster {{ name: test, listen: \"127.0.0.1:{port}\", routes: [{routes}] }}\n")
        };
        let [first, second, third] = [config(0), config(1), config(2)];
        tokio::join!(
            Self::launch_with(version, &first),
            Self::launch_with(version, &second),
            Self::launch_with(version, &third)
        )
        .into()
    }

    async fn try_launch(version: NatsVersion, config: &str) -> anyhow::Result<Self> {
        let program = install::nats(version)?;
        let folder = process::scratch(None, "postbox-nats-")?;
        let data = folder.join("data");
        let process =
            ServerProcess { pid_file: data.join("pid"), working: data.clone(), signal: "KILL", remove: folder.clone() };
        // The guard comes first: from here on whatever we make is removed.
        let guard = ProcessGuard::new(&process)?;
        process::own_folder(&data, 0o700)?;
        let mut nats = Self { program, config: config.to_owned(), folder, port: 0, server: None, guard };
        for last in (0..PORT_TRIES).rev() {
            nats.port = free_port()?;
            match nats.try_start().await {
                Err(error) if last > 0 && format!("{error:#}").contains("in use") => {}
                started => {
                    started?;
                    break;
                }
            }
        }
        Ok(nats)
    }

    /// `nats://127.0.0.1:PORT`; the same after a restart.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// SIGKILL. What was acknowledged is in its files, as long as the machine lives.
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
        let (data, log, file) = (self.folder.join("data"), self.folder.join("log"), self.folder.join("nats.conf"));
        let (port, store) = (self.port, data.display());
        let fixed = format!("listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: \"{store}\" }}\n");
        fs::write(&file, fixed + &self.config)?;
        let deadline = Instant::now() + Duration::from_secs(START_SECONDS_MAX);
        let mut command = process::command(&self.program, &data)?;
        command.arg("-c").arg(&file).arg("-P").arg(data.join("pid")).stderr(File::create(&log)?);
        let mut server = command.spawn().context("nats-server")?;
        while let Err(error) = greet(self.port).await {
            let status = server.try_wait()?;
            if status.is_some() || Instant::now() > deadline {
                let _ = server.kill();
                let _ = server.wait();
                return Err(error.context(format!("nats-server does not start: {}", tail(&log))));
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

impl Drop for PrivateNats {
    fn drop(&mut self) {
        if self.server.is_some() {
            // Frozen, it would hear no other signal.
            self.signal("KILL");
        }
        self.guard.stop(self.server.as_mut());
    }
}

/// A server says who it is first.
async fn greet(port: u16) -> anyhow::Result<()> {
    let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    anyhow::ensure!(line.starts_with("INFO "), "it says {line:?}");
    stream.get_mut().shutdown().await?;
    Ok(())
}
