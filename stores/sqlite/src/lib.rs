#![doc = include_str!("../README.md")]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod admin;
mod append;
mod apply;
mod classify;
mod clock;
mod config;
mod dead_letters;
mod decode;
mod depth;
mod diagnose;
mod due;
mod find;
mod inspect;
mod lease;
mod lifecycle;
mod log;
mod maintain;
mod migrate;
mod once;
mod parts;
#[cfg(test)]
mod plans;
mod receive;
mod replay;
mod schema;
mod settle;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod store;
mod tail;
mod thread;
mod unrouted;
mod wal;
mod window;

pub use append::{Rusqlite, Sqlite};
pub use apply::TxHandler;
pub use config::{SqliteConfig, SqliteTable};
pub use once::once_in;
pub use store::SqliteStore;
