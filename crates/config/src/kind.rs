//! How values are written: each [`Kind`] is one way.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use postbox_core::Envelope;
use serde_json::{Value, json};
use toml::de::DeValue;

use crate::document;
use crate::faults::suggestion;
use crate::reader::Place;
use crate::secret::is_variable;
use crate::table::{Key, Table};
use crate::units::{duration_text, parse_duration, parse_size};

/// What may be written, for documents.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Its JSON Schema.
    pub schema: Value,
    /// The keys of a table.
    pub keys: Vec<Key>,
    /// The types of a table, if it has several.
    pub variants: Vec<Variant>,
}

/// One `type` of a table.
#[derive(Debug, Clone)]
pub struct Variant {
    /// The value of `type`.
    pub name: &'static str,
    /// What the type is.
    pub doc: String,
    /// Its keys.
    pub keys: Vec<Key>,
    /// An example, as an inline table.
    pub example: &'static str,
}

type Read<T> = Box<dyn Fn(&Place<'_>) -> Option<T>>;

/// A way to write values of one type.
pub struct Kind<T> {
    /// For documents.
    pub shape: Shape,
    read: Read<T>,
}

impl<T: 'static> Kind<T> {
    /// `read` returns the value, or `None` after it has reported a fault.
    pub(crate) fn new(schema: Value, read: impl Fn(&Place<'_>) -> Option<T> + 'static) -> Self {
        Self { shape: Shape { schema, keys: Vec::new(), variants: Vec::new() }, read: Box::new(read) }
    }

    /// Returns the value, or `None` after a fault was reported.
    pub fn read(&self, place: &Place<'_>) -> Option<T> {
        (self.read)(place)
    }

    /// A value that commands which only look at the store do not need: its faults are warnings to
    /// them.
    pub fn for_delivery(self) -> Self {
        let Self { shape, read } = self;
        Self { shape, read: Box::new(move |place| place.reader.for_delivery(|| read(place))) }
    }

    /// Converts each value.
    pub fn map<U: 'static>(self, make: impl Fn(T) -> U + 'static) -> Kind<U> {
        let Self { shape, read } = self;
        Kind { shape, read: Box::new(move |place| read(place).map(&make)) }
    }

    /// Checks each value. The message must not repeat it.
    pub fn check(self, check: impl Fn(&T) -> Result<(), String> + 'static) -> Self {
        let Self { shape, read } = self;
        let checked = move |place: &Place<'_>| {
            let value = read(place)?;
            match check(&value) {
                Ok(()) => Some(value),
                Err(text) => place.fault(format!("{}: {text}", place.name)),
            }
        };
        Self { shape, read: Box::new(checked) }
    }

    /// Also accepts one word in quotes, for a value that this kind cannot express.
    pub fn or_word(self, word: &'static str, value: T) -> Self
    where
        T: Copy,
    {
        let Self { mut shape, read } = self;
        shape.schema = json!({ "anyOf": [shape.schema, { "const": word }] });
        let either = move |place: &Place<'_>| match place.value.as_str() {
            Some(text) if text == word => Some(value),
            Some(_) => place.fault(format!("{} is neither a number nor {word:?}", place.name)),
            None => read(place),
        };
        Self { shape, read: Box::new(either) }
    }
}

impl<T: 'static> Kind<Vec<T>> {
    /// Rejects an empty list or table where leaving it out means "all": an empty one looks as if it
    /// meant "none". `wanted` says what to name.
    pub fn not_empty(self, wanted: &'static str) -> Self {
        let Self { mut shape, read } = self;
        let least = if shape.schema["type"] == "array" { "minItems" } else { "minProperties" };
        shape.schema[least] = 1.into();
        let filled = move |place: &Place<'_>| {
            let is_empty = match place.value {
                DeValue::Array(items) => items.is_empty(),
                DeValue::Table(table) => table.is_empty(),
                _ => false,
            };
            let fault = || place.fault(format!("{} is empty; name {wanted}, or leave it out for all", place.name));
            if is_empty { fault() } else { read(place) }
        };
        Self { shape, read: Box::new(filled) }
    }
}

/// `true` or `false`.
pub fn boolean() -> Kind<bool> {
    Kind::new(json!({ "type": "boolean" }), |place| match place.value {
        DeValue::Boolean(answer) => Some(*answer),
        _ => place.wrong_type("true or false"),
    })
}

/// A whole number in a range.
pub fn integer<T>(range: RangeInclusive<T>) -> Kind<T>
where
    T: Copy + Display + TryFrom<i128> + PartialOrd + 'static,
    Value: From<T>,
{
    let (low, high) = (*range.start(), *range.end());
    let schema = json!({ "type": "integer", "minimum": Value::from(low), "maximum": Value::from(high) });
    Kind::new(schema, move |place| {
        let DeValue::Integer(digits) = place.value else { return place.wrong_type("a whole number") };
        // A number beyond 128 bits is out of every range.
        let number = i128::from_str_radix(digits.as_str(), digits.radix()).ok();
        let fault = || {
            let shown = number.map(|number| format!(" = {number}")).unwrap_or_default();
            format!("{}{shown} is out of range; {low} to {high} are allowed", place.name)
        };
        let fits = number.and_then(|number| T::try_from(number).ok()).filter(|number| range.contains(number));
        fits.or_else(|| place.fault(fault()))
    })
}

/// A number from 0 to 1.
pub fn fraction() -> Kind<f64> {
    Kind::new(json!({ "type": "number", "minimum": 0, "maximum": 1 }), |place| {
        let number = match place.value {
            DeValue::Float(digits) => digits.as_str().parse().ok(),
            DeValue::Integer(digits) => digits.as_str().parse().ok(),
            _ => return place.wrong_type("a number from 0 to 1"),
        };
        let fault = || format!("{} is out of range; 0 to 1 is allowed, e.g. 0.1", place.name);
        number.filter(|number| (0.0..=1.0).contains(number)).or_else(|| place.fault(fault()))
    })
}

/// Text that `parse` understands. Its message says what is wrong and how to write it. It may repeat
/// the text, which is removed again if it may be a secret. An `env:NAME` is rejected: only a
/// [`secret`](crate::secret()) is looked up, and the user expects that this is, too.
pub fn text<T: 'static>(parse: impl Fn(&str) -> Result<T, String> + 'static) -> Kind<T> {
    Kind::new(json!({ "type": "string" }), move |place| {
        place.parsed(|text| match text.strip_prefix("env:") {
            Some(name) if is_variable(name) => Err(format!("{text:?} is not looked up here; write the value itself")),
            _ => parse(text),
        })
    })
}

/// A parser of core's types, for [`text`] and [`entries`]: names, topics, rates.
pub fn from_core<T: FromStr<Err = postbox_core::Error>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: postbox_core::Error| error.message().to_owned())
}

/// The path of a file.
pub fn path() -> Kind<PathBuf> {
    text(|text| match text {
        "" => Err("is empty; write the path of a file".to_owned()),
        text => Ok(text.into()),
    })
}

/// A duration of at least `least`.
pub fn duration(least: Duration) -> Kind<Duration> {
    let mut kind = text(move |text| match parse_duration(text)? {
        short if short < least => Err(format!("{text:?} is too short; at least {}", duration_text(least))),
        duration => Ok(duration),
    });
    kind.shape.schema["pattern"] = "^ *([0-9]+ *(ms|s|m|min|h|d) *)+$".into();
    kind
}

/// A number of bytes in a range.
pub fn size(range: RangeInclusive<usize>) -> Kind<usize> {
    let mut kind = text(move |text| match usize::try_from(parse_size(text)?) {
        Ok(size) if range.contains(&size) => Ok(size),
        _ => {
            let (low, high) = (range.start(), range.end());
            Err(format!("{text:?} is out of range; {low} to {high} bytes are allowed"))
        }
    });
    kind.shape.schema["pattern"] = "^ *[0-9]+ *(B|KB|kB|KiB|MB|MiB|GB|GiB)? *$".into();
    kind
}

/// One of a few words.
pub fn words<T: Copy + 'static, const N: usize>(words: [(&'static str, T); N]) -> Kind<T> {
    let names = words.map(|(word, _)| word);
    let mut kind = text(move |text| match words.iter().find(|(word, _)| *word == text) {
        Some((_, value)) => Ok(*value),
        None => Err(format!("{text:?} is none of {}; {}", names.join(", "), suggestion(text, &names))),
    });
    kind.shape.schema = json!({ "enum": names.to_vec() });
    kind
}

/// The envelope of a sink, one of those that it supports.
pub fn envelope<const N: usize>(envelopes: [Envelope; N]) -> Kind<Envelope> {
    words(envelopes.map(|envelope| (envelope.name(), envelope)))
}

/// The CloudEvents source of events that have none.
pub fn event_source() -> Kind<String> {
    text(|text| match text {
        "" => Err("is empty: CloudEvents requires one; leave it out".to_owned()),
        source => Ok(source.to_owned()),
    })
}

/// A list of values of another kind.
pub fn list<T: 'static>(kind: Kind<T>) -> Kind<Vec<T>> {
    let schema = json!({ "type": "array", "items": kind.shape.schema });
    Kind::new(schema, move |place| match place.value {
        DeValue::Array(items) => Some(items.iter().filter_map(|item| kind.read(&place.item(item))).collect()),
        _ => place.wrong_type("a list, e.g. [\"…\"]"),
    })
}

/// A table with user-chosen keys; `parse` reads their names as [`text`] does.
pub fn entries<N: 'static, T: 'static>(parse: fn(&str) -> Result<N, String>, kind: Kind<T>) -> Kind<Vec<(N, T)>> {
    let schema = json!({ "type": "object", "additionalProperties": kind.shape.schema });
    let shape = Shape { schema, ..kind.shape.clone() };
    let read = move |place: &Place<'_>| {
        let values = place.section()?.places().into_iter().filter_map(|(key, place)| match parse(key) {
            Ok(name) => Some((name, kind.read(&place)?)),
            Err(text) => {
                place.reader.refuse(place.line, key, format!("{}: {text}", place.name));
                None
            }
        });
        Some(values.collect())
    };
    Kind { shape, read: Box::new(read) }
}

/// A table within a table.
pub fn nested<T: Table>() -> Kind<T> {
    let keys = T::keys();
    let shape = Shape { schema: document::object(&keys), keys, variants: Vec::new() };
    Kind { shape, read: Box::new(|place| place.section()?.finish(|section| Some(T::read(section)))) }
}
