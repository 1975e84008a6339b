//! `cargo xtask planted`: deliberate mistakes, and whether the checks find them.
//!
//! A mistake is a text edit in `xtask/planted.toml`. It is made in a copy of the tree, so that no switch for it stands in the product.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::root;

/// The list, beside this crate's manifest.
const LIST: &str = "xtask/planted.toml";
/// Where `--write` puts the table.
const TABLE: &str = "docs/planted-bugs.md";

#[derive(Deserialize)]
struct List {
    bug: Vec<Bug>,
}

/// One mistake.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Bug {
    /// Says what goes wrong.
    name: String,
    file: PathBuf,
    /// Pairs of texts: each occurrence of the first becomes the second.
    edits: Vec<(String, String)>,
    /// What finds it.
    by: Catcher,
    /// For `suite` and `test`: the test target, or `lib`.
    #[serde(default)]
    target: String,
    /// For `suite` and `test`: which of its tests, in nextest's filter language. For `ledger`: which kinds of fault, so that its rounds are short.
    #[serde(default)]
    filter: String,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Catcher {
    /// The conformance suites, which every implementation runs.
    Suite,
    /// A test of its own.
    Test,
    /// `cargo xtask simulate`.
    Simulator,
    /// `cargo xtask crash`.
    Ledger,
}

impl Catcher {
    fn name(self) -> &'static str {
        match self {
            Self::Suite => "suite",
            Self::Test => "test",
            Self::Simulator => "simulator",
            Self::Ledger => "ledger",
        }
    }
}

/// Plants each mistake and prints the table; `true` if all were found.
pub(crate) fn run(name: Option<&str>, write: bool) -> anyhow::Result<bool> {
    crate::servers::install()?;
    let list: List = toml::from_str(&fs::read_to_string(root().join(LIST))?).context(LIST)?;
    let copy = crate::target()?.join("planted");
    let tree = copy.join("tree");
    copy_tree(&tree)?;
    let mut rows = String::from("| mistake | file | found by | seconds |\n|---|---|---|---|\n");
    let (mut found, mut planted) = (0, 0);
    for bug in list.bug.iter().filter(|bug| name.is_none_or(|name| bug.name.contains(name))) {
        let took = plant(bug, &tree, &copy.join("target")).with_context(|| bug.name.clone())?;
        planted += 1;
        found += usize::from(took.is_some());
        let seconds = took.map_or("**not found**".to_owned(), |took| format!("{:.1}", took.as_secs_f64()));
        let row = format!("| {} | `{}` | {} | {seconds} |", bug.name, bug.file.display(), bug.by.name());
        println!("{row}");
        writeln!(rows, "{row}")?;
    }
    ensure!(planted > 0, "no mistake is called so; they are in {LIST}");
    println!("planted: {planted}, found: {found}");
    if write {
        fs::write(root().join(TABLE), page(&rows, planted, found))?;
    }
    Ok(found == planted)
}

fn page(rows: &str, planted: usize, found: usize) -> String {
    format!(
        "# Planted mistakes\n\nEach line is a deliberate mistake, made in a copy of the tree, and the check that finds it. The seconds\n\
         are those of the check, without the build. Written by `cargo xtask planted --write`; the edits are in\n\
         [`xtask/planted.toml`](../xtask/planted.toml).\n\n{found} of {planted} are found.\n\n{rows}"
    )
}

/// What git tracks, and nothing that was built. Files that are alike keep their time, so that only what changed is built anew.
fn copy_tree(tree: &Path) -> anyhow::Result<()> {
    let tracked = Command::new("git").current_dir(root()).args(["ls-files", "-z"]).output().context("git")?;
    ensure!(tracked.status.success(), "git ls-files: {}", String::from_utf8_lossy(&tracked.stderr));
    for name in String::from_utf8(tracked.stdout)?.split('\0').filter(|name| !name.is_empty()) {
        let (from, to) = (root().join(name), tree.join(name));
        let Ok(text) = fs::read(&from) else { continue };
        if fs::read(&to).is_ok_and(|there| there == text) {
            continue;
        }
        fs::create_dir_all(to.parent().unwrap_or(tree))?;
        fs::copy(&from, &to).with_context(|| name.to_owned())?;
    }
    Ok(())
}

/// Makes the edit, runs the check, takes the edit back. How long the check took to fail; `None` if it passed.
fn plant(bug: &Bug, tree: &Path, target: &Path) -> anyhow::Result<Option<Duration>> {
    let file = tree.join(&bug.file);
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let mut planted = text.clone();
    for (old, new) in &bug.edits {
        ensure!(planted.contains(old), "{old:?} does not occur in {}", bug.file.display());
        planted = planted.replace(old, new);
    }
    fs::write(&file, planted)?;
    let checked = check(bug, tree, target);
    fs::write(&file, text)?;
    checked
}

fn check(bug: &Bug, tree: &Path, target: &Path) -> anyhow::Result<Option<Duration>> {
    let (build, run) = match bug.by {
        Catcher::Suite | Catcher::Test => {
            let mut arguments = vec!["nextest", "run", "--workspace", "--all-features", "--locked"];
            match bug.target.as_str() {
                "lib" => arguments.push("--lib"),
                target => arguments.extend(["--test", target]),
            }
            let run = [&arguments[..], &["--no-tests", "fail", "--max-fail", "1", "-E", &bug.filter]].concat();
            ([&arguments[..], &["--no-run"]].concat(), run)
        }
        Catcher::Simulator => (vec!["xtask", "simulate", "--seeds", "1"], vec!["xtask", "simulate"]),
        Catcher::Ledger => {
            let run = [
                "xtask", "crash", "--debug", "--events", "100000", "--faults", "500", "--round", "10000", "--rate",
                "800",
            ];
            let run = [&run[..], &["--minutes", "5", "--only", &bug.filter]].concat();
            (vec!["build", "--workspace", "--all-features", "--locked", "--bins"], run)
        }
    };
    let cargo = |arguments: &[&str]| {
        let mut command = crate::steps::cargo();
        command.current_dir(tree).args(arguments).env("CARGO_TARGET_DIR", target);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().context("cargo")
    };
    let built = cargo(&build)?;
    // A seed may already find it.
    ensure!(built.success() || matches!(bug.by, Catcher::Simulator), "the tree does not build with this mistake in it");
    let start = Instant::now();
    let passed = cargo(&run)?.success();
    Ok((!passed).then(|| start.elapsed()))
}
