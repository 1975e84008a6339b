//! Prints results: tables at a terminal, tab-separated lines for pipes, and JSON on request.

use std::io::{IsTerminal as _, Write as _};

use postbox_server::text::{safe_json, safe_line};
use serde::Serialize;

use crate::failure::Failure;
use crate::layout;

/// Writes text to standard output unchanged.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// Prints one line to standard output.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    print(&format!("{}\n", safe_line(text)))
}

/// Prints a remark, which is not a result, as one line to standard error.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "postbox: {}", safe_line(text));
}

/// Prints indented JSON to standard output.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))?;
    print(&format!("{}\n", safe_json(&text)))
}

/// Prints a result, as a line or as JSON.
pub(crate) fn result(as_json: bool, what: &impl Serialize, text: &str) -> Result<(), Failure> {
    if as_json { json(what) } else { line(text) }
}

/// Prints what a command did. If that fails, the error says it.
pub(crate) fn done(as_json: bool, what: &impl Serialize, text: &str) -> Result<(), Failure> {
    result(as_json, what, text).map_err(|failure| failure.nevertheless(text))
}

/// Prints one of several JSON values as a line.
pub(crate) fn json_line(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))?;
    // A payload is printed as it is, perhaps over several lines. In JSON, such characters are
    // outside of strings.
    print(&format!("{}\n", safe_json(&text).replace(['\n', '\r', '\t'], " ")))
}

/// Whether standard output is a terminal.
pub(crate) fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// Whether the user wants no colours: <https://no-color.org>.
pub(crate) fn is_colorless() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Prints one line for a pipe, with cells separated by tabs.
pub(crate) fn line_of(cells: &[impl AsRef<str>]) -> Result<(), Failure> {
    let cells: Vec<String> = cells.iter().map(|cell| safe_line(cell.as_ref())).collect();
    print(&format!("{}\n", cells.join("\t")))
}

/// Prints rows: a table at a terminal, else a head line and one line per row, all columns in place,
/// cells separated by tabs.
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

/// Prints names and values, one below the other. A long value is wrapped under its beginning.
pub(crate) fn fields<N: AsRef<str>, V: AsRef<str>>(fields: &[(N, V)]) -> Result<(), Failure> {
    print(&layout::fields(fields, if is_terminal() { layout::width() } else { None }))
}
