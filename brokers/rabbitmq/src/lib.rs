//! Postbox to and from RabbitMQ (AMQP 0-9-1).
//!
//! - A [`RabbitmqSink`] publishes all events of a call without waiting, then waits for the
//!   confirms. Every message is mandatory: one that no queue takes is not delivered.
//! - A [`RabbitmqSource`] consumes a queue and acknowledges what is stored. A missing queue is
//!   created as a quorum queue.
//!
//! The README of this crate has the tables: properties, answers, codes.
//!
//! # What this crate deliberately does not do
//!
//! It never retries and never reconnects behind its caller's back (the engine owns retry). It
//! declares no exchange, and never changes an existing queue.

mod caution;
mod classify;
mod config;
mod connection;
mod consumer;
mod message;
mod route;
mod sink;
mod source;

pub use config::{RabbitmqSinkTable, RabbitmqSourceTable};
pub use sink::RabbitmqSink;
pub use source::RabbitmqSource;
