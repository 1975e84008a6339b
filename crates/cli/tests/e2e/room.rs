//! A folder of a test's own with a store in it, and the binary to be run there.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::servers::{Postgres, Version};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::sync::watch;

/// Nothing here takes long; this only turns a hang into a failure.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// Which store a test runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
}

/// A folder, a store, the binary.
pub(crate) struct Room {
    folder: tempfile::TempDir,
    pub(crate) kind: Kind,
    pub(crate) url: String,
}

impl Room {
    /// An empty store, not migrated.
    pub(crate) async fn empty(kind: Kind) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let url = match kind {
            Kind::Sqlite => format!("sqlite:{}", folder.path().join("postbox.db").display()),
            Kind::Postgres => Postgres::shared(Version::V15).await.fresh_database().await,
        };
        Ok(Self { folder, kind, url })
    }

    /// A store somewhere else, as it is.
    pub(crate) fn on(kind: Kind, url: String) -> Result<Self> {
        Ok(Self { folder: tempfile::tempdir()?, kind, url })
    }

    /// A store with its schema.
    pub(crate) async fn migrated(kind: Kind) -> Result<Self> {
        let room = Self::empty(kind).await?;
        room.ok(&["migrate", "up"])?;
        Ok(room)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the configuration; the store's section is put in front. Where it does not say where to listen, that is on a free port: the
    /// default one is for one test at a time.
    pub(crate) fn config(&self, text: &str) -> Result<()> {
        let server = if text.contains("[server]") { "" } else { "\n[server]\nlisten = \"127.0.0.1:0\"\n" };
        std::fs::write(self.path("postbox.toml"), format!("[store]\nurl = {:?}\n{text}{server}", self.url))?;
        Ok(())
    }

    /// The binary, in this folder, on this store.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_postbox"));
        command.args(args).current_dir(self.folder.path()).stdin(Stdio::null());
        for name in ["POSTBOX_CONFIG", "POSTBOX_LOG", "RUST_BACKTRACE"] {
            command.env_remove(name);
        }
        command.env("POSTBOX_STORE", &self.url);
        command
    }

    pub(crate) fn output(&self, args: &[&str]) -> Result<Output> {
        Ok(self.command(args).output()?)
    }

    /// It must end with 0; gives what it printed.
    pub(crate) fn ok(&self, args: &[&str]) -> Result<String> {
        let output = self.output(args)?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "postbox {args:?} ended with {}: {stderr}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    /// `postbox dispatch`: what became of the events. Not how many were fetched: one that waits behind a slow one of its key is fetched
    /// again, and what is slow depends on the machine.
    pub(crate) fn dispatch(&self, args: &[&str]) -> Result<String> {
        let printed = self.ok(&[&["dispatch"], args].concat())?;
        let (fetched, became) = printed.trim_end().split_once(' ').context("two counts at least")?;
        ensure!(fetched.starts_with("fetched="), "{printed}");
        Ok(became.to_owned())
    }

    /// It must end with `code` and print nothing but its complaint; gives that.
    pub(crate) fn refuses(&self, code: i32, args: &[&str]) -> Result<String> {
        complaint(&self.output(args)?, code, args)
    }

    /// Runs SQL as any program would; the outbox's table is called `OUTBOX` in it.
    pub(crate) async fn sql(&self, sql: &str) -> Result<()> {
        match self.kind {
            Kind::Sqlite => {
                let path = self.url.trim_start_matches("sqlite:");
                rusqlite::Connection::open(path)?.execute_batch(&sql.replace("OUTBOX", "postbox_outbox"))?;
            }
            Kind::Postgres => {
                let (client, connection) = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
                let connection = tokio::spawn(connection);
                client.batch_execute(&sql.replace("OUTBOX", "postbox.outbox")).await?;
                drop(client);
                connection.await??;
            }
        }
        Ok(())
    }

    /// Everything that is in the store, to compare with later: "nothing changed".
    pub(crate) async fn snapshot(&self) -> Result<Vec<u8>> {
        if self.kind == Kind::Sqlite {
            return Ok(bytes(&self.path("postbox.db")).unwrap_or_default());
        }
        const TABLES: &str = "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) FROM pg_class AS c \
            JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'r' \
            AND n.nspname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1";
        let (client, connection) = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
        let connection = tokio::spawn(connection);
        let mut all = String::new();
        for row in client.query(TABLES, &[]).await? {
            let table: String = row.get(0);
            let rows = format!("SELECT coalesce(string_agg(t::text, E'\\n' ORDER BY t::text), '') FROM {table} AS t");
            let rows: String = client.query_one(&rows, &[]).await?.get(0);
            all += &format!("{table}\n{rows}\n");
        }
        drop(client);
        connection.await??;
        Ok(all.into_bytes())
    }

    /// Three events: two of key 1 and one of key 2.
    pub(crate) async fn insert_three(&self) -> Result<()> {
        self.sql(
            "INSERT INTO OUTBOX (topic, key, payload) VALUES ('order.placed', '1', '{\"n\":1}');\n\
             INSERT INTO OUTBOX (topic, key, payload) VALUES ('order.placed', '2', '{\"n\":2}');\n\
             INSERT INTO OUTBOX (topic, key, payload) VALUES ('order.paid', '1', '{\"n\":3}');",
        )
        .await
    }

    /// The lines of a file sink, as JSON.
    pub(crate) fn lines(&self, name: &str) -> Result<Vec<serde_json::Value>> {
        let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// `postbox run` until it says where it listens.
    pub(crate) async fn serve(&self) -> Result<Served> {
        self.serve_with(&[]).await
    }

    /// The same with these variables in its environment.
    pub(crate) async fn serve_with(&self, env: &[(&str, &str)]) -> Result<Served> {
        let mut command = tokio::process::Command::from(self.command(&["run", "--log-json"]));
        command.envs(env.iter().copied());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
        let mut lines = BufReader::new(child.stderr.take().context("no stderr")?).lines();
        let started = async {
            while let Some(line) = lines.next_line().await? {
                let value: serde_json::Value = serde_json::from_str(&line).with_context(|| line.clone())?;
                if let Some(address) = value["address"].as_str() {
                    return Ok(address.to_owned());
                }
            }
            anyhow::bail!("it ended without listening")
        };
        let address = tokio::time::timeout(DEADLINE, started).await.context("it never listened")??;
        let (note, log) = watch::channel(Vec::new());
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                note.send_modify(|log| log.push(line));
            }
        });
        Ok(Served { child, address, log })
    }
}

/// A running `postbox run`.
pub(crate) struct Served {
    child: tokio::process::Child,
    pub(crate) address: String,
    /// What it logged since it listens; closed when it has ended.
    log: watch::Receiver<Vec<String>>,
}

impl Served {
    pub(crate) fn pid(&self) -> Result<u32> {
        self.child.id().context("it has ended already")
    }

    /// SIGTERM; it must end with 0 in time. Gives what it logged.
    pub(crate) async fn terminate(self) -> Result<Vec<String>> {
        signal(self.pid()?, "TERM")?;
        self.ended().await
    }

    /// It must end with 0 in time. Gives what it logged.
    pub(crate) async fn ended(mut self) -> Result<Vec<String>> {
        let status = tokio::time::timeout(DEADLINE, self.child.wait()).await.context("it does not stop")??;
        while self.log.changed().await.is_ok() {}
        let log = self.log.borrow().clone();
        ensure!(status.success(), "it ended with {status}: {log:#?}");
        Ok(log)
    }

    /// SIGKILL; gives the moment.
    pub(crate) async fn kill(mut self) -> Result<Instant> {
        self.child.start_kill()?;
        let killed = Instant::now();
        self.child.wait().await?;
        Ok(killed)
    }

    /// Waits until so many lines of its log say this.
    pub(crate) async fn logged(&self, text: &str, lines: usize) -> Result<()> {
        let mut log = self.log.clone();
        let said = log.wait_for(|log| log.iter().filter(|line| line.contains(text)).count() >= lines);
        tokio::time::timeout(DEADLINE, said)
            .await
            .with_context(|| format!("it never said {text:?} {lines} times"))??;
        Ok(())
    }
}

/// Sends a signal to a process that this test started.
pub(crate) fn signal(pid: u32, name: &str) -> Result<()> {
    let sent = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status()?;
    ensure!(sent.success(), "no process {pid}");
    Ok(())
}

/// What a failed command said: one exit code, nothing on standard output, no panic, every line ours.
pub(crate) fn complaint(output: &Output, code: i32, args: &[&str]) -> Result<String> {
    let stderr = String::from_utf8(output.stderr.clone())?;
    ensure!(output.status.code() == Some(code), "postbox {args:?} ended with {}: {stderr}", output.status);
    ensure!(output.stdout.is_empty(), "postbox {args:?} printed {:?}", String::from_utf8_lossy(&output.stdout));
    ensure!(!stderr.contains("panicked") && !stderr.trim().is_empty(), "{stderr}");
    Ok(stderr)
}

/// A file's bytes, or none.
pub(crate) fn bytes(path: &Path) -> Option<Vec<u8>> {
    std::fs::read(path).ok()
}

/// A test of each of these functions for each store.
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod on_sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() -> anyhow::Result<()> { super::$name(crate::room::Kind::Sqlite).await })*
        }
        mod on_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() -> anyhow::Result<()> { super::$name(crate::room::Kind::Postgres).await })*
        }
    };
}
pub(crate) use on_both;
