//! `cargo xtask planted`: plants deliberate mistakes and checks that the tests find them.
//!
//! A mistake is a text edit in `xtask/planted.toml`. It is made in a copy of the tree, so that the
//! product contains no switch for it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::root;
use crate::suite::WORKSPACE;

/// The list of mistakes.
const LIST: &str = "xtask/planted.toml";
/// The page that `--write` writes.
const TABLE: &str = "docs/planted-bugs.md";
/// Simulator seeds per mistake.
const SEEDS: &str = "100000";
/// Time limit for these; SQLite worlds are slower than those of the memory store.
const SIMULATOR_SECONDS: &str = "60";

#[derive(Deserialize)]
struct List {
    bug: Vec<Bug>,
}

/// One mistake.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Bug {
    /// Describes what goes wrong.
    name: String,
    file: PathBuf,
    /// Pairs of texts: every occurrence of the first is replaced by the second.
    edits: Vec<(String, String)>,
    /// The check that must find it.
    by: Catcher,
    /// For `simulator`: the store.
    #[serde(default)]
    store: Option<String>,
    /// For `suite` and `test`: the test target, or `lib`.
    #[serde(default)]
    target: String,
    /// For `suite` and `test`: the tests to run, in nextest's filter language. For `ledger`: the
    /// kinds of fault, so that its rounds are short.
    #[serde(default)]
    filter: String,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Catcher {
    /// The conformance suites, which every implementation runs.
    Suite,
    /// A specific test.
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

/// The result of one mistake.
#[derive(Clone, Deserialize, Serialize)]
enum Outcome {
    /// The check failed after this many seconds, at this test or seed, on the tree of this commit.
    Found {
        seconds: f64,
        what: String,
        #[serde(default)]
        commit: String,
    },
    Missed,
    /// The check proves nothing: the tree does not build with the mistake, or the filter matches no
    /// test.
    Broken(String),
}

/// Outcomes by the names of mistakes.
type Results = BTreeMap<String, Outcome>;

/// Which mistakes, and what becomes of the outcomes.
#[derive(Args)]
pub(crate) struct Options {
    /// Only those whose name contains this
    #[arg(long)]
    name: Option<String>,
    /// Plants only what has no outcome yet, e.g. after an interrupted run. Each outcome names its
    /// commit
    #[arg(long)]
    resume: bool,
    /// Those of the crash ledger too, which take minutes each
    #[arg(long)]
    ledger: bool,
    /// Writes all outcomes there are to docs/planted-bugs.md
    #[arg(long)]
    write: bool,
}

/// Plants each mistake and prints the table; `true` if all planted ones are found.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    crate::servers::install()?;
    let list: List = toml::from_str(&fs::read_to_string(root().join(LIST))?).context(LIST)?;
    let folder = crate::target()?.join("planted");
    let (tree, target, kept) = (folder.join("tree"), folder.join("target"), folder.join("results.json"));
    copy_tree(&tree)?;
    let mut results = match fs::read(&kept) {
        Ok(text) if options.resume || options.name.is_some() => {
            serde_json::from_slice(&text).with_context(|| kept.display().to_string())?
        }
        _ => Results::new(),
    };
    let (mut all_found, commit) = (true, commit()?);
    for bug in &list.bug {
        let named = options.name.as_ref().is_none_or(|name| bug.name.contains(name));
        let known = options.resume && results.contains_key(&bug.name);
        let too_long = matches!(bug.by, Catcher::Ledger) && !options.ledger;
        if !named || known || too_long {
            continue;
        }
        let outcome = plant(bug, &tree, &target, &commit).with_context(|| bug.name.clone())?;
        println!("{}", row(bug, Some(&outcome)));
        all_found &= matches!(outcome, Outcome::Found { .. });
        results.insert(bug.name.clone(), outcome);
        fs::write(&kept, serde_json::to_vec_pretty(&results)?)?;
    }
    let page = page(&list, &results);
    if options.write {
        fs::write(root().join(TABLE), page)?;
    }
    Ok(all_found)
}

fn page(list: &List, results: &Results) -> String {
    let mut rows = String::new();
    let (mut found, mut planted) = (0, 0);
    for bug in &list.bug {
        let outcome = results.get(&bug.name);
        planted += usize::from(outcome.is_some());
        found += usize::from(matches!(outcome, Some(Outcome::Found { .. })));
        rows += &row(bug, outcome);
        rows.push('\n');
    }
    let all = list.bug.len();
    format!(
        "# Planted mistakes\n\nEach line is a deliberate mistake, made in a copy of the tree, and the check that finds it. Written\n\
         by `cargo xtask planted --write`; the edits are in [`xtask/planted.toml`](../xtask/planted.toml).\n\n\
         Of {all} mistakes {planted} were planted and {found} of these found. The seconds are those of the\n\
         check, without the build; a time-out counts as found, and its test bears the word. The commit is\n\
         that of the tree.\n\n\
         | mistake | file | found by | seconds | commit |\n|---|---|---|---|---|\n{rows}"
    )
}

fn row(bug: &Bug, outcome: Option<&Outcome>) -> String {
    let (what, seconds, commit) = match outcome {
        Some(Outcome::Found { seconds, what, commit }) => {
            (what.replace('|', "\\|"), format!("{seconds:.1}"), commit.as_str())
        }
        Some(Outcome::Missed) => (String::new(), "**not found**".to_owned(), ""),
        Some(Outcome::Broken(why)) => (why.replace('|', "\\|"), "**not checked**".to_owned(), ""),
        None => (String::new(), "not run".to_owned(), ""),
    };
    let by = bug.by.name();
    let by = if what.is_empty() { by.to_owned() } else { format!("{by}: {what}") };
    format!("| {} | `{}` | {by} | {seconds} | {commit} |", bug.name.replace('|', "\\|"), bug.file.display())
}

/// Copies the files that git tracks, and no build output. Unchanged files keep their time, so that
/// only changed ones are rebuilt.
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

/// The commit of the tree, with `-dirty` if it has other changes.
fn commit() -> anyhow::Result<String> {
    let mut describe = Command::new("git");
    describe.current_dir(root()).args(["describe", "--always", "--dirty", "--abbrev=8", "--exclude", "*"]);
    let head = describe.output().context("git")?;
    ensure!(head.status.success(), "git describe: {}", String::from_utf8_lossy(&head.stderr));
    Ok(String::from_utf8(head.stdout)?.trim().to_owned())
}

/// Makes the edit, runs the check, and undoes the edit.
fn plant(bug: &Bug, tree: &Path, target: &Path, commit: &str) -> anyhow::Result<Outcome> {
    let file = tree.join(&bug.file);
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let mut planted = text.clone();
    for (old, new) in &bug.edits {
        ensure!(planted.contains(old), "{old:?} does not occur in {}", bug.file.display());
        planted = planted.replace(old, new);
    }
    fs::write(&file, planted)?;
    let checked = check(bug, tree, target, commit);
    fs::write(&file, text)?;
    checked
}

fn check(bug: &Bug, tree: &Path, target: &Path, commit: &str) -> anyhow::Result<Outcome> {
    let cargo = |arguments: &[&str]| {
        let mut command = crate::steps::cargo();
        command.current_dir(tree).args(arguments).env("CARGO_TARGET_DIR", target);
        command
    };
    let (mut build, mut run) = match bug.by {
        Catcher::Suite | Catcher::Test => {
            let mut arguments = [&["nextest", "run"][..], &WORKSPACE].concat();
            match bug.target.as_str() {
                "lib" => arguments.push("--lib"),
                target => arguments.extend(["--test", target]),
            }
            let how = ["--profile", "planted", "--no-tests", "fail", "--max-fail", "1", "-E", &bug.filter];
            (cargo(&[&arguments[..], &["--no-run"]].concat()), cargo(&[&arguments[..], &how].concat()))
        }
        Catcher::Simulator => {
            let mut run = Command::new(target.join("debug/simulate"));
            run.args(["--seeds", SEEDS, "--seconds", SIMULATOR_SECONDS]);
            run.args(["--store", bug.store.as_deref().unwrap_or("memory")]);
            (cargo(&[&["build"][..], &WORKSPACE, &["--bin", "simulate"]].concat()), run)
        }
        Catcher::Ledger => {
            let run = ["xtask", "crash", "--debug", "--events", "100000", "--faults", "500", "--round", "10000"];
            let run = [&run[..], &["--rate", "800", "--minutes", "5", "--only", &bug.filter]].concat();
            (cargo(&[&["build"][..], &WORKSPACE, &["--bins"]].concat()), cargo(&run))
        }
    };
    let built = build.stdin(Stdio::null()).output().context("cargo")?;
    if !built.status.success() {
        let said = String::from_utf8_lossy(&built.stderr);
        let why = said.lines().find(|line| line.starts_with("error")).unwrap_or("no error is named");
        return Ok(Outcome::Broken(format!("does not build: {why}")));
    }
    let start = Instant::now();
    let checked = run.stdin(Stdio::null()).output().with_context(|| format!("{run:?}"))?;
    let seconds = start.elapsed().as_secs_f64();
    if checked.status.success() {
        return Ok(Outcome::Missed);
    }
    let said = [checked.stdout, checked.stderr].concat();
    Ok(match failure(bug.by, &String::from_utf8_lossy(&said)) {
        Some(what) => Outcome::Found { seconds, what, commit: commit.to_owned() },
        None => Outcome::Broken(format!("the check ended with {} and names no failure", checked.status)),
    })
}

/// Extracts the failed test or seed from the output.
fn failure(by: Catcher, said: &str) -> Option<String> {
    let mut lines = said.lines().map(str::trim);
    match by {
        Catcher::Suite | Catcher::Test => {
            let line = lines.find(|line| ["FAIL [", "TIMEOUT [", "SIGABRT ["].iter().any(|it| line.starts_with(it)))?;
            let how = if line.starts_with("TIMEOUT") { ", time-out" } else { "" };
            Some(format!("`{}`{how}", line.split_whitespace().last()?))
        }
        // `seed 7 failed: loss: …`
        Catcher::Simulator => lines.find_map(|line| {
            let (seed, violation) = line.strip_prefix("seed ")?.split_once(" failed: ")?;
            Some(format!("seed {seed}, {}", violation.split(':').next()?))
        }),
        // `60 s: 10000 events, 25 faults: {"lost": 3}`
        Catcher::Ledger => {
            let violations = lines.filter_map(|line| Some(line.split_once(" faults: ")?.1));
            violations.map(str::to_owned).find(|violations| violations != "clean")
        }
    }
}
