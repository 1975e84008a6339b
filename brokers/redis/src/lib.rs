//! Postbox to and from Redis Streams (Redis 7, Valkey 9).
//!
//! - [`RedisSink`] adds events to streams: all of one call in one pipeline, each with an outcome of
//!   its own.
//! - [`RedisSource`] reads a stream as a member of a consumer group, and acknowledges what is
//!   stored.
//! - [`RedisLeases`] takes lanes in Redis too, for whoever has such a rule.
//!
//! The README of this crate has the tables: fields, answers, codes.
//!
//! # What this crate deliberately does not do
//!
//! It never retries (the engine does), knows no cluster, and never trims a stream but by the
//! `maxlen` it was given.

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
