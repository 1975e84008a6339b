//! Postbox over MQTT 5: a sink that publishes with QoS 1, and a source with a session that the
//! server keeps.
//!
//! ```no_run
//! use postbox_config::{ReadOptions, SinkConfig, SinkContext, read};
//! use postbox_mqtt::MqttSinkTable;
//!
//! # async fn build(context: &SinkContext) -> Result<(), Box<dyn std::error::Error>> {
//! let keys = "url = \"mqtt://127.0.0.1:1883\"\ntopic = \"orders/{topic}\"";
//! let (table, _) = read::<MqttSinkTable>(keys, ReadOptions::none())?;
//! let sink = table.build(context).await?;
//! # Ok(()) }
//! ```
//!
//! - A [`MqttSink`] publishes all events of a call without waiting, as far as the server allows,
//!   and settles each by its own PUBACK.
//! - A [`MqttSource`] acknowledges what is stored, in order of arrival.
//!
//! # What this crate deliberately does not do
//!
//! It never retries and never sends what a lost connection had queued (the engine owns retry). It
//! does not use QoS 2 or MQTT 3.

mod classify;
mod config;
mod connection;
mod message;
mod sink;
mod source;
mod topic;

pub use config::{MqttSinkTable, MqttSourceTable};
pub use sink::MqttSink;
pub use source::MqttSource;
