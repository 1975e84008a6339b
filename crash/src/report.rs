//! The table at the end of a run.

use std::fmt::Write as _;
use std::process::Command;

use postbox_crash_checker::Verdict;
use postbox_crash_checker::verdict::VIOLATIONS;

use crate::options::{Options, SinkKind};

/// A table that is both plain text and Markdown.
pub(crate) fn table(options: &Options, verdict: &Verdict) -> String {
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
    let sink = if options.sink == SinkKind::Http { "http" } else { "file" };
    row("store, sink, seed", format!("{}, {sink}, {}", options.store.name(), options.seed));
    row("version", version());
    row("events committed", verdict.events.to_string());
    row("arrivals", verdict.arrivals.to_string());
    for (name, count) in &verdict.facts {
        row(name, count.to_string());
    }
    row("**faults**", format!("**{}**", verdict.faults.values().sum::<u64>()));
    for (name, count) in &verdict.faults {
        row(&format!("– {name}"), count.to_string());
    }
    row("duplicates, of at most", format!("{} of {}", verdict.duplicates, verdict.duplicates_bound));
    for (name, meaning) in VIOLATIONS {
        let count = verdict.violations.get(name).copied().unwrap_or_default();
        row(&format!("**{name}**: {meaning}"), format!("**{count}**"));
    }
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or_default();
    let mut text = format!("| {:<width$} | count |\n|{}|---:|\n", "crash ledger", "-".repeat(width + 2));
    for (name, value) in rows {
        let _ = writeln!(text, "| {name:<width$} | {value} |");
    }
    text
}

/// The version, and the commit where git knows it.
fn version() -> String {
    let output = Command::new("git").args(["describe", "--always", "--dirty"]).output();
    let commit = output.ok().filter(|output| output.status.success());
    let commit = commit.map(|output| format!(", {}", String::from_utf8_lossy(&output.stdout).trim()));
    format!("{}{}", env!("CARGO_PKG_VERSION"), commit.unwrap_or_default())
}
