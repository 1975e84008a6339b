//! Conformance suites, real servers and a fault proxy for tests of Postbox.
//!
//! Everything here panics when a server is not installed or does not start, and when something does
//! not hold or does not come in time. The message says which, and what to do.

pub mod clock;
pub mod collector;
pub mod conformance;
pub mod hostile;
pub mod inbox;
pub mod memory;
pub mod proxy;
pub mod receiving;
pub mod sending;
pub mod servers;
pub mod sink_faults;
pub mod tls;
pub mod warnings;
