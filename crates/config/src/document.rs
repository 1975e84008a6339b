//! What people read of declared keys: the commented file, and the tables of the guide.

use crate::key::{Key, Shape, Start};

/// Where comments beside commented-out keys begin, and where lines end.
const COMMENT_COLUMN: usize = 33;
const LINE_CHARS_MAX: usize = 110;

/// The keys of one table as lines of the commented file, but for those without an example. With `commented`, every key is commented
/// out, because the table itself is only an example; without, keys that have a default are written.
pub fn commented(keys: &[Key], commented: bool) -> String {
    let mut lines = String::new();
    for key in keys {
        let (value, absent) = written(key);
        if value.is_empty() {
            continue;
        }
        let is_set = !commented && matches!(key.start, Start::Value(_));
        let code = format!("{}{} = {value}", if is_set { "" } else { "#" }, key.name);
        let comment = plain(key.summary()) + &absent;
        let beside = format!("{code:<COMMENT_COLUMN$} # {comment}");
        if commented && beside.chars().count() <= LINE_CHARS_MAX {
            lines.push_str(&beside);
            lines.push('\n');
        } else {
            lines.push_str(&format!("{}{code}\n", comment_lines(&comment)));
        }
        if let Shape::Tagged(variants, _) = &key.shape {
            for (index, variant) in variants.iter().enumerate() {
                let names: Vec<&str> = variant.keys.iter().map(|key| key.name).collect();
                let names = if names.is_empty() { String::new() } else { format!(" Keys: {}.", names.join(", ")) };
                let head = if index == 0 { variant.name } else { variant.example };
                lines.push_str(&comment_lines(&format!("{head}: {}{names}", plain(&variant.doc))));
            }
        }
    }
    lines
}

/// A value to show for a key, and what to say of its absence.
fn written(key: &Key) -> (String, String) {
    match (&key.start, &key.shape) {
        (_, Shape::Table(keys)) => (inline(keys), String::new()),
        (Start::Value(literal), _) => (literal.to_string(), String::new()),
        (Start::Required(example), _) => ((*example).to_owned(), String::new()),
        (Start::Unset(meaning, example), _) => {
            let absent = if meaning.is_empty() { String::new() } else { format!(" Default: {}.", plain(meaning)) };
            ((*example).to_owned(), absent)
        }
    }
}

/// The defaults of a nested table.
fn inline(keys: &[Key]) -> String {
    let defaults = keys.iter().filter_map(|key| match key.start {
        Start::Value(literal) => Some(format!("{} = {literal}", key.name)),
        _ => None,
    });
    format!("{{ {} }}", defaults.collect::<Vec<_>>().join(", "))
}

/// Markdown as plain text. Summaries have code and emphasis, no links.
fn plain(markdown: &str) -> String {
    markdown.split("\n\n").next().unwrap_or_default().replace('`', "")
}

/// A comment, wrapped.
pub(crate) fn comment_lines(text: &str) -> String {
    let mut lines = String::from("#");
    let mut width = 1;
    for word in text.split_whitespace() {
        if width + 1 + word.chars().count() > LINE_CHARS_MAX {
            lines.push_str("\n#");
            width = 1;
        }
        lines.push(' ');
        lines.push_str(word);
        width += 1 + word.chars().count();
    }
    lines.push('\n');
    lines
}

/// The keys of one table as a Markdown table. `prefix` stands before each name.
pub fn guide_table(keys: &[Key], prefix: &str) -> String {
    let mut rows = String::from("| key | default | |\n|---|---|---|\n");
    push_rows(&mut rows, keys, prefix);
    rows
}

fn push_rows(rows: &mut String, keys: &[Key], prefix: &str) {
    for key in keys {
        let default = match (&key.start, &key.shape) {
            (_, Shape::Table(_)) => String::new(),
            (Start::Required(_), _) => "required".to_owned(),
            (Start::Value(literal), _) => format!("`{literal}`"),
            (Start::Unset(meaning, _), _) => (*meaning).to_owned(),
        };
        let doc = key.doc.replace("\n\n", " ").replace('|', "\\|");
        rows.push_str(&format!("| `{prefix}{}` | {default} | {doc} |\n", key.name));
        if let Shape::Table(keys) = &key.shape {
            push_rows(rows, keys, &format!("{prefix}{}.", key.name));
        }
    }
}
