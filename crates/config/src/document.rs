//! Documents generated from declared keys: the commented file, the guide's tables, the JSON Schema.

use serde_json::{Map, Value, json};

use crate::kind::Variant;
use crate::table::{Key, Start};

/// The column of comments beside commented-out keys; and the longest line.
const COMMENT_COLUMN: usize = 33;
const LINE_CHARS_MAX: usize = 100;

/// Writes all sections as a commented file in which every value is the default. Sections with
/// user-chosen names get an example name and are commented out.
pub fn commented_file(sections: &[Key]) -> String {
    let mut text = String::new();
    for section in sections {
        let mut example = |doc: &str, other: &str, kind: &str, keys: &[Key]| match section.start {
            Start::Unset(_, name) if !name.is_empty() => {
                let name = if other.is_empty() { name } else { other };
                let head = format!("{}#[{}.{name}]\n{kind}", comment(&plain(doc)), section.name);
                text.push_str(&format!("\n{head}{}", commented(keys, true)));
            }
            // What has a type is its default until somebody writes another.
            _ if !kind.is_empty() && keys.is_empty() => {}
            _ if !kind.is_empty() => {
                let head = format!("{}#[{}]\n{kind}", comment(&plain(doc)), section.name);
                text.push_str(&format!("\n{head}{}", commented(keys, true)));
            }
            _ => text.push_str(&format!("\n[{}]\n{}", section.name, commented(keys, false))),
        };
        if section.shape.variants.is_empty() {
            example(&section.doc, "", "", &section.shape.keys);
        }
        for (index, Variant { name, doc, keys, .. }) in section.shape.variants.iter().enumerate() {
            // Two tables must not have the same name.
            let other = if index == 0 { "" } else { name };
            example(doc, other, &format!("#type = {name:?}\n"), keys);
        }
    }
    text
}

/// Writes the keys of one table. With `all`, every key is commented out, because the table itself
/// is only an example; otherwise keys with a default are written. Keys without an example come
/// last, by name.
fn commented(keys: &[Key], all: bool) -> String {
    let (mut lines, mut rest) = (String::new(), Vec::new());
    for key in keys {
        let (value, absent) = match &key.start {
            Start::Value(value) => (value.clone(), String::new()),
            Start::Required(example) => ((*example).to_owned(), " Required.".to_owned()),
            Start::Unset(_, "") if !key.shape.keys.is_empty() => (defaults(&key.shape.keys), String::new()),
            Start::Unset(_, "") => {
                rest.push(key.name);
                continue;
            }
            Start::Unset("", example) => ((*example).to_owned(), String::new()),
            Start::Unset(meaning, example) => ((*example).to_owned(), format!(" Default: {}.", plain(meaning))),
        };
        let below = key.shape.keys.iter().filter(|key| !matches!(key.start, Start::Value(_)));
        let is_set = !all && matches!(key.start, Start::Value(_));
        let code = format!("{}{} = {value}", if is_set { "" } else { "#" }, key.name);
        let summary = plain(&key.doc) + &absent + &names(" More keys", below.map(|key| key.name));
        let beside = format!("{code:<COMMENT_COLUMN$} # {summary}\n");
        lines.push_str(&match all && beside.chars().count() <= LINE_CHARS_MAX {
            true => beside,
            false => format!("{}{code}\n", comment(&summary)),
        });
        // A second key with the same choices needs no second list of them.
        let kinds = |key: &Key| key.shape.variants.iter().map(|variant| variant.name).collect::<Vec<_>>();
        if keys.iter().take_while(|earlier| earlier.name != key.name).any(|earlier| kinds(earlier) == kinds(key)) {
            continue;
        }
        for (index, Variant { name, doc, keys, example }) in key.shape.variants.iter().enumerate() {
            let head = if index == 0 { name } else { example };
            let keys: Vec<String> = keys.iter().map(with_nested).collect();
            let keys = names(" Keys", keys.iter().map(String::as_str));
            lines.push_str(&comment(&format!("{head}: {}{keys}", plain(doc))));
        }
    }
    lines + &comment(&names("More keys", rest.into_iter()))
}

/// A key's name, and the names of its nested keys.
fn with_nested(key: &Key) -> String {
    let nested: Vec<&str> = key.shape.keys.iter().map(|key| key.name).collect();
    if nested.is_empty() { key.name.to_owned() } else { format!("{} ({})", key.name, nested.join(", ")) }
}

fn names<'a>(head: &str, names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.collect();
    if names.is_empty() { String::new() } else { format!("{head}: {}.", names.join(", ")) }
}

/// The defaults of a nested table.
fn defaults(keys: &[Key]) -> String {
    let defaults = keys.iter().filter_map(|key| match &key.start {
        Start::Value(value) => Some(format!("{} = {value}", key.name)),
        _ => None,
    });
    format!("{{ {} }}", defaults.collect::<Vec<_>>().join(", "))
}

/// The first paragraph of Markdown as plain text. Summaries contain code and emphasis, but no
/// links.
fn plain(markdown: &str) -> String {
    markdown.split("\n\n").next().unwrap_or_default().replace('`', "")
}

/// Writes a wrapped comment; nothing for an empty text.
fn comment(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= LINE_CHARS_MAX => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(format!("# {word}")),
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// The guide's Markdown for the table at a place such as `"server"` or `"subscriptions.sink"`;
/// `None` if there is no table.
pub fn guide_table(keys: &[Key], place: &str) -> Option<String> {
    let (name, rest) = place.split_once('.').unwrap_or((place, ""));
    let shape = &keys.iter().find(|key| key.name == name)?.shape;
    if !rest.is_empty() {
        return guide_table(&shape.keys, rest);
    }
    if shape.variants.is_empty() {
        return Some(rows(&shape.keys)).filter(|rows| !rows.is_empty());
    }
    let parts = shape.variants.iter().map(|Variant { name, doc, keys, .. }| {
        let rows = rows(keys);
        format!("`type = \"{name}\"`: {doc}\n{}{rows}", if rows.is_empty() { "" } else { "\n" })
    });
    Some(parts.collect::<Vec<_>>().join("\n"))
}

fn rows(keys: &[Key]) -> String {
    let mut rows = String::new();
    push_rows(&mut rows, keys, "");
    if rows.is_empty() { rows } else { format!("| key | default | |\n|---|---|---|\n{rows}") }
}

fn push_rows(rows: &mut String, keys: &[Key], prefix: &str) {
    for key in keys {
        let default = match &key.start {
            Start::Required(_) => "required".to_owned(),
            Start::Value(value) => format!("`{value}`"),
            Start::Unset(meaning, _) => (*meaning).to_owned(),
        };
        let doc = key.doc.replace("\n\n", " ").replace('|', "\\|");
        rows.push_str(&format!("| `{prefix}{}` | {default} | {doc} |\n", key.name));
        push_rows(rows, &key.shape.keys, &format!("{prefix}{}.", key.name));
    }
}

/// Returns the JSON Schema (draft 2020-12) of a file with these sections.
pub fn json_schema(title: &str, sections: &[Key]) -> Value {
    let mut schema = object(sections);
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    schema["title"] = title.into();
    schema
}

/// Returns the schema of a table with exactly these keys.
pub(crate) fn object(keys: &[Key]) -> Value {
    let properties: Map<String, Value> = keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    let required = keys.iter().filter(|key| matches!(key.start, Start::Required(_))).map(|key| key.name);
    json!({
        "type": "object",
        "properties": properties,
        "required": required.collect::<Vec<_>>(),
        "additionalProperties": false,
    })
}

/// Returns the schema of one type of a table.
pub(crate) fn variant(variant: &Variant) -> Value {
    let mut schema = object(&variant.keys);
    schema["description"] = variant.doc.as_str().into();
    schema["properties"]["type"] = json!({ "const": variant.name });
    if let Value::Array(required) = &mut schema["required"] {
        required.push("type".into());
    }
    schema
}

fn property(key: &Key) -> Value {
    let mut property = key.shape.schema.clone();
    property["description"] = key.doc.as_str().into();
    // Values that are not JSON, such as inline tables, are left out.
    match &key.start {
        Start::Value(value) => property["default"] = serde_json::from_str(value).unwrap_or_default(),
        Start::Required(example) | Start::Unset(_, example) => {
            if let Ok(example) = serde_json::from_str::<Value>(example) {
                property["examples"] = json!([example]);
            }
        }
    }
    property
}
