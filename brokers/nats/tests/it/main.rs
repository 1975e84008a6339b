//! Tests of what is specific to NATS: subjects, headers, sizes, credentials, streams that the sink
//! creates, and faults of a server, of the network and of a cluster.

mod broker;
mod cluster;
mod connections;
mod faults;
mod hostile;
mod receiving;
mod stand;
mod streams;
mod unreadable;
