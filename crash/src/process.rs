//! Child processes: started, signalled by the recorded id, and reaped.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use anyhow::Context as _;

/// The library that moves a process's clock, if it is installed.
pub(crate) fn faketime_library() -> Option<PathBuf> {
    let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib", "/usr/lib64"];
    let library = |folder| Path::new(folder).join("faketime/libfaketimeMT.so.1");
    folders.into_iter().map(library).find(|library| library.is_file())
}

/// A child process that is killed when this is dropped, at the latest.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// Closing it asks a writer or an endpoint to end.
    stdin: Option<ChildStdin>,
}

impl Process {
    /// Starts a command, with this standard output, and standard error appended to a file.
    pub(crate) fn start(command: &mut Command, stdout: Stdio, log: &Path) -> anyhow::Result<Self> {
        let log = File::options().create(true).append(true).open(log)?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(stdout)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{:?}", command.get_program()))?;
        let stdin = child.stdin.take();
        Ok(Self { child, stdin })
    }

    pub(crate) fn child_mut(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks it to end by closing its standard input.
    pub(crate) fn ask_to_end(&mut self) {
        drop(self.stdin.take());
    }

    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a signal to a process that this program started. It may have ended already.
pub(crate) fn signal(pid: u32, name: &str) {
    let _ = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).stderr(Stdio::null()).status();
}
