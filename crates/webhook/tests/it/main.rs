//! The verifiers against vectors, an independent implementation, and everything that must be refused.
#![allow(clippy::unwrap_used)]

mod golden;
mod matrix;
mod random;
mod sns;
