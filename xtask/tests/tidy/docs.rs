//! Links lead somewhere, and the drawn state machine is the real one.

use std::collections::BTreeSet;

use postbox_core::State;

use crate::{files, none, root};

#[test]
fn relative_links_lead_somewhere() {
    let mut faults = Vec::new();
    for (name, text) in files(&["md"]) {
        let page = root().join(&name);
        let folder = page.parent().expect("a page lies in a folder");
        for link in links(&text) {
            let target = link.split('#').next().unwrap_or_default();
            let elsewhere = target.is_empty() || target.contains("://") || target.starts_with("mailto:");
            if !elsewhere && !folder.join(target).exists() {
                faults.push(format!("{name} links to {link}, which does not exist"));
            }
        }
    }
    none(&faults);
}

/// The targets of inline links outside code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        }
        if code {
            continue;
        }
        // Every second piece between back quotes is code.
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        for (at, _) in prose.match_indices("](") {
            let rest = &prose[at + 2..];
            let target = rest.split([')', ' ']).next().unwrap_or_default();
            found.push(target.to_owned());
        }
    }
    found
}

#[test]
fn links_are_found_in_prose_and_not_in_code() {
    let text = "a [b](c.md#d) and [e](https://f) `[g](h)`\n```\n[i](j)\n```\n[k](l \"m\")";
    assert_eq!(links(text), ["c.md#d", "https://f", "l"]);
}

/// A file that moves takes the pages along that name it.
#[test]
fn files_that_pages_name_are_there() {
    const FOLDERS: [&str; 8] = ["bench/", "brokers/", "crash/", "crates/", "docs/", "drivers/", "stores/", "xtask/"];
    // It is about the broker that the reader adds.
    const INVENTED: [&str; 1] = ["brokers/lines"];
    let mut faults = Vec::new();
    for (page, text) in files(&["md"]) {
        // Every second piece between back quotes is code.
        for code in text.split('`').skip(1).step_by(2) {
            let is_path = FOLDERS.iter().any(|folder| code.starts_with(folder))
                && !code.contains(|c: char| c.is_whitespace() || "*<{…".contains(c));
            let path = code.split(':').next().unwrap_or_default();
            if is_path && !INVENTED.contains(&path) && !root().join(path).exists() {
                faults.push(format!("{page} names {path}, which does not exist"));
            }
        }
    }
    none(&faults);
}

/// `docs/state-machine.md` shows exactly the transition table of `State::may_become`.
#[test]
fn the_state_machine_is_drawn_as_it_is() {
    let page = std::fs::read_to_string(root().join("docs/state-machine.md")).expect("docs/state-machine.md");
    let drawn: BTreeSet<(String, String)> = page
        .lines()
        .filter_map(|line| line.split_once(" --> "))
        .map(|(from, to)| (from.trim().to_owned(), to.split(':').next().unwrap_or(to).trim().to_owned()))
        .filter(|(from, to)| from != "[*]" && to != "[*]")
        .collect();
    let mut real = BTreeSet::new();
    for from in State::ALL {
        assert!(page.contains(&format!("| `{from}` |")), "docs/state-machine.md explains no state {from}");
        let next = State::ALL.into_iter().filter(|next| from.may_become(*next));
        real.extend(next.map(|next| (from.to_string(), next.to_string())));
    }
    let arrows = |faults: Vec<&(String, String)>| {
        faults.iter().map(|(from, to)| format!("{from} --> {to}")).collect::<Vec<_>>().join(", ")
    };
    let missing = arrows(real.difference(&drawn).collect());
    let extra = arrows(drawn.difference(&real).collect());
    assert!(missing.is_empty() && extra.is_empty(), "docs/state-machine.md: missing: {missing}; too many: {extra}");
}
