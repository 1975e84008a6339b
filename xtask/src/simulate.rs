//! `cargo xtask simulate`: worlds of the simulator, from their seeds.

use std::process::Command;

use anyhow::Context as _;
use clap::Args;

use crate::steps::cargo;
use crate::suite::WORKSPACE;

/// Which seeds.
#[derive(Args)]
pub(crate) struct Options {
    /// Whose store: memory or sqlite.
    #[arg(long, default_value = "memory")]
    store: String,
    /// How many; 200,000 of memory, 2,000 of sqlite.
    #[arg(long)]
    seeds: Option<u64>,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Only this one: says what happens, and makes it short if it ends badly.
    #[arg(long)]
    seed: Option<u64>,
}

/// Runs the simulator; `true` if every seed holds.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let mut command = program()?;
    command.args(["--store", &options.store, "--first", &options.first.to_string()]);
    for (name, number) in [("--seed", options.seed), ("--seeds", options.seeds)] {
        if let Some(number) = number {
            command.args([name, &number.to_string()]);
        }
    }
    Ok(command.status().context("the simulator")?.success())
}

/// Builds it with the one feature set of the workspace.
pub(crate) fn program() -> anyhow::Result<Command> {
    let mut build = cargo();
    build.args(["build", "--quiet"]).args(WORKSPACE).args(["--bin", "simulate"]);
    anyhow::ensure!(build.status().context("cargo")?.success(), "crates/simulator does not build");
    Ok(Command::new(crate::target()?.join("debug/simulate")))
}
