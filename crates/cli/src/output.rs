//! How results are printed: tables for people at a terminal, one line a record with tabs for pipes,
//! JSON when asked for.

use std::io::{IsTerminal as _, Write as _};

use postbox_server::text::{safe_json, safe_line};
use serde::Serialize;

use crate::failure::Failure;
use crate::layout;

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

/// What a command did: a line, or the same as JSON.
pub(crate) fn done(as_json: bool, what: &impl Serialize, text: &str) -> Result<(), Failure> {
    if as_json { json(what) } else { line(text) }
}

/// JSON in one line: one of many.
pub(crate) fn json_line(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))?;
    print(&format!("{}\n", safe_json(&text)))
}

/// Whether a person looks at standard output.
pub(crate) fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// Whether the person wants no colors: <https://no-color.org>.
pub(crate) fn is_colorless() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// One line of a pipe: cells separated by tabs.
pub(crate) fn line_of(cells: &[impl AsRef<str>]) -> Result<(), Failure> {
    let cells: Vec<String> = cells.iter().map(|cell| safe_line(cell.as_ref())).collect();
    print(&format!("{}\n", cells.join("\t")))
}

/// Rows: a table at a terminal, else one line a row behind a line with the head, every column at
/// its place, cells separated by tabs.
pub(crate) fn rows(head: &[&str], rows: &[Vec<String>]) -> Result<(), Failure> {
    if is_terminal() {
        return print(&layout::rows(head, rows, layout::width()));
    }
    if rows.is_empty() {
        return Ok(());
    }
    line_of(head)?;
    rows.iter().try_for_each(|row| line_of(row))
}

/// Names and values, one below the other; a long value goes on where it began.
pub(crate) fn fields<N: AsRef<str>, V: AsRef<str>>(fields: &[(N, V)]) -> Result<(), Failure> {
    print(&layout::fields(fields, if is_terminal() { layout::width() } else { None }))
}
