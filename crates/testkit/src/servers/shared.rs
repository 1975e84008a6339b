//! One server for all test processes of this user.

use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::postgres::connect;
use super::private::{Cluster, START_SECONDS_MAX, Settings};
use super::process::ServerProcess;
use super::{Postgres, Version, install};

/// Locks held until this process ends in any way, because a URL outlives the handle it came from.
static HELD: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// Returns the server named by the environment, the one already running, or a new one.
pub(super) async fn find_or_start(version: Version) -> anyhow::Result<Postgres> {
    let variable = format!("POSTBOX_TEST_PG{}", version.number());
    if let Ok(url) = std::env::var(&variable) {
        return Postgres::at(version, &url, false).context(variable);
    }
    let settings = Settings::fast();
    let bin = install::postgres_bin(version)?;
    let folder = folder(&format!("pg{}", version.number()), (&bin, format!("{settings:?}")))?;
    let cluster = Cluster { bin, folder: folder.clone(), env: Vec::new() };
    let run = folder.join("run");
    let process = cluster.below(&run).process(run);
    let port = share(&folder, &process, || running(&cluster), || start(&cluster, &settings)).await;
    Ok(Postgres::on_port(version, port.with_context(|| version.name())?))
}

/// Returns the port of the server that runs below this folder, or of a new one. It lives as long as
/// somebody uses it.
pub(super) async fn share(
    folder: &Path,
    process: &ServerProcess,
    running: impl AsyncFnOnce() -> anyhow::Result<Option<u16>>,
    start: impl AsyncFnOnce() -> anyhow::Result<u16>,
) -> anyhow::Result<u16> {
    let users = lock_file(&folder.join("users"))?;
    // Waits while the guard is removing an idle server, then keeps the next one from being removed.
    users.lock_shared()?;
    HELD.lock().expect("nobody panics while holding it").push(users);
    // One process at a time looks and starts. The others wait here and then find the server.
    let starter = lock_file(&folder.join("starter"))?;
    starter.lock()?;
    let port = match running().await? {
        Some(port) => port,
        None => start().await?,
    };
    // If another guard has the lock already, this one ends.
    process.watch(&folder.join("users"), &folder.join("guard"))?;
    Ok(port)
}

/// Returns a folder that is the same for every process that would start the same server.
pub(super) fn folder(name: &str, what: impl Hash) -> anyhow::Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    let user = fs::metadata("/proc/self")?.uid();
    let name = format!("postbox-shared-{user}-{name}-{:08x}", hasher.finish() as u32);
    let folder = std::env::temp_dir().join(name);
    fs::create_dir_all(&folder)?;
    fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Ok(folder.canonicalize()?)
}

fn lock_file(path: &Path) -> anyhow::Result<File> {
    File::options().create(true).append(true).open(path).with_context(|| format!("{}", path.display()))
}

/// Returns the port of a server that is already running. A slow answer on a busy machine does not
/// count as none, because the folder of a missing server is removed.
async fn running(cluster: &Cluster) -> anyhow::Result<Option<u16>> {
    let run = cluster.folder.join("run");
    let Ok(port) = fs::read_to_string(run.join("port")) else { return Ok(None) };
    let port = port.trim().parse()?;
    let process = cluster.below(&run).process(run);
    let deadline = Instant::now() + Duration::from_secs(START_SECONDS_MAX);
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres?connect_timeout=5");
    while let Err(error) = connect(&url).await {
        if !process.lives() {
            return Ok(None);
        }
        anyhow::ensure!(Instant::now() < deadline, "the shared server does not answer on port {port}: {error:#}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(Some(port))
}

async fn start(cluster: &Cluster, settings: &Settings) -> anyhow::Result<u16> {
    let run = cluster.folder.join("run");
    let _ = fs::remove_dir_all(&run);
    fs::create_dir(&run)?;
    let cluster = cluster.below(&run);
    cluster.create(settings)?;
    let (_left_to_its_guard, port) = cluster.start_anywhere().await?;
    fs::write(run.join("port"), port.to_string())?;
    Ok(port)
}

impl Cluster {
    fn below(&self, folder: &Path) -> Self {
        Self { bin: self.bin.clone(), folder: folder.to_path_buf(), env: Vec::new() }
    }
}
