//! A server of one test's own, to be killed, frozen, emptied and started again.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::ports::on_free_port;
use super::private::tail;
use super::process::{self, ProcessGuard, ServerProcess};
use super::unavailable;

/// They start in 50 ms to 10 s on a busy machine; more than this is a hang.
pub(super) const START_TIME_MAX: Duration = Duration::from_secs(120);

/// What is special about a server.
pub trait Program: Send {
    /// Its name in a failure and in its folder's.
    const NAME: &'static str;

    /// Starts it on this port. This folder is ours, and `data` below it the server's own.
    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command>;

    /// Whether it serves.
    fn answers(port: u16) -> impl Future<Output = bool> + Send;
}

/// A server. Dropping it, or dying in any way, stops it and removes its data.
#[derive(Debug)]
pub struct PrivateServer<P> {
    pub(super) program: P,
    folder: PathBuf,
    port: u16,
    server: Option<Child>,
    guard: ProcessGuard,
}

impl<P: Program> PrivateServer<P> {
    /// Starts a server of this program, if that is installed.
    pub(super) async fn of(program: anyhow::Result<P>) -> Self {
        Self::prepared(program, async |_, _| ()).await
    }

    /// The same with a program that has to know its port before.
    pub(super) async fn prepared(program: anyhow::Result<P>, mut prepare: impl AsyncFnMut(&mut P, u16)) -> Self {
        let started = async {
            let mut server = Self::new(program?)?;
            let start = async |port| {
                server.port = port;
                prepare(&mut server.program, port).await;
                server.try_start().await
            };
            on_free_port(start).await?;
            Ok(server)
        };
        started.await.unwrap_or_else(|error| unavailable(&error))
    }

    fn new(program: P) -> anyhow::Result<Self> {
        let folder = process::scratch(None, &format!("postbox-{}-", P::NAME))?;
        // The guard comes first: from here on whatever we make is removed.
        let guard = ProcessGuard::new(&server_process(&folder, "KILL"))?;
        process::own_folder(&folder.join("data"), 0o700)?;
        Ok(Self { program, folder, port: 0, server: None, guard })
    }

    /// Its port on 127.0.0.1; the same after a restart.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its process's id, for whoever measures it.
    ///
    /// # Panics
    ///
    /// If it does not run.
    pub fn pid(&self) -> u32 {
        self.server.as_ref().expect("the server is running: call start first").id()
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// SIGKILL. What is in its files is there after the next start, as long as the machine lives.
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
        process::freeze(self.pid()).expect("our own child can be frozen");
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
        self.server = Some(start(&self.program, &self.folder, self.port).await?);
        Ok(())
    }

    fn signal(&self, signal: &str) {
        process::signal(self.pid(), signal).expect("our own child can be signalled");
    }
}

impl<P> Drop for PrivateServer<P> {
    fn drop(&mut self) {
        self.guard.stop(self.server.as_mut());
    }
}

/// A server as [`start`] starts it, for its guard.
pub(super) fn server_process(folder: &Path, signal: &'static str) -> ServerProcess {
    let (pid_file, working) = (folder.join("pid"), folder.join("data"));
    ServerProcess { pid_file, working, signal, remove: folder.to_owned() }
}

/// Starts a server and waits until it answers. What it prints is in `log`.
pub(super) async fn start<P: Program>(program: &P, folder: &Path, port: u16) -> anyhow::Result<Child> {
    let log = folder.join("log");
    let mut command = program.command(folder, port)?;
    let output = File::create(&log)?;
    let mut server = command.stdout(output.try_clone()?).stderr(output).spawn().context(P::NAME)?;
    fs::write(folder.join("pid"), server.id().to_string())?;
    let deadline = Instant::now() + START_TIME_MAX;
    while !P::answers(port).await {
        let status = server.try_wait()?;
        if status.is_some() || Instant::now() > deadline {
            let _ = (server.kill(), server.wait());
            anyhow::bail!("{} does not start: {}", P::NAME, tail(&log));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(server)
}
