#![doc = include_str!("../README.md")]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod append;
mod apply;
mod classify;
mod clock;
mod config;
mod count;
mod decode;
mod due;
mod inspect;
mod lease;
mod log;
mod migrate;
mod receive;
mod schema;
mod settle;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod steer;
mod store;
mod thread;
mod window;

pub use append::append_in;
pub use apply::TxHandler;
pub use config::{SqliteConfig, Synchronous};
pub use receive::once_in;
pub use store::SqliteStore;
