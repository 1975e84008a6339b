//! What every implementation of a contract must pass, one named test per promise.
//!
//! Write a fixture and pass it to a macro. Every case of the suite becomes a `#[tokio::test]`:
//!
//! ```text
//! async fn fixture() -> MyFixture { … }       // fresh, migrated and empty for each case
//! postbox_testkit::store_suite!(fixture);     // a `StoreFixture`
//! postbox_testkit::apply_suite!(fixture);     // an `ApplyFixture`: handler and store share a database
//! postbox_testkit::transact_suite!(fixture);  // a `RouterFixture`: handlers of a router in the store's transaction
//! postbox_testkit::sink_suite!(fixture);      // a `SinkFixture`
//! postbox_testkit::source_suite!(fixture);    // a `SourceFixture`: the contract of a broker's source
//! postbox_testkit::receiving_suite!(fixture); // a `ReceivingFixture`: from the producer into the inbox
//! ```
//!
//! Cases know a store only through the contracts and its fixture. What a store cannot do is
//! declared as data ([`StoreCapabilities`]). A defect in a contract gets a case here first, so that
//! all stores inherit it. [`faults`] says how calls are delayed, and how their answers are lost.

mod cases;
pub mod faults;
mod fixture;
mod harness;
mod memory;
mod world;

#[doc(hidden)]
pub mod admin;
#[doc(hidden)]
pub mod append;
#[doc(hidden)]
pub mod apply;
#[doc(hidden)]
pub mod crashes;
#[doc(hidden)]
pub mod dead_letters;
#[doc(hidden)]
pub mod expiry;
#[doc(hidden)]
pub mod fidelity;
#[doc(hidden)]
pub mod filter;
#[doc(hidden)]
pub mod hold;
#[doc(hidden)]
pub mod inspect;
#[doc(hidden)]
pub mod lanes;
#[doc(hidden)]
pub mod late;
#[doc(hidden)]
pub mod lease;
#[doc(hidden)]
pub mod lifecycle;
#[doc(hidden)]
pub mod lost;
#[doc(hidden)]
pub mod mark;
#[doc(hidden)]
pub mod migrate;
#[doc(hidden)]
pub mod order;
#[doc(hidden)]
pub mod prune;
#[doc(hidden)]
pub mod read;
#[doc(hidden)]
pub mod receive;
#[doc(hidden)]
pub mod receiving;
#[doc(hidden)]
pub mod replay;
#[doc(hidden)]
pub mod reset;
#[doc(hidden)]
pub mod routing;
#[doc(hidden)]
pub mod settle;
#[doc(hidden)]
pub mod sink;
#[doc(hidden)]
pub mod skipped;
#[doc(hidden)]
pub mod source;
#[doc(hidden)]
pub mod storm;
#[doc(hidden)]
pub mod tail;
#[doc(hidden)]
pub mod transact;

pub use fixture::{
    ApplyFixture, Attempt, Destination, OpenTransaction, Poison, ReceivingFixture, ReceivingTraits, SinkFixture,
    SinkTraits, SourceFixture, StoreCapabilities, StoreFixture, forbidden_transitions, is_text,
};
pub use memory::MemoryFixture;

/// All suites that a store must pass.
#[macro_export]
macro_rules! store_suite {
    ($fixture:expr) => {
        $crate::conformance_suite!(append, $fixture);
        $crate::conformance_suite!(fidelity, $fixture);
        $crate::conformance_suite!(lease, $fixture);
        $crate::conformance_suite!(crashes, $fixture);
        $crate::conformance_suite!(read, $fixture);
        $crate::conformance_suite!(order, $fixture);
        $crate::conformance_suite!(settle, $fixture);
        $crate::conformance_suite!(skipped, $fixture);
        $crate::conformance_suite!(expiry, $fixture);
        $crate::conformance_suite!(hold, $fixture);
        $crate::conformance_suite!(storm, $fixture);
        $crate::conformance_suite!(inspect, $fixture);
        $crate::conformance_suite!(tail, $fixture);
        $crate::conformance_suite!(admin, $fixture);
        $crate::conformance_suite!(dead_letters, $fixture);
        $crate::conformance_suite!(prune, $fixture);
        $crate::conformance_suite!(routing, $fixture);
        $crate::conformance_suite!(filter, $fixture);
        $crate::conformance_suite!(replay, $fixture);
        $crate::conformance_suite!(lifecycle, $fixture);
        $crate::conformance_suite!(reset, $fixture);
        $crate::conformance_suite!(lanes, $fixture);
        $crate::conformance_suite!(receive, $fixture);
        $crate::conformance_suite!(mark, $fixture);
        $crate::conformance_suite!(migrate, $fixture);
        $crate::conformance_suite!(lost, $fixture);
        $crate::conformance_suite!(late, $fixture);
    };
}

/// The suite of `Apply`.
#[macro_export]
macro_rules! apply_suite {
    ($fixture:expr) => {
        $crate::conformance_suite!(apply, $fixture);
    };
}

/// The suite of `Transact`.
#[macro_export]
macro_rules! transact_suite {
    ($fixture:expr) => {
        $crate::conformance_suite!(transact, $fixture);
    };
}

/// The suite of `Sink`.
#[macro_export]
macro_rules! sink_suite {
    ($fixture:expr) => {
        $crate::conformance_suite!(sink, $fixture);
    };
}

/// The suite of `Source`.
#[macro_export]
macro_rules! source_suite {
    ($fixture:expr) => {
        $crate::conformance_suite!(source, $fixture);
    };
}

/// The suite of the whole way from a producer into the inbox.
#[macro_export]
macro_rules! receiving_suite {
    ($fixture:expr) => {
        $crate::conformance_suite!(receiving, $fixture);
    };
}
