//! TOML as a tree of values with their lines.

use postbox_config::{Entry, Node, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The text that is being read.
pub(super) struct Lines<'a>(pub(super) &'a str);

impl Lines<'_> {
    /// The line of a place in the text, from 1.
    pub(super) fn line(&self, start: usize) -> usize {
        let before = &self.0.as_bytes()[..start.min(self.0.len())];
        1 + before.iter().filter(|byte| **byte == b'\n').count()
    }

    pub(super) fn entries(&self, table: &DeTable<'_>) -> Vec<Entry> {
        let entries = table.iter().map(|(key, value)| Entry {
            key: key.get_ref().to_string(),
            line: self.line(key.span().start),
            node: self.node(value),
        });
        entries.collect()
    }

    fn node(&self, value: &Spanned<DeValue<'_>>) -> Node {
        let read = match value.get_ref() {
            DeValue::String(text) => Value::Text(text.to_string()),
            // A number beyond 128 bits is beyond every range, too.
            DeValue::Integer(number) => {
                Value::Integer(i128::from_str_radix(number.as_str(), number.radix()).unwrap_or(i128::MAX))
            }
            DeValue::Boolean(answer) => Value::Bool(*answer),
            DeValue::Array(items) => Value::List(items.iter().map(|item| self.node(item)).collect()),
            DeValue::Table(table) => Value::Table(self.entries(table)),
            other => Value::Other(other.type_str()),
        };
        Node { line: self.line(value.span().start), value: read }
    }
}
