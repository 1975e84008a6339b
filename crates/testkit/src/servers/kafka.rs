//! A server with the Kafka protocol for a single test: Tansu.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use tokio::net::TcpStream;

use super::private_server::{PrivateServer, Program};
use super::{install, process};

/// A server with one broker that keeps everything in memory. If it is killed, it forgets topics and
/// offsets.
pub type PrivateKafka = PrivateServer<Tansu>;

/// How Tansu is started.
#[derive(Debug)]
pub struct Tansu {
    program: PathBuf,
    /// The address it advertises to clients.
    advertised: SocketAddr,
}

impl PrivateServer<Tansu> {
    /// Starts a server.
    pub async fn launch() -> Self {
        Self::launch_behind(async |address| address).await
    }

    /// Starts a server that advertises the address returned by `advertise`, for example a proxy's.
    /// A Kafka client connects to the advertised address, whatever address it was given first.
    pub async fn launch_behind(mut advertise: impl AsyncFnMut(SocketAddr) -> SocketAddr) -> Self {
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let program = install::kafka().map(|program| Tansu { program, advertised: nowhere });
        let prepare = async |tansu: &mut Tansu, port| tansu.advertised = advertise(([127, 0, 0, 1], port).into()).await;
        Self::prepared(program, prepare).await
    }

    /// Returns `127.0.0.1:PORT`, the advertised address; the same after a restart.
    pub fn brokers(&self) -> String {
        self.program.advertised.to_string()
    }
}

impl Program for Tansu {
    const NAME: &'static str = "tansu";

    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command> {
        let mut command = process::command(&self.program, &folder.join("data"))?;
        command.args(["broker", "--storage-engine", "memory://tansu/"]);
        command.arg("--listener-url").arg(format!("tcp://127.0.0.1:{port}"));
        command.arg("--advertised-listener-url").arg(format!("tcp://{}", self.advertised));
        Ok(command)
    }

    async fn answers(port: u16) -> bool {
        TcpStream::connect(("127.0.0.1", port)).await.is_ok()
    }
}
