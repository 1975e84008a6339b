//! Docs and doctests in one go.
//!
//! `cargo doc` checks every dependency once more, which takes minutes. `cargo test --doc` gives
//! rustdoc what the build has made. So it runs this program in rustdoc's place, which makes the
//! docs from the same arguments, and then runs the doctests.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Names the folder of the docs for this program in rustdoc's place.
const FOLDER: &str = "XTASK_DOCS";

/// Makes `cargo test --doc` write the docs into the target folder as well; warnings are errors.
pub(crate) fn with_docs(command: &mut Command, target: &Path) {
    // Not the file of this process, which the build may have replaced.
    command.env("RUSTDOC", target.join("debug/xtask")).env(FOLDER, target.join("doc"));
}

/// Does rustdoc's work, if cargo runs this program in its place.
pub(crate) fn rustdoc() -> Option<ExitCode> {
    let folder = std::env::var_os(FOLDER)?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let run = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    let is_test = arguments.iter().any(|argument| argument == "--test");
    let documented = !is_test || {
        let mut rest = arguments.iter();
        let mut kept = Vec::new();
        while let Some(argument) = rest.next() {
            match argument.to_str() {
                Some("--test") => {}
                Some("--test-run-directory" | "--test-args") => drop(rest.next()),
                _ => kept.push(argument),
            }
        }
        run(Command::new("rustdoc").args(kept).args(["-D", "warnings", "--out-dir"]).arg(folder))
    };
    let tested = run(Command::new("rustdoc").args(arguments));
    Some(if documented && tested { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
