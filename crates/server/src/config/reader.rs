//! Walks a TOML tree and keeps going: every fault is written down at its line, nothing stops at the first.

use std::cell::RefCell;
use std::ops::Range;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Reading;
use super::faults::{Fault, may_be_secret, unknown};
use super::values::{parse_duration, parse_size};
use crate::secret::Secret;

/// A value with the line it stands on.
pub(super) struct At<T> {
    pub(super) line: usize,
    pub(super) value: T,
}

/// One of a list.
pub(super) enum Entry<'r, 'i> {
    Text(At<String>),
    Table(Section<'r, 'i>),
}

/// Where `env:NAME` is looked up.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The text being read and the faults found so far.
pub(super) struct Reader<'a> {
    text: &'a str,
    env: Lookup<'a>,
    /// Whether a missing variable is a fault. Commands that only look at a store do not need the sinks' secrets.
    secrets_needed: bool,
    /// Whether the files that are named are looked at.
    pub(super) files: bool,
    faults: RefCell<Vec<Fault>>,
    warnings: RefCell<Vec<Fault>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(text: &'a str, reading: &Reading<'a>) -> Self {
        let Reading { env, secrets_needed, files, .. } = *reading;
        Self { text, env, secrets_needed, files, faults: RefCell::default(), warnings: RefCell::default() }
    }

    pub(super) fn line(&self, span: &Range<usize>) -> usize {
        let before = &self.text.as_bytes()[..span.start.min(self.text.len())];
        1 + before.iter().filter(|byte| **byte == b'\n').count()
    }

    pub(super) fn fault(&self, line: usize, text: impl Into<String>) {
        self.faults.borrow_mut().push(Fault { line, text: text.into() });
    }

    /// A fault that repeats what is written there, unless that may be a secret.
    pub(super) fn refuse(&self, line: usize, written: &str, text: String) {
        let text = match may_be_secret(written) {
            true => text.replace(&format!("{written:?}"), "what is written there").replace(written, "…"),
            false => text,
        };
        self.fault(line, text);
    }

    pub(super) fn count(&self) -> usize {
        self.faults.borrow().len()
    }

    /// The faults, and the warnings.
    pub(super) fn into_findings(self) -> (Vec<Fault>, Vec<Fault>) {
        (self.faults.into_inner(), self.warnings.into_inner())
    }

    /// Resolves `env:NAME`; other text is the secret itself.
    pub(super) fn secret(&self, path: &str, at: &At<String>, always_needed: bool) -> Option<Secret> {
        let Some(name) = at.value.strip_prefix("env:") else {
            return Some(Secret::new(at.value.clone()));
        };
        match (self.env)(name) {
            Some(value) if !value.is_empty() => Some(Secret::new(value)),
            _ if !self.secrets_needed && !always_needed => Some(Secret::default()),
            _ => {
                let text = match is_variable(name) {
                    true => format!("{path} needs the environment variable {name}, which is not set; export {name}=…"),
                    false => format!(
                        "{path} needs the environment variable that it names after env:, which is not set (and not repeated here: is it the secret \
                         itself?); write \"env:NAME\", with the secret in NAME"
                    ),
                };
                self.fault(at.line, text);
                None
            }
        }
    }
}

/// Whether this looks like the name of a variable, so that it can be repeated.
fn is_variable(name: &str) -> bool {
    let usual = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    !name.is_empty() && name.len() <= 64 && name.chars().all(usual) && (name.contains('_') || name.len() <= 12)
}

/// One table and what has been asked of it.
pub(super) struct Section<'r, 'i> {
    pub(super) reader: &'r Reader<'r>,
    pub(super) path: String,
    pub(super) line: usize,
    table: &'r DeTable<'i>,
    known: RefCell<Vec<&'static str>>,
}

impl<'r, 'i> Section<'r, 'i> {
    pub(super) fn new(reader: &'r Reader<'r>, path: String, line: usize, table: &'r DeTable<'i>) -> Self {
        Self { reader, path, line, table, known: RefCell::default() }
    }

    /// The full name of one of its keys.
    pub(super) fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Writes a fault down at the key's line, or at the section's when the key is not there.
    pub(super) fn fault(&self, key: &str, text: impl Into<String>) {
        self.reader.fault(self.line_of(key).unwrap_or(self.line), text);
    }

    /// Writes down what is allowed and still a risk.
    pub(super) fn warning(&self, key: &str, text: impl Into<String>) {
        let fault = Fault { line: self.line_of(key).unwrap_or(self.line), text: text.into() };
        self.reader.warnings.borrow_mut().push(fault);
    }

    /// The line of a key, if it is there.
    pub(super) fn line_of(&self, key: &str) -> Option<usize> {
        self.find(key).map(|value| self.reader.line(&value.span()))
    }

    fn find(&self, key: &str) -> Option<&'r Spanned<DeValue<'i>>> {
        self.table.iter().find(|(name, _)| name.get_ref() == key).map(|(_, value)| value)
    }

    fn value(&self, key: &'static str) -> Option<&'r Spanned<DeValue<'i>>> {
        self.known.borrow_mut().push(key);
        self.find(key)
    }

    fn wrong_type(&self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) {
        let line = self.reader.line(&value.span());
        let found = value.get_ref().type_str();
        self.reader.fault(line, format!("{} must be {wanted}, not {found}", self.name(key)));
    }

    pub(super) fn has(&self, key: &'static str) -> bool {
        self.value(key).is_some()
    }

    pub(super) fn string(&self, key: &'static str) -> Option<At<String>> {
        let value = self.value(key)?;
        let line = self.reader.line(&value.span());
        match value.get_ref().as_str() {
            Some(text) => Some(At { line, value: text.to_owned() }),
            None => {
                self.wrong_type(key, value, "text in quotes");
                None
            }
        }
    }

    /// A string that `parse` understands; otherwise a fault with its message.
    pub(super) fn parsed<T>(&self, key: &'static str, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let at = self.string(key)?;
        match parse(&at.value) {
            Ok(value) => Some(value),
            Err(text) => {
                self.reader.refuse(at.line, &at.value, format!("{}: {text}", self.name(key)));
                None
            }
        }
    }

    pub(super) fn duration(&self, key: &'static str, least: Duration) -> Option<Duration> {
        self.parsed(key, |text| {
            let duration = parse_duration(text)?;
            if duration < least {
                return Err(format!("{text:?} is too short; at least {least:?}"));
            }
            Ok(duration)
        })
    }

    pub(super) fn size(&self, key: &'static str, allowed: std::ops::RangeInclusive<usize>) -> Option<usize> {
        self.parsed(key, |text| {
            let size = usize::try_from(parse_size(text)?).map_err(|_| format!("{text:?} is too large"))?;
            if !allowed.contains(&size) {
                return Err(format!(
                    "{text:?} is out of range; {} to {} bytes are allowed",
                    allowed.start(),
                    allowed.end()
                ));
            }
            Ok(size)
        })
    }

    pub(super) fn integer(&self, key: &'static str, allowed: std::ops::RangeInclusive<u64>) -> Option<u64> {
        let value = self.value(key)?;
        let Some(integer) = value.get_ref().as_integer() else {
            self.wrong_type(key, value, "a whole number");
            return None;
        };
        match u64::from_str_radix(integer.as_str(), integer.radix()) {
            Ok(number) if allowed.contains(&number) => Some(number),
            _ => {
                let (low, high) = (allowed.start(), allowed.end());
                let line = self.reader.line(&value.span());
                let text = format!("{} = {integer} is out of range; {low} to {high} are allowed", self.name(key));
                self.reader.fault(line, text);
                None
            }
        }
    }

    pub(super) fn boolean(&self, key: &'static str) -> Option<bool> {
        let value = self.value(key)?;
        let answer = value.get_ref().as_bool();
        if answer.is_none() {
            self.wrong_type(key, value, "true or false");
        }
        answer
    }

    pub(super) fn strings(&self, key: &'static str) -> Option<Vec<At<String>>> {
        let value = self.value(key)?;
        let Some(array) = value.get_ref().as_array() else {
            self.wrong_type(key, value, "a list of texts, e.g. [\"…\"]");
            return None;
        };
        let mut strings = Vec::with_capacity(array.len());
        for item in array.iter() {
            match item.get_ref().as_str() {
                Some(text) => strings.push(At { line: self.reader.line(&item.span()), value: text.to_owned() }),
                None => self.wrong_type(key, item, "a list of texts"),
            }
        }
        Some(strings)
    }

    /// A list of texts and tables.
    pub(super) fn entries(&self, key: &'static str) -> Option<Vec<Entry<'r, 'i>>> {
        let value = self.value(key)?;
        let Some(array) = value.get_ref().as_array() else {
            self.wrong_type(key, value, "a list, e.g. [\"…\"]");
            return None;
        };
        let entries = array.iter().filter_map(|item| match item.get_ref().as_str() {
            Some(text) => Some(Entry::Text(At { line: self.reader.line(&item.span()), value: text.to_owned() })),
            None if item.get_ref().as_table().is_some() => self.subsection(key, item).map(Entry::Table),
            None => {
                self.wrong_type(key, item, "a list of texts, or of tables");
                None
            }
        });
        Some(entries.collect())
    }

    pub(super) fn section(&self, key: &'static str) -> Option<Section<'r, 'i>> {
        let value = self.value(key)?;
        self.subsection(key, value)
    }

    fn subsection(&self, key: &str, value: &'r Spanned<DeValue<'i>>) -> Option<Section<'r, 'i>> {
        match value.get_ref().as_table() {
            Some(table) => Some(Section::new(self.reader, self.name(key), self.reader.line(&value.span()), table)),
            None => {
                self.wrong_type(key, value, "a table");
                None
            }
        }
    }

    /// Every entry as a section, for tables whose keys the user chose.
    pub(super) fn sections(&self) -> Vec<(At<String>, Section<'r, 'i>)> {
        let entries = self.table.iter().filter_map(|(name, value)| {
            let at = At { line: self.reader.line(&name.span()), value: name.get_ref().to_string() };
            let mut section = self.subsection(name.get_ref(), value)?;
            section.line = at.line;
            Some((at, section))
        });
        entries.collect()
    }

    /// Every entry as text, for tables whose keys the user chose.
    pub(super) fn texts(&self) -> Vec<(String, At<String>)> {
        let entries = self.table.iter().filter_map(|(name, value)| match value.get_ref().as_str() {
            Some(text) => {
                let at = At { line: self.reader.line(&value.span()), value: text.to_owned() };
                Some((name.get_ref().to_string(), at))
            }
            None => {
                self.wrong_type(name.get_ref(), value, "text in quotes");
                None
            }
        });
        entries.collect()
    }

    /// Refuses every key that nobody asked for.
    pub(super) fn finish(self) {
        let known = self.known.borrow();
        for name in self.table.keys() {
            if !known.contains(&name.get_ref().as_ref()) {
                let line = self.reader.line(&name.span());
                let place =
                    if self.path.is_empty() { " at the top".to_owned() } else { format!(" in [{}]", self.path) };
                self.reader.fault(line, unknown("key", name.get_ref(), &place, &known));
            }
        }
    }
}
