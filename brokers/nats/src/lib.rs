//! Postbox over NATS JetStream: a sink that publishes in bulk, and a source that is a durable
//! consumer.
//!
//! ```no_run
//! use postbox_config::{ReadOptions, SinkConfig, SinkContext, read};
//! use postbox_nats::NatsSinkTable;
//!
//! # async fn build(context: &SinkContext) -> Result<(), Box<dyn std::error::Error>> {
//! let keys = "url = \"nats://127.0.0.1:4222\"\nsubject = \"orders.{topic}\"";
//! let (table, _) = read::<NatsSinkTable>(keys, ReadOptions::none())?;
//! let sink = table.build(context).await?;
//! # Ok(()) }
//! ```
//!
//! - A [`NatsSink`] publishes all events of a call without waiting, then waits for the acks. The
//!   message id is the event's dedupe id, so the stream recognises a repeat within its duplicate
//!   window.
//! - A [`NatsSource`] acknowledges what is stored, reports messages in progress to the server, and
//!   gives back the rest.
//!
//! The README of this crate has the tables: headers, codes, what it was tested against.
//!
//! # What this crate deliberately does not do
//!
//! It never retries and never sends what a lost connection had queued (the engine owns retry). It
//! does not use core NATS without a stream, and never changes an existing stream or consumer.

mod classify;
mod config;
mod connection;
mod consumer;
mod jetstream;
mod message;
mod sink;
mod source;
mod subject;
mod unreadable;

pub use config::{AuthTable, CreateTable, NatsSinkTable, NatsSourceTable};
pub use sink::NatsSink;
pub use source::NatsSource;
