//! Config, wiring, HTTP API and metrics: what turns the Postbox library into a service.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use postbox_server::{Config, Service};
//!
//! let config = Config::parse("[subscriptions.orders-out]\nsink = { type = \"stdout\" }\n")?;
//! let service = Service::start(config).await?;
//! println!("http://{}/readyz", service.address());
//! service.stop();
//! service.wait().await?;
//! # Ok(()) }
//! ```
//!
//! # What this crate deliberately does not do
//!
//! It contains no SQL and no delivery logic: it reads the configuration, connects stores, relays
//! and sinks, and reports their state.

mod bus;
mod cache;
mod config;
mod connect;
mod cron;
mod fault;
mod http;
mod lease;
mod metrics;
mod served_store;
mod service;
mod sinks;
mod sources;
pub mod status;
mod stores;
mod supervised_receiver;
pub mod text;
mod wiring;

pub use config::*;
pub use connect::{Tried, connect};
pub use cron::Cron;
pub use lease::{LaneLeases, LeaseChoice};
pub use postbox_config::{Fault, Faults, ReadOptions, Secret, parse_duration};
pub use postbox_postgres::{Roles, ToolScripts};
pub use service::Service;
pub use sinks::SinkChoice;
pub use sources::NamedSource;
pub use stores::{
    NamedStore, StoreConfig, check_standby, check_store_url, grants, open_store, tool_scripts, validate_schema,
};
pub use wiring::{Sinks, relay};
