//! Conformance suites, real servers, a fault proxy and an event ledger for tests of Postbox.

pub mod clock;
pub mod collector;
pub mod conformance;
pub mod hostile;
pub mod inbox;
pub mod ledger;
pub mod memory;
pub mod proxy;
pub mod receiving;
pub mod sending;
pub mod servers;
pub mod warnings;
