//! Promises of the store that the suites do not cover: crashes, restarts, other clusters, plain
//! SQL, roles.

#[path = "../support/mod.rs"]
mod support;

mod append;
mod comments;
mod crash;
mod cursor;
mod guard;
mod hostile_producer;
mod known;
mod notify;
mod order;
mod prune;
mod restart;
mod servers;
mod shared_transaction;
mod side_by_side;
mod sql;
mod surface;
mod tls;
