//! How results are printed: tables for people at a terminal, one line a record with tabs for pipes,
//! JSON when asked for.

use std::io::{IsTerminal as _, Write as _};

use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width, presets};
use postbox_server::text::{safe_json, safe_line};
use serde::Serialize;

use crate::failure::Failure;

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

/// JSON in one line: one of many.
pub(crate) fn json_line(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::failed(format!("cannot write JSON: {error}")))?;
    print(&format!("{}\n", safe_json(&text)))
}

/// Whether a person looks at standard output.
pub(crate) fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// One line of a pipe: cells separated by tabs.
pub(crate) fn line_of(cells: &[impl AsRef<str>]) -> Result<(), Failure> {
    let cells: Vec<String> = cells.iter().map(|cell| safe_line(cell.as_ref())).collect();
    print(&format!("{}\n", cells.join("\t")))
}

/// Rows: a table with a head at a terminal, else one line a row, cells separated by tabs, without a
/// head.
pub(crate) fn rows(head: &[&str], rows: &[Vec<String>]) -> Result<(), Failure> {
    if !is_terminal() {
        let lines = rows.iter().map(|row| row.iter().map(|cell| safe_line(cell)).collect::<Vec<_>>().join("\t") + "\n");
        return print(&lines.collect::<String>());
    }
    print(&format!("{}\n", table(head, rows, Table::new().width())))
}

/// A column up to this width is never broken, so that an id can be copied; the terminal may wrap
/// the line instead.
const UNBROKEN_CHARS: u16 = 40;
/// What the last column, a text, has at least, however narrow the terminal.
const LAST_CHARS: u16 = 24;
/// Spaces after a column; the style adds one between two.
const GAP_CHARS: u16 = 1;

/// Columns in which nothing stands are left out: a terminal is narrow. `width` is the terminal's,
/// if it says.
fn table(head: &[&str], rows: &[Vec<String>], width: Option<u16>) -> Table {
    let nothing = |cell: &str| matches!(cell, "" | "-" | "0");
    let shown: Vec<usize> =
        (0..head.len()).filter(|column| *column == 0 || rows.iter().any(|row| !nothing(&row[*column]))).collect();
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(shown.iter().map(|column| head[*column]));
    for row in rows {
        table.add_row(shown.iter().map(|column| safe_line(&row[*column])));
    }
    let contents = table.column_max_content_widths();
    let last = contents.len().saturating_sub(1);
    let widths = contents.iter().enumerate().map(|(column, content)| {
        let most = if column == last { LAST_CHARS } else { UNBROKEN_CHARS };
        (*content).min(most)
    });
    let widths: Vec<u16> = widths.collect();
    let needed = widths.iter().map(|width| width + GAP_CHARS + 1).sum::<u16>();
    // Some terminals say 0 when they do not know.
    table.set_width(width.filter(|width| *width > 0).unwrap_or(u16::MAX).max(needed));
    for (column, width) in table.column_iter_mut().zip(&widths) {
        column.set_padding((0, GAP_CHARS));
        column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(width + GAP_CHARS)));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_width(width: Option<u16>) -> String {
        let row = |id: &str, error: &str| vec![id.to_owned(), "0".to_owned(), "k".to_owned(), error.to_owned()];
        let rows = [
            row("01a1fe73-bd35-7fca-ae4b-4c8c8328d1ed", "the target answered 500 Internal Server Error"),
            row("01a1fe73-bd37-7604-a990-d8bea4d274f1", "-"),
        ];
        table(&["id", "blocked", "key", "error"], &rows, width).to_string()
    }

    #[test]
    fn an_id_can_be_copied_from_any_terminal() {
        for width in [None, Some(0), Some(10), Some(80), Some(200)] {
            let shown = of_width(width);
            assert!(shown.contains("01a1fe73-bd35-7fca-ae4b-4c8c8328d1ed  k"), "{width:?}\n{shown}");
            let longest = shown.lines().map(|line| line.chars().count()).max().expect("lines");
            assert!(longest <= usize::from(width.filter(|it| *it > 70).unwrap_or(100)), "{width:?} {longest}\n{shown}");
        }
    }

    #[test]
    fn columns_without_content_are_left_out() {
        assert!(!of_width(Some(80)).contains("blocked"));
        assert!(of_width(Some(80)).contains("key"));
    }
}
