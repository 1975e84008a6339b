//! SQS and SNS, for a single test or shared by all tests of a run: moto, which keeps everything in
//! memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;

use super::private_server::{self, PrivateServer, Program};
use super::{install, process, shared, unavailable};

/// A server. If it is killed, it forgets all queues, topics and messages.
pub type PrivateSqs = PrivateServer<Moto>;

/// How moto is started.
#[derive(Debug)]
pub struct Moto {
    libraries: PathBuf,
    python: PathBuf,
}

/// The server that all tests of a run share. Each test uses other names of queues and topics.
#[derive(Debug, Clone)]
pub struct Sqs {
    port: u16,
}

impl Sqs {
    /// Returns the shared server. The first one to ask starts it.
    pub async fn shared() -> Self {
        static SERVER: OnceCell<Sqs> = OnceCell::const_new();
        SERVER.get_or_try_init(Self::find_or_start).await.unwrap_or_else(|error| unavailable(&error)).clone()
    }

    async fn find_or_start() -> anyhow::Result<Self> {
        let moto = Moto::installed()?;
        let shared = shared::folder("sqs", &moto.libraries)?;
        let port = private_server::share(&moto, &shared, "KILL", |_| Ok(())).await?;
        Ok(Self { port })
    }

    /// Returns `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl PrivateServer<Moto> {
    /// Starts a server.
    pub async fn launch() -> Self {
        Self::of(Moto::installed()).await
    }

    /// Returns `http://127.0.0.1:PORT`; the same after a restart.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port())
    }
}

impl Moto {
    fn installed() -> anyhow::Result<Self> {
        install::moto().map(|(libraries, python)| Self { libraries, python })
    }
}

impl Program for Moto {
    const NAME: &'static str = "moto";

    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command> {
        let data = folder.join("data");
        let mut command = process::command(&self.python, &data)?;
        command.args(["-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", &port.to_string()]);
        command.env("PYTHONPATH", &self.libraries).env("PYTHONDONTWRITEBYTECODE", "1").env("HOME", &data);
        Ok(command)
    }

    async fn answers(port: u16) -> bool {
        let asked = async {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
            stream.write_all(b"GET /moto-api/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await?;
            let mut answer = [0; 12];
            stream.read_exact(&mut answer).await?;
            std::io::Result::Ok(answer)
        };
        asked.await.is_ok_and(|answer| answer == *b"HTTP/1.1 200")
    }
}
