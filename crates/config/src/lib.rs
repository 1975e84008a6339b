//! Configuration keys, each declared once.
//!
//! A [`table!`] declares a struct: for each key a doc comment, a type, how it is written, and its
//! default. The reader (which reports every fault at its line), the commented file of `postbox
//! init`, the guide's tables and a JSON Schema are derived from it.
//!
//! ```
//! use std::time::Duration;
//! use postbox_config::{duration, integer, read, ReadOptions, table};
//!
//! table! {
//!     /// Where things wait.
//!     pub struct QueueConfig {
//!         /// Most things that wait.
//!         capacity: usize = integer(1_usize..=1_000), default(100);
//!         /// Longest wait.
//!         ///
//!         /// The guide shows this paragraph too; the commented file shows the first one only.
//!         wait: Option<Duration> = duration(Duration::ZERO), unset("for ever", r#""30s""#);
//!     }
//! }
//!
//! assert_eq!(QueueConfig::default().capacity, 100);
//! let (queue, _) = read::<QueueConfig>("wait = \"5s\"", ReadOptions::none()).expect("no faults");
//! assert_eq!(queue.wait, Some(Duration::from_secs(5)));
//! let faults = read::<QueueConfig>("capcity = 5", ReadOptions::none()).expect_err("a fault");
//! assert!(faults.to_string().contains("did you mean `capacity`?"));
//! ```
//!
//! A doc comment is Markdown. Its first paragraph is the summary; the rest is for the guide.
//!
//! # What this crate deliberately does not do
//!
//! It knows no adapter: each adapter brings its own table, and the server combines them.

mod adapter;
mod client;
mod document;
mod faults;
mod kind;
mod reader;
mod secret;
mod table;
mod units;

pub use adapter::{
    Adapter, LeaseConfig, Leases, SinkConfig, SinkContext, SourceConfig, SourceContext, StoreOptions, adapter,
};
pub use client::{TlsTable, plain};
pub use document::{commented_file, guide_table, json_schema};
pub use faults::{Fault, Faults, nearest, suggestion};
pub use kind::{
    Kind, Shape, Variant, boolean, duration, entries, envelope, event_source, fraction, from_core, integer, list,
    nested, path, size, text, words,
};
pub use reader::{LISTEN_DEFAULT, Place, ReadOptions, Reader, Section, read};
pub use secret::{LiveSecret, Secret, all_secrets, has_stray_end, secret, secret_always, signing_secret};
pub use table::{Key, Start, Table, doc};
pub use units::{duration_text, parse_duration, parse_size};

#[cfg(test)]
mod tests;
