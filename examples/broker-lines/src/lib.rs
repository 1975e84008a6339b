//! A sink that sends events as lines over TCP: the layout of a broker's crate, in one folder.

mod classify;
mod config;
pub mod server;
mod sink;

pub use config::LinesConfig;
pub use sink::LinesSink;
