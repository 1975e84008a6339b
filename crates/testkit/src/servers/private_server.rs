//! A server for a single test, which can be killed, frozen, emptied and restarted; and one for all
//! tests of a run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::ports::on_free_port;
use super::private::tail;
use super::process::{self, ProcessGuard, ServerProcess};
use super::{shared, unavailable};

/// Longest start. Servers start in 50 ms to 10 s on a busy machine; more than this is a hang.
const START_TIME_MAX: Duration = Duration::from_secs(120);

/// What differs between servers.
pub trait Program: Send {
    /// Its name in failures and in its folder's name.
    const NAME: &'static str;

    /// Returns the command to start it on this port. `folder` is ours; `data` below it is the
    /// server's.
    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command>;

    /// Returns whether it serves.
    fn answers(port: u16) -> impl Future<Output = bool> + Send;
}

/// A server. Dropping this, or any death of this process, stops it and removes its data.
#[derive(Debug)]
pub struct PrivateServer<P> {
    pub(super) program: P,
    folder: PathBuf,
    port: u16,
    server: Option<Child>,
    guard: ProcessGuard,
}

impl<P: Program> PrivateServer<P> {
    /// Starts a server of this program, if it is installed.
    pub(super) async fn of(program: anyhow::Result<P>) -> Self {
        Self::prepared(program, async |_, _| ()).await
    }

    /// The same for a program that must know its port first.
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
        // The guard comes first: from here on, everything we create is removed.
        let guard = ProcessGuard::new(&server_process(&folder, "KILL"))?;
        process::own_folder(&folder.join("data"), 0o700)?;
        Ok(Self { program, folder, port: 0, server: None, guard })
    }

    /// Returns its port on 127.0.0.1; the same after a restart.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns its process id, to measure it.
    pub fn pid(&self) -> u32 {
        self.server.as_ref().expect("the server is running: call start first").id()
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Kills it (SIGKILL). Data in its files survives, as long as the machine lives.
    pub fn kill(&mut self) {
        self.signal("KILL");
        if let Some(mut server) = self.server.take() {
            server.wait().expect("our own child can be waited for");
        }
    }

    /// Returns whether it was started and not killed.
    pub fn is_running(&self) -> bool {
        self.server.is_some()
    }

    /// Removes its data, while it is stopped.
    pub fn empty(&self) {
        let data = self.folder.join("data");
        fs::remove_dir_all(&data).expect("our own folder");
        process::own_folder(&data, 0o700).expect("our own folder");
    }

    /// Freezes it: connections stay, but nothing is answered. When this returns, none of its
    /// threads runs.
    pub fn freeze(&self) {
        process::freeze(self.pid()).expect("our own child can be frozen");
    }

    /// Ends [`Self::freeze`].
    pub fn thaw(&self) {
        self.signal("CONT");
    }

    /// Starts it again on the same port with the same data, and waits until it answers.
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

/// Describes a server that [`start`] starts, for its guard.
fn server_process(folder: &Path, signal: &'static str) -> ServerProcess {
    let (pid_file, working) = (folder.join("pid"), folder.join("data"));
    ServerProcess { pid_file, working, signal, remove: folder.to_owned() }
}

/// Returns the port of the one server of this program for all processes, and starts it unless it
/// runs, in `run` below this folder. `prepare` writes there what its users need as well.
pub(super) async fn share<P: Program>(
    program: &P,
    below: &Path,
    signal: &'static str,
    prepare: impl Fn(&Path) -> std::io::Result<()>,
) -> anyhow::Result<u16> {
    let folder = below.join("run");
    let process = server_process(&folder, signal);
    let running = async || {
        let Ok(port) = fs::read_to_string(folder.join("port")) else { return Ok(None) };
        let port = port.trim().parse::<u16>()?;
        let deadline = Instant::now() + START_TIME_MAX;
        while !P::answers(port).await {
            if !process.lives() {
                return Ok(None);
            }
            anyhow::ensure!(Instant::now() < deadline, "the shared {} does not answer on port {port}", P::NAME);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Some(port))
    };
    let begin = async || {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder)?;
        process::own_folder(&folder.join("data"), 0o700)?;
        prepare(&folder)?;
        let port = on_free_port(async |port| start(program, &folder, port).await.map(|_to_its_guard| port)).await?;
        fs::write(folder.join("port"), port.to_string())?;
        Ok(port)
    };
    shared::share(below, &process, running, begin).await
}

/// Starts a server and waits until it answers. Its output is in `log`.
async fn start<P: Program>(program: &P, folder: &Path, port: u16) -> anyhow::Result<Child> {
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
