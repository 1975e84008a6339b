//! The verifiers against vectors, an independent implementation, and everything that must be refused.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod golden;
mod matrix;
mod mutations;
mod random;
mod senders;
mod sns;
