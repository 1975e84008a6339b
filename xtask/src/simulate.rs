//! `cargo xtask simulate`: runs the simulator's worlds from their seeds.

use std::process::Command;

use anyhow::Context as _;

use crate::steps::cargo;
use crate::suite::WORKSPACE;

/// Runs the simulator; `true` if every seed holds.
pub(crate) fn run(arguments: &[String]) -> anyhow::Result<bool> {
    let mut build = cargo();
    build.args(["build", "--quiet"]).args(WORKSPACE).args(["--bin", "simulate"]);
    anyhow::ensure!(build.status().context("cargo")?.success(), "crates/simulator does not build");
    let mut simulate = Command::new(crate::target()?.join("debug/simulate"));
    Ok(simulate.args(arguments).status().context("the simulator")?.success())
}
