//! What the store keeps to itself, whoever calls it and however the database is set: roles with no
//! more rights than they need, tenants, forged rows, planted functions, odd settings, other
//! encodings, dumps.

mod dump;
mod encodings;
mod everything;
mod forged;
mod names;
mod roles;
mod settings;
mod tenants;
mod twins;

pub(crate) use roles::url_as;
