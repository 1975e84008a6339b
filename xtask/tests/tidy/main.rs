//! Conventions checked by tests: layers of crates, banned words, links. Every failure says what to
//! change.

mod docs;
mod features;
mod layers;
mod planted;
mod publishing;
mod sources;
mod supply;
mod words;

use std::path::{Path, PathBuf};

/// The workspace's root.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_path_buf()
}

/// Every file of the workspace with one of these extensions, as path from the root and text.
fn files(extensions: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    collect(&root(), extensions, &mut found);
    assert!(!found.is_empty(), "no {extensions:?} files found");
    found.sort();
    found
}

fn collect(folder: &Path, extensions: &[&str], found: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(folder).expect("a folder of ours can be read") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && name != ".git" && !path.join("CACHEDIR.TAG").exists() {
                collect(&path, extensions, found);
            }
        } else if path.extension().is_some_and(|extension| extensions.iter().any(|wanted| extension == *wanted)) {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let name = path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned();
            found.push((name, text));
        }
    }
}

/// Fails with all faults at once.
#[track_caller]
fn none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}
