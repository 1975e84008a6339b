//! Two tenants in one database: neither sees, changes, counts or blocks rows of the other.

mod apart;
mod hostile;
mod owner;
mod unlimited;
mod world;
