//! A RabbitMQ, of one test's own or shared by all of a run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;

use super::ports::free_port;
use super::private::tail;
use super::process::{self, ProcessGuard, ServerProcess};
use super::{install, shared, unavailable};

/// It starts in 10 s on a busy machine; more than this is a hang.
const START_SECONDS_MAX: u64 = 120;
/// How often a start is tried when somebody else took the port first.
const PORT_TRIES: usize = 5;
/// Its program runs in the shell's process. The port mapper of the node, which would stay behind as
/// a daemon, ends with the folder.
const START: &str = r#"
echo $$ > pid
if [ "$2" = first ]; then
  (epmd -address 127.0.0.1 -port "$ERL_EPMD_PORT" & while [ -d "$1" ]; do sleep 0.2; done; kill $!) &
fi
exec "$0"
"#;

/// What a node is started with.
#[derive(Debug, Clone)]
struct Node {
    bin: PathBuf,
    folder: PathBuf,
    config: String,
}

/// A server. Dropping it, or dying in any way, stops it and removes its data.
#[derive(Debug)]
pub struct PrivateRabbitmq {
    node: Node,
    port: u16,
    epmd_port: u16,
    server: Option<Child>,
    guard: ProcessGuard,
}

/// The server that all tests of a run share. They differ in the names of their queues.
#[derive(Debug, Clone)]
pub struct Rabbitmq {
    folder: PathBuf,
    port: u16,
}

impl Rabbitmq {
    /// The shared server; the first to ask starts it.
    ///
    /// # Panics
    ///
    /// If it is not installed or does not start; the message says what to do.
    pub async fn shared() -> Self {
        static SERVER: OnceCell<Rabbitmq> = OnceCell::const_new();
        SERVER.get_or_try_init(Self::find_or_start).await.unwrap_or_else(|error| unavailable(&error)).clone()
    }

    async fn find_or_start() -> anyhow::Result<Self> {
        let bin = install::rabbitmq()?;
        let folder = shared::folder("rabbitmq", &bin)?;
        let node = Node { bin, folder: folder.join("run"), config: String::new() };
        let process = node.process("TERM");
        let running = async || {
            let Ok(port) = fs::read_to_string(node.folder.join("port")) else { return Ok(None) };
            let port = port.trim().parse()?;
            let deadline = Instant::now() + Duration::from_secs(START_SECONDS_MAX);
            while !answers(port).await {
                if !process.lives() {
                    return Ok(None);
                }
                anyhow::ensure!(Instant::now() < deadline, "the shared RabbitMQ does not answer on port {port}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(Some(port))
        };
        let start = async || {
            let _ = fs::remove_dir_all(&node.folder);
            fs::create_dir(&node.folder)?;
            process::own_folder(&node.data(), 0o700)?;
            let (_left_to_its_guard, port, epmd_port) = node.start_anywhere().await?;
            fs::write(node.folder.join("epmd-port"), epmd_port.to_string())?;
            fs::write(node.folder.join("port"), port.to_string())?;
            Ok(port)
        };
        let port = shared::share(&folder, &process, running, start).await?;
        Ok(Self { folder: node.folder.clone(), port })
    }

    /// `amqp://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}", self.port)
    }

    /// Runs `rabbitmqctl`, which takes a second or two; what it printed.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        let epmd_port = fs::read_to_string(self.folder.join("epmd-port")).expect("it was started");
        let node =
            Node { bin: install::rabbitmq().expect("it runs"), folder: self.folder.clone(), config: String::new() };
        node.ctl(self.port, epmd_port.parse().expect("a port"), arguments)
    }
}

impl PrivateRabbitmq {
    /// Starts a server.
    ///
    /// # Panics
    ///
    /// If it is not installed or does not start; the message says what to do.
    pub async fn launch() -> Self {
        Self::launch_with("").await
    }

    /// Starts a server with more lines in its `rabbitmq.conf`.
    ///
    /// # Panics
    ///
    /// As [`Self::launch`].
    pub async fn launch_with(config: &str) -> Self {
        Self::try_launch(config).await.unwrap_or_else(|error| unavailable(&error))
    }

    async fn try_launch(config: &str) -> anyhow::Result<Self> {
        let bin = install::rabbitmq()?;
        let node = Node { bin, folder: process::scratch(None, "postbox-rabbitmq-")?, config: config.to_owned() };
        // The guard comes first: from here on whatever we make is removed.
        let guard = ProcessGuard::new(&node.process("KILL"))?;
        process::own_folder(&node.data(), 0o700)?;
        let (server, port, epmd_port) = node.start_anywhere().await?;
        Ok(Self { node, port, epmd_port, server: Some(server), guard })
    }

    /// `amqp://127.0.0.1:PORT`; the same after a restart.
    pub fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}", self.port)
    }

    /// What the node knows of its quorum queues is in its files from here on. It writes the name of
    /// a new one 3 s later; killed before, it has the queue afterwards and nothing of what was in
    /// it, and nobody leads it.
    pub fn sync(&self) {
        self.ctl(&["eval", "ok = dets:sync(ra_directory_reverse)."]);
    }

    /// SIGKILL. What was confirmed is in its files, as long as the machine lives; for a queue that
    /// is new see [`Self::sync`].
    pub fn kill(&mut self) {
        self.signal("KILL");
        if let Some(mut server) = self.server.take() {
            server.wait().expect("our own child can be waited for");
        }
    }

    /// Removes its data, while it is stopped.
    ///
    /// # Panics
    ///
    /// If it cannot be removed.
    pub fn empty(&self) {
        let data = self.node.data();
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
        self.server = Some(self.node.start(self.port, self.epmd_port, "again").await.expect("it starts again"));
    }

    /// Runs `rabbitmqctl`, which takes a second or two; what it printed.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        self.node.ctl(self.port, self.epmd_port, arguments)
    }

    fn signal(&self, signal: &str) {
        let server = self.server.as_ref().expect("the server is running: call start first");
        process::signal(server.id(), signal).expect("our own child can be signalled");
    }
}

impl Drop for PrivateRabbitmq {
    fn drop(&mut self) {
        self.guard.stop(self.server.as_mut());
    }
}

impl Node {
    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn process(&self, signal: &'static str) -> ServerProcess {
        let working = self.data();
        ServerProcess { pid_file: working.join("pid"), working, signal, remove: self.folder.clone() }
    }

    async fn start_anywhere(&self) -> anyhow::Result<(Child, u16, u16)> {
        for last in (0..PORT_TRIES).rev() {
            let (port, epmd_port) = (free_port()?, free_port()?);
            match self.start(port, epmd_port, "first").await {
                Err(error) if last > 0 && format!("{error:#}").contains("in use") => {}
                started => return Ok((started?, port, epmd_port)),
            }
        }
        unreachable!("the last try is returned")
    }

    /// Starts on this port and waits until it speaks AMQP.
    async fn start(&self, port: u16, epmd_port: u16, time: &str) -> anyhow::Result<Child> {
        let fixed = format!(
            "listeners.tcp.1 = 127.0.0.1:{port}\nloopback_users = none\ndisk_free_limit.absolute = 1MB\n\
             log.console = true\nlog.console.level = error\n"
        );
        fs::write(self.folder.join("rabbitmq.conf"), fixed + &self.config)?;
        fs::write(self.folder.join("plugins"), "[].\n")?;
        let log = self.folder.join("log");
        let mut command = self.command("sh", port, epmd_port)?;
        command.args(["-c", START]).arg(self.bin.join("rabbitmq-server")).arg(&self.folder).arg(time);
        command.stdout(File::create(&log)?);
        let deadline = Instant::now() + Duration::from_secs(START_SECONDS_MAX);
        let mut server = command.spawn().context("sh")?;
        while !answers(port).await {
            let status = server.try_wait()?;
            if status.is_some() || Instant::now() > deadline {
                let _ = (server.kill(), server.wait());
                anyhow::bail!("rabbitmq-server does not start: {}", tail(&log));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(server)
    }

    fn ctl(&self, port: u16, epmd_port: u16, arguments: &[&str]) -> String {
        let command = self.command(self.bin.join("rabbitmqctl"), port, epmd_port);
        let mut command = command.expect("a user to run it as");
        command.args(["--erlang-cookie", "postbox", "--quiet"]).args(arguments);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let output = command.output().expect("rabbitmqctl runs");
        let text = |bytes| String::from_utf8_lossy(bytes).trim().to_owned();
        assert!(output.status.success(), "rabbitmqctl {arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn command(&self, program: impl AsRef<Path>, port: u16, epmd_port: u16) -> anyhow::Result<Command> {
        let (data, folder) = (self.data(), &self.folder);
        let mut command = process::command(program.as_ref(), &data)?;
        command.env("PATH", "/usr/bin:/bin:/usr/sbin").env("LC_ALL", "C.UTF-8").env("HOME", &data);
        command.env("RABBITMQ_NODENAME", format!("t{port}@localhost")).env("RABBITMQ_MNESIA_BASE", data.join("mnesia"));
        command.env("RABBITMQ_LOG_BASE", data.join("log")).env("RABBITMQ_CONFIG_FILE", folder.join("rabbitmq"));
        command.env("RABBITMQ_ENABLED_PLUGINS_FILE", folder.join("plugins")).env("RABBITMQ_CONF_ENV_FILE", "/dev/null");
        command.env("RABBITMQ_DIST_PORT", free_port()?.to_string());
        command.env("ERL_EPMD_PORT", epmd_port.to_string()).env("ERL_EPMD_ADDRESS", "127.0.0.1");
        // Without it a script stays in between, and a signal would not reach the server.
        command.env("RABBITMQ_ALLOW_INPUT", "1");
        // How long a consumer keeps a message is looked at every second instead of every minute.
        let arguments = "-noinput -setcookie postbox +S 2:2 -rabbit channel_tick_interval 1000";
        command.env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", arguments);
        Ok(command)
    }
}

/// A server says who it is once it is asked for this protocol.
async fn answers(port: u16) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
        stream.read_u8().await
    };
    asked.await.is_ok_and(|first| first == 1)
}
