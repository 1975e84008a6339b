//! What is known of a key before anything is read.

use crate::kind::Kind;
use crate::reader::{Place, Reader};
use crate::value::{Literal, Node};

/// A declared key.
#[derive(Debug, Clone)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// What it does, in Markdown; the first paragraph is the summary.
    pub doc: String,
    /// What may be written there.
    pub shape: Shape,
    /// What holds without it.
    pub start: Start,
}

impl Key {
    /// The first paragraph of the doc.
    pub fn summary(&self) -> &str {
        self.doc.split("\n\n").next().unwrap_or_default()
    }
}

/// What may be written.
#[derive(Debug, Clone)]
pub enum Shape {
    /// Text, and what it is: "duration", "URL" …
    Text(&'static str),
    /// One of these words.
    Words(Vec<&'static str>),
    /// A whole number, from … to.
    Integer(u64, u64),
    /// True or false.
    Bool,
    /// A list.
    List(Box<Shape>),
    /// A table whose keys the user chooses.
    Map(Box<Shape>),
    /// A table with these keys.
    Table(Vec<Key>),
    /// Any of these.
    Either(Vec<Shape>),
    /// A table whose `type` decides which keys it has, beside those that all have.
    Tagged(Vec<Variant>, Vec<Key>),
}

/// One `type` of a tagged table.
#[derive(Debug, Clone)]
pub struct Variant {
    /// The word after `type =`.
    pub name: &'static str,
    /// What it is.
    pub doc: String,
    /// Its keys.
    pub keys: Vec<Key>,
    /// An example, as an inline table.
    pub example: &'static str,
}

/// What holds while a key is not written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// Nothing: it must be written, for example so.
    Required(&'static str),
    /// This.
    Value(Literal),
    /// What a word says, with an example of what else may be written.
    Unset(&'static str, &'static str),
}

/// What a key of type `T` is without being written.
pub trait Initial<T> {
    /// For documents.
    fn start(&self) -> Start;
    /// The value; `kind` reads what is written in the declaration.
    fn value<K: Kind>(&self, kind: &K) -> T
    where
        T: From<K::Value>;
}

/// See [`default`].
#[derive(Debug)]
pub struct Default_(Literal);

/// The value that holds while the key is not written.
pub fn default(literal: impl Into<Literal>) -> Default_ {
    Default_(literal.into())
}

impl<T> Initial<T> for Default_ {
    fn start(&self) -> Start {
        Start::Value(self.0)
    }

    fn value<K: Kind>(&self, kind: &K) -> T
    where
        T: From<K::Value>,
    {
        let reader = Reader::default();
        let value = kind.read(&Place::new(&reader, "default".into(), &Node::from(self.0)));
        value.expect("a declared default is right: every table is read without keys by a test").into()
    }
}

/// See [`unset`].
#[derive(Debug)]
pub struct Unset(&'static str, &'static str);

/// A key that may be absent: `meaning` says what holds then, `example` is a value as in the file.
pub fn unset(meaning: &'static str, example: &'static str) -> Unset {
    Unset(meaning, example)
}

impl<T: Default> Initial<T> for Unset {
    fn start(&self) -> Start {
        Start::Unset(self.0, self.1)
    }

    fn value<K: Kind>(&self, _: &K) -> T
    where
        T: From<K::Value>,
    {
        T::default()
    }
}

/// See [`required`].
#[derive(Debug)]
pub struct Required(&'static str);

/// A key that must be written; `example` is a value as in the file.
pub fn required(example: &'static str) -> Required {
    Required(example)
}

impl<T: Default> Initial<T> for Required {
    fn start(&self) -> Start {
        Start::Required(self.0)
    }

    fn value<K: Kind>(&self, _: &K) -> T
    where
        T: From<K::Value>,
    {
        T::default()
    }
}

/// The lines of a doc comment as one text: paragraphs, each on one line.
pub fn doc(lines: &[&str]) -> String {
    let mut text = String::new();
    for line in lines.iter().map(|line| line.trim()) {
        match line {
            "" => text.push_str("\n\n"),
            line if text.is_empty() || text.ends_with('\n') => text.push_str(line),
            line => {
                text.push(' ');
                text.push_str(line);
            }
        }
    }
    text
}
