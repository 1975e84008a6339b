//! A NATS server with JetStream for a single test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use super::ports::free_port;
use super::private_server::{PrivateServer, Program};
use super::{install, process, unavailable};

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NatsVersion {
    /// 2.9, the distribution's.
    V2_9,
    /// 2.15, from a wheel.
    V2_15,
}

/// A server with JetStream.
pub type PrivateNats = PrivateServer<Nats>;

/// How NATS is started.
#[derive(Debug)]
pub struct Nats {
    program: PathBuf,
    config: String,
}

impl PrivateServer<Nats> {
    /// Starts a server.
    pub async fn launch(version: NatsVersion) -> Self {
        Self::launch_with(version, "").await
    }

    /// Starts a server with more lines in its configuration file.
    pub async fn launch_with(version: NatsVersion, config: &str) -> Self {
        Self::of(install::nats(version).map(|program| Nats { program, config: config.to_owned() })).await
    }

    /// Starts three servers that form one cluster.
    pub async fn launch_cluster(version: NatsVersion) -> [Self; 3] {
        let ports = [(); 3].map(|()| free_port().unwrap_or_else(|error| unavailable(&error)));
        let routes = ports.map(|port| format!("nats://127.0.0.1:{port}")).join(", ");
        let config = |n: usize| {
            let port = ports[n];
            format!("server_name: n{n}\ncluster {{ name: test, listen: \"127.0.0.1:{port}\", routes: [{routes}] }}\n")
        };
        let [first, second, third] = [config(0), config(1), config(2)];
        tokio::join!(
            Self::launch_with(version, &first),
            Self::launch_with(version, &second),
            Self::launch_with(version, &third)
        )
        .into()
    }

    /// Returns `nats://127.0.0.1:PORT`; the same after a restart.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port())
    }
}

impl Program for Nats {
    const NAME: &'static str = "nats-server";

    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command> {
        let (data, file) = (folder.join("data"), folder.join("nats.conf"));
        let fixed = format!("listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: {data:?} }}\n");
        fs::write(&file, fixed + &self.config)?;
        let mut command = process::command(&self.program, &data)?;
        command.arg("-c").arg(&file);
        Ok(command)
    }

    /// The server sends its INFO first.
    async fn answers(port: u16) -> bool {
        let asked = async {
            let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
            let mut line = String::new();
            stream.read_line(&mut line).await?;
            stream.get_mut().shutdown().await?;
            std::io::Result::Ok(line)
        };
        asked.await.is_ok_and(|line| line.starts_with("INFO "))
    }
}
