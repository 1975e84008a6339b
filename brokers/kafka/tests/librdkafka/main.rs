//! Runs the suites, and the tests of what is specific to Kafka, with librdkafka: all but
//! `krafka_alone.rs` and `topics_made_anew.rs`, which say why.
#![cfg(feature = "rdkafka")]

#[path = "../conformance.rs"]
mod conformance;
#[path = "../it/hostile.rs"]
mod hostile;
#[path = "../it/receiving.rs"]
mod receiving;
#[path = "../it/sink_faults.rs"]
mod sink_faults;
#[path = "../it/source_faults.rs"]
mod source_faults;
#[path = "../it/stand.rs"]
#[allow(clippy::duplicate_mod)]
mod stand;
#[path = "../it/who_we_are.rs"]
mod who_we_are;

/// The client under test.
const CLIENT: &str = "librdkafka";
