//! What is particular to NATS: subjects, headers, sizes, credentials, streams that are made, faults
//! of a server, of the way there and of a cluster.

mod broker;
mod cluster;
mod connections;
mod faults;
mod hostile;
mod receiving;
mod stand;
mod streams;
mod unreadable;
