//! Fits tables and fields into a terminal, from 60 columns on.

use comfy_table::{Cell, Color, ColumnConstraint, ContentArrangement, Table, Width, presets};
use postbox_server::text::safe_line;

use crate::output::is_colorless;

/// A column up to this width is never broken, so that an id can be copied.
const UNBROKEN_CHARS: u16 = 40;
/// Lengths of shortened ids in a table that is too wide: the time to a fraction of a millisecond,
/// or more if that does not distinguish the rows.
pub(crate) const SHORT_ID_CHARS: [usize; 2] = [18, 23];
/// Least width of the last column, which is a text.
const LAST_CHARS: u16 = 24;
/// Spaces after a column; the style adds one between two.
const GAP_CHARS: u16 = 1;
/// Spaces between a name and its value.
const FIELD_GAP_CHARS: u16 = 2;

/// The terminal's width, if known. Some terminals report 0 when they do not know it.
pub(crate) fn width() -> Option<u16> {
    Table::new().width().filter(|width| *width > 0)
}

/// Renders a table. Empty columns are left out. If it does not fit, ids are cut to the shortest
/// length that distinguishes the rows (every command accepts prefixes). Then values that are equal
/// in all rows are printed once above it. If that is not enough, each row becomes a block with one
/// line per cell.
pub(crate) fn rows(head: &[&str], rows: &[Vec<String>], width: Option<u16>) -> String {
    let nothing = |cell: &str| matches!(cell, "" | "-" | "0");
    let some = |column: &usize| *column == 0 || rows.iter().any(|row| !nothing(&row[*column]));
    let shown: Vec<usize> = (0..head.len()).filter(some).collect();
    let whole = Columns::of(head, rows, shown.clone());
    if whole.fit(width) {
        return whole.table(width);
    }
    let rows = &short_ids(head, rows)[..];
    let cut = Columns::of(head, rows, shown.clone());
    if cut.fit(width) {
        return cut.table(width);
    }
    let same =
        |column: &usize| *column > 0 && rows.len() > 1 && rows.iter().all(|row| row[*column] == rows[0][*column]);
    let (constant, varying): (Vec<usize>, Vec<usize>) = shown.into_iter().partition(same);
    let rest = Columns::of(head, rows, varying);
    let above: Vec<(&str, &String)> = constant.iter().map(|column| (head[*column], &rows[0][*column])).collect();
    let above = if above.is_empty() { String::new() } else { fields(&above, width) + "\n" };
    if rest.fit(width) {
        return above + &rest.table(width);
    }
    above + &rest.blocks(width)
}

/// How many columns of a terminal a line takes: characters of East Asia take two.
pub(crate) fn columns(line: &str) -> u16 {
    let mut table = Table::new();
    table.add_row([line]);
    table.column_max_content_widths().first().copied().unwrap_or(0)
}

/// The beginning of a line that is wider than this, with an ellipsis.
pub(crate) fn cut_to(line: &str, width: u16) -> String {
    if columns(line) <= width {
        return line.to_owned();
    }
    let ends: Vec<usize> = line.char_indices().map(|(end, _)| end).collect();
    let fit = ends.partition_point(|end| columns(&line[..*end]) < width);
    format!("{}…", &line[..ends[fit.saturating_sub(1)]])
}

/// The rows with shortened ids, if they have any.
fn short_ids(head: &[&str], rows: &[Vec<String>]) -> Vec<Vec<String>> {
    let mut rows = rows.to_vec();
    let Some(column) = head.iter().position(|name| *name == "id") else { return rows };
    let mut ids: Vec<String> = rows.iter().map(|row| row[column].clone()).collect();
    ids.sort();
    ids.dedup();
    let tell_apart = |chars: &usize| {
        ids.iter().all(|id| id.get(..*chars).is_some())
            && ids.windows(2).all(|pair| pair[0].get(..*chars) != pair[1].get(..*chars))
    };
    if let Some(chars) = SHORT_ID_CHARS.into_iter().find(tell_apart) {
        rows.iter_mut().for_each(|row| row[column].truncate(chars));
    }
    rows
}

/// Renders names and values, one below the other. Without a width, each is one line.
pub(crate) fn fields<N: AsRef<str>, V: AsRef<str>>(fields: &[(N, V)], width: Option<u16>) -> String {
    let names = fields.iter().map(|(name, _)| name.as_ref().chars().count()).max().unwrap_or(0);
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    for (name, value) in fields {
        let (name, value) = (safe_line(name.as_ref()), safe_line(value.as_ref()));
        let (of_name, of_value) = (color_of_mark(&name), color_of(&name, &value));
        table.add_row([painted(name, of_name), painted(value, of_value)]);
    }
    table.set_width(width.unwrap_or(u16::MAX));
    for (column, padding) in table.column_iter_mut().zip([FIELD_GAP_CHARS, 0]) {
        column.set_padding((0, padding));
    }
    let first = u16::try_from(names).unwrap_or(UNBROKEN_CHARS) + FIELD_GAP_CHARS;
    if let Some(column) = table.column_mut(0) {
        column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(first)));
    }
    lines(&mut table)
}

/// The colour of a mark of the doctor.
fn color_of_mark(mark: &str) -> Option<Color> {
    match mark.trim_end() {
        "PROBLEM" => Some(Color::DarkRed),
        "note" => Some(Color::DarkYellow),
        "ok" => Some(Color::DarkGreen),
        _ => None,
    }
}

/// The colour of a cell: red waits for a person, yellow waits by itself.
fn color_of(name: &str, cell: &str) -> Option<Color> {
    match (name.trim_start(), cell) {
        (_, "" | "-" | "0") => None,
        ("dead", _) | ("state", "dead") => Some(Color::DarkRed),
        ("retrying" | "blocked", _) | ("state", "retrying" | "blocked") => Some(Color::DarkYellow),
        _ => None,
    }
}

/// Colours only a terminal. The table library honours `NO_COLOR` only halfway: it would omit the
/// colour and still print the sequence that ends it.
fn painted(text: String, color: Option<Color>) -> Cell {
    let cell = Cell::new(text);
    match color.filter(|_| !is_colorless()) {
        Some(color) => cell.fg(color),
        None => cell,
    }
}

/// Some columns of the rows.
struct Columns<'a> {
    head: Vec<&'a str>,
    rows: Vec<Vec<String>>,
    /// The minimum width of each.
    least: Vec<u16>,
}

impl<'a> Columns<'a> {
    fn of(head: &[&'a str], rows: &[Vec<String>], shown: Vec<usize>) -> Self {
        let head: Vec<&str> = shown.iter().map(|column| head[*column]).collect();
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| shown.iter().map(|column| safe_line(&row[*column])).collect()).collect();
        let mut table = Table::new();
        table.set_header(&head).add_rows(&rows);
        let contents = table.column_max_content_widths();
        let last = contents.len().saturating_sub(1);
        let least =
            |(column, content): (usize, &u16)| (*content).min(if column == last { LAST_CHARS } else { UNBROKEN_CHARS });
        let least = contents.iter().enumerate().map(least).collect();
        Self { head, rows, least }
    }

    fn fit(&self, width: Option<u16>) -> bool {
        let needed: u32 = self.least.iter().map(|width| u32::from(width + GAP_CHARS + 1)).sum();
        // The style adds no space after the last column.
        width.is_none_or(|width| needed <= u32::from(width) + 1)
    }

    fn table(&self, width: Option<u16>) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
        let painted = |row: &Vec<String>| {
            let cells = self.head.iter().zip(row);
            cells.map(|(name, cell)| painted(cell.clone(), color_of(name, cell))).collect::<Vec<_>>()
        };
        table.set_header(&self.head).add_rows(self.rows.iter().map(painted)).set_width(width.unwrap_or(u16::MAX));
        for (column, least) in table.column_iter_mut().zip(&self.least) {
            column.set_padding((0, GAP_CHARS));
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(least + GAP_CHARS)));
        }
        lines(&mut table)
    }

    /// The first cell of each row, with the non-empty others below it.
    fn blocks(&self, width: Option<u16>) -> String {
        let block = |row: &Vec<String>| {
            let cells = self.head.iter().zip(row).skip(1).filter(|(_, cell)| !matches!(cell.as_str(), "" | "-" | "0"));
            let cells: Vec<(String, &String)> = cells.map(|(name, cell)| (format!("  {name}"), cell)).collect();
            format!("{}\n{}", row[0], if cells.is_empty() { String::new() } else { fields(&cells, width) })
        };
        self.rows.iter().map(block).collect()
    }
}

/// Renders without the spaces that fill up the last column.
fn lines(table: &mut Table) -> String {
    table.style_text_only();
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_width(width: Option<u16>) -> String {
        let row = |id: &str, error: &str| vec![id.to_owned(), "0".to_owned(), "k".to_owned(), error.to_owned()];
        let shown = [
            row("01a1fe73-bd35-7fca-ae4b-4c8c8328d1ed", "the target answered 500 Internal Server Error"),
            row("01a1fe73-bd37-7604-a990-d8bea4d274f1", "-"),
        ];
        rows(&["id", "blocked", "key", "error"], &shown, width)
    }

    #[test]
    fn an_id_can_be_copied_from_any_terminal() {
        for (width, id) in [
            (None, "01a1fe73-bd35-7fca-ae4b-4c8c8328d1ed"),
            (Some(40), "01a1fe73-bd35-7fca"),
            (Some(60), "01a1fe73-bd35-7fca"),
            (Some(80), "01a1fe73-bd35-7fca-ae4b-4c8c8328d1ed"),
            (Some(200), "01a1fe73-bd35-7fca-ae4b-4c8c8328d1ed"),
        ] {
            let shown = of_width(width);
            assert!(shown.contains(id), "{width:?}\n{shown}");
            let longest = shown.lines().map(|line| line.chars().count()).max().expect("lines");
            assert!(longest <= usize::from(width.unwrap_or(100)), "{width:?} {longest}\n{shown}");
        }
    }

    /// The ids of one transaction have the same beginning.
    #[test]
    fn ids_are_cut_to_what_tells_them_apart() {
        let cut = |ids: [&str; 2]| short_ids(&["id"], &ids.map(|id| vec![id.to_owned()])).concat();
        let id = "01a1fe73-bd35-7fca-ae4b-4c8c8328d1ed";
        let (other, next) = ("01a1fe73-bd35-7fca-ae4c-4c8c8328d1ed", "01a1fe73-bd35-7fca-ae4b-4c8c8328d1ee");
        assert_eq!(cut([id, id]), ["01a1fe73-bd35-7fca"; 2]);
        assert_eq!(cut([id, other]), ["01a1fe73-bd35-7fca-ae4b", "01a1fe73-bd35-7fca-ae4c"]);
        assert_eq!(cut([id, next]), [id, next]);
        assert_eq!(cut(["-", id]), ["-", id]);
    }

    #[test]
    fn what_waits_for_a_person_is_red() {
        let colors = [("dead", "2"), ("dead", "0"), ("state", "dead"), ("state", "retrying"), ("id", "dead")];
        let (red, yellow) = (Some(Color::DarkRed), Some(Color::DarkYellow));
        assert_eq!(colors.map(|(name, cell)| color_of(name, cell)), [red, None, red, yellow, None]);
        assert_eq!(["PROBLEM", "note   ", "any"].map(color_of_mark), [red, yellow, None]);
    }

    #[test]
    fn columns_without_content_are_left_out() {
        assert!(!of_width(Some(80)).contains("blocked"));
        assert!(of_width(Some(80)).contains("key"));
    }
}
