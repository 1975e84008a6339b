//! What every implementation of a contract must pass, one named test per promise.
//!
//! Write a fixture, name it to a macro, and every case of the suite becomes a `#[tokio::test]` of its own:
//!
//! ```text
//! async fn fixture() -> MyFixture { … }             // a fresh, migrated, empty store for each case
//! postbox_testkit::store_suite!(fixture);           // or one of append_suite!, log_suite!, inspect_suite!, receive_suite!, migrate_suite!
//! postbox_testkit::apply_suite!(fixture);           // where handler and store share a database
//! postbox_testkit::sink_suite!(sink_fixture);
//! postbox_testkit::source_suite!(source_fixture);       // the contract of a broker's source
//! postbox_testkit::receiving_suite!(receiving_fixture); // from the producer into the inbox
//! ```
//!
//! [`faults`] says how calls are made late, and how their answers are lost.
//!
//! Cases know a store only through the contracts and its fixture. What a store cannot do is said as data
//! ([`StoreCapabilities`]); a case that needs it is then not asked. A contract bug gets a case here first, so that all stores inherit it.

pub mod faults;
mod fixture;
mod harness;
mod memory;
mod world;

pub mod append;
pub mod apply;
pub mod fidelity;
pub mod hold;
pub mod inspect;
pub mod late;
pub mod lease;
pub mod lost;
pub mod migrate;
pub mod order;
pub mod prune;
pub mod read;
pub mod receive;
pub mod receiving;
pub mod settle;
pub mod sink;
pub mod source;
pub mod steer;
pub mod storm;

pub use fixture::{
    ApplyFixture, Attempt, Destination, OpenTransaction, Poison, ReceivingFixture, ReceivingTraits, SinkFixture,
    SinkTraits, SourceFixture, StoreCapabilities, StoreFixture, forbidden_transitions,
};
pub use memory::MemoryFixture;

/// Expands to one named test per case. The suites' macros call it; it is not meant to be called by hand.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_cases {
    ($suite:ident, $fixture:expr, [$($case:ident),* $(,)?]) => {
        mod $suite {
            #[allow(unused_imports)]
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    $crate::conformance::$suite::$case(&($fixture)().await).await;
                }
            )*
        }
    };
}

/// The suites of `Append`.
#[macro_export]
macro_rules! append_suite {
    ($fixture:expr) => {
        $crate::append_cases!($fixture);
        $crate::fidelity_cases!($fixture);
    };
}

/// The suites of `Log`.
#[macro_export]
macro_rules! log_suite {
    ($fixture:expr) => {
        $crate::lease_cases!($fixture);
        $crate::read_cases!($fixture);
        $crate::order_cases!($fixture);
        $crate::settle_cases!($fixture);
        $crate::hold_cases!($fixture);
        $crate::storm_cases!($fixture);
    };
}

/// The suites of `Inspect`.
#[macro_export]
macro_rules! inspect_suite {
    ($fixture:expr) => {
        $crate::inspect_cases!($fixture);
        $crate::steer_cases!($fixture);
        $crate::prune_cases!($fixture);
    };
}

/// The suite of `Receive`.
#[macro_export]
macro_rules! receive_suite {
    ($fixture:expr) => {
        $crate::receive_cases!($fixture);
    };
}

/// The suite of `Migrate`.
#[macro_export]
macro_rules! migrate_suite {
    ($fixture:expr) => {
        $crate::migrate_cases!($fixture);
    };
}

/// The suite of `Apply`. `$fixture` is an async function that gives a fresh [`ApplyFixture`].
#[macro_export]
macro_rules! apply_suite {
    ($fixture:expr) => {
        $crate::apply_cases!($fixture);
    };
}

/// The suite of `Sink`. `$fixture` is an async function that gives a fresh [`SinkFixture`].
#[macro_export]
macro_rules! sink_suite {
    ($fixture:expr) => {
        $crate::sink_cases!($fixture);
    };
}

/// The suite of `Source`. `$fixture` is an async function that gives a fresh [`SourceFixture`].
#[macro_export]
macro_rules! source_suite {
    ($fixture:expr) => {
        $crate::source_cases!($fixture);
    };
}

/// The suite of the way from a producer into the inbox. `$fixture` is an async function that gives a fresh
/// [`ReceivingFixture`].
#[macro_export]
macro_rules! receiving_suite {
    ($fixture:expr) => {
        $crate::receiving_cases!($fixture);
    };
}

/// Every suite a store must pass. `$fixture` is an async function that gives a fresh [`StoreFixture`].
#[macro_export]
macro_rules! store_suite {
    ($fixture:expr) => {
        $crate::append_suite!($fixture);
        $crate::log_suite!($fixture);
        $crate::inspect_suite!($fixture);
        $crate::receive_suite!($fixture);
        $crate::migrate_suite!($fixture);
        $crate::lost_cases!($fixture);
        $crate::late_cases!($fixture);
    };
}

#[cfg(test)]
mod tests {
    /// A case that is written but not listed would never run.
    #[test]
    fn every_case_is_listed_in_its_suite() {
        for (file, text) in [
            ("append", include_str!("append.rs")),
            ("apply", include_str!("apply.rs")),
            ("fidelity", include_str!("fidelity.rs")),
            ("hold", include_str!("hold.rs")),
            ("inspect", include_str!("inspect.rs")),
            ("late", include_str!("late.rs")),
            ("lease", include_str!("lease.rs")),
            ("lost", include_str!("lost.rs")),
            ("migrate", include_str!("migrate.rs")),
            ("order", include_str!("order.rs")),
            ("read", include_str!("read.rs")),
            ("receive", include_str!("receive.rs")),
            ("receiving", include_str!("receiving.rs")),
            ("prune", include_str!("prune.rs")),
            ("settle", include_str!("settle.rs")),
            ("sink", include_str!("sink.rs")),
            ("source", include_str!("source.rs")),
            ("steer", include_str!("steer.rs")),
            ("storm", include_str!("storm.rs")),
        ] {
            let list = text.split("conformance_cases!").nth(1).unwrap_or_else(|| panic!("{file}.rs has no list"));
            for case in text.lines().filter_map(|line| line.strip_prefix("pub async fn ")?.split_once('(')) {
                let listed = list.split([',', '[', ']']).any(|word| word.trim() == case.0);
                assert!(listed, "{file}.rs: add {} to the list at its end", case.0);
            }
        }
    }
}
