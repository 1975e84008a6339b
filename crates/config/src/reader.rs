//! Reads a tree and keeps going: every fault is written down at its line, nothing stops at the
//! first.

use std::cell::RefCell;
use std::net::SocketAddr;

use crate::faults::{Fault, may_be_secret, unknown};
use crate::key::{Initial, Start};
use crate::kind::Kind;
use crate::value::{Entry, Node, Value};

/// How a configuration is read.
#[derive(Clone, Copy)]
pub struct ReadOptions<'a> {
    /// The name faults begin with.
    pub file: &'a str,
    /// Where `env:NAME` is looked up.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// Whether a missing variable for a sink or source is a fault. Commands that only look at the
    /// store do without.
    pub secrets_needed: bool,
    /// Whether the files that sinks name are read too, to find what does not fit. A text alone says
    /// nothing of them.
    pub files: bool,
}

/// The faults and warnings found so far, and what keys are checked against.
pub struct Reader<'a> {
    options: ReadOptions<'a>,
    /// Where the service listens.
    listening: RefCell<Option<SocketAddr>>,
    faults: RefCell<Vec<Fault>>,
    warnings: RefCell<Vec<Fault>>,
}

/// Knows no variable and needs none.
impl Default for Reader<'_> {
    fn default() -> Self {
        Self::new(ReadOptions { file: "", env: &|_| None, secrets_needed: false, files: false })
    }
}

impl<'a> Reader<'a> {
    /// A reader that has found nothing yet.
    pub fn new(options: ReadOptions<'a>) -> Self {
        Self { options, listening: RefCell::default(), faults: RefCell::default(), warnings: RefCell::default() }
    }

    /// Writes a fault down.
    pub fn fault(&self, line: usize, text: impl Into<String>) {
        self.faults.borrow_mut().push(Fault { line, text: text.into() });
    }

    /// A fault that repeats what is written there, unless that may be a secret.
    pub fn refuse(&self, line: usize, written: &str, text: String) {
        let text = match may_be_secret(written) {
            true => text.replace(&format!("{written:?}"), "what is written there").replace(written, "…"),
            false => text,
        };
        self.fault(line, text);
    }

    /// Writes down what is allowed and still a risk.
    pub fn warning(&self, line: usize, text: String) {
        self.warnings.borrow_mut().push(Fault { line, text });
    }

    /// How many faults there are.
    pub fn count(&self) -> usize {
        self.faults.borrow().len()
    }

    /// The faults, and the warnings.
    pub fn into_findings(self) -> (Vec<Fault>, Vec<Fault>) {
        (self.faults.into_inner(), self.warnings.into_inner())
    }

    /// Whether the files that are named are looked at.
    pub fn files(&self) -> bool {
        self.options.files
    }

    /// Whether a missing variable of a sink or source is a fault.
    pub fn secrets_needed(&self) -> bool {
        self.options.secrets_needed
    }

    /// A variable of the environment.
    pub fn env(&self, name: &str) -> Option<String> {
        (self.options.env)(name)
    }

    /// Says where the service listens, before the sinks are read.
    pub fn set_listening(&self, address: SocketAddr) {
        *self.listening.borrow_mut() = Some(address);
    }

    /// Where the service listens: no sink may call that.
    pub fn listening(&self) -> Option<SocketAddr> {
        *self.listening.borrow()
    }
}

/// A value, and what it is called in faults.
pub struct Place<'r> {
    /// Where faults go.
    pub reader: &'r Reader<'r>,
    /// The full name of its key.
    pub name: String,
    /// The value.
    pub node: &'r Node,
    is_item: bool,
}

impl<'r> Place<'r> {
    /// A value of the key with this full name.
    pub fn new(reader: &'r Reader<'r>, name: String, node: &'r Node) -> Self {
        Self { reader, name, node, is_item: false }
    }

    /// One of a list that stands here.
    pub(crate) fn item(&self, node: &'r Node) -> Self {
        Self { reader: self.reader, name: self.name.clone(), node, is_item: true }
    }

    /// Writes a fault down; always `None`.
    pub fn fault<T>(&self, text: impl Into<String>) -> Option<T> {
        self.reader.fault(self.node.line, text);
        None
    }

    /// Says what should be here instead; always `None`.
    pub fn wrong_type<T>(&self, wanted: &str) -> Option<T> {
        let wanted = if self.is_item { format!("a list, each of it {wanted}") } else { wanted.to_owned() };
        self.fault(format!("{} must be {wanted}, not {}", self.name, self.node.value.type_name()))
    }

    /// The text here.
    pub fn text(&self) -> Option<&'r str> {
        match &self.node.value {
            Value::Text(text) => Some(text),
            _ => self.wrong_type("text in quotes"),
        }
    }

    /// Text that `parse` understands; otherwise a fault with its message.
    pub fn parsed<T>(&self, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let written = self.text()?;
        match parse(written) {
            Ok(value) => Some(value),
            Err(text) => {
                self.reader.refuse(self.node.line, written, format!("{}: {text}", self.name));
                None
            }
        }
    }

    /// The table here.
    pub fn section(&self) -> Option<Section<'r>> {
        match &self.node.value {
            Value::Table(entries) => Some(Section::new(self.reader, self.name.clone(), self.node.line, entries)),
            _ => self.wrong_type("a table"),
        }
    }
}

/// One table and what has been asked of it.
pub struct Section<'r> {
    /// Where faults go.
    pub reader: &'r Reader<'r>,
    /// Its full name.
    pub path: String,
    /// The line it begins on.
    pub line: usize,
    entries: &'r [Entry],
    known: RefCell<Vec<&'static str>>,
    faulty: RefCell<Vec<&'static str>>,
}

impl<'r> Section<'r> {
    /// A table; `path` is its full name, empty for the whole file.
    pub fn new(reader: &'r Reader<'r>, path: String, line: usize, entries: &'r [Entry]) -> Self {
        Self { reader, path, line, entries, known: RefCell::default(), faulty: RefCell::default() }
    }

    /// Reads a table in which nothing is written.
    pub fn empty<T>(read: impl FnOnce(&Section<'_>) -> T) -> T {
        let reader = Reader::default();
        read(&Section::new(&reader, String::new(), 0, &[]))
    }

    /// All keys and values.
    pub fn entries(&self) -> &'r [Entry] {
        self.entries
    }

    /// The full name of one of its keys.
    pub fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The same of a key that the user chose. One that may be a secret is not repeated.
    pub fn chosen_name(&self, key: &str) -> String {
        self.name(if may_be_secret(key) { "…" } else { key })
    }

    /// Reads a key, or says what holds without it.
    pub fn get<K: Kind, T: From<K::Value>>(&self, key: &'static str, kind: &K, initial: &impl Initial<T>) -> T {
        let before = self.reader.count();
        let value = match (self.place(key), initial.start()) {
            (Some(place), _) => kind.read(&place),
            (None, Start::Required(example)) => {
                let path = &self.path;
                self.reader.fault(self.line, format!("{path} has no {key}; write {key} = {example}"));
                None
            }
            (None, _) => None,
        };
        if self.reader.count() > before {
            self.faulty.borrow_mut().push(key);
        }
        value.map_or_else(|| initial.value(kind), T::from)
    }

    /// Where a key's value stands, if it is there. From now on the key is known.
    pub fn place(&self, key: &'static str) -> Option<Place<'r>> {
        if !self.known.borrow().contains(&key) {
            self.known.borrow_mut().push(key);
        }
        Some(Place::new(self.reader, self.name(key), &self.find(key)?.node))
    }

    fn find(&self, key: &str) -> Option<&'r Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// Whether a key is written.
    pub fn has(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    /// Whether none of these keys was read with a fault.
    pub fn is_right(&self, keys: &[&str]) -> bool {
        !self.faulty.borrow().iter().any(|faulty| keys.contains(faulty))
    }

    /// The line of a key's value; the section's when the key is not there.
    pub fn line_of(&self, key: &str) -> usize {
        self.find(key).map_or(self.line, |entry| entry.node.line)
    }

    /// Writes a fault of a key down.
    pub fn fault(&self, key: &str, text: impl Into<String>) {
        self.reader.fault(self.line_of(key), text);
    }

    /// Writes down what is allowed and still a risk.
    pub fn warning(&self, key: &str, text: impl Into<String>) {
        self.reader.warning(self.line_of(key), text.into());
    }

    /// Refuses these keys as unknown, because of what another key says.
    pub fn forbid(&self, keys: &[&str]) {
        self.known.borrow_mut().retain(|known| !keys.contains(known));
    }

    /// Refuses every key that nobody asked for.
    pub fn finish(self) {
        let known = self.known.borrow();
        for entry in self.entries.iter().filter(|entry| !known.contains(&entry.key.as_str())) {
            self.refuse_unknown(entry, &known);
        }
    }

    fn refuse_unknown(&self, entry: &Entry, known: &[&str]) {
        let text = match self.path.as_str() {
            "" => unknown("section", &entry.key, "", known),
            path => unknown("key", &entry.key, &format!(" in [{path}]"), known),
        };
        self.reader.fault(entry.line, text);
    }
}
