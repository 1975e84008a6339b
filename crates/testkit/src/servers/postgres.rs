//! A running Postgres, as tests see it.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context as _;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::OnceCell;
use tokio_postgres::NoTls;

use super::{shared, unavailable};

/// Databases of ended tests to drop for each new one. More than one, so that their number shrinks.
const ORPHANS_MAX: usize = 2;

/// A major version of Postgres.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// 15, the oldest supported.
    V15,
    /// 18, the newest.
    V18,
}

impl Version {
    /// Both versions.
    pub const ALL: [Self; 2] = [Self::V15, Self::V18];

    /// The major version.
    pub fn number(self) -> u32 {
        match self {
            Self::V15 => 15,
            Self::V18 => 18,
        }
    }

    /// The name, as people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::V15 => "Postgres 15",
            Self::V18 => "Postgres 18",
        }
    }
}

/// A running Postgres. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Postgres {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    version: Version,
    /// The URL of a superuser, up to and without the database name.
    base: String,
    /// The server is ours: databases of ended test processes may be dropped.
    ours: bool,
}

impl Postgres {
    /// Returns the server that all tests of a run share. The first one to ask starts it.
    pub async fn shared(version: Version) -> Self {
        static SERVERS: [OnceCell<Postgres>; 2] = [const { OnceCell::const_new() }; 2];
        let shared = SERVERS[version as usize].get_or_try_init(|| shared::find_or_start(version)).await;
        shared.unwrap_or_else(|error| unavailable(&error)).clone()
    }

    /// Uses a server under a superuser's URL. `ours` if no other project uses it.
    pub(super) fn at(version: Version, url: &str, ours: bool) -> anyhow::Result<Self> {
        let (base, _) = url
            .rsplit_once('/')
            .filter(|(base, _)| base.contains("://") && !base.ends_with('/'))
            .with_context(|| format!("{url:?} is no Postgres URL: expected postgres://user@host:port/database"))?;
        Ok(Self { inner: Arc::new(Inner { version, base: base.to_owned(), ours }) })
    }

    pub(super) fn on_port(version: Version, port: u16) -> Self {
        let base = format!("postgres://postgres@127.0.0.1:{port}");
        Self { inner: Arc::new(Inner { version, base, ours: true }) }
    }

    /// Returns its version.
    pub fn version(&self) -> Version {
        self.inner.version
    }

    /// Returns a superuser's URL of the `postgres` database.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// Returns a superuser's URL of a database.
    pub fn url_of(&self, database: &str) -> String {
        format!("{}/{database}", self.inner.base)
    }

    /// Creates an empty database with a unique name and returns its URL.
    ///
    /// It lives as long as the server. Once this process has ended, later tests drop it.
    pub async fn fresh_database(&self) -> String {
        self.created(self.create_database("template0").await)
    }

    /// Like [`Self::fresh_database`], with everything `prepare` created in a template, whose URL it
    /// is given. It runs once per server for each program that asks, and must leave no connection
    /// open.
    pub async fn prepared_database(&self, prepare: impl AsyncFnOnce(String)) -> String {
        self.created(self.copy_prepared(prepare).await)
    }

    fn created(&self, name: anyhow::Result<String>) -> String {
        let name = name.unwrap_or_else(|error| panic!("{}: creating a database: {error:#}", self.version().name()));
        self.url_of(&name)
    }

    /// Runs a script through psql and returns its output, with columns separated by `|`.
    pub fn psql(url: &str, script: &str) -> String {
        let program = super::install::psql().unwrap_or_else(|error| unavailable(&error));
        // By standard input, because --command would put everything into one transaction.
        let mut child = std::process::Command::new(program)
            .args(["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1", url])
            .env("PGOPTIONS", "--client-min-messages=warning")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("psql is there: we looked");
        let mut stdin = child.stdin.take().expect("it is piped");
        // A psql that stopped at an error reads no more. Its exit status reports it.
        let _ = stdin.write_all(script.as_bytes());
        drop(stdin);
        let output = child.wait_with_output().expect("our own child");
        assert!(output.status.success(), "psql: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("the databases of tests are UTF-8")
    }

    async fn copy_prepared(&self, prepare: impl AsyncFnOnce(String)) -> anyhow::Result<String> {
        let program = std::env::current_exe()?;
        let mut hasher = DefaultHasher::new();
        (&program, std::fs::metadata(&program)?.modified()?).hash(&mut hasher);
        let (number, name) = (hasher.finish() as i64, format!("prepared_{:016x}", hasher.finish()));
        let client = connect(&self.url()).await?;
        let there = "SELECT FROM pg_database WHERE datname = $1";
        if client.query_opt(there, &[&name]).await?.is_none() {
            // One process prepares at a time. It may die meanwhile.
            client.execute("SELECT pg_advisory_lock($1)", &[&number]).await?;
            if client.query_opt(there, &[&name]).await?.is_none() {
                client.batch_execute(&format!("DROP DATABASE IF EXISTS {name}_new WITH (FORCE)")).await?;
                client.batch_execute(&format!("CREATE DATABASE {name}_new TEMPLATE template0")).await?;
                prepare(self.url_of(&format!("{name}_new"))).await;
                client.batch_execute(&format!("ALTER DATABASE {name}_new RENAME TO {name}")).await?;
            }
            client.execute("SELECT pg_advisory_unlock($1)", &[&number]).await?;
        }
        self.create_database(&name).await
    }

    async fn create_database(&self, template: &str) -> anyhow::Result<String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (count, random) = (COUNT.fetch_add(1, Ordering::Relaxed), SmallRng::from_os_rng().random::<u32>());
        let name = format!("t_{}_{count}_{random:08x}", std::process::id());
        let client = connect(&self.url()).await?;
        // `file_copy` beats `wal_log` if nothing is flushed: no WAL for 7 MB of catalog.
        client.batch_execute(&format!("CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")).await?;
        if self.inner.ours {
            self.drop_orphans(&client).await?;
        }
        Ok(name)
    }

    /// Drops databases of ended tests. Two tests may pick the same one; the slower one's error is
    /// ignored.
    async fn drop_orphans(&self, client: &tokio_postgres::Client) -> anyhow::Result<()> {
        let rows = client.query(r"SELECT datname FROM pg_database WHERE datname LIKE 't\_%'", &[]).await?;
        let names: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        let orphans = names.iter().filter(|name| {
            let owner = name.split('_').nth(1).unwrap_or_default();
            !Path::new("/proc").join(owner).exists()
        });
        for orphan in orphans.take(ORPHANS_MAX) {
            let _ = client.batch_execute(&format!("DROP DATABASE IF EXISTS {orphan} WITH (FORCE)")).await;
        }
        Ok(())
    }
}

/// Connects, and runs the connection in the background.
pub(super) async fn connect(url: &str) -> anyhow::Result<tokio_postgres::Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}
