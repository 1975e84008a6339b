//! Plain words, and lines of a readable length.

use crate::{files, none};

/// Words of a private language, each with the usual one. Split in two, so that this file does not
/// find itself.
const PRIVATE: &[(&str, &str)] = &[
    (concat!("ho", "use"), "write project, workspace or code base"),
    (concat!("ro", "oms"), "write crates or modules"),
    (concat!("fl", "oors"), "write layers"),
    (concat!("bo", "oks"), "write state or position"),
    (concat!("to", "ld"), "write logged, reported, answered or known"),
    (concat!("he", "ir"), "write next owner"),
];

/// Last column of comments and prose.
const COLUMNS_MAX: usize = 100;

#[test]
fn no_private_words() {
    let mut faults = Vec::new();
    for (name, text) in files(&["rs", "sql", "toml", "md"]) {
        for (n, line) in text.lines().enumerate() {
            let lower = line.to_lowercase();
            let words: Vec<&str> = lower.split(|c: char| !c.is_alphanumeric() && c != '\'').collect();
            for (word, cure) in PRIVATE.iter().filter(|(word, _)| words.contains(word)) {
                faults.push(format!("{name}:{}: {word}: {cure}", n + 1));
            }
        }
    }
    none(&faults);
}

#[test]
fn comments_and_prose_end_at_the_hundredth_column() {
    let mut faults = Vec::new();
    for (name, text) in files(&["rs", "sql", "md"]) {
        let mut fenced = false;
        for (n, line) in text.lines().enumerate() {
            let bare = line.trim_start();
            let body = match name.rsplit_once('.').map(|(_, extension)| extension) {
                Some("rs") => bare.strip_prefix("///").or(bare.strip_prefix("//!")).or(bare.strip_prefix("//")),
                Some("sql") => bare.strip_prefix("--"),
                _ => Some(line),
            };
            let Some(body) = body.map(str::trim_start) else { continue };
            fenced ^= body.starts_with("```");
            if !fenced && !cannot_break(body) && line.chars().count() > COLUMNS_MAX {
                faults.push(format!("{name}:{}: {} columns; wrap it at {COLUMNS_MAX}", n + 1, line.chars().count()));
            }
        }
    }
    none(&faults);
}

/// Whether a line cannot be wrapped: a table row, a link target, a command, or a single long word.
fn cannot_break(body: &str) -> bool {
    let words = body.trim_start_matches(['-', ' ']).split(' ').count();
    let code = body.starts_with('`') && body.trim_end().ends_with('`');
    body.starts_with('|') || body.starts_with('[') || words == 1 || code
}

#[test]
fn a_row_and_a_long_word_need_no_break() {
    assert!(cannot_break("| a | b |") && cannot_break("- https://example.com/long"));
    assert!(cannot_break("`cargo test --a-long-command`") && !cannot_break("a sentence"));
}

/// The glossary has few terms, one per thing.
#[test]
fn the_glossary_is_short() {
    let page = std::fs::read_to_string(crate::root().join("CONTRIBUTING.md")).expect("CONTRIBUTING.md");
    let glossary = page.split("## Glossary").nth(1).expect("a glossary").split("\n## ").next().expect("its text");
    let terms = glossary.lines().filter(|line| line.starts_with("| **")).count();
    assert!((1..=20).contains(&terms), "{terms} terms in CONTRIBUTING.md");
}
