//! Promises of the store that the suites do not cover: other processes, plain inserts, odd files.

#[path = "../common/mod.rs"]
mod common;

mod abort;
mod apply;
mod cursor;
mod open;
mod plain_insert;
mod sqlx;
mod steps;
mod window;
