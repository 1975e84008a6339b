//! Prints results: tables at a terminal, tab-separated lines for pipes, and JSON on request.
//!
//! Printing returns no error, so that none can keep a command from its work or replace its failure.
//! The first one is kept for [`finish`], which `main` calls last.

use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::sync::Mutex;

use postbox_core::lock;
use postbox_server::text::{safe_json, safe_line};
use serde::Serialize;

use crate::failure::Failure;
use crate::layout;

/// The first error of standard output, after which nothing more is printed, and what was done
/// though it could not be printed.
static BROKEN: Mutex<Option<(io::Error, String)>> = Mutex::new(None);

/// Returns how the command ended. A success becomes a failure if standard output could not be
/// written; beside a failure, that is only noted. If the reader has closed it (`postbox list |
/// head`), nobody misses what is not printed.
pub(crate) fn finish(ended: Result<(), Failure>) -> Result<(), Failure> {
    let Some((error, done)) = lock(&BROKEN).take() else { return ended };
    if error.kind() == ErrorKind::BrokenPipe {
        return ended;
    }
    let text = format!("cannot write the output: {error}{done}");
    if ended.is_ok() {
        return Err(Failure::failed(text));
    }
    note(&text);
    ended
}

/// Whether nothing can be printed any more.
pub(crate) fn is_broken() -> bool {
    lock(&BROKEN).is_some()
}

/// Adds what was done to the error of standard output, if it has one. A person who sees only a
/// failure would do it again.
pub(crate) fn nevertheless(what: &str) {
    if let Some((_, done)) = lock(&BROKEN).as_mut() {
        done.push_str("; nevertheless: ");
        done.push_str(what);
    }
}

/// Writes text to standard output unchanged.
pub(crate) fn print(text: &str) {
    if is_broken() {
        return;
    }
    let mut stdout = io::stdout().lock();
    if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        fail(error);
    }
}

fn fail(error: io::Error) {
    lock(&BROKEN).get_or_insert((error, String::new()));
}

/// Prints one line to standard output.
pub(crate) fn line(text: &str) {
    print(&format!("{}\n", safe_line(text)));
}

/// Prints a remark, which is not a result, as one line to standard error.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "postbox: {}", safe_line(text));
}

/// Prints indented JSON to standard output.
pub(crate) fn json(value: &impl Serialize) {
    match serde_json::to_string_pretty(value) {
        Ok(text) => print(&format!("{}\n", safe_json(&text))),
        Err(error) => fail(error.into()),
    }
}

/// Prints a result, as a line or as JSON.
pub(crate) fn result(as_json: bool, what: &impl Serialize, text: &str) {
    if as_json { json(what) } else { line(text) }
}

/// Prints what a command did. If that fails, the error says what was done.
pub(crate) fn done(as_json: bool, what: &impl Serialize, text: &str) {
    result(as_json, what, text);
    nevertheless(text);
}

/// Prints one of several JSON values as a line.
pub(crate) fn json_line(value: &impl Serialize) {
    match serde_json::to_string(value) {
        // A payload is printed as it is, perhaps over several lines. In JSON, such characters are
        // outside of strings.
        Ok(text) => print(&format!("{}\n", safe_json(&text).replace(['\n', '\r', '\t'], " "))),
        Err(error) => fail(error.into()),
    }
}

/// Whether standard output is a terminal.
pub(crate) fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Whether the user wants no colours: <https://no-color.org>.
pub(crate) fn is_colorless() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Prints one line for a pipe, with cells separated by tabs.
pub(crate) fn line_of(cells: &[impl AsRef<str>]) {
    let cells: Vec<String> = cells.iter().map(|cell| safe_line(cell.as_ref())).collect();
    print(&format!("{}\n", cells.join("\t")));
}

/// Prints rows: a table at a terminal, else a head line and one line per row, all columns in place,
/// cells separated by tabs.
pub(crate) fn rows(head: &[&str], rows: &[Vec<String>]) {
    if is_terminal() {
        return print(&layout::rows(head, rows, layout::width()));
    }
    if rows.is_empty() {
        return;
    }
    line_of(head);
    rows.iter().for_each(|row| line_of(row));
}

/// Prints names and values, one below the other. A long value is wrapped under its beginning.
pub(crate) fn fields<N: AsRef<str>, V: AsRef<str>>(fields: &[(N, V)]) {
    print(&layout::fields(fields, if is_terminal() { layout::width() } else { None }));
}
