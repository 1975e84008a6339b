//! A folder for one test, with a store in it, and the binary to run there.

use std::path::PathBuf;
use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::servers::{Postgres, Version};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::sync::watch;

/// Only turns a hang into a failure: nothing here takes long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// A subscription `out` that writes to `out.jsonl`.
pub(crate) const FILE_SINK: &str = "[subscriptions.out]\nsink = { type = \"file\", path = \"out.jsonl\" }\n";

/// The sink line of a subscription that posts to this URL on loopback.
pub(crate) fn http_sink(url: &str) -> String {
    format!("sink = {{ type = \"http\", url = \"{url}\", allow = [\"127.0.0.1\"] }}\n")
}

/// The store that a test runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
}

/// A folder, a store and the binary.
pub(crate) struct TestEnv {
    folder: tempfile::TempDir,
    pub(crate) kind: Kind,
    pub(crate) url: String,
}

impl TestEnv {
    /// A store without a schema.
    pub(crate) async fn empty(kind: Kind) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let url = match kind {
            Kind::Sqlite => format!("sqlite:{}", folder.path().join("postbox.db").display()),
            Kind::Postgres => Postgres::shared(Version::V15).await.fresh_database().await,
        };
        Ok(Self { folder, kind, url })
    }

    /// An existing store, unchanged.
    pub(crate) fn on(kind: Kind, url: String) -> Result<Self> {
        Ok(Self { folder: tempfile::tempdir()?, kind, url })
    }

    /// A store with its schema.
    pub(crate) async fn migrated(kind: Kind) -> Result<Self> {
        let up = |env: Self| env.ok(&["migrate", "up"]).map(|_| env);
        if kind == Kind::Sqlite {
            return up(Self::empty(kind).await?);
        }
        let prepare = async |url| drop(Self::on(kind, url).and_then(up).expect("migrated"));
        Self::on(kind, Postgres::shared(Version::V15).await.prepared_database(prepare).await)
    }

    /// A store with its schema, and this configuration.
    pub(crate) async fn with(kind: Kind, config: &str) -> Result<Self> {
        let env = Self::migrated(kind).await?;
        env.config(config)?;
        Ok(env)
    }

    /// The same store of Postgres with another role.
    pub(crate) fn as_role(&self, role: &str, config: &str) -> Result<Self> {
        let (scheme, rest) = self.url.split_once("://").context("a URL")?;
        let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
        let other = Self::on(Kind::Postgres, format!("{scheme}://{role}@{host}"))?;
        other.config(config)?;
        Ok(other)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the configuration with this store, and a free port to listen on unless the text sets
    /// one.
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
        // Without a URL, the configuration file names the stores.
        match self.url.as_str() {
            "" => command.env_remove("POSTBOX_STORE"),
            url => command.env("POSTBOX_STORE", url),
        };
        command
    }

    pub(crate) fn output(&self, args: &[&str]) -> Result<Output> {
        Ok(self.command(args).output()?)
    }

    /// Starts the binary with its output captured.
    pub(crate) fn spawn(&self, args: &[&str]) -> Result<Child> {
        let mut command = tokio::process::Command::from(self.command(args));
        Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?)
    }

    /// Returns the standard output, whatever the exit code.
    pub(crate) fn said(&self, args: &[&str]) -> Result<String> {
        Ok(String::from_utf8(self.output(args)?.stdout)?)
    }

    /// Must exit with 0; returns the JSON it printed.
    pub(crate) fn json(&self, args: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.ok(args)?)?)
    }

    /// Must exit with 0; returns what it printed.
    pub(crate) fn ok(&self, args: &[&str]) -> Result<String> {
        let output = self.output(args)?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "postbox {args:?} ended with {}: {stderr}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Creates the configured subscriptions; nothing may be pending yet.
    pub(crate) fn subscribe(&self) -> Result<()> {
        ensure!(self.dispatch(&[])? == "dispatched=0 failed=0 dead=0");
        Ok(())
    }

    /// `postbox dispatch`: returns the counts without `fetched=`, which depends on the machine's
    /// speed.
    pub(crate) fn dispatch(&self, args: &[&str]) -> Result<String> {
        let printed = self.ok(&[&["dispatch"], args].concat())?;
        let (fetched, became) = printed.trim_end().split_once(' ').context("two counts at least")?;
        ensure!(fetched.starts_with("fetched="), "{printed}");
        Ok(became.to_owned())
    }

    /// Must exit with `code` and print only an error; returns it.
    pub(crate) fn refuses(&self, code: i32, args: &[&str]) -> Result<String> {
        complaint(&self.output(args)?, code, args)
    }

    /// Runs SQL as any program would; `OUTBOX` stands for the outbox table.
    pub(crate) async fn sql(&self, sql: &str) -> Result<()> {
        match self.kind {
            Kind::Sqlite => {
                let path = self.url.trim_start_matches("sqlite:");
                rusqlite::Connection::open(path)?.execute_batch(&sql.replace("OUTBOX", "postbox_outbox"))?;
            }
            Kind::Postgres => self.client().await?.batch_execute(&sql.replace("OUTBOX", "postbox.outbox")).await?,
        }
        Ok(())
    }

    /// Opens a connection to the database.
    pub(crate) async fn client(&self) -> Result<tokio_postgres::Client> {
        let (client, connection) = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        Ok(client)
    }

    /// The whole content of the store, to check later that nothing changed.
    pub(crate) async fn snapshot(&self) -> Result<Vec<u8>> {
        if self.kind == Kind::Sqlite {
            let path = self.path("postbox.db");
            if path.exists() {
                // Include what an earlier process left in the write-ahead log.
                _ = rusqlite::Connection::open(&path)?.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
            }
            return Ok(std::fs::read(path).unwrap_or_default());
        }
        const TABLES: &str = "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) FROM pg_class AS c \
            JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'r' \
            AND n.nspname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1";
        let client = self.client().await?;
        let mut all = String::new();
        for row in client.query(TABLES, &[]).await? {
            let table: String = row.get(0);
            let rows = format!("SELECT coalesce(string_agg(t::text, E'\\n' ORDER BY t::text), '') FROM {table} AS t");
            let rows: String = client.query_one(&rows, &[]).await?.get(0);
            all += &format!("{table}\n{rows}\n");
        }
        Ok(all.into_bytes())
    }

    /// Inserts events of a topic and a key, with the payload `{"n":…}`, in this order.
    pub(crate) async fn insert<'a>(&self, events: impl IntoIterator<Item = (&'a str, String, i64)>) -> Result<()> {
        let row = |(topic, key, n)| format!("('{topic}', '{key}', '{{\"n\":{n}}}')");
        let rows: Vec<String> = events.into_iter().map(row).collect();
        self.sql(&format!("INSERT INTO OUTBOX (topic, key, payload) VALUES {}", rows.join(","))).await
    }

    /// Inserts three events: two of key 1 and one of key 2.
    pub(crate) async fn insert_three(&self) -> Result<()> {
        let events = [("order.placed", 1, 1), ("order.placed", 2, 2), ("order.paid", 1, 3)];
        self.insert(events.map(|(topic, key, n)| (topic, key.to_string(), n))).await
    }

    /// The lines of a file sink as JSON; a line that is not complete yet is left out.
    pub(crate) fn lines(&self, name: &str) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// Starts `postbox run` and waits until it logs its address.
    pub(crate) async fn serve(&self) -> Result<Served> {
        self.serve_with(&[]).await
    }

    /// The same with these variables in its environment.
    pub(crate) async fn serve_with(&self, env: &[(&str, &str)]) -> Result<Served> {
        self.serve_to(Stdio::piped(), env).await
    }

    /// The same with this standard output.
    pub(crate) async fn serve_to(&self, output: Stdio, env: &[(&str, &str)]) -> Result<Served> {
        let mut command = self.command(&["run", "--log-json"]);
        command.envs(env.iter().copied()).stdout(output);
        Self::start(command).await
    }

    /// The same, with these limits of open files, as `prlimit` takes them: `SOFT:HARD`.
    pub(crate) async fn serve_with_files(&self, limits: &str) -> Result<Served> {
        let service = self.command(&["run", "--log-json"]);
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={limits}")).arg(service.get_program()).args(service.get_args());
        command.current_dir(self.folder.path()).stdin(Stdio::null()).stdout(Stdio::piped());
        for (name, value) in service.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Self::start(command).await
    }

    /// Starts a `postbox run --log-json` and waits until it logs its address.
    async fn start(command: Command) -> Result<Served> {
        let mut command = tokio::process::Command::from(command);
        command.stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let mut lines = BufReader::new(child.stderr.take().context("no stderr")?).lines();
        let started = async {
            while let Some(line) = lines.next_line().await? {
                let value: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
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
    child: Child,
    pub(crate) address: String,
    /// Log lines since it listens; closed when it has ended.
    log: watch::Receiver<Vec<String>>,
}

impl Served {
    pub(crate) fn pid(&self) -> Result<u32> {
        self.child.id().context("it has ended already")
    }

    /// Sends SIGTERM; it must exit with 0 in time. Returns its log.
    pub(crate) async fn terminate(self) -> Result<Vec<String>> {
        signal(self.pid()?, "TERM")?;
        self.ended().await
    }

    /// It must exit with 0 in time. Returns its log.
    pub(crate) async fn ended(self) -> Result<Vec<String>> {
        let (status, log) = self.status().await?;
        ensure!(status.success(), "it ended with {status}: {log:#?}");
        Ok(log)
    }

    /// It must end in time. Returns how it ended, and its log.
    pub(crate) async fn status(mut self) -> Result<(ExitStatus, Vec<String>)> {
        let status = tokio::time::timeout(DEADLINE, self.child.wait()).await.context("it does not stop")??;
        while self.log.changed().await.is_ok() {}
        let log = self.log.borrow().clone();
        Ok((status, log))
    }

    /// Returns its log so far.
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.borrow().clone()
    }

    /// Sends SIGKILL; returns the time.
    pub(crate) async fn kill(mut self) -> Result<Instant> {
        self.child.start_kill()?;
        let killed = Instant::now();
        self.child.wait().await?;
        Ok(killed)
    }

    /// Waits until this many log lines contain the text.
    pub(crate) async fn logged(&self, text: &str, lines: usize) -> Result<()> {
        let mut log = self.log.clone();
        let said = log.wait_for(|log| log.iter().filter(|line| line.contains(text)).count() >= lines);
        let said = tokio::time::timeout(DEADLINE, said).await;
        said.with_context(|| format!("it never said {text:?} {lines} times"))??;
        Ok(())
    }
}

/// The output of a process that must end in time.
pub(crate) async fn ended(child: Child) -> Result<Output> {
    Ok(tokio::time::timeout(DEADLINE, child.wait_with_output()).await.context("it does not end")??)
}

/// Polls until `look` finds something, and returns it.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    let began = Instant::now();
    let found = async {
        loop {
            if let Some(found) = look().await? {
                return Ok(found);
            }
            // The longer it takes, the more rarely: a look may be a process, and takes time from
            // what it waits for.
            let pause = began.elapsed() / 10;
            tokio::time::sleep(pause.clamp(Duration::from_millis(5), Duration::from_secs(1))).await;
        }
    };
    tokio::time::timeout(DEADLINE, found).await.with_context(|| format!("{what}: it never came"))?
}

/// Waits until a session waits for a lock of this connection.
pub(crate) async fn until_waited_for(holder: &tokio_postgres::Client) -> Result<()> {
    const WAITING: &str =
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))";
    let waits = async || anyhow::Ok((holder.query_one(WAITING, &[]).await?.get::<_, i64>(0) > 0).then_some(()));
    until("somebody who waits for the lock", waits).await
}

/// Sends a GET to a running service; returns the whole answer.
pub(crate) async fn get(address: &str, path: &str, headers: &str) -> Result<String> {
    get_as("localhost", address, path, headers).await
}

/// The same under another name of the host.
pub(crate) async fn get_as(host: &str, address: &str, path: &str, headers: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// The parameters of the function that reads a lane on Postgres.
pub(crate) const WINDOW_PARAMETERS: &str =
    "(inline_max int, rows_max bigint, of_lane int, lane_count int, topic_likes text[],
  of_tenant text, of_kinds text[], of_aggregates text[], of_headers jsonb, of_subscription int, under_epoch bigint,
  under_revision int, last_place text, last_snap text, last_settled bigint, read_after bigint, look_max bigint,
  may_stay boolean, settle_to bigint, now_delivered bigint)";

/// Sends a signal to a process that this test started.
pub(crate) fn signal(pid: u32, name: &str) -> Result<()> {
    let sent = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status()?;
    ensure!(sent.success(), "no process {pid}");
    Ok(())
}

/// The error of a failed command: the expected exit code, nothing on standard output, no panic.
pub(crate) fn complaint(output: &Output, code: i32, args: &[&str]) -> Result<String> {
    let stderr = String::from_utf8(output.stderr.clone())?;
    ensure!(output.status.code() == Some(code), "postbox {args:?} ended with {}: {stderr}", output.status);
    ensure!(output.stdout.is_empty(), "postbox {args:?} printed {:?}", String::from_utf8_lossy(&output.stdout));
    ensure!(!stderr.contains("panicked") && !stderr.trim().is_empty(), "{stderr}");
    Ok(stderr)
}

/// Named tests, each of one call.
macro_rules! cases {
    ($($name:ident => $call:expr;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() -> anyhow::Result<()> {
                $call.await
            }
        )*
    };
}
pub(crate) use cases;

/// One test per function and store.
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod on_sqlite {
            crate::env::cases! { $($name => super::$name(crate::env::Kind::Sqlite);)* }
        }
        mod on_postgres {
            crate::env::cases! { $($name => super::$name(crate::env::Kind::Postgres);)* }
        }
    };
}
pub(crate) use on_both;
