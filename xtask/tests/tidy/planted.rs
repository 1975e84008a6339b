//! The deliberate mistakes of `cargo xtask planted` fit the code: an edit that matches nothing
//! would plant nothing.

use std::fs;

/// With rows of mistakes that are gone, or none of a new one, it would say more than is known.
#[test]
fn the_page_has_a_row_of_each_planted_mistake() {
    let [list, page] = ["xtask/planted.toml", "docs/planted-bugs.md"]
        .map(|file| fs::read_to_string(crate::root().join(file)).expect("it is there"));
    let list: toml::Table = list.parse().expect("the list is TOML");
    let bugs = list["bug"].as_array().expect("a list of bugs").iter();
    let names: Vec<String> = bugs.map(|bug| bug["name"].as_str().expect("a name").replace('|', "\\|")).collect();
    let rows: Vec<&str> = page.lines().filter_map(|row| row.strip_prefix("| ")?.split(" | ").next()).skip(1).collect();
    assert_eq!(rows, names, "`cargo xtask planted --resume --write` writes the page");
}

#[test]
fn every_planted_mistake_finds_its_place() {
    let list = fs::read_to_string(crate::root().join("xtask/planted.toml")).expect("the list is there");
    let list: toml::Table = list.parse().expect("the list is TOML");
    let bugs = list["bug"].as_array().expect("a list of bugs");
    assert!(bugs.len() >= 40, "at least forty mistakes, not {}", bugs.len());
    let text = |value: &toml::Value| value.as_str().expect("a text").to_owned();
    let mut faults = Vec::new();
    for bug in bugs {
        let (name, file) = (text(&bug["name"]), text(&bug["file"]));
        let code =
            fs::read_to_string(crate::root().join(&file)).unwrap_or_else(|error| panic!("{name}: {file}: {error}"));
        for edit in bug["edits"].as_array().expect("a list of pairs") {
            let old = text(&edit[0]);
            if !code.contains(&old) {
                faults.push(format!("xtask/planted.toml, {name:?}: {file} has no {old:?}; follow the code"));
            }
        }
    }
    crate::none(&faults);
}
