//! Docs and doctests in one go.
//!
//! `cargo doc` checks every dependency once more, which takes minutes. `cargo test --doc` gives
//! rustdoc what the build has made. So it runs this program in rustdoc's place, which makes the
//! docs from the same arguments, as JSON, checks the public API, and then runs the doctests.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};

use crate::api;

/// Names the folder of the docs for this program in rustdoc's place.
const FOLDER: &str = "XTASK_DOCS";

/// Makes `cargo test --doc` document the libraries as well, in the target folder.
pub(crate) fn with_docs(command: &mut Command, target: &Path) {
    // Not the file of this process, which the build may have replaced.
    command.env("RUSTDOC", target.join("debug/xtask")).env(FOLDER, target.join("doc"));
}

/// Does rustdoc's work, if cargo runs this program in its place.
pub(crate) fn rustdoc() -> Option<ExitCode> {
    let folder = std::env::var_os(FOLDER)?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let is_test = arguments.iter().any(|argument| argument == "--test");
    let documented = !is_test || {
        let mut rest = arguments.iter();
        let mut kept = Vec::new();
        while let Some(argument) = rest.next() {
            match argument.to_str() {
                Some("--test") => {}
                Some("--test-run-directory" | "--test-args") => drop(rest.next()),
                _ => kept.push(argument.clone()),
            }
        }
        let done = api::document(&kept, Path::new(&folder));
        if let Err(error) = &done {
            println!("error: {error:#}");
        }
        done.is_ok()
    };
    let tested = Command::new("rustdoc").args(arguments).status().is_ok_and(|status| status.success());
    Some(if documented && tested { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
