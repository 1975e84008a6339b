//! Starts programs without privileges, and stops them whatever happens to us.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

/// Longest wait for a freeze. It takes microseconds, so more than this is a hang.
const FREEZE_TIME_MAX: Duration = Duration::from_secs(20);

/// Stops the process in the pid file `$1` with signal `$3` if it works in folder `$2` (the pid may
/// belong to another process by now). Waits until it is gone (a zombie has no folder). Removes
/// folder `$4`.
const STOP: &str = r#"
stop() {
  pid=$(head -n 1 "$1" 2>/dev/null) || pid=
  if [ -n "$pid" ] && [ "$(readlink "/proc/$pid/cwd")" = "$2" ]; then
    kill "-$3" "$pid"
    n=0
    while [ "$(readlink "/proc/$pid/cwd")" = "$2" ]; do
      n=$((n + 1)); [ $n -eq 200 ] && kill -KILL "$pid"; [ $n -ge 400 ] && break
      sleep 0.05
    done
  fi
  rm -rf "$4"
}
"#;

/// Returns the user that servers run as, (uid, gid), if we are root; `None` if we may run them
/// ourselves.
pub(super) fn unprivileged() -> anyhow::Result<Option<(u32, u32)>> {
    let ours = fs::metadata("/proc/self").context("this fixture needs /proc")?.uid();
    if ours != 0 {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd").context("/etc/passwd")?;
    let find = |name: &str| {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut numbers = line.split(':').skip(2).map(str::parse::<u32>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    };
    find("postgres")
        .or_else(|| find("nobody"))
        .map(Some)
        .context("servers refuse root, and there is no user postgres or nobody")
}

/// Creates a command that runs unprivileged in `folder`, without our terminal, pipes and `PG…`
/// variables.
pub(super) fn command(program: &Path, folder: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(program);
    command.current_dir(folder).env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C").env("TZ", "UTC");
    // A separate process group: Ctrl-C on the test run must not reach the server before its guard.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Some((uid, gid)) = unprivileged()? {
        command.uid(uid).gid(gid);
    }
    Ok(command)
}

/// Creates `folder` for the unprivileged user. Every user can traverse its parents.
pub(super) fn own_folder(folder: &Path, mode: u32) -> anyhow::Result<()> {
    fs::create_dir_all(folder)?;
    own(folder, mode)
}

/// Gives a file or folder to the unprivileged user.
pub(super) fn own(path: &Path, mode: u32) -> anyhow::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    if let Some((uid, gid)) = unprivileged()? {
        std::os::unix::fs::chown(path, Some(uid), Some(gid))?;
    }
    Ok(())
}

/// Creates a folder for us, below the temporary folder if no parent is given.
pub(super) fn scratch(parent: Option<&Path>, prefix: &str) -> anyhow::Result<PathBuf> {
    let parent = parent.map_or_else(std::env::temp_dir, Path::to_path_buf);
    let folder = tempfile::Builder::new().prefix(prefix).tempdir_in(parent)?.keep();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))?;
    // The guard compares it with the kernel's path, which contains no links.
    Ok(folder.canonicalize()?)
}

/// Sends a signal to one of our processes.
pub(super) fn signal(pid: impl std::fmt::Display, signal: &str) -> anyhow::Result<()> {
    let status = Command::new("sh")
        .args(["-c", "kill \"-$1\" \"$2\"", "sh", signal, &pid.to_string()])
        .status()
        .context("sh")?;
    anyhow::ensure!(status.success(), "cannot send {signal} to process {pid}");
    Ok(())
}

/// Freezes one of our processes. When this returns, none of its threads runs; on a busy machine
/// SIGSTOP takes effect a moment later.
pub(super) fn freeze(pid: impl std::fmt::Display) -> anyhow::Result<()> {
    signal(&pid, "STOP")?;
    let deadline = Instant::now() + FREEZE_TIME_MAX;
    while !is_stopped(&pid)? {
        anyhow::ensure!(Instant::now() < deadline, "process {pid} does not stand still");
        std::thread::yield_now();
    }
    Ok(())
}

fn is_stopped(pid: impl std::fmt::Display) -> anyhow::Result<bool> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).context("the process is gone")?;
    Ok(threads.flatten().all(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
    }))
}

/// A server that a guard stops, and what is removed afterwards.
#[derive(Debug, Clone)]
pub(super) struct ServerProcess {
    /// The file whose first line is the pid.
    pub(super) pid_file: PathBuf,
    /// The folder that it works in.
    pub(super) working: PathBuf,
    /// The signal that stops it.
    pub(super) signal: &'static str,
    /// The folder removed afterwards.
    pub(super) remove: PathBuf,
}

impl ServerProcess {
    /// Returns whether the process lives: it works in its folder, as [`STOP`] checks.
    pub(super) fn lives(&self) -> bool {
        let pid = fs::read_to_string(&self.pid_file).unwrap_or_default();
        let pid = pid.lines().next().unwrap_or_default();
        fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|folder| folder == self.working)
    }

    /// Starts a guard without an owner. It stops the server once no process has held a lock on
    /// `users` for some seconds. Its own lock on `watch` shows later guards that it exists.
    pub(super) fn watch(&self, users: &Path, watch: &Path) -> anyhow::Result<()> {
        let wait = r#"
exec 8>>"$6" 9>>"$5"
flock -n -x 8 || exit 0
idle=0
while [ $idle -lt 4 ]; do
  sleep 3
  # Taking the lock at all means that nobody uses the server. A newcomer waits while we hold it, for an instant.
  if flock -n -x 9; then idle=$((idle + 1)); [ $idle -lt 4 ] && flock -u 9; else idle=0; fi
done
stop "$1" "$2" "$3" "$4"
"#;
        self.guard(wait, &[users, watch]).spawn().context("sh")?;
        Ok(())
    }

    fn guard(&self, wait: &str, extra: &[&Path]) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{STOP}\n{wait}\n"), "guard"]);
        command.arg(&self.pid_file).arg(&self.working).arg(self.signal).arg(&self.remove).args(extra);
        command.current_dir("/").process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

/// Stops a server when dropped, or when this process dies.
#[derive(Debug)]
pub(super) struct ProcessGuard {
    guard: Child,
    pipe: Option<ChildStdin>,
}

impl ProcessGuard {
    pub(super) fn new(server: &ServerProcess) -> anyhow::Result<Self> {
        // Nothing is ever written. Reading ends when this process, the only holder of the other
        // end, is gone.
        let wait = r#"read -r nothing; stop "$@""#;
        let mut guard = server.guard(wait, &[]).stdin(Stdio::piped()).spawn().context("sh")?;
        let pipe = guard.stdin.take();
        Ok(Self { guard, pipe })
    }

    /// Waits until the server is stopped and its data removed.
    pub(super) fn stop(&mut self, server: Option<&mut Child>) {
        drop(self.pipe.take());
        if let Some(server) = server {
            let _ = server.wait();
        }
        let _ = self.guard.wait();
    }
}
