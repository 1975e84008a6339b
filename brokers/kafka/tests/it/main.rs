//! Tests of what is specific to Kafka.

mod hostile;
mod receiving;
mod sink_faults;
mod source_faults;
mod stand;
mod who_we_are;
