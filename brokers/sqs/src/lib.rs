//! Postbox to and from Amazon SQS, and to Amazon SNS.
//!
//! - [`SqsSink`] sends events to a queue or publishes them to a topic, ten a request, each with an
//!   outcome of its own.
//! - [`SqsSource`] reads a queue, keeps messages from coming again while they are stored, and
//!   deletes what is stored.
//!
//! The README of this crate has the tables: attributes, answers, codes.
//!
//! # What this crate deliberately does not do
//!
//! It never retries, and neither does the client (the engine does). It makes no queue, topic or
//! subscription, and no field of an event says where to.

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
