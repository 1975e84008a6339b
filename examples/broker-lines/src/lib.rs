//! A sink that sends events as lines over TCP: what a broker's crate looks like, in one folder.

mod classify;
mod config;
pub mod server;
mod sink;

pub use config::LinesConfig;
pub use sink::LinesSink;
