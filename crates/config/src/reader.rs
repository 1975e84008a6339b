//! Reads a file to its end: every fault is reported with its line, none stops the reader.

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::Kind;
use crate::faults::{Fault, Faults, may_be_secret, unknown};
use crate::table::Table;

/// Where the service listens if the file does not say.
pub const LISTEN_DEFAULT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8600);

/// How a configuration is read.
#[derive(Clone, Copy)]
pub struct ReadOptions<'a> {
    /// The file name that faults begin with.
    pub file: &'a str,
    /// Looks up `env:NAME`.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// Whether the program delivers or receives. Commands that only look at the store need no
    /// secret of a sink or source. To them a fault of a [`Kind::for_delivery`] or within
    /// [`Reader::for_delivery`] is a warning, and nothing else is.
    pub delivers: bool,
    /// Whether the files that sinks name are read as well, to find faults in them.
    pub files: bool,
    /// The full name of a key whose value the command line replaces, so that its variable may be
    /// missing; the key then has its default.
    pub replaced: Option<&'a str>,
}

impl ReadOptions<'_> {
    /// No environment, no file name, and no need for secrets.
    pub fn none() -> Self {
        ReadOptions { file: "", env: &|_| None, delivers: false, files: false, replaced: None }
    }
}

/// Reads a whole file; returns its tables and the warnings.
pub fn read<T: Table>(text: &str, options: ReadOptions<'_>) -> Result<(T, Vec<Fault>), Faults> {
    let reader = Reader::new(text, options);
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let line = error.span().map_or(0, |span| reader.line(span.start));
        let message: Vec<_> = error.message().split_whitespace().collect();
        reader.fault(line, format!("this is not TOML: {}", message.join(" ")));
    }
    // With syntax errors the tree has holes, and faults found in it would vanish once the syntax is
    // right.
    let section = errors.is_empty().then(|| Section::new(&reader, String::new(), 1, root.get_ref()));
    let table = section.and_then(|section| section.finish(|section| Some(T::read(section))));
    let faults = reader.faults.into_inner();
    match table {
        Some(table) if faults.is_empty() => Ok((table, reader.warnings.into_inner())),
        _ => Err(Faults::new(options.file, faults)),
    }
}

/// The faults and warnings found so far, and what keys are checked against.
pub struct Reader<'a> {
    /// The options.
    pub options: ReadOptions<'a>,
    /// The service's own address, which no sink may call; the default until another one was read.
    pub listening: Cell<SocketAddr>,
    lines: Lines,
    faults: RefCell<Vec<Fault>>,
    warnings: RefCell<Vec<Fault>>,
}

impl<'a> Reader<'a> {
    /// Creates a reader of this text, without faults.
    pub fn new(text: &str, options: ReadOptions<'a>) -> Self {
        let (faults, warnings) = Default::default();
        Self { options, listening: Cell::new(LISTEN_DEFAULT), lines: Lines::of(text), faults, warnings }
    }

    /// Reports a fault.
    pub fn fault(&self, line: usize, text: impl Into<String>) {
        self.faults.borrow_mut().push(Fault { line, text: text.into() });
    }

    /// The number of faults so far.
    fn count(&self) -> usize {
        self.faults.borrow().len()
    }

    /// Reads or checks what only delivery needs: if the program does not deliver, its faults become
    /// warnings.
    pub fn for_delivery<T>(&self, read: impl FnOnce() -> T) -> T {
        let before = self.count();
        let value = read();
        if !self.options.delivers {
            self.warnings.borrow_mut().extend(self.faults.borrow_mut().drain(before..));
        }
        value
    }

    /// Reports a fault that repeats the written value, unless that may be a secret.
    pub fn refuse(&self, line: usize, written: &str, text: String) {
        let text = match may_be_secret(written) {
            true => text.replace(&format!("{written:?}"), "what is written there").replace(written, "…"),
            false => text,
        };
        self.fault(line, text);
    }

    /// The line of a position in the text, from 1.
    fn line(&self, start: usize) -> usize {
        self.lines.at(start)
    }
}

/// The positions of line ends, found once: looking up the line of each element of a long list must
/// not scan the text each time.
struct Lines {
    ends: Vec<usize>,
}

impl Lines {
    fn of(text: &str) -> Self {
        Self { ends: text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect() }
    }

    /// The line of a position, from 1. A line end belongs to the line it ends.
    fn at(&self, place: usize) -> usize {
        1 + self.ends.partition_point(|end| *end < place)
    }
}

/// A value, and its name in faults.
pub struct Place<'r> {
    /// Receives the faults.
    pub reader: &'r Reader<'r>,
    /// The full name of its key.
    pub name: String,
    /// Its line.
    pub line: usize,
    pub(crate) value: &'r DeValue<'r>,
    is_item: bool,
}

impl<'r> Place<'r> {
    /// An element of the list at this place.
    pub(crate) fn item(&self, item: &'r Spanned<DeValue<'r>>) -> Self {
        let line = self.reader.line(item.span().start);
        Self { reader: self.reader, name: self.name.clone(), line, value: item.get_ref(), is_item: true }
    }

    /// Reports a fault; always `None`.
    pub fn fault<T>(&self, text: impl Into<String>) -> Option<T> {
        self.reader.fault(self.line, text);
        None
    }

    /// Reports which type is expected here; always `None`.
    pub(crate) fn wrong_type<T>(&self, wanted: &str) -> Option<T> {
        let wanted = if self.is_item { format!("a list, each item {wanted}") } else { wanted.to_owned() };
        self.fault(format!("{} must be {wanted}, not {}", self.name, self.value.type_str()))
    }

    /// The text at this place.
    pub(crate) fn text(&self) -> Option<&'r str> {
        self.value.as_str().or_else(|| self.wrong_type("text in quotes"))
    }

    /// Text that `parse` understands; otherwise reports its message as a fault.
    pub(crate) fn parsed<T>(&self, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let written = self.text()?;
        let refuse = |text| self.reader.refuse(self.line, written, format!("{}: {text}", self.name));
        parse(written).map_err(refuse).ok()
    }

    /// The table at this place.
    pub(crate) fn section(&self) -> Option<Section<'r>> {
        match self.value {
            DeValue::Table(table) => Some(Section::new(self.reader, self.name.clone(), self.line, table)),
            _ => self.wrong_type("a table"),
        }
    }
}

/// One table, and which of its keys were read.
pub struct Section<'r> {
    /// Receives the faults.
    pub reader: &'r Reader<'r>,
    /// Its full name; empty for the whole file.
    pub path: String,
    line: usize,
    table: &'r DeTable<'r>,
    known: RefCell<Vec<&'static str>>,
    faulty: RefCell<Vec<&'static str>>,
}

impl<'r> Section<'r> {
    /// Creates a table that begins at this line.
    pub fn new(reader: &'r Reader<'r>, path: String, line: usize, table: &'r DeTable<'r>) -> Self {
        Self { reader, path, line, table, known: RefCell::default(), faulty: RefCell::default() }
    }

    /// Reads an empty table.
    pub fn empty<T>(read: impl FnOnce(&Section<'_>) -> T) -> T {
        let (reader, table) = (Reader::new("", ReadOptions::none()), DeTable::new());
        read(&Section::new(&reader, String::new(), 0, &table))
    }

    /// Reads the table, then rejects every key that was not read.
    pub(crate) fn finish<T>(self, read: impl FnOnce(&Self) -> Option<T>) -> Option<T> {
        let result = read(&self)?;
        let known = self.known.borrow();
        for (key, _) in self.table.iter().filter(|(key, _)| !known.contains(&key.get_ref().as_ref())) {
            let text = match self.path.as_str() {
                "" => unknown("section", key.get_ref(), "", &known),
                path => unknown("key", key.get_ref(), &format!(" in [{path}]"), &known),
            };
            self.reader.fault(self.reader.line(key.span().start), text);
        }
        Some(result)
    }

    /// The full name of one of its keys.
    pub fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// A key's value, or the default of its type.
    pub fn get<K: 'static, T: From<K> + Default>(&self, key: &'static str, kind: &Kind<K>) -> T {
        self.value(key, kind).map(T::from).unwrap_or_default()
    }

    /// A key's value, or `default`, written as in the file.
    pub fn get_or<K: 'static, T: From<K>>(&self, key: &'static str, kind: &Kind<K>, default: &str) -> T {
        let value = self.value(key, kind).or_else(|| {
            let reader = Reader::new(default, ReadOptions::none());
            let value = DeValue::parse(default).ok()?;
            kind.read(&Place { reader: &reader, name: String::new(), line: 0, value: value.get_ref(), is_item: false })
        });
        value.expect("a declared default is right: every table is read without keys by a test").into()
    }

    /// As [`Self::get`], but the key is required.
    pub fn require<K: 'static, T: From<K> + Default>(&self, key: &'static str, kind: &Kind<K>, example: &str) -> T {
        if !self.has(key) {
            self.faulty.borrow_mut().push(key);
            self.fault(key, format!("{} has no {key}; write {key} = {example}", self.path));
        }
        self.get(key, kind)
    }

    fn value<K: 'static>(&self, key: &'static str, kind: &Kind<K>) -> Option<K> {
        let before = self.reader.count();
        let value = self.place(key).and_then(|place| kind.read(&place));
        if self.reader.count() > before {
            self.faulty.borrow_mut().push(key);
        }
        value
    }

    /// The place of a key, if it is there. Marks the key as known.
    pub(crate) fn place(&self, key: &'static str) -> Option<Place<'r>> {
        if !self.known.borrow().contains(&key) {
            self.known.borrow_mut().push(key);
        }
        let (name, value) = self.table.get_key_value(key)?;
        Some(self.place_of(self.name(key), name.span().start, value.get_ref()))
    }

    /// Every key with its place. A name that may be a secret is not repeated, and one with a line
    /// break is escaped: a fault is one line.
    pub(crate) fn places(&self) -> Vec<(&'r str, Place<'r>)> {
        let places = self.table.iter().map(|(key, value)| {
            let shown = match may_be_secret(key.get_ref()) {
                true => "…".to_owned(),
                false => key.get_ref().escape_debug().to_string(),
            };
            (key.get_ref().as_ref(), self.place_of(self.name(&shown), key.span().start, value.get_ref()))
        });
        places.collect()
    }

    fn place_of(&self, name: String, start: usize, value: &'r DeValue<'r>) -> Place<'r> {
        Place { reader: self.reader, name, line: self.reader.line(start), value, is_item: false }
    }

    /// The line of a key or of one in a nested table, if it is there.
    pub fn line_at(&self, path: &[&str]) -> Option<usize> {
        let (last, tables) = path.split_last()?;
        let mut table = self.table;
        for name in tables {
            table = table.get(*name)?.get_ref().as_table()?;
        }
        table.get_key_value(*last).map(|(key, _)| self.reader.line(key.span().start))
    }

    /// Whether a key is written.
    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Whether none of these keys had a fault.
    pub fn is_right(&self, keys: &[&str]) -> bool {
        !self.faulty.borrow().iter().any(|faulty| keys.contains(faulty))
    }

    /// The line of a key; the section's if the key is missing.
    pub fn line_of(&self, key: &str) -> usize {
        self.line_at(&[key]).unwrap_or(self.line)
    }

    /// Reports a fault of a key.
    pub fn fault(&self, key: &str, text: impl Into<String>) {
        self.reader.fault(self.line_of(key), text);
    }

    /// Reports a warning: something allowed but risky.
    pub fn warning(&self, key: &str, text: impl Into<String>) {
        if self.reader.options.delivers {
            self.reader.warnings.borrow_mut().push(Fault { line: self.line_of(key), text: text.into() });
        }
    }

    /// Rejects these keys as unknown, because another key's value rules them out.
    pub fn forbid(&self, keys: &[&str]) {
        self.known.borrow_mut().retain(|known| !keys.contains(known));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_has_its_line() {
        for text in ["", "\n", "a", "a\nb", "\n\na\n", "ä\r\nb\n\nc"] {
            let lines = Lines::of(text);
            for place in 0..text.len() + 2 {
                let before = &text.as_bytes()[..place.min(text.len())];
                assert_eq!(
                    lines.at(place),
                    1 + before.iter().filter(|byte| **byte == b'\n').count(),
                    "{text:?} {place}"
                );
            }
        }
    }
}
