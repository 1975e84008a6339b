//! Developer commands: `cargo xtask test`, `docs`, `simulate`, `crash`, `planted`, `bench`,
//! `servers`.
//!
//! Installs what it needs with the usual clients of the registries (apt, pip, cargo), and nothing
//! from anywhere else.
#![allow(clippy::print_stdout, reason = "a command for people")]

mod api;
mod docs;
mod planted;
mod servers;
mod simulate;
mod steps;
mod suite;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Context as _;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Developer commands of Postbox")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs everything that must pass before a change is merged: format, lints, layers, all tests
    /// on real servers, examples, docs.
    Test {
        /// Only format, lints and tests.
        #[arg(long)]
        fast: bool,
    },
    /// Checks the docs of the libraries, runs their examples, and compares their public API with
    /// `docs/api`; with `UPDATE=1` it writes that folder.
    Docs,
    /// Installs the servers that the tests use, unless they are installed.
    Servers,
    /// Plants deliberate mistakes into a copy of the tree, one at a time, and says which check
    /// finds each and how fast.
    Planted(planted::Options),
    /// The crash ledger: real processes, faults from a seed, and a table of what was lost. `--
    /// --help` lists the options.
    Crash {
        /// Use what `cargo xtask test` has built already, instead of a release build
        #[arg(long)]
        debug: bool,
        /// Arguments for it.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Simulated worlds from seeds: the engine with the memory store under faults. `--seed S`
    /// replays one; `-- --help` lists the options.
    Simulate {
        /// Arguments for it.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Benchmarks: `drain`, `latency`, `append`, `ingress`, `outbound`, `sinks`, `sources`,
    /// `replicas`, `retention` or `status`; each prints Postbox's figure, its limit and the ratio.
    /// `-- --help` lists the options.
    Bench {
        /// Arguments for the benchmark.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    if let Some(done) = docs::rustdoc() {
        return done;
    }
    match run(Arguments::parse().task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> anyhow::Result<bool> {
    match task {
        Task::Test { fast } => suite::test(fast),
        Task::Docs => suite::docs(),
        Task::Servers => servers::install().map(|()| true),
        Task::Planted(options) => planted::run(&options),
        Task::Crash { debug, arguments } => {
            servers::install()?;
            crash(!debug, &arguments)
        }
        Task::Simulate { arguments } => simulate::run(&arguments),
        Task::Bench { arguments } => bench(&arguments),
    }
}

/// Runs the crash ledger with the binary under test.
fn crash(release: bool, arguments: &[String]) -> anyhow::Result<bool> {
    let mut build = steps::cargo();
    build.args([
        "build",
        "--quiet",
        "--workspace",
        "--all-features",
        "--locked",
        "--bin",
        "postbox",
        "--bin",
        "postbox-crash",
    ]);
    if release {
        build.arg("--release");
    }
    anyhow::ensure!(build.status().context("cargo")?.success(), "the workspace does not build");
    let programs = target()?.join(if release { "release" } else { "debug" });
    let mut command = match arguments.first().is_some_and(|first| first == "judge") {
        true => Command::new(programs.join("postbox-crash")),
        false => ledger(&programs)?,
    };
    Ok(command.args(arguments).status()?.success())
}

/// The command of the crash ledger, whose programs are built already.
fn ledger(programs: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(programs.join("postbox-crash"));
    command.arg("run").arg("--binary").arg(programs.join("postbox")).arg("--folder").arg(target()?.join("crash"));
    Ok(command)
}

fn bench(arguments: &[String]) -> anyhow::Result<bool> {
    servers::install()?;
    let mut command = steps::cargo();
    command.args(["run", "--quiet", "--release", "--locked", "--package", "postbox-bench", "--"]).args(arguments);
    Ok(command.status().context("cargo")?.success())
}

/// The workspace's root.
fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies in the workspace").to_path_buf()
}

/// Cargo's target folder, the one this program was built in.
fn target() -> anyhow::Result<PathBuf> {
    let output = steps::cargo().args(["metadata", "--format-version", "1", "--no-deps"]).output().context("cargo")?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    Ok(PathBuf::from(metadata["target_directory"].as_str().context("cargo metadata names no target folder")?))
}

/// Whether a program runs successfully.
fn answers(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}
