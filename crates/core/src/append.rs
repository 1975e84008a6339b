//! The append contract: the write side of every log.

use std::ops::Deref;

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
/// - An event whose id is in the log already, with the same topic, key, tenant and payload, is
///   *known*: it is not appended again, the others are, and the answer says so. The log's event
///   stays as it is, whatever else the two differ in. Within one call the second of two is known.
/// - An id that is in the log with another topic, key, tenant or payload: `Conflict`, code
///   `event_id_taken`, nothing is written.
/// - What retention has deleted is not known any more: it is appended again.
/// - An unknown log: `NotFound`, code `log_unknown`.
/// - Events carry on the current [`Context`](crate::Context), as [`kit::in_context`] fills it in.
/// - `seq` order within one call is the order given.
/// - Local relays of the same store are woken after the commit.
/// - Cancel-safety: a dropped future may or may not have committed; append again with the same ids
///   to find out.
#[async_trait]
pub trait Append: Send + Sync + 'static {
    /// Appends `events` to `log` and commits.
    async fn append(&self, log: &LogName, events: &[NewEvent]) -> Result<Appended>;
}

/// What an append gives: the ids, as a slice, and whether they are new.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Appended {
    ids: Vec<EventId>,
    known: usize,
}

impl Appended {
    /// The ids of all events in the order given, and how many of them were known.
    pub fn new(ids: Vec<EventId>, known: usize) -> Self {
        Self { ids, known }
    }

    /// The id of the only event, or of the first.
    ///
    /// # Panics
    ///
    /// Where there was nothing to append.
    pub fn id(&self) -> EventId {
        *self.ids.first().expect("there was an event to append")
    }

    /// The ids of all events, known or new, in the order given.
    pub fn ids(&self) -> &[EventId] {
        &self.ids
    }

    /// How many were in the log already, with the same content, and were not appended again.
    pub fn known(&self) -> usize {
        self.known
    }

    /// Whether none was in the log already.
    pub fn is_new(&self) -> bool {
        self.known == 0
    }
}

impl Deref for Appended {
    type Target = [EventId];

    fn deref(&self) -> &[EventId] {
        &self.ids
    }
}

impl IntoIterator for Appended {
    type Item = EventId;
    type IntoIter = std::vec::IntoIter<EventId>;

    fn into_iter(self) -> Self::IntoIter {
        self.ids.into_iter()
    }
}
