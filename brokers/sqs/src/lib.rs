//! Postbox to and from Amazon SQS, and to Amazon SNS.
//!
//! - [`SqsSink`] sends events to a queue or publishes them to a topic, ten per request, each with
//!   its own outcome.
//! - [`SqsSource`] reads a queue, keeps messages hidden while they are being stored, and deletes
//!   what is stored.
//!
//! The README of this crate has the tables: attributes, answers, codes.
//!
//! # What this crate deliberately does not do
//!
//! It never retries, and neither does the client (the engine does). It creates no queue, topic or
//! subscription, and no field of an event decides where it is sent.

mod classify;
mod config;
mod connection;
mod message;
mod sink;
mod source;

pub use config::{AwsTable, SnsSinkTable, SqsSinkTable, SqsSourceTable};
pub use connection::{QueueUrl, TopicArn};
pub use sink::SqsSink;
pub use source::SqsSource;
