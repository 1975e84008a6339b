//! `cargo xtask test`: what CI runs, and what everybody runs before a change lands.

use std::process::Command;

use anyhow::Context as _;

use crate::steps::{Steps, cargo};
use crate::{answers, docs, root, servers};

/// The single feature set.
pub(crate) const WORKSPACE: [&str; 3] = ["--workspace", "--all-features", "--locked"];

/// The usual file system in memory.
const MEMORY: &str = "/dev/shm";

/// Steps of the simulator. The worlds of the second consist of many small transactions.
const SIMULATIONS: [(&str, &[&str]); 2] =
    [("simulator: 200,000 seeds", &[]), ("simulator: 400 seeds of SQLite", &["--store", "sqlite", "--seeds", "400"])];

/// Runs of the crash ledger: what is printed, and the arguments.
const LEDGERS: [(&str, &[&str]); 2] = [
    ("crash ledger: Postgres, 100,000 events, 100 faults", &[]),
    (
        "crash ledger: SQLite, 20,000 events, 20 faults",
        &["--store", "sqlite", "--sink", "file", "--events", "20000", "--faults", "20"],
    ),
];

/// Runs the suite; `true` if all of it passed.
pub(crate) fn test(fast: bool) -> anyhow::Result<bool> {
    let mut steps = Steps::default();
    let skip = std::env::var_os("POSTBOX_ALLOW_SKIP").is_some() && std::env::var_os("CI").is_none();
    steps.run("servers: Postgres, pgbouncer, Mosquitto, NATS, RabbitMQ, Redis, Valkey", || match servers::install() {
        Err(error) if skip => {
            println!("SKIPPED, and with it every test on a missing server: {error:#}");
            Ok(())
        }
        result => result,
    });
    steps.command("format", "run: cargo fmt --all", cargo().args(["fmt", "--all", "--check"]));
    let is_built = build(&mut steps);
    if !fast {
        let published = published()?;
        steps.run("packages: every crate that users need can be published", || package(&published));
        documentation(&mut steps)?;
    }
    if is_built {
        // Not concurrently: tests of leases and deadlines fail beside CPU-heavy work.
        tests(&mut steps)?;
        if !fast {
            steps.run("examples: each runs and proves its result", run_examples);
            proofs(&mut steps)?;
        }
    }
    Ok(steps.sum_up())
}

/// Runs the step of the docs alone; `true` if it passed.
pub(crate) fn docs() -> anyhow::Result<bool> {
    let mut steps = Steps::default();
    documentation(&mut steps)?;
    Ok(steps.sum_up())
}

/// Cargo that lints the workspace while it builds it. Clippy is a compiler with more lints, so
/// running it as one saves checking everything a second time, the dependencies included.
fn linted() -> Command {
    let mut command = cargo();
    command.env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver");
    // `cargo clippy -- -D warnings` hands its arguments over like this.
    command.env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
    command
}

/// Builds tests and programs first, so that later steps do not wait for cargo's lock. In one go:
/// programs alone would be built with other features of their dependencies.
fn build(steps: &mut Steps) -> bool {
    let cure = "fix what is named above: cargo clippy --workspace --all-features --all-targets";
    let mut command = linted();
    // `--all-targets` would build each library once more as a benchmark, also those without tests.
    command.args(["build", "--quiet", "--lib", "--bins", "--tests", "--examples"]).args(WORKSPACE);
    steps.command("build and lints: clippy, warnings denied", cure, &mut command)
}

fn tests(steps: &mut Steps) -> anyhow::Result<()> {
    let name = "tests: layers, units, conformance on every store and broker, end to end";
    let mut command = linted();
    // A database of each test is copied and dropped, thousands of files in all. On ext4 a new file
    // avoids the places of those that were deleted lately, which cost half of the time.
    if is_memory_ample() {
        command.env("TMPDIR", MEMORY).env("POSTBOX_SERVERS", servers::cache()?);
    }
    if answers("cargo-nextest", &["nextest", "--version"]) {
        let cure = "a test failed above; run it alone: cargo nextest run --workspace --all-features -E 'test(NAME)'";
        command.args(["nextest", "run"]).args(WORKSPACE).args(["--no-fail-fast", "--status-level", "slow"]);
        // Tests mostly wait, so twice as many threads as cores.
        let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
        command.args(["--hide-progress-bar", "--test-threads", &threads.to_string()]);
        steps.command(name, cure, &mut command);
    } else {
        println!("cargo-nextest is not installed (quicker: cargo install --locked cargo-nextest); using cargo test");
        command.args(["test", "--quiet"]).args(WORKSPACE).args(["--all-targets", "--no-fail-fast"]);
        let cure = "a test failed above; run it alone: cargo test --workspace --all-features NAME";
        steps.command(name, cure, &mut command);
    }
    Ok(())
}

/// Returns whether there is a file system in memory that holds what all tests write.
fn is_memory_ample() -> bool {
    const KIB_MIN: u64 = 8 * 1024 * 1024;
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    // The device, the folder, the type, and the options. The last mount of a folder hides others.
    let options = mounts.lines().rev().find_map(|mount| match mount.split(' ').collect::<Vec<_>>()[..] {
        [_, MEMORY, "tmpfs", options, ..] => Some(options),
        _ => None,
    });
    let size = |option: &str| option.strip_prefix("size=")?.strip_suffix('k')?.parse::<u64>().ok();
    options.is_some_and(|options| {
        let mut options = options.split(',');
        !options.clone().any(|option| option == "noexec") && options.find_map(size).is_some_and(|size| size >= KIB_MIN)
    })
}

/// The simulator and the crash ledger.
fn proofs(steps: &mut Steps) -> anyhow::Result<()> {
    let programs = crate::target()?.join("debug");
    for (name, how) in SIMULATIONS {
        let cure = "a seed failed above, with the command that replays it";
        steps.command(name, cure, Command::new(programs.join("simulate")).args(how));
    }
    for (name, how) in LEDGERS {
        let cure = "a promise broke, or the run did not end: the table above, and what its folder holds, say which";
        steps.command(name, cure, crate::ledger(&programs)?.args(how));
    }
    Ok(())
}

/// Returns the arguments of cargo that name the crates that are published.
fn published() -> anyhow::Result<Vec<String>> {
    let output = cargo().args(["metadata", "--format-version", "1", "--no-deps", "--locked"]).output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let published = packages.iter().filter(|package| package["publish"].is_null());
    Ok(published.filter_map(|package| package["name"].as_str()).map(|name| format!("--package={name}")).collect())
}

/// Makes the packages without building them again.
fn package(published: &[String]) -> anyhow::Result<()> {
    let mut command = cargo();
    command.args(["package", "--quiet", "--no-verify", "--allow-dirty", "--offline", "--locked"]).args(published);
    // Cargo warns that each has no homepage; there is none yet.
    let output = command.output()?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn documentation(steps: &mut Steps) -> anyhow::Result<()> {
    let name = "docs of libraries: examples hold; warnings and broken links denied; the public API is as kept";
    let cure = "fix what is named above: cargo xtask docs";
    let mut command = linted();
    command.args(["test", "--quiet", "--no-fail-fast", "--doc"]).args(WORKSPACE);
    docs::with_docs(&mut command, &crate::target()?);
    steps.command(name, cure, &mut command);
    Ok(())
}

/// Runs the examples; each proves its own result.
fn run_examples() -> anyhow::Result<()> {
    let mut names: Vec<String> = std::fs::read_dir(root().join("examples"))?
        .filter_map(Result::ok)
        .filter(|entry| entry.path().join("Cargo.toml").is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        // It serves until it is stopped; an end-to-end test covers it.
        .filter(|name| name != "service")
        .collect();
    names.sort();
    let programs = crate::target()?.join("debug");
    let mut failed = Vec::new();
    for name in names {
        println!("{name}:");
        // Gives the program an empty database of a real Postgres in DATABASE_URL.
        let mut command = Command::new(programs.join("examples/with-postgres"));
        command.arg(programs.join(&name));
        if !command.status()?.success() {
            failed.push(name);
        }
    }
    anyhow::ensure!(failed.is_empty(), "wrong result: {}", failed.join(", "));
    Ok(())
}
