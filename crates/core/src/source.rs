//! The source contract: where messages from brokers come from.

use async_trait::async_trait;

use crate::error::Result;
use crate::receive::Inbound;

/// A message from a broker and the handle to acknowledge it by.
#[derive(Debug)]
pub struct SourceMessage {
    /// The message, ready for [`crate::Receive`].
    pub inbound: Inbound,
    /// The source's own handle.
    pub tag: u64,
}

/// A broker consumer. (Webhooks push and go straight to [`crate::Receive`].)
///
/// Behaviour:
/// - `next` waits for messages and gives at least one, at most `max`. Cancel-safe: a message not yet given is not lost.
/// - A message is acknowledged only after it was stored durably; one that is neither acknowledged nor refused comes again.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// The next messages.
    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>>;
    /// These are stored.
    async fn ack(&self, tags: &[u64]) -> Result<()>;
    /// These could not be stored now; send them again.
    async fn nak(&self, tags: &[u64]) -> Result<()>;
}

const _: Option<&dyn Source> = None;
