//! How values are written: one [`Kind`] for each way.

use std::fmt::Display;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::Table;
use crate::faults::suggestion;
use crate::key::Shape;
use crate::reader::Place;
use crate::units::{parse_duration, parse_size};
use crate::value::Value;

/// A way to write values of one type.
pub trait Kind {
    /// What is read.
    type Value;
    /// For documents.
    fn shape(&self) -> Shape;
    /// The value, or `None` after a fault was written down.
    fn read(&self, place: &Place<'_>) -> Option<Self::Value>;
}

/// `true` or `false`.
#[derive(Debug)]
pub struct Bool;

impl Kind for Bool {
    type Value = bool;

    fn shape(&self) -> Shape {
        Shape::Bool
    }

    fn read(&self, place: &Place<'_>) -> Option<bool> {
        match place.node.value {
            Value::Bool(answer) => Some(answer),
            _ => place.wrong_type("true or false"),
        }
    }
}

/// A whole number in a range.
#[derive(Debug)]
pub struct Integer<T>(pub RangeInclusive<T>);

impl<T: Copy + Display + TryInto<u64> + TryFrom<i128> + PartialOrd> Kind for Integer<T> {
    type Value = T;

    fn shape(&self) -> Shape {
        let bound = |bound: &T| (*bound).try_into().unwrap_or(u64::MAX);
        Shape::Integer(bound(self.0.start()), bound(self.0.end()))
    }

    fn read(&self, place: &Place<'_>) -> Option<T> {
        let Value::Integer(number) = place.node.value else { return place.wrong_type("a whole number") };
        match T::try_from(number).ok().filter(|number| self.0.contains(number)) {
            Some(number) => Some(number),
            None => {
                let (low, high) = (self.0.start(), self.0.end());
                place.fault(format!("{} = {number} is out of range; {low} to {high} are allowed", place.name))
            }
        }
    }
}

/// Text that `parse` understands. A fault begins with the key and repeats the text, unless it may
/// be a secret.
pub struct Text<T> {
    /// What it is, for documents.
    pub what: &'static str,
    /// Reads it, or says what is wrong and how to write it.
    pub parse: fn(&str) -> Result<T, String>,
}

impl<T> Kind for Text<T> {
    type Value = T;

    fn shape(&self) -> Shape {
        Shape::Text(self.what)
    }

    fn read(&self, place: &Place<'_>) -> Option<T> {
        place.parsed(self.parse)
    }
}

/// Parses as core does, for [`Text`].
pub fn from_core<T: FromStr<Err = postbox_core::Error>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: postbox_core::Error| error.message().to_owned())
}

/// Any text.
#[derive(Debug)]
pub struct Plain;

impl Kind for Plain {
    type Value = String;

    fn shape(&self) -> Shape {
        Shape::Text("text")
    }

    fn read(&self, place: &Place<'_>) -> Option<String> {
        place.text().map(str::to_owned)
    }
}

/// The path of a file.
#[derive(Debug)]
pub struct Path;

impl Kind for Path {
    type Value = PathBuf;

    fn shape(&self) -> Shape {
        Shape::Text("path")
    }

    fn read(&self, place: &Place<'_>) -> Option<PathBuf> {
        match place.text()? {
            "" => place.fault(format!("{} is empty; write the path of a file", place.name)),
            text => Some(text.into()),
        }
    }
}

/// A duration of at least so much.
#[derive(Debug)]
pub struct Span(pub Duration);

impl Kind for Span {
    type Value = Duration;

    fn shape(&self) -> Shape {
        Shape::Text("duration")
    }

    fn read(&self, place: &Place<'_>) -> Option<Duration> {
        place.parsed(|text| match parse_duration(text)? {
            short if short < self.0 => Err(format!("{text:?} is too short; at least {:?}", self.0)),
            duration => Ok(duration),
        })
    }
}

/// A number of bytes in a range.
#[derive(Debug)]
pub struct Size(pub RangeInclusive<usize>);

impl Kind for Size {
    type Value = usize;

    fn shape(&self) -> Shape {
        Shape::Text("size")
    }

    fn read(&self, place: &Place<'_>) -> Option<usize> {
        place.parsed(|text| {
            let size = usize::try_from(parse_size(text)?).map_err(|_| format!("{text:?} is too large"))?;
            let (low, high) = (self.0.start(), self.0.end());
            let range = || format!("{text:?} is out of range; {low} to {high} bytes are allowed");
            self.0.contains(&size).then_some(size).ok_or_else(range)
        })
    }
}

/// One of a few words.
pub struct Words<T: 'static>(pub &'static [(&'static str, T)]);

impl<T: Copy> Kind for Words<T> {
    type Value = T;

    fn shape(&self) -> Shape {
        Shape::Words(self.0.iter().map(|(word, _)| *word).collect())
    }

    fn read(&self, place: &Place<'_>) -> Option<T> {
        place.parsed(|text| match self.0.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(*value),
            None => {
                let words: Vec<_> = self.0.iter().map(|(word, _)| *word).collect();
                Err(format!("{text:?} is none of {}; {}", words.join(", "), suggestion(text, &words)))
            }
        })
    }
}

/// A list of what another kind reads.
#[derive(Debug)]
pub struct List<K>(pub K);

impl<K: Kind> Kind for List<K> {
    type Value = Vec<K::Value>;

    fn shape(&self) -> Shape {
        Shape::List(Box::new(self.0.shape()))
    }

    fn read(&self, place: &Place<'_>) -> Option<Self::Value> {
        let Value::List(items) = &place.node.value else { return place.wrong_type("a list, e.g. [\"…\"]") };
        Some(items.iter().filter_map(|item| self.0.read(&place.item(item))).collect())
    }
}

/// A table whose keys the user chooses.
#[derive(Debug)]
pub struct Map<K>(pub K);

impl<K: Kind> Kind for Map<K> {
    type Value = Vec<(String, K::Value)>;

    fn shape(&self) -> Shape {
        Shape::Map(Box::new(self.0.shape()))
    }

    fn read(&self, place: &Place<'_>) -> Option<Self::Value> {
        let section = place.section()?;
        let values = section.entries().iter().filter_map(|entry| {
            let place = Place::new(section.reader, section.chosen_name(&entry.key), &entry.node);
            Some((entry.key.clone(), self.0.read(&place)?))
        });
        Some(values.collect())
    }
}

/// A table within a table.
#[derive(Debug)]
pub struct Nested<T>(PhantomData<fn() -> T>);

impl<T> Nested<T> {
    /// A table of this type.
    #[allow(clippy::new_without_default, reason = "it is written in declarations only")]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T: Table> Kind for Nested<T> {
    type Value = T;

    fn shape(&self) -> Shape {
        Shape::Table(T::keys())
    }

    fn read(&self, place: &Place<'_>) -> Option<T> {
        let section = place.section()?;
        let table = T::read(&section);
        section.finish();
        Some(table)
    }
}
