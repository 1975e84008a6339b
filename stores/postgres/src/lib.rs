#![doc = include_str!("../README.md")]

mod append;
mod apply;
mod classify;
mod config;
mod connect;
mod decode;
mod inspect;
mod log;
mod once;
mod receive;
mod schema;
mod session;
mod snapshot;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod store;

pub use append::append_in;
pub use apply::TxHandler;
pub use config::{PostgresConfig, PostgresTable};
pub use once::once_in;
pub use schema::{Roles, SchemaName};
pub use store::PostgresStore;
