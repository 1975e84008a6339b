//! A process that is killed and restarted.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};

/// A process, and how it is started.
pub struct Service {
    program: PathBuf,
    arguments: Vec<OsString>,
    store: String,
    child: Option<Child>,
}

impl Service {
    /// Starts it.
    pub fn start(program: &Path, arguments: &[&str], store: &str) -> anyhow::Result<Self> {
        let arguments = arguments.iter().map(OsString::from).collect();
        let mut service = Self { program: program.to_owned(), arguments, store: store.to_owned(), child: None };
        service.revive()?;
        Ok(service)
    }

    /// Restarts it if it has ended, as any supervisor does: its database may have been down.
    pub fn revive(&mut self) -> anyhow::Result<()> {
        if let Some(child) = &mut self.child
            && child.try_wait()?.is_none()
        {
            return Ok(());
        }
        let mut command = command(&self.program, &self.store);
        // It logs a lot while everything around it is killed.
        command.args(&self.arguments).stdout(Stdio::null()).stderr(Stdio::null());
        self.child = Some(command.spawn().with_context(|| format!("{:?}", self.program))?);
        Ok(())
    }

    /// Kills the process (SIGKILL) and starts a new one.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.end();
        self.revive()
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            // An error means that it has ended already.
            let _ = (child.kill(), child.wait());
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.end();
    }
}

/// The command for a program on a store.
fn command(program: &Path, store: &str) -> Command {
    let mut command = Command::new(program);
    command.env("POSTBOX_STORE", store).stdin(Stdio::null());
    command
}

/// Runs a command of `postbox` on a store; returns its output.
pub fn ask(program: &Path, store: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = command(program, store).args(arguments).output().with_context(|| format!("{program:?}"))?;
    ensure!(output.status.success(), "postbox {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The path of the `postbox` program: beside this one, or on the PATH.
pub fn postbox() -> anyhow::Result<PathBuf> {
    let beside = std::env::current_exe()?.with_file_name("postbox");
    Ok(if beside.is_file() { beside } else { "postbox".into() })
}
