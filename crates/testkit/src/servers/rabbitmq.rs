//! A RabbitMQ, for a single test or shared by all tests of a run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;

use super::ports::free_port;
use super::private_server::{self, PrivateServer, Program};
use super::{install, process, shared, unavailable};

/// Runs the server in the shell's process. The node's port mapper would stay behind as a daemon; it
/// ends when the folder is removed.
const START: &str = r#"
if [ "$2" = first ]; then
  (epmd -address 127.0.0.1 -port "$ERL_EPMD_PORT" & while [ -d "$1" ]; do sleep 0.2; done; kill $!) &
fi
exec "$0"
"#;

/// A server. See [`PrivateServer::sync`] for what a kill leaves of a new queue.
pub type PrivateRabbitmq = PrivateServer<Rabbit>;

/// How RabbitMQ is started.
#[derive(Debug, Clone)]
pub struct Rabbit {
    bin: PathBuf,
    config: String,
    epmd_port: u16,
}

/// The server that all tests of a run share. Each test uses other queue names.
#[derive(Debug, Clone)]
pub struct Rabbitmq {
    rabbit: Rabbit,
    folder: PathBuf,
    port: u16,
}

impl Rabbitmq {
    /// Returns the shared server. The first one to ask starts it.
    pub async fn shared() -> Self {
        static SERVER: OnceCell<Rabbitmq> = OnceCell::const_new();
        let server = SERVER.get_or_try_init(|| Self::find_or_start("")).await;
        server.unwrap_or_else(|error| unavailable(&error)).clone()
    }

    /// Returns the server that all tests share that name the same lines for its `rabbitmq.conf`.
    pub async fn shared_with(config: &str) -> Self {
        Self::find_or_start(config).await.unwrap_or_else(|error| unavailable(&error))
    }

    async fn find_or_start(config: &str) -> anyhow::Result<Self> {
        let mut rabbit = Rabbit::installed(config)?;
        let shared = shared::folder("rabbitmq", (&rabbit.bin, config))?;
        let prepare = |folder: &Path| fs::write(folder.join("epmd-port"), rabbit.epmd_port.to_string());
        let port = private_server::share(&rabbit, &shared, "TERM", prepare).await?;
        let folder = shared.join("run");
        rabbit.epmd_port = fs::read_to_string(folder.join("epmd-port"))?.trim().parse()?;
        Ok(Self { rabbit, folder, port })
    }

    /// `amqp://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}", self.port)
    }

    /// Runs `rabbitmqctl`, which takes a second or two. Returns its output.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        self.rabbit.ctl(&self.folder, self.port, arguments)
    }
}

impl PrivateServer<Rabbit> {
    /// Starts a server.
    pub async fn launch() -> Self {
        Self::launch_with("").await
    }

    /// Starts a server with more lines in its `rabbitmq.conf`.
    pub async fn launch_with(config: &str) -> Self {
        Self::of(Rabbit::installed(config)).await
    }

    /// Returns `amqp://127.0.0.1:PORT`; the same after a restart.
    pub fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}", self.port())
    }

    /// Makes the node write its queues and bindings to its files now. By itself it writes them, and
    /// the name of a new quorum queue, some seconds later. If it is killed before that, it has lost
    /// the binding, or has the queue without its messages and without a leader.
    pub fn sync(&self) {
        self.ctl(&[
            "eval",
            "ok = mnesia:sync_log(), dumped = mnesia:dump_log(), ok = dets:sync(ra_directory_reverse).",
        ]);
    }

    /// Runs `rabbitmqctl`, which takes a second or two. Returns its output.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        self.program.ctl(self.folder(), self.port(), arguments)
    }
}

impl Rabbit {
    fn installed(config: &str) -> anyhow::Result<Self> {
        Ok(Self { bin: install::rabbitmq()?, config: config.to_owned(), epmd_port: free_port()? })
    }

    fn ctl(&self, folder: &Path, port: u16, arguments: &[&str]) -> String {
        let command = self.run(self.bin.join("rabbitmqctl"), folder, port);
        let mut command = command.expect("a user to run it as");
        command.args(["--erlang-cookie", "postbox", "--quiet"]).args(arguments);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let output = command.output().expect("rabbitmqctl runs");
        let text = |bytes| String::from_utf8_lossy(bytes).trim().to_owned();
        assert!(output.status.success(), "rabbitmqctl {arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn run(&self, program: impl AsRef<Path>, folder: &Path, port: u16) -> anyhow::Result<Command> {
        let data = folder.join("data");
        let mut command = process::command(program.as_ref(), &data)?;
        command.env("PATH", "/usr/bin:/bin:/usr/sbin").env("LC_ALL", "C.UTF-8").env("HOME", &data);
        command.env("RABBITMQ_NODENAME", format!("t{port}@localhost")).env("RABBITMQ_MNESIA_BASE", data.join("mnesia"));
        command.env("RABBITMQ_LOG_BASE", data.join("log")).env("RABBITMQ_CONFIG_FILE", folder.join("rabbitmq"));
        command.env("RABBITMQ_ENABLED_PLUGINS_FILE", folder.join("plugins")).env("RABBITMQ_CONF_ENV_FILE", "/dev/null");
        command.env("RABBITMQ_DIST_PORT", free_port()?.to_string());
        command.env("ERL_EPMD_PORT", self.epmd_port.to_string()).env("ERL_EPMD_ADDRESS", "127.0.0.1");
        // Without it a script stays in between, and a signal would not reach the server.
        command.env("RABBITMQ_ALLOW_INPUT", "1");
        // Check every second, instead of every minute, how long a consumer has kept a message.
        let arguments = "-noinput -setcookie postbox +S 2:2 -rabbit channel_tick_interval 1000";
        command.env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", arguments);
        Ok(command)
    }
}

impl Program for Rabbit {
    const NAME: &'static str = "rabbitmq-server";

    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command> {
        let config = folder.join("rabbitmq.conf");
        let time = if config.exists() { "again" } else { "first" };
        let fixed = format!(
            "listeners.tcp.1 = 127.0.0.1:{port}\nloopback_users = none\ndisk_free_limit.absolute = 1MB\n\
             log.console = true\nlog.console.level = error\n"
        );
        fs::write(config, fixed + &self.config)?;
        fs::write(folder.join("plugins"), "[].\n")?;
        let mut command = self.run("sh", folder, port)?;
        command.args(["-c", START]).arg(self.bin.join("rabbitmq-server")).arg(folder).arg(time);
        Ok(command)
    }

    /// The server sends its protocol header once it is asked for this protocol.
    async fn answers(port: u16) -> bool {
        let asked = async {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
            stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
            stream.read_u8().await
        };
        asked.await.is_ok_and(|first| first == 1)
    }
}
