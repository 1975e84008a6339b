//! Postbox to Postbox: events are appended to a log of another store, each once.
//!
//! - [`BusSink`] appends what a subscription reads to a log of another database, through that
//!   database's inbox: an event that was sent before is recognised there and changes nothing.
//! - Events of one key stand in the log in the order in which they were sent.
//! - An event keeps the id from its first log on all its ways, so in a ring of databases it stops
//!   where it began.

mod classify;
mod sink;

pub use sink::BusSink;
