//! Postbox to Postbox: events go into a log of another store, each once.
//!
//! - [`BusSink`] appends what a subscription reads to a log of another database, through the inbox
//!   of that database: an event that was sent before is known there and changes nothing.
//! - Events of one key stand in the log in the order in which they were sent.
//! - An event keeps the id of its first log on all its ways, so a ring of databases ends where it
//!   began.

mod classify;
mod sink;

pub use sink::BusSink;
