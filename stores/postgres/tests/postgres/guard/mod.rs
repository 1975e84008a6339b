//! What the store protects, whatever calls it and however the database is configured: roles with
//! minimal rights, tenants, forged rows, planted functions, odd settings, other encodings, dumps.

mod dump;
mod encodings;
mod everything;
mod forged;
mod names;
mod roles;
mod settings;
mod tenants;
mod twins;
