//! Tests of what is specific to RabbitMQ: routes, headers, sizes, returned messages, blocked
//! connections, users and certificates, and faults of a server and of the network.

mod broker;
mod connections;
mod faults;
mod hostile;
mod receiving;
mod stand;
mod unreadable;
