//! The append contract: the write side of every log.

use std::ops::Deref;

use async_trait::async_trait;

use crate::error::Result;
use crate::event::{EventId, NewEvent};
use crate::names::LogName;

/// Appends events in its own transaction.
///
/// To append in *your* transaction, which is what an outbox is for, use [`Postbox::append`]. It
/// takes the same events and returns the same result.
///
/// [`Postbox::append`]: crate::Postbox::append
/// [`kit::in_context`]: crate::kit::in_context
///
/// Behaviour:
/// - All events are appended or none, in one round trip for any number of events.
/// - Ids come back in the order given. An event without an id gets a fresh UUIDv7.
/// - Every event is validated first (`limits`). The first fault is returned and nothing is written.
/// - An event whose id is in the log already, with the same topic, key, tenant and payload, is
///   *known*. It is not appended again, the others are, and the result says so. The event in the
///   log stays as it is, even if other fields differ. If one call has the same event twice, the
///   second is known.
/// - If an id is in the log with another topic, key, tenant or payload: `Conflict`, code
///   `event_id_taken`. Nothing is written.
/// - An event that retention has deleted is no longer known, so it is appended again.
/// - An unknown log: `NotFound`, code `log_unknown`.
/// - Events inherit the current [`Context`](crate::Context), as [`kit::in_context`] fills it in.
/// - Within one call, `seq` follows the order given.
/// - Local relays of the same store are woken after the commit.
/// - Cancel-safety: if the future is dropped, it may or may not have committed. Append again with
///   the same ids to find out.
#[async_trait]
pub trait Append: Send + Sync + 'static {
    /// Appends `events` to `log` and commits.
    async fn append(&self, log: &LogName, events: &[NewEvent]) -> Result<Appended>;
}

/// The result of an append: the ids, as a slice, and whether they are new.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Appended {
    ids: Vec<EventId>,
    known: usize,
}

impl Appended {
    /// Creates a result from the ids of all events, in the order given, and the number of known
    /// ones.
    pub fn new(ids: Vec<EventId>, known: usize) -> Self {
        Self { ids, known }
    }

    /// Returns the id of the only event, or of the first.
    ///
    /// # Panics
    ///
    /// If there was nothing to append.
    pub fn id(&self) -> EventId {
        *self.ids.first().expect("there was an event to append")
    }

    /// Returns the ids of all events, known or new, in the order given.
    pub fn ids(&self) -> &[EventId] {
        &self.ids
    }

    /// Returns how many events were in the log already, with the same content, and were not
    /// appended.
    pub fn known(&self) -> usize {
        self.known
    }

    /// Returns whether none of the events was in the log already.
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
