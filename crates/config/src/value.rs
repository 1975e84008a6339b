//! Values with the lines they stand on.

use std::fmt;

/// A value and its line.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The line in the file, from 1.
    pub line: usize,
    /// The value.
    pub value: Value,
}

/// What can be written.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Text.
    Text(String),
    /// A whole number.
    Integer(i128),
    /// True or false.
    Bool(bool),
    /// A list.
    List(Vec<Node>),
    /// A table.
    Table(Vec<Entry>),
    /// Something that no key takes, by the name of its type.
    Other(&'static str),
}

impl Value {
    /// The name of its type.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Text(_) => "string",
            Self::Integer(_) => "integer",
            Self::Bool(_) => "boolean",
            Self::List(_) => "array",
            Self::Table(_) => "table",
            Self::Other(name) => name,
        }
    }
}

/// A key and its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The line of the key.
    pub line: usize,
    /// The value.
    pub node: Node,
}

/// A default as it would be written in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Literal {
    /// Text, without its quotes.
    Text(&'static str),
    /// A whole number.
    Integer(i32),
    /// True or false.
    Bool(bool),
}

impl From<&'static str> for Literal {
    fn from(text: &'static str) -> Self {
        Self::Text(text)
    }
}

impl From<i32> for Literal {
    fn from(number: i32) -> Self {
        Self::Integer(number)
    }
}

impl From<bool> for Literal {
    fn from(answer: bool) -> Self {
        Self::Bool(answer)
    }
}

impl From<Literal> for Node {
    fn from(literal: Literal) -> Self {
        let value = match literal {
            Literal::Text(text) => Value::Text(text.to_owned()),
            Literal::Integer(number) => Value::Integer(number.into()),
            Literal::Bool(answer) => Value::Bool(answer),
        };
        Self { line: 0, value }
    }
}

/// As TOML, and as JSON.
impl fmt::Display for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Bool(answer) => write!(f, "{answer}"),
        }
    }
}
