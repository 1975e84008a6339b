//! The verifiers, tested with vectors, an independent implementation, and everything that must be
//! refused.
#![allow(clippy::unwrap_used)]
#![allow(clippy::print_stdout, reason = "random tests print their seed")]

mod bad_input;
mod differential;
mod golden;
mod matrix;
mod mutations;
mod random;
mod senders;
mod sns;
