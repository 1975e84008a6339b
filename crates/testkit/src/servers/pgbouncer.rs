//! A transaction-mode pooler in front of a Postgres.

use std::fs;
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::ports::free_port;
use super::postgres::connect;
use super::private::tail;
use super::process::{self, ProcessGuard, ServerProcess};
use super::{Postgres, install, unavailable};

/// Longest start. It takes 50 ms, so more than this is a hang.
const START_SECONDS_MAX: u64 = 20;

/// A pgbouncer in transaction mode. Dropping this stops it, and so does any death of this process.
#[derive(Debug)]
pub struct PgBouncer {
    base: String,
    program: PathBuf,
    folder: PathBuf,
    server: Child,
    guard: ProcessGuard,
}

impl PgBouncer {
    /// Number of connections to the server, shared by all clients of one role and database.
    pub const CONNECTIONS: usize = 4;

    /// Starts one in front of `postgres`, with so few connections that clients must take turns.
    pub async fn start(postgres: &Postgres) -> Self {
        Self::start_for(postgres, &[]).await
    }

    /// The same, if clients may also connect as these roles.
    pub async fn start_for(postgres: &Postgres, roles: &[&str]) -> Self {
        Self::try_start(postgres, roles).await.unwrap_or_else(|error| unavailable(&error))
    }

    /// Returns a superuser's URL of a database through the pooler. The database is given by name or
    /// by its own URL.
    pub fn url(&self, database: &str) -> String {
        let name = database.rsplit('/').next().unwrap_or(database);
        format!("{}/{name}", self.base)
    }

    async fn try_start(postgres: &Postgres, roles: &[&str]) -> anyhow::Result<Self> {
        let program = install::pgbouncer()?;
        let folder = process::scratch(None, "postbox-pgbouncer-")?;
        process::own_folder(&folder, 0o755)?;
        let pid_file = folder.join("pid");
        let process = ServerProcess { pid_file, working: folder.clone(), signal: "INT", remove: folder.clone() };
        let guard = ProcessGuard::new(&process)?;
        let upstream: tokio_postgres::Config = postgres.url().parse().context("the server's URL")?;
        let host = match upstream.get_hosts().first() {
            Some(tokio_postgres::config::Host::Tcp(host)) => host.clone(),
            _ => "127.0.0.1".to_owned(),
        };
        let superuser = upstream.get_user().unwrap_or("postgres");
        let users: String = [superuser].iter().chain(roles).map(|user| format!("\"{user}\" \"\"\n")).collect();
        fs::write(folder.join("users"), users)?;
        let port = free_port()?;
        let config = format!(
            "[databases]\n* = host={host} port={}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = trust\nauth_file = {users}\npool_mode = transaction\n\
             default_pool_size = {connections}\nmax_client_conn = 500\nignore_startup_parameters = extra_float_digits\n\
             logfile = {log}\npidfile = {pid}\nserver_lifetime = 60\n",
            upstream.get_ports().first().copied().unwrap_or(5432),
            users = folder.join("users").display(),
            connections = Self::CONNECTIONS,
            log = folder.join("log").display(),
            pid = folder.join("pid").display(),
        );
        fs::write(folder.join("pgbouncer.ini"), config)?;
        let mut server = process::command(&program, &folder)?.arg(folder.join("pgbouncer.ini")).spawn()?;
        let base = format!("postgres://{superuser}@127.0.0.1:{port}");
        let url = format!("{base}/postgres?connect_timeout=5");
        let deadline = Instant::now() + Duration::from_secs(START_SECONDS_MAX);
        while let Err(error) = connect(&url).await {
            let status = server.try_wait()?;
            if status.is_some() || Instant::now() > deadline {
                let _ = server.kill();
                let _ = server.wait();
                return Err(error.context(format!("pgbouncer does not start: {}", tail(&folder.join("log")))));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Self { base, program, folder, server, guard })
    }

    /// Kills it (SIGKILL). Every connection breaks, while the server behind it finishes its
    /// requests.
    pub fn kill(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }

    /// Starts it again on the same port, after [`Self::kill`].
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn start_again(&mut self) -> anyhow::Result<()> {
        let _ = fs::remove_file(self.folder.join("pid"));
        self.server = process::command(&self.program, &self.folder)?.arg(self.folder.join("pgbouncer.ini")).spawn()?;
        Ok(())
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        self.guard.stop(Some(&mut self.server));
    }
}
