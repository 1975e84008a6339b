//! Config, wiring, HTTP API and metrics: what turns the Postbox library into a service.

mod config;
mod schedule;
mod secret;
mod store;
mod wiring;

pub use config::*;
pub use schedule::Schedule;
pub use secret::Secret;
pub use store::{MissingFile, StoreUrl, count_outbox, open_store, schema_script};
