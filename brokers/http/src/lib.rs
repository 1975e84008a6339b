//! Postbox over HTTP: a signing webhook sink.
//!
//! ```no_run
//! use std::sync::Arc;
//! use postbox_core::Clock;
//! use postbox_http::{HttpSink, HttpSinkConfig};
//! use postbox_webhook::standard::SignKey;
//!
//! # fn build(clock: Arc<dyn Clock>, secret: &str) -> Result<HttpSink, Box<dyn std::error::Error>> {
//! let config = HttpSinkConfig { keys: vec![SignKey::parse(secret)?], ..HttpSinkConfig::new("https://example.org/hook") };
//! let sink = HttpSink::new(config, clock)?;
//! # Ok(sink) }
//! ```
//!
//! - [`HttpSink`] posts each event in the target's [`Envelope`](postbox_core::Envelope) and signs
//!   it as Standard Webhooks defines. By default this is the unchanged payload with CloudEvents
//!   headers. The answer's status becomes an [`Outcome`](postbox_core::Outcome). It serves webhook
//!   targets and your own HTTP handlers alike.
//! - [`PublicClient`] fetches from addresses that outsiders may name, with the address guard of the
//!   sink.
//! - A sink calls only public addresses and those of allowed networks ([`HttpSinkConfig::allow`]),
//!   whatever the URL or the DNS says.
//!
//! The README of this crate has the tables: headers, statuses, codes, limits.
//!
//! # What this crate deliberately does not do
//!
//! It never retries (the engine does), never follows a redirect, never reads proxy variables, never
//! decompresses, and needs no process-wide TLS provider.

mod classify;
mod client;
mod config;
mod connect;
mod fetch;
mod guard;
mod request;
mod reserved;
mod secrets;
mod sink;
mod tls;

pub use config::{ClientCert, HttpSinkConfig, HttpSinkTable, check_url};
pub use fetch::{Fetched, PublicClient};
pub use ipnet::IpNet;
pub use reserved::is_of_one_request;
pub use sink::HttpSink;
