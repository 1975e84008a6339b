//! The keys of `sink = { type = "lines", … }`.

use std::sync::Arc;

use async_trait::async_trait;
use postbox::Result;
use postbox::contract::Sink;
use postbox_config::{SinkConfig, SinkContext, integer, table, text};

use crate::LinesSink;

table! {
    /// Events as lines over TCP.
    pub struct LinesConfig {
        /// Where to: `HOST:PORT`.
        address: String = text(address), required(r#""127.0.0.1:7000""#);
        /// Most calls at once, each on a connection of its own.
        connections: usize = integer(1_usize..=256), default(8);
    }
}

fn address(text: &str) -> Result<String, String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(text.to_owned()),
        _ => Err(format!("{text:?} is not a valid address; write HOST:PORT")),
    }
}

#[async_trait]
impl SinkConfig for LinesConfig {
    async fn build(&self, _: &SinkContext) -> postbox::Result<Arc<dyn Sink>> {
        Ok(Arc::new(LinesSink::new(self)))
    }
}
