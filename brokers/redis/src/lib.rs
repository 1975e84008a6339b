//! Sends events to Redis Streams, and receives messages from them (Redis 7, Valkey 9).
//!
//! - [`RedisSink`] adds all events of a call to streams in one pipeline, and gives each its own
//!   outcome.
//! - [`RedisSource`] reads a stream as a member of a consumer group, and acknowledges what is
//!   stored.
//! - [`RedisLeases`] leases lanes in Redis in addition to the store, where that is required.
//!
//! The guide (`docs/guide/redis.md`) describes the fields, answers and codes.
//!
//! # What this crate deliberately does not do
//!
//! It never retries (the engine does), does not support Redis Cluster, and trims a stream only by
//! the configured `maxlen`.

mod address;
mod classify;
mod config;
mod connection;
mod fields;
mod lease;
mod sink;
mod source;
mod stream;

pub use config::{RedisLeaseConfig, RedisSinkConfig, RedisSourceConfig};
pub use lease::RedisLeases;
pub use sink::RedisSink;
pub use source::RedisSource;
