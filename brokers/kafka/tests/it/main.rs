//! What the suites do not know: what is special about Kafka.

mod hostile;
mod receiving;
mod sink_faults;
mod source_faults;
mod stand;
mod who_we_are;
