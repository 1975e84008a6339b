//! What a user finds with a crate, and whether it can be published.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::layers::metadata;
use crate::{none, root};

/// The workspace crates that are published: those whose manifest does not forbid it.
fn published(metadata: &Value) -> BTreeMap<&str, &Value> {
    let packages = metadata["packages"].as_array().expect("a list").iter();
    let ours = packages.filter(|package| package["source"].is_null() && package["publish"].is_null());
    ours.map(|package| (package["name"].as_str().expect("a name"), package)).collect()
}

#[test]
fn what_is_published_says_what_it_is_and_has_its_licences() {
    let metadata = metadata();
    let published = published(&metadata);
    assert!(published.contains_key("postbox") && !published.contains_key("postbox-testkit"));
    let mut faults = Vec::new();
    for (name, package) in &published {
        let is_empty = |key: &str| package[key].as_array().is_none_or(Vec::is_empty);
        if package["description"].is_null() || is_empty("keywords") || is_empty("categories") {
            faults.push(format!("{name}: its manifest needs description, keywords and categories"));
        }
        let folder = Path::new(package["manifest_path"].as_str().expect("a path")).parent().expect("a folder");
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            if !folder.join(file).is_file() {
                faults
                    .push(format!("{name}: no {file} in its folder; licences are symbolic links to those of the root"));
            }
        }
        let features = package["features"].as_object().is_some_and(|features| !features.is_empty());
        if features && package["metadata"]["docs"]["rs"]["all-features"] != true {
            faults.push(format!("{name}: has features: add [package.metadata.docs.rs] all-features = true"));
        }
    }
    none(&faults);
}

#[test]
fn what_is_published_needs_only_what_is_published() {
    let metadata = metadata();
    let published = published(&metadata);
    let mut faults = Vec::new();
    for (name, package) in &published {
        let dependencies = package["dependencies"].as_array().expect("a list").iter();
        for used in dependencies.filter(|it| it["source"].is_null() && it["kind"].is_null()) {
            let other = used["name"].as_str().expect("a name");
            if used["req"] == "*" || !published.contains_key(other) {
                faults.push(format!("{name} uses {other}, which has no version or is not published"));
            }
        }
    }
    none(&faults);
}

#[test]
fn the_public_api_of_every_crate_that_programs_use_is_kept() {
    let metadata = metadata();
    let published = published(&metadata);
    let parts = published["postbox"]["dependencies"].as_array().expect("a list").iter();
    let parts = parts.filter(|it| it["source"].is_null() && it["kind"].is_null()).map(|it| it["name"].as_str());
    let file = |name: &str| format!("{}.txt", name.replace('-', "_"));
    let wanted: BTreeSet<String> = parts.flatten().chain(["postbox"]).map(file).collect();
    let folder = std::fs::read_dir(root().join("docs/api")).expect("docs/api");
    let kept: BTreeSet<String> =
        folder.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    assert_eq!(kept, wanted, "create an empty file for a new crate, then: UPDATE=1 cargo xtask docs");
}
