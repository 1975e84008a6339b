#![doc = include_str!("../README.md")]

mod append;
mod grants;
pub mod migration;
mod params;
mod refusal;
mod row_security;
mod schema;
mod text;

pub use append::{AppendStatement, Columns, Postgres, no_transaction, once_statement};
pub use grants::{RELAY_TABLES, Roles};
pub use migration::ToolScripts;
pub use params::{Bound, Param, Typed, param};
pub use refusal::{
    MIGRATE, REBASE, REFERENCE_MISSING, Refusal, SCHEMA_DAMAGED, STANDBY, UNREACHABLE, append_refused, cursor_foreign,
    is_undefined, log_unknown, unreachable,
};
pub use schema::{EVENT_COLUMNS, LOG_NAMES, SchemaName, check_log_name, is_meant};
