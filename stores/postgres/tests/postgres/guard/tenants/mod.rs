//! Two tenants in one database: neither sees, changes, counts or hinders what is the other's.

mod apart;
mod owner;
mod world;
