//! Tests of what is specific to Kafka.

mod hostile;
mod krafka_alone;
mod receiving;
mod sink_faults;
mod source_faults;
mod stand;
mod topics_made_anew;
mod who_we_are;

/// The client under test. `../librdkafka/main.rs` runs these tests with the other one.
const CLIENT: &str = "krafka";
