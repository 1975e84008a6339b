//! What a sink adapter hands to whoever joins the adapters: its keys, and how it is built from
//! them.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Clock, Result, Sink};

use crate::Table;
use crate::key::{Key, Variant};
use crate::reader::Section;

/// What a sink is built with beside its own keys.
#[derive(Clone)]
pub struct SinkContext {
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Where the service listens: a sink never calls that.
    pub listening: Vec<SocketAddr>,
    /// Longest time for one call, after which the engine drops it.
    pub deliver_timeout: Duration,
    /// Most calls at once, where the subscription says so.
    pub concurrency: Option<usize>,
}

/// The configuration of a sink, which builds it.
#[async_trait]
pub trait SinkConfig: fmt::Debug + Send + Sync + 'static {
    /// Builds the sink. Everything that can be wrong is found here, before the first event.
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>>;
}

/// One row of the table of sinks.
pub struct SinkType {
    /// The word after `type =`.
    pub name: &'static str,
    /// An example, as an inline table.
    pub example: &'static str,
    doc: fn() -> String,
    keys: fn() -> Vec<Key>,
    read: fn(&Section<'_>) -> Arc<dyn SinkConfig>,
}

impl SinkType {
    /// The row of a sink whose keys are `C`.
    pub const fn new<C: SinkConfig + Table>(name: &'static str, example: &'static str) -> Self {
        Self { name, example, doc: C::doc, keys: C::keys, read: |section| Arc::new(C::read(section)) }
    }

    /// Reads its keys.
    pub fn read(&self, section: &Section<'_>) -> Arc<dyn SinkConfig> {
        (self.read)(section)
    }

    /// For documents.
    pub fn variant(&self) -> Variant {
        Variant { name: self.name, doc: (self.doc)(), keys: (self.keys)(), example: self.example }
    }
}

const _: Option<&dyn SinkConfig> = None;
