//! Steps of a suite: run, timed, and summed up at the end.

use std::io::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

/// Runs steps, even after one has failed, so that one run shows everything that is wrong.
pub(crate) struct Steps {
    start: Instant,
    done: Vec<Step>,
}

struct Step {
    name: &'static str,
    took: Duration,
    /// What went wrong, with the cure.
    failure: Option<String>,
}

impl Default for Steps {
    fn default() -> Self {
        Self { start: Instant::now(), done: Vec::new() }
    }
}

impl Steps {
    /// Runs a command; `cure` is the message if it fails.
    pub(crate) fn command(&mut self, name: &'static str, cure: &str, command: &mut Command) -> bool {
        self.run(name, || {
            let status = command.status().map_err(|error| anyhow::anyhow!("{:?}: {error}", command.get_program()))?;
            anyhow::ensure!(status.success(), "{cure}");
            Ok(())
        })
    }

    /// Runs any step.
    pub(crate) fn run(&mut self, name: &'static str, step: impl FnOnce() -> anyhow::Result<()>) -> bool {
        println!("\n── {name}");
        let _ = std::io::stdout().flush();
        let start = Instant::now();
        let failure = step().err().map(|error| format!("{error:#}"));
        let ok = failure.is_none();
        self.done.push(Step { name, took: start.elapsed(), failure });
        ok
    }

    /// Prints a summary; `true` if everything passed.
    pub(crate) fn sum_up(&self) -> bool {
        println!("\n── summary");
        for step in &self.done {
            let word = if step.failure.is_none() { "ok    " } else { "FAILED" };
            println!("{word} {:>6.1} s  {}", step.took.as_secs_f64(), step.name);
            if let Some(failure) = &step.failure {
                println!("       {}", failure.replace('\n', "\n       "));
            }
        }
        let failed = self.done.iter().filter(|step| step.failure.is_some()).count();
        let total = self.start.elapsed().as_secs_f64();
        let passed = self.done.len() - failed;
        println!("       {total:>6.1} s  from first to last");
        // On a separate line, for tools that read test counts from CI logs.
        println!("steps: {passed} passed, {failed} failed");
        failed == 0
    }
}

/// Cargo, in the workspace.
pub(crate) fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(crate::root());
    // Variables that `cargo run` set for this program would look like a changed environment to the
    // builds.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR" {
            command.env_remove(name);
        }
    }
    command
}
