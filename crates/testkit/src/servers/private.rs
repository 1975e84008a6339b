//! A Postgres for a single test, which can be stopped, killed and restarted.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::ports::on_free_port;
use super::postgres::connect;
use super::process::{self, ProcessGuard, ServerProcess};
use super::{Postgres, Version, install, unavailable};

/// Longest start. A loaded machine takes several seconds for crash recovery; more than this is a
/// hang.
pub(super) const START_SECONDS_MAX: u64 = 60;

/// How a server is configured.
#[derive(Debug, Clone)]
pub struct Settings {
    lines: Vec<(String, String)>,
    under: Option<PathBuf>,
}

impl Settings {
    /// Flushes nothing: quick, and correct as long as the *machine* does not crash.
    pub fn fast() -> Self {
        Self::durable().with("fsync", "off").with("full_page_writes", "off")
    }

    /// As in production, for crash tests and benchmarks.
    pub fn durable() -> Self {
        Self { lines: Vec::new(), under: None }
            .with("max_connections", "300")
            .with("max_prepared_transactions", "20")
            .with("shared_buffers", "128MB")
    }

    /// Adds a line to `postgresql.conf`. The last one of a name wins.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.lines.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Puts the data below this folder, which every user must be able to traverse.
    #[must_use]
    pub fn under(self, folder: &Path) -> Self {
        Self { under: Some(folder.to_owned()), ..self }
    }

    fn render(&self) -> String {
        let fixed = "listen_addresses = '127.0.0.1'\nunix_socket_directories = ''\nlog_line_prefix = '%m [%p] %d '\n";
        self.lines.iter().fold(fixed.to_owned(), |text, (name, value)| text + &format!("{name} = '{value}'\n"))
    }
}

/// A private Postgres. Dropping this, or any death of this process, stops it at once and removes
/// its data.
#[derive(Debug)]
pub struct PrivatePostgres {
    postgres: Postgres,
    cluster: Cluster,
    port: u16,
    server: Option<Child>,
    /// The pid of the WAL writer, while it is frozen.
    frozen: Option<i32>,
    guard: ProcessGuard,
}

impl PrivatePostgres {
    /// Starts a server.
    pub async fn launch(version: Version, settings: Settings) -> Self {
        Self::try_launch(version, &settings).await.unwrap_or_else(|error| unavailable(&error))
    }

    async fn try_launch(version: Version, settings: &Settings) -> anyhow::Result<Self> {
        let bin = install::postgres_bin(version)?;
        let folder = process::scratch(settings.under.as_deref(), "postbox-pg-")?;
        let cluster = Cluster { bin, folder: folder.clone(), env: Vec::new() };
        // The guard comes first: from here on, everything we create is removed.
        let guard = ProcessGuard::new(&cluster.process(folder))?;
        cluster.create(settings)?;
        let (server, port) = cluster.start_anywhere().await.with_context(|| version.name())?;
        let postgres = Postgres::on_port(version, port);
        Ok(Self { postgres, cluster, port, server: Some(server), frozen: None, guard })
    }

    /// Returns the server as clients see it. Its URLs stay the same after a restart.
    pub fn postgres(&self) -> &Postgres {
        &self.postgres
    }

    /// Returns the first process's id, to measure it; `None` while it is stopped.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(Child::id)
    }

    /// Crashes it as Postgres sees it: nothing is flushed (`pg_ctl stop -m immediate`).
    pub fn stop_immediate(&mut self) {
        self.stop("QUIT");
    }

    /// Stops it: sessions are cut off, everything is flushed (`pg_ctl stop -m fast`).
    pub fn stop_fast(&mut self) {
        self.stop("INT");
    }

    /// Restarts it as a standby without a primary: nothing can be written until `pg_promote()`.
    pub async fn restart_as_standby(&mut self) {
        self.stop_fast();
        fs::write(self.cluster.data().join("standby.signal"), "").expect("its folder is ours");
        self.start().await;
    }

    /// Sends SIGKILL to the first process. The others notice and end.
    pub fn kill(&mut self) {
        self.stop("KILL");
    }

    /// Returns the folder with its data, to be copied while it is stopped.
    pub fn data(&self) -> PathBuf {
        self.cluster.data()
    }

    /// Sets the environment from the next start on: a library to load, and the clock it shows.
    pub fn set_env(&mut self, env: &[(&str, &str)]) {
        self.cluster.env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    }

    /// Freezes the process that flushes in the background, so that an immediate stop loses
    /// everything that no commit flushed. (A long `wal_writer_delay` may end at any moment of the
    /// test.)
    pub async fn freeze_wal_writer(&mut self) {
        const WAL_WRITER: &str = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'";
        let client = connect(&self.url()).await.expect("the server is running: call start first");
        let pid = client.query_one(WAL_WRITER, &[]).await.expect("a server has one").get(0);
        process::freeze(pid).expect("a process of our own server");
        self.frozen = Some(pid);
    }

    /// Starts it again on the same port with the same data, and waits until it accepts connections.
    pub async fn start(&mut self) {
        if let Err(error) = self.try_start().await {
            panic!("{} does not start again: {error:#}", self.postgres.version().name());
        }
    }

    /// Like [`Self::start`], if it may fail to start, as on a full disk.
    pub async fn try_start(&mut self) -> anyhow::Result<()> {
        if self.server.is_none() {
            self.server = Some(self.cluster.start(self.port).await?);
        }
        Ok(())
    }

    /// Returns whether the first process runs. A full disk may have stopped it.
    pub fn runs(&mut self) -> bool {
        if self.server.as_mut().is_some_and(|server| server.try_wait().is_ok_and(|ended| ended.is_some())) {
            self.server = None;
        }
        self.server.is_some()
    }

    fn stop(&mut self, signal: &str) {
        self.signal(signal);
        if let Some(pid) = self.frozen.take() {
            // A frozen process gets no other signal, and every stop waits for it. It may be gone
            // already.
            let _ = process::signal(pid, "KILL");
        }
        if let Some(mut server) = self.server.take() {
            server.wait().expect("our own child can be waited for");
        }
    }

    fn signal(&self, signal: &str) {
        let server = self.server.as_ref().expect("the server is running: call start first");
        process::signal(server.id(), signal).expect("our own child can be signalled");
    }
}

impl std::ops::Deref for PrivatePostgres {
    type Target = Postgres;

    fn deref(&self) -> &Postgres {
        &self.postgres
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        if let Some(pid) = self.frozen.take() {
            let _ = process::signal(pid, "CONT");
        }
        self.guard.stop(self.server.as_mut());
    }
}

/// A data folder and the programs for it.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) bin: PathBuf,
    /// Our folder. The server's data is in `data` below it.
    pub(super) folder: PathBuf,
    /// Environment of the server, in addition to that of all programs.
    pub(super) env: Vec<(String, String)>,
}

impl Cluster {
    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }

    pub(super) fn process(&self, remove: PathBuf) -> ServerProcess {
        ServerProcess { pid_file: self.data().join("postmaster.pid"), working: self.data(), signal: "QUIT", remove }
    }

    /// Runs `initdb` and writes the configuration.
    pub(super) fn create(&self, settings: &Settings) -> anyhow::Result<()> {
        let data = self.data();
        process::own_folder(&data, 0o700)?;
        let output = process::command(&self.bin.join("initdb"), &data)?
            .args(["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-sync", "--pgdata"])
            .arg(&data)
            .stdout(File::create(self.log())?)
            .stderr(File::options().append(true).open(self.log())?)
            .status()
            .with_context(|| format!("{}", self.bin.join("initdb").display()))?;
        anyhow::ensure!(output.success(), "initdb failed: {}", tail(&self.log()));
        Ok(fs::write(data.join("postgresql.auto.conf"), settings.render())?)
    }

    /// Starts on a free port.
    pub(super) async fn start_anywhere(&self) -> anyhow::Result<(Child, u16)> {
        on_free_port(async |port| Ok((self.start(port).await?, port))).await
    }

    /// Starts on this port and waits until it accepts connections.
    pub(super) async fn start(&self, port: u16) -> anyhow::Result<Child> {
        let deadline = Instant::now() + Duration::from_secs(START_SECONDS_MAX);
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres?connect_timeout=5");
        let mut server = self.spawn(port)?;
        loop {
            if connect(&url).await.is_ok() {
                return Ok(server);
            }
            if let Some(status) = server.try_wait()? {
                let log = tail(&self.log());
                // After SIGKILL the orphans hold the old shared memory until they notice.
                anyhow::ensure!(log.contains("shared memory block"), "postgres ended with {status}: {log}");
                fs::write(self.log(), "")?;
                server = self.spawn(port)?;
            }
            if Instant::now() > deadline {
                let _ = server.kill();
                let _ = server.wait();
                anyhow::bail!("postgres accepts no connections after {START_SECONDS_MAX} s: {}", tail(&self.log()));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn spawn(&self, port: u16) -> anyhow::Result<Child> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let mut command = process::command(&self.bin.join("postgres"), &self.data())?;
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.arg("-D").arg(self.data()).arg("-p").arg(port.to_string()).stderr(log);
        Ok(command.spawn()?)
    }
}

/// Returns the last lines of a server's log, for the text of a failure.
pub(super) fn tail(log: &Path) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().rev().take(8).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}
