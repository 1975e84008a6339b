//! The sink against real servers on loopback, the ingress against a real client, and both together.

#![allow(clippy::unwrap_used)]

mod answers;
mod bounds;
mod envelope;
mod ingress;
mod known;
mod samples;
mod serve;
mod stand;
mod tls;
mod together;
