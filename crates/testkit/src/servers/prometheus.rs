//! A Prometheus for a single test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::private_server::{PrivateServer, Program};
use super::{install, process, unavailable};

/// A Prometheus that scrapes one target every second.
pub type PrivatePrometheus = PrivateServer<Prometheus>;

/// How Prometheus is started.
#[derive(Debug)]
pub struct Prometheus {
    program: PathBuf,
    target: String,
    rules: PathBuf,
}

impl PrivateServer<Prometheus> {
    /// Starts one that scrapes `HOST:PORT/metrics` and evaluates the rules of a file.
    pub async fn launch(target: &str, rules: &Path) -> Self {
        let program = |bin: PathBuf| Prometheus {
            program: bin.join("prometheus"),
            target: target.to_owned(),
            rules: rules.into(),
        };
        Self::of(install::prometheus().map(program)).await
    }
}

impl Program for Prometheus {
    const NAME: &'static str = "prometheus";

    fn command(&self, folder: &Path, port: u16) -> anyhow::Result<Command> {
        let (data, file) = (folder.join("data"), folder.join("prometheus.yml"));
        // It runs as another user, which may not be able to read the rules where they are.
        fs::copy(&self.rules, folder.join("rules.yml"))?;
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files: [rules.yml]\nscrape_configs:\n  \
             - {{ job_name: postbox, static_configs: [{{ targets: [\"{}\"] }}] }}\n",
            self.target
        );
        fs::write(&file, config)?;
        let mut command = process::command(&self.program, &data)?;
        command.arg(format!("--config.file={}", file.display()));
        command.arg(format!("--storage.tsdb.path={}", data.display()));
        command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
        Ok(command)
    }

    async fn answers(port: u16) -> bool {
        let asked = async {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
            stream.write_all(b"GET /-/ready HTTP/1.0\r\n\r\n").await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.map(|_| answer)
        };
        asked.await.is_ok_and(|answer| answer.contains(" 200 OK"))
    }
}

/// Runs `promtool` with these arguments in this folder. Returns its output if it exited with 0.
///
/// # Errors
///
/// If it reported a problem.
pub fn promtool(folder: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let bin = install::prometheus().unwrap_or_else(|error| unavailable(&error));
    let output = Command::new(bin.join("promtool")).args(arguments).current_dir(folder).output()?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success(), "promtool {arguments:?}: {said}");
    Ok(said)
}
