#![doc = include_str!("../README.md")]

mod admin;
mod append;
mod apply;
mod classify;
mod config;
mod connect;
mod criteria;
mod dead_letters;
mod decode;
mod diagnose;
pub mod driver;
mod due;
mod execute;
mod find;
mod hint;
mod inspect;
mod lane;
mod lease;
mod lifecycle;
mod log;
mod maintain;
mod migrate;
mod once;
mod payload;
#[cfg(test)]
mod plans;
mod prune;
mod rebase;
mod receive;
mod replay;
mod row_security;
mod servers;
mod session;
mod settle;
mod store;
mod subscription;
mod tail;
mod unrouted;
mod walk;
mod window;

/// The pool of [`PostgresStore::from_pool`].
pub use deadpool_postgres;
/// The driver whose transactions events are appended in.
pub use tokio_postgres;

pub use append::TokioPostgres;
pub use apply::TxHandler;
pub use config::{PostgresConfig, PostgresTable};
pub use once::once_in;
pub use postbox_postgres_sql::{Postgres, Roles, SchemaName, ToolScripts};
pub use store::PostgresStore;
