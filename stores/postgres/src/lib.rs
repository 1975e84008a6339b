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
mod grants;
mod hint;
mod inspect;
mod lane;
mod lease;
mod lent;
mod lifecycle;
mod log;
mod maintain;
mod migrate;
mod once;
mod params;
mod payload;
#[cfg(test)]
mod plans;
mod prune;
mod rebase;
mod receive;
mod replay;
mod row_security;
mod schema;
mod script;
mod session;
mod settle;
mod store;
mod subscription;
mod tail;
mod text;
mod unrouted;
mod window;

/// The pool of [`PostgresStore::from_pool`].
pub use deadpool_postgres;
/// The driver whose transactions events are appended in.
pub use tokio_postgres;

pub use append::{Postgres, TokioPostgres};
pub use apply::TxHandler;
pub use config::{PostgresConfig, PostgresTable};
pub use grants::Roles;
pub use once::once_in;
pub use schema::SchemaName;
pub use script::ToolScripts;
pub use store::PostgresStore;
