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
//!
//! # What this crate deliberately does not do
//!
//! It creates no topics and uses no transactions. It repeats only a request whose answer is
//! missing, within one call and under its sequence number, as Kafka's idempotent producer does.
//! With `acks = "leader"` there are no sequence numbers, so a repeated record may be stored twice.

mod classify;
mod config;
mod connection;
mod message;
mod sink;
mod source;
mod topic;

pub use config::{AuthTable, KafkaSinkTable, KafkaSourceTable};
pub use connection::Mechanism;
pub use sink::{Acks, KafkaSink};
pub use source::{KafkaSource, OffsetReset};
