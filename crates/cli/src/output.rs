//! How results are printed: tables for people at a terminal, one line a record with tabs for pipes, JSON when asked for.

use std::io::{IsTerminal as _, Write as _};

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use crate::failure::Failure;
use crate::text::{safe_json, safe_line};

/// Writes text to standard output as it is.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// One line on standard output.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    print(&format!("{}\n", safe_line(text)))
}

/// One line on standard error: a remark that is no result.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "postbox: {}", safe_line(text));
}

/// JSON, indented, on standard output.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))?;
    print(&format!("{}\n", safe_json(&text)))
}

/// Whether a person looks at standard output.
pub(crate) fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// Rows: a table with a head at a terminal, else one line a row, cells separated by tabs, without a head.
pub(crate) fn rows(head: &[&str], rows: &[Vec<String>]) -> Result<(), Failure> {
    if !is_terminal() {
        let lines = rows.iter().map(|row| row.iter().map(|cell| safe_line(cell)).collect::<Vec<_>>().join("\t") + "\n");
        return print(&lines.collect::<String>());
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(head);
    for row in rows {
        table.add_row(row.iter().map(|cell| safe_line(cell)));
    }
    print(&format!("{table}\n"))
}
