//! Banned words, and files that are too long.

use std::collections::{BTreeMap, BTreeSet};

use crate::{files, none, root};

/// Most lines of a file. Above 400 a file should justify its length.
const LINES_MAX: usize = 600;

/// Split in two, so that this file does not find itself.
const BANNED: &[(&str, &str)] = &[
    (concat!("dbg", "!("), "take the leftover debugging out"),
    (concat!("todo", "!("), "do it, or file an issue and say what happens meanwhile"),
    (concat!("unimplemented", "!("), "do it, or file an issue and say what happens meanwhile"),
    (concat!("#[ign", "ore"), "no ignored tests: assert today's wrong result with a note instead"),
    (concat!("/wo", "rk/"), "a path of one machine: derive it"),
    (concat!("/ro", "ot/"), "a path of one machine: derive it"),
    (concat!("/ho", "me/"), "a path of one machine: derive it"),
    (concat!("index.cra", "tes.io"), "name packages, not the hosts of registries"),
    (concat!("pypi", ".org"), "name packages, not the hosts of registries"),
    (concat!("registry.npm", "js"), "name packages, not the hosts of registries"),
    (concat!("allow(mis", "sing_docs"), "write the sentence"),
    (concat!("allow(un", "safe_code"), "unsafe is forbidden here"),
];

/// Marks of unfinished work; allowed with the number of an issue after them.
const UNFINISHED: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];

#[test]
fn no_banned_words() {
    let mut faults = Vec::new();
    for (name, text) in files(&["rs", "sql", "toml", "md", "sh"]) {
        for (n, line) in text.lines().enumerate() {
            for (word, cure) in BANNED.iter().filter(|(word, _)| line.contains(word)) {
                faults.push(format!("{name}:{}: {word}: {cure}", n + 1));
            }
        }
    }
    none(&faults);
}

#[test]
fn unfinished_work_names_its_issue() {
    let mut faults = Vec::new();
    for (name, text) in files(&["rs", "sql", "md"]) {
        for (n, line) in text.lines().enumerate() {
            let words = line.split(|c: char| !c.is_ascii_alphanumeric());
            let unfinished = words.into_iter().find(|word| UNFINISHED.contains(word));
            if let Some(word) = unfinished.filter(|_| !line.contains("(#")) {
                faults.push(format!("{name}:{}: write {word}(#ISSUE), or do it", n + 1));
            }
        }
    }
    none(&faults);
}

#[test]
fn no_file_is_too_long() {
    let long = files(&["rs", "sql"]).into_iter().map(|(name, text)| (name, text.lines().count()));
    let faults: Vec<_> = long
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(name, lines)| format!("{name} has {lines} lines; split it by {LINES_MAX}"))
        .collect();
    none(&faults);
}

#[test]
fn every_crate_says_what_it_is() {
    let mut faults = Vec::new();
    for (name, _) in
        files(&["toml"]).into_iter().filter(|(name, text)| name.ends_with("Cargo.toml") && text.contains("[package]"))
    {
        let folder = root().join(&name).parent().expect("a manifest lies in a folder").to_path_buf();
        let documented = ["src/lib.rs", "src/main.rs"].iter().any(|file| {
            std::fs::read_to_string(folder.join(file)).is_ok_and(|text| text.trim_start().starts_with("//!"))
        });
        if !documented && !folder.join("README.md").is_file() {
            faults.push(format!("{name}: the crate has neither crate docs nor a README"));
        }
    }
    none(&faults);
}

#[test]
fn every_crate_takes_the_workspace_lints() {
    // Examples are meant to be copied out of the workspace.
    let is_ours = |name: &str| name.ends_with("Cargo.toml") && !name.starts_with("examples/");
    let members = files(&["toml"]).into_iter().filter(|(name, text)| is_ours(name) && text.contains("[package]"));
    let without = members.filter(|(_, text)| !text.contains("[lints]\nworkspace = true"));
    let faults: Vec<_> = without.map(|(name, _)| format!("{name}: add [lints] workspace = true")).collect();
    none(&faults);
}

/// The modules that code imports from `crate::`.
fn imports(text: &str) -> Vec<String> {
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let paths = code.split("crate::").skip(1).flat_map(|rest| match rest.strip_prefix('{') {
        Some(list) => list.split('}').next().unwrap_or_default().split(',').collect(),
        None => vec![rest],
    });
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    paths.map(|path| path.trim_start().chars().take_while(|c| is_name(*c)).collect()).collect()
}

/// Folders that import each other, directly or through others, can only be understood together, so
/// they should be one folder.
#[test]
fn no_two_folders_import_each_other() {
    let mut imported: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    let mut folders = BTreeSet::new();
    for (name, text) in files(&["rs"]) {
        let Some((of, path)) = name.split_once("/src/") else { continue };
        let module = path.split(['/', '.']).next().unwrap_or_default();
        let place = (of.to_owned(), module.to_owned());
        if path.contains('/') {
            folders.insert(place.clone());
        }
        imported.entry(place).or_default().extend(imports(&text));
    }
    let reached = |of: &str, from: &str| {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(module) = next.pop() {
            let further = imported.get(&(of.to_owned(), module)).into_iter().flatten();
            next.extend(further.filter(|module| reached.insert((*module).clone())).cloned());
        }
        reached
    };
    let mut faults = Vec::new();
    for (of, one) in &folders {
        for (_, two) in folders.iter().filter(|(crate_of, two)| crate_of == of && one < two) {
            if reached(of, one).contains(two) && reached(of, two).contains(one) {
                faults.push(format!("{of}/src: {one} and {two} need each other; move what both need beside them"));
            }
        }
    }
    none(&faults);
}
