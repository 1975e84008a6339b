//! Compares the public API of the crates that programs use, item by item, with `docs/api`.
//!
//! A line of `docs/api` that goes away or changes can break a program: by
//! [Cargo's rules](https://doc.rust-lang.org/cargo/reference/semver.html) it needs a new minor
//! version before 1.0. So whoever changes the API sees that in the same commit.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

/// Documents the crate that rustdoc's `arguments` name; warnings are errors. If `docs/api` has a
/// file for the crate, fails unless its API is the one in the file. With `UPDATE=1`, writes the
/// file instead.
pub(crate) fn document(arguments: &[OsString], folder: &Path) -> anyhow::Result<()> {
    let mut rest = arguments.iter();
    let name = rest.find(|it| *it == "--crate-name").and_then(|_| rest.next()).context("rustdoc: no --crate-name")?;
    let name = name.to_string_lossy();
    // The format is unstable: `public-api` 0.52.0 reads 57, that of Rust 1.95. Raise both together.
    let json = ["-Dwarnings", "-Zunstable-options", "--output-format=json", "--out-dir"];
    let mut command = Command::new("rustdoc");
    command.env("RUSTC_BOOTSTRAP", "1").args(arguments).args(json).arg(folder);
    anyhow::ensure!(command.status()?.success(), "{name}: its docs have the faults above");
    let kept = crate::root().join(format!("docs/api/{name}.txt"));
    if !kept.is_file() {
        return Ok(());
    }
    let items = public_api::Builder::from_rustdoc_json(folder.join(format!("{name}.json")))
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .build()
        .with_context(|| format!("{name}: the JSON of rustdoc; use Rust 1.95, or raise public-api in Cargo.toml"))?;
    let now: BTreeSet<String> = items.items().map(ToString::to_string).collect();
    if std::env::var_os("UPDATE").is_some() {
        let text: String = now.iter().flat_map(|line| [line, "\n"]).collect();
        return std::fs::write(&kept, text).with_context(|| kept.display().to_string());
    }
    let text = std::fs::read_to_string(&kept)?;
    let before: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    for gone in before.difference(&now) {
        println!("- {gone}");
    }
    for new in now.difference(&before) {
        println!("+ {new}");
    }
    anyhow::ensure!(
        before == now,
        "the public API of {name} is not that of docs/api/{name}.txt, see above; a line with `-` can break \
         programs: say so in CHANGELOG.md; then: UPDATE=1 cargo xtask docs"
    );
    Ok(())
}
