//! Sends events to Kafka topics, and receives messages from them: a sink that publishes in batches,
//! and a source that is a member of a consumer group.
//!
//! ```no_run
//! use postbox_config::{ReadOptions, SinkConfig, SinkContext, read};
//! use postbox_kafka::KafkaSinkTable;
//!
//! # async fn build(context: &SinkContext) -> Result<(), Box<dyn std::error::Error>> {
//! let keys = "brokers = \"127.0.0.1:9092\"\ntopic = \"orders\"";
//! let (table, _) = read::<KafkaSinkTable>(keys, ReadOptions::none())?;
//! let sink = table.build(context).await?;
//! # Ok(()) }
//! ```
//!
//! - A [`KafkaSink`] passes all events of a call to one idempotent producer, and settles each by
//!   its own confirmation. The record's key is the event's, so a key stays in one partition.
//! - A [`KafkaSource`] commits an offset once everything before it is stored.
//! - Both speak with the brokers through a [`Client`], and follow the same rules with each.
//!
//! | feature | for |
//! |---|---|
//! | `rdkafka` | [`Client::Librdkafka`], a library in C that is built with gcc and make |
//!
//! # What this crate deliberately does not do
//!
//! It creates no topics and uses no transactions. It repeats only a request whose answer is
//! missing, within one call and under its sequence number, as Kafka's idempotent producer does.
//! With `acks = "leader"` there are no sequence numbers, so a repeated record may be stored twice.
//!
//! With [`Client::Librdkafka`] it also has no TLS and no SCRAM, does not notice that a topic was
//! deleted and created again, and does not know whether brokers had a record already.

mod classify;
mod client;
mod config;
mod connection;
mod group;
mod message;
mod sink;
mod source;
mod topic;

pub use client::{Acks, Client};
pub use config::{KafkaSinkTable, KafkaSourceTable};
pub use connection::{AuthTable, Mechanism};
pub use group::OffsetReset;
pub use sink::KafkaSink;
pub use source::KafkaSource;
