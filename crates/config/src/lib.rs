//! Configuration keys, each declared once.
//!
//! A [`table!`] declares a struct: per key a doc comment, a type, how it is written, and what it is
//! without being written. From that come the reader, which reports every fault at its line, the
//! commented file that `postbox init` writes, the tables of the guide, and a JSON Schema.
//!
//! ```
//! use std::time::Duration;
//! use postbox_config::{Integer, Span, Table, default, unset, table};
//!
//! table! {
//!     /// `[queue]`: where things wait.
//!     pub struct QueueConfig {
//!         /// Most things that wait.
//!         capacity: usize = Integer(1_usize..=1_000), default(100);
//!         /// Longest wait.
//!         ///
//!         /// The guide shows this paragraph too; the commented file shows the first one only.
//!         wait: Option<Duration> = Span(Duration::ZERO), unset("for ever", r#""30s""#);
//!     }
//! }
//!
//! impl Table for QueueConfig {}
//!
//! assert_eq!(QueueConfig::default().capacity, 100);
//! ```
//!
//! A doc comment is Markdown. Its first paragraph is the summary; the rest is for the guide.
//!
//! # What this crate deliberately does not do
//!
//! It knows no file format and no adapter: values arrive as a tree of [`Node`]s that somebody else
//! parsed, and an adapter brings its own table.

mod document;
mod faults;
mod key;
mod kind;
mod reader;
mod schema;
mod secret;
mod sink;
mod units;
mod value;

pub use document::{commented, guide_table};
pub use faults::{Fault, Faults, may_be_secret, suggestion, unknown};
pub use key::{Default_, Initial, Key, Required, Shape, Start, Unset, Variant, default, doc, required, unset};
pub use kind::{Bool, Integer, Kind, List, Map, Nested, Path, Plain, Size, Span, Text, Words, from_core};
pub use reader::{Place, ReadOptions, Reader, Section};
pub use schema::{schema, schema_object};
pub use secret::{LiveSecret, Secret, SecretText, SigningSecret, all_secrets};
pub use sink::{SinkConfig, SinkContext, SinkType};
pub use units::{duration_text, parse_duration, parse_size};
pub use value::{Entry, Literal, Node, Value};

/// The keys of a table. [`table!`] implements it.
pub trait Fields: Sized {
    /// What the table is for.
    fn doc() -> String;
    /// Its keys, as declared.
    fn keys() -> Vec<Key>;
    /// Reads each key by itself.
    fn fields(section: &Section<'_>) -> Self;
}

/// A table of keys that is read as a whole.
pub trait Table: Fields {
    /// Writes down what is wrong between keys. Runs even after faults, so it must not rely on any
    /// value.
    fn validate(&self, section: &Section<'_>) {
        let _ = section;
    }

    /// Reads every key, then checks them together. Whoever made the section calls
    /// [`Section::finish`].
    fn read(section: &Section<'_>) -> Self {
        let table = Self::fields(section);
        table.validate(section);
        table
    }
}

/// Declares a table of keys: a struct with `Default`, and its [`Fields`].
///
/// Each key is `name: Type = kind, start;`: `kind` says how a value is written ([`Kind`]), `start`
/// what holds without one ([`default`], [`unset`] or [`required`]).
#[macro_export]
macro_rules! table {
    (
        $(#[doc = $doc:literal])*
        $vis:vis struct $table:ident {
            $( $(#[doc = $key_doc:literal])* $name:ident : $ty:ty = $kind:expr, $start:expr; )*
        }
    ) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone, PartialEq)]
        $vis struct $table {
            $( $(#[doc = $key_doc])* $vis $name: $ty, )*
        }

        impl $crate::Fields for $table {
            fn doc() -> String {
                $crate::doc(&[$($doc),*])
            }

            fn keys() -> Vec<$crate::Key> {
                vec![$( $crate::Key {
                    name: stringify!($name),
                    doc: $crate::doc(&[$($key_doc),*]),
                    shape: $crate::Kind::shape(&$kind),
                    start: $crate::Initial::<$ty>::start(&$start),
                } ),*]
            }

            fn fields(section: &$crate::Section<'_>) -> Self {
                let _ = section;
                Self { $( $name: section.get(stringify!($name), &$kind, &$start), )* }
            }
        }

        impl Default for $table {
            fn default() -> Self {
                $crate::Section::empty(|section| <Self as $crate::Fields>::fields(section))
            }
        }
    };
}

#[cfg(test)]
mod tests;
