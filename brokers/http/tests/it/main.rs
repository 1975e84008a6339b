//! Tests the sink against real servers on loopback.

#![allow(clippy::unwrap_used)]

mod answers;
mod bounds;
mod envelope;
mod samples;
mod stand;
mod tls;
