//! Tables of keys, and the macro that declares them.

use crate::kind::Shape;
use crate::reader::Section;

/// A table of keys. [`table!`](crate::table!) implements it.
pub trait Table: Sized + 'static {
    /// Returns what the table is for.
    fn doc() -> String;
    /// Returns its keys, as declared.
    fn keys() -> Vec<Key>;
    /// Reads each key, then checks them together.
    fn read(section: &Section<'_>) -> Self;
}

/// A declared key.
#[derive(Debug, Clone)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// What it does, in Markdown; the first paragraph is the summary.
    pub doc: String,
    /// What may be written.
    pub shape: Shape,
    /// Its default.
    pub start: Start,
}

/// The default of a key.
#[derive(Debug, Clone)]
pub enum Start {
    /// None: the key is required. With an example.
    Required(&'static str),
    /// This value, as in the file.
    Value(String),
    /// No value: a word for what that means, and an example of a value. Either may be empty.
    Unset(&'static str, &'static str),
}

/// Joins the lines of a doc comment into one text with a line per paragraph.
pub fn doc(lines: &[&str]) -> String {
    let mut text = String::new();
    for line in lines.iter().map(|line| line.trim()) {
        let glue = if line.is_empty() { "\n\n" } else { " " };
        if !(text.is_empty() || text.ends_with('\n')) {
            text.push_str(glue);
        }
        text.push_str(line);
    }
    text
}

/// Declares a table of keys: a struct with `Default`, and its [`Table`].
///
/// Each key is `name: Type = kind, start;`. The kind says how a value is written
/// ([`Kind`](crate::Kind)), the start what applies without one: `default(value)`, `unset("meaning",
/// "example")` or `required("example")`, with examples as in the file. Without a start, it is the
/// type's own default. `#[check(method)]` names a method that checks all keys together: `fn(&self,
/// &Section<'_>)`. It runs even after faults, so it must not rely on any value.
#[macro_export]
macro_rules! table {
    (@start) => { $crate::Start::Unset("", "") };
    (@start default($value:expr)) => { $crate::Start::Value(format!("{:?}", $value)) };
    (@start unset($meaning:expr, $example:expr)) => { $crate::Start::Unset($meaning, $example) };
    (@start required($example:expr)) => { $crate::Start::Required($example) };
    (@read $section:ident $name:ident $kind:expr, default($value:expr)) => {
        $section.get_or(stringify!($name), &$kind, &format!("{:?}", $value))
    };
    (@read $section:ident $name:ident $kind:expr, required($example:expr)) => {
        $section.require(stringify!($name), &$kind, $example)
    };
    (@read $section:ident $name:ident $kind:expr $(, $($start:tt)*)?) => { $section.get(stringify!($name), &$kind) };
    (
        $(#[doc = $doc:literal])*
        $(#[derive($($derive:ident),*)])?
        $(#[check($check:ident)])?
        $vis:vis struct $table:ident {
            $(
                $(#[doc = $key_doc:literal])*
                $name:ident : $ty:ty = $kind:expr $(, $start:ident($($arg:expr),*))?;
            )*
        }
    ) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone $($(, $derive)*)?)]
        $vis struct $table {
            $( $(#[doc = $key_doc])* $vis $name: $ty, )*
        }

        impl $crate::Table for $table {
            fn doc() -> String {
                $crate::doc(&[$($doc),*])
            }

            fn keys() -> Vec<$crate::Key> {
                vec![$( $crate::Key {
                    name: stringify!($name),
                    doc: $crate::doc(&[$($key_doc),*]),
                    shape: $kind.shape,
                    start: $crate::table!(@start $($start($($arg),*))?),
                } ),*]
            }

            fn read(section: &$crate::Section<'_>) -> Self {
                let _ = section;
                let table = Self { $( $name: $crate::table!(@read section $name $kind $(, $start($($arg),*))?), )* };
                $( table.$check(section); )?
                table
            }
        }

        impl Default for $table {
            fn default() -> Self {
                $crate::Section::empty(|section| <Self as $crate::Table>::read(section))
            }
        }
    };
}
