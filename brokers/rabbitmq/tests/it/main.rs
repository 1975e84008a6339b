//! What is particular to RabbitMQ: routes, headers, sizes, returned messages, blocked connections,
//! users and certificates, faults of a server and of the way there.

mod broker;
mod connections;
mod faults;
mod hostile;
mod receiving;
mod stand;
mod unreadable;
