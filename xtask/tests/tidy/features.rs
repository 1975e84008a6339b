//! What `postbox` adds to a service's Cargo.lock.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::{none, root};

/// The dependencies of a facade's feature, direct and through other features. A weak one (`?`)
/// counts, because it is in the lock file, too.
fn taken(features: &toml::Table, feature: &str) -> BTreeSet<String> {
    let mut taken = BTreeSet::new();
    for it in features[feature].as_array().expect("a list").iter().map(|it| it.as_str().expect("text")) {
        match it.strip_prefix("dep:").or_else(|| it.split_once('/').map(|(name, _)| name.trim_end_matches('?'))) {
            Some(dependency) => _ = taken.insert(dependency.to_owned()),
            None => taken.extend(self::taken(features, it)),
        }
    }
    taken
}

/// A lock file can contain the SQLite library only once, and each version of `rusqlite` and of
/// `sqlx` requires its own. A service with another version (with `sqlx` 0.8, even if it never uses
/// SQLite) could not use ours.
#[test]
fn nobody_gets_sqlite_who_did_not_ask_for_it() {
    let manifest = std::fs::read_to_string(root().join("crates/postbox/Cargo.toml")).expect("a manifest");
    let manifest: toml::Table = manifest.parse().expect("TOML");
    let features = manifest["features"].as_table().expect("a table");
    let asked = features.keys().filter(|name| !name.contains("sqlite"));
    let faults: Vec<_> = asked
        .filter(|name| taken(features, name).contains("postbox-sqlite"))
        .map(|name| {
            format!(
                "crates/postbox/Cargo.toml: the feature {name} takes postbox-sqlite: leave it to a feature of that name"
            )
        })
        .collect();
    none(&faults);
    assert!(taken(features, "sqlx-sqlite").contains("postbox-sqlite"), "features are followed");
}

/// Most crates that the default features may bring, ours included.
const CRATES_MAX: usize = 130;

#[test]
fn a_service_gets_few_crates() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut tree = Command::new(cargo);
    tree.args(["tree", "--package", "postbox", "--edges", "normal", "--prefix", "none", "--no-dedupe", "--locked"]);
    let tree = tree.args(["--format", "{p}"]).current_dir(root()).output().expect("cargo runs");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8_lossy(&tree.stdout);
    let crates: BTreeSet<&str> = tree.lines().filter(|line| !line.is_empty()).collect();
    assert!(crates.len() > 50, "{} crates: the tree was not read", crates.len());
    assert!(
        crates.len() <= CRATES_MAX,
        "postbox brings {} crates by default, at most {CRATES_MAX} may be: see `cargo tree -p postbox -e normal`",
        crates.len()
    );
}

/// A service that already has an older `sqlx`, directly and through `sea-orm`, which puts the
/// SQLite library into the lock file even where it is off; and an older `rusqlite`.
const SERVICE: &str = r#"
[package]
name = "service"
edition = "2024"

[workspace]

[dependencies]
rusqlite = "0.32"
sea-orm = { version = "1.1", default-features = false, features = ["runtime-tokio", "sqlx-postgres"] }
sqlx = { version = "0.8", features = ["postgres", "runtime-tokio"] }
"#;

/// All driver features at once: none of them may break a lock file.
const DRIVERS: [&str; 5] = ["diesel", "diesel-async", "sea-orm", "sqlx", "sqlx08"];

/// Needs the registry, and takes some seconds.
#[test]
#[allow(clippy::print_stdout, reason = "a skip must be seen")]
fn a_service_with_an_older_sqlx_sea_orm_or_rusqlite_can_add_postbox() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("service");
    std::fs::create_dir_all(folder.join("src")).expect("made");
    let postbox = root().join("crates/postbox");
    let manifest = format!("{SERVICE}postbox = {{ path = {postbox:?}, features = {DRIVERS:?} }}\n");
    std::fs::write(folder.join("Cargo.toml"), manifest).expect("written");
    std::fs::write(folder.join("src/lib.rs"), "").expect("written");
    _ = std::fs::remove_file(folder.join("Cargo.lock"));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut resolve = Command::new(cargo);
    let resolved = resolve.args(["generate-lockfile"]).current_dir(&folder).output().expect("cargo runs");
    let said = String::from_utf8_lossy(&resolved.stderr);
    if resolved.status.success() {
        return;
    }
    let may_skip = std::env::var_os("POSTBOX_ALLOW_SKIP").is_some() && std::env::var_os("CI").is_none();
    if may_skip && !said.contains("failed to select a version") {
        println!("SKIPPED: the registry cannot be reached: {said}");
        return;
    }
    panic!("such a service cannot add postbox; see docs/decisions/sqlite-is-asked-for.md:\n{said}");
}
