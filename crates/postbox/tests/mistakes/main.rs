//! For common mistakes, the compiler's message names the cure.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Compiles without an error. Identifies the crates of this build among those left by other builds.
const RIGHT: &str = "
#[derive(postbox::Event, serde::Serialize, serde::Deserialize)]
#[event(topic = \"order.paid\")]
pub struct OrderPaid {}
pub async fn mail(_: postbox::router::Event<OrderPaid>) -> Result<(), std::io::Error> { Ok(()) }
pub fn right(store: &postbox::MemoryStore, sqlite: &postbox::sqlite::SqliteStore, _: &postbox::postgres::PostgresStore) {
    let _ = postbox::Postbox::new(store.clone()).append(&mut store.begin(), OrderPaid {});
    let _ = postbox::router::Router::<()>::new().on(mail);
    let _ = postbox::router::Router::<(), _>::in_transaction(sqlite);
}";

const SAMPLES: &str = include_str!("samples.rs");

#[test]
fn every_mistake_is_answered_with_its_cure() {
    let folder = tempfile::tempdir().expect("a folder");
    let deps = std::env::current_exe().expect("this test").parent().expect("its folder").to_owned();
    let right = folder.path().join("right.rs");
    std::fs::write(&right, RIGHT).expect("written");
    let builds = candidates(&deps, "libpostbox-")
        .into_iter()
        .flat_map(|postbox| candidates(&deps, "libserde-").into_iter().map(move |serde| [postbox.clone(), serde]));
    let build = builds.take(40).find(|build| errors(&deps, build, &right, folder.path()).is_empty());
    let build = build.expect("this build's crates are beside this test");

    let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mistakes/samples.rs");
    let said = errors(&deps, &build, &samples, folder.path());
    let expected: BTreeMap<u64, &str> =
        (1..).zip(SAMPLES.lines()).filter_map(|(line, text)| Some((line, text.split_once("//~ ")?.1))).collect();
    assert!(expected.len() >= 10, "ten usual mistakes");
    for (line, cure) in &expected {
        let answer = said.get(line).unwrap_or_else(|| panic!("line {line} compiles: {said:#?}"));
        assert!(answer.contains(cure), "line {line} does not say {cure:?}:\n{answer}");
    }
    let others: Vec<_> = said.iter().filter(|(line, _)| !expected.contains_key(*line)).collect();
    assert!(others.is_empty(), "{others:#?}");
}

/// Returns libraries of that name, the newest first.
fn candidates(deps: &Path, name: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(deps).expect("listed").map(|entry| entry.expect("read"));
    let is_one = |file: &str| file.starts_with(name) && file.ends_with(".rlib");
    let mut found: Vec<_> = entries
        .filter(|entry| is_one(&entry.file_name().to_string_lossy()))
        .map(|entry| (entry.metadata().and_then(|it| it.modified()).expect("a time"), entry.path()))
        .collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

/// Returns the compiler's errors for a file, by line.
fn errors(deps: &Path, [postbox, serde]: &[PathBuf; 2], file: &Path, into: &Path) -> BTreeMap<u64, String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let compiled = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=lib", "--emit=metadata", "--error-format=json", "--cap-lints=allow"])
        .arg("--out-dir")
        .arg(into)
        .arg(format!("-Ldependency={}", deps.display()))
        .arg(format!("--extern=postbox={}", postbox.display()))
        .arg(format!("--extern=serde={}", serde.display()))
        .arg(file)
        .output()
        .expect("the compiler runs");
    let said = String::from_utf8(compiled.stderr).expect("text");
    let messages = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let errors = messages.filter(|message| message["level"] == "error");
    let mut by_line = BTreeMap::new();
    for error in errors {
        let spans = error["spans"].as_array().into_iter().flatten();
        let primary = spans.filter(|span| span["is_primary"] == true).find_map(|span| span["line_start"].as_u64());
        let text: &mut String = by_line.entry(primary.unwrap_or_default()).or_default();
        text.push_str(error["rendered"].as_str().unwrap_or_default());
    }
    // "aborting due to …" belongs to no line of the file.
    if by_line.len() > 1 {
        by_line.remove(&0);
    }
    by_line
}
