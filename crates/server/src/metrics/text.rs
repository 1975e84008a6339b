//! The Prometheus text format, written by hand: one family at a time, labels escaped.
//! <https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format>

use std::fmt::Write as _;

use crate::text::neutralise;

/// What a number means.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// Only rises, until the program restarts.
    Counter,
    /// Rises and falls.
    Gauge,
}

/// A page of metrics in the making.
#[derive(Default)]
pub(super) struct Page(String);

impl Page {
    /// Starts a family. Its samples must follow at once.
    pub(super) fn family(&mut self, name: &str, kind: Kind, help: &str) -> Family<'_> {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        let _ = writeln!(self.0, "# HELP {name} {}", escape(help));
        let _ = writeln!(self.0, "# TYPE {name} {kind}");
        Family { name: name.to_owned(), page: &mut self.0 }
    }

    pub(super) fn finish(self) -> String {
        self.0
    }
}

/// One family of samples.
pub(super) struct Family<'a> {
    name: String,
    page: &'a mut String,
}

impl Family<'_> {
    /// One sample.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: f64) {
        self.page.push_str(&self.name);
        for (index, (name, value)) in labels.iter().enumerate() {
            let _ = write!(self.page, "{}{name}=\"{}\"", if index == 0 { '{' } else { ',' }, escape(value));
        }
        if !labels.is_empty() {
            self.page.push('}');
        }
        let _ = writeln!(self.page, " {value}");
    }

    /// One whole number.
    pub(super) fn count(&mut self, labels: &[(&str, &str)], value: u64) {
        self.sample(labels, value as f64);
    }
}

/// Backslash, quote and line feed are the three characters that the format gives a meaning. Who appends chooses topics, and must not be able to hide one on
/// the page or in a terminal.
fn escape(text: &str) -> String {
    neutralise(text, |c| c == '\n').replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_stand_under_their_family_and_labels_are_escaped() {
        let mut page = Page::default();
        let mut family = page.family("a_total", Kind::Counter, "What is\ncounted.");
        family.count(&[("topic", "a\"b\\c\nd"), ("code", "x")], 3);
        family.sample(&[], 0.25);
        family.count(&[("topic", "x\u{202e}y\u{1b}")], 1);
        let expected = "# HELP a_total What is\\ncounted.\n# TYPE a_total counter\na_total{topic=\"a\\\"b\\\\c\\nd\",code=\"x\"} 3\na_total 0.25\na_total{topic=\"x\\\\u{202e}y\\\\u{1b}\"} 1\n";
        assert_eq!(page.finish(), expected);
    }
}
