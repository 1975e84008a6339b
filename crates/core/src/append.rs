//! The append contract: the write side of every log.

use async_trait::async_trait;

use crate::error::Result;
use crate::event::{EventId, NewEvent};
use crate::names::LogName;

/// Appends events in a transaction of its own.
///
/// Appending in *your* transaction, which is what an outbox is for, is [`Postbox::append`]: it
/// takes the same events and gives the same result.
///
/// [`Postbox::append`]: crate::Postbox::append
/// [`kit::in_context`]: crate::kit::in_context
///
/// Behaviour:
/// - All events are appended or none; one round trip for any number of them.
/// - Ids come back in the order given. An event without an id gets a fresh UUIDv7.
/// - Every event is validated first (`limits`); the first fault is returned and nothing is written.
/// - An id that is in the log already: `Conflict`, code `event_id_taken`, nothing is written.
/// - An unknown log: `NotFound`, code `log_unknown`.
/// - Events carry on the current [`Context`](crate::Context), as [`kit::in_context`] fills it in.
/// - `seq` order within one call is the order given.
/// - Local relays of the same store are woken after the commit.
/// - Cancel-safety: a dropped future may or may not have committed; append again with the same ids
///   to find out.
#[async_trait]
pub trait Append: Send + Sync + 'static {
    /// Appends `events` to `log` and commits.
    async fn append(&self, log: &LogName, events: &[NewEvent]) -> Result<Vec<EventId>>;
}
