//! A Mosquitto for a single test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::private_server::{PrivateServer, Program};
use super::{install, process};

/// An MQTT 5 CONNECT without a client id.
const CONNECT: &[u8] = b"\x10\x0d\x00\x04MQTT\x05\x02\x00\x0a\x00\x00\x00";

/// A server with MQTT. If it is killed, it may forget what it confirmed last: it saves sessions and
/// their messages after each change, but does not wait for that.
pub type PrivateMqtt = PrivateServer<Mosquitto>;

/// How Mosquitto is started.
#[derive(Debug)]
pub struct Mosquitto {
    program: PathBuf,
    config: String,
}

impl PrivateServer<Mosquitto> {
    /// Starts a server that accepts everybody.
    pub async fn launch() -> Self {
        Self::launch_with("allow_anonymous true\n").await
    }

    /// Starts a server with these lines in its configuration file.
    pub async fn launch_with(config: &str) -> Self {
        Self::of(install::mosquitto().map(|program| Mosquitto { program, config: config.to_owned() })).await
    }

    /// Returns `mqtt://127.0.0.1:PORT`; the same after a restart.
    pub fn url(&self) -> String {
        format!("mqtt://127.0.0.1:{}", self.port())
    }
}

impl Program for Mosquitto {
    const NAME: &'static str = "mosquitto";

    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command> {
        let (data, file) = (folder.join("data"), folder.join("mosquitto.conf"));
        let fixed = format!(
            "listener {port} 127.0.0.1\npersistence true\npersistence_location {}/\nautosave_on_changes true\n\
             autosave_interval 1\nlog_dest stderr\nset_tcp_nodelay true\n",
            data.display()
        );
        fs::write(&file, fixed + &self.config)?;
        let mut command = process::command(&self.program, &data)?;
        command.arg("-c").arg(file);
        Ok(command)
    }

    /// Returns whether it answers a CONNECT, even with a refusal.
    async fn answers(port: u16) -> bool {
        let asked = async {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
            stream.write_all(CONNECT).await?;
            stream.read_u8().await
        };
        asked.await.is_ok_and(|first| first == 0x20)
    }
}
