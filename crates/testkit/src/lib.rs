//! Conformance suites, real-server fixtures, a fault proxy and an event-ledger checker for Postbox and its implementers.

pub mod clock;
pub mod conformance;
pub mod hostile;
pub mod inbox;
pub mod ledger;
pub mod proxy;
pub mod servers;
pub mod warnings;
