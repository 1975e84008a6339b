//! The tail contract: a log as it grows, watched without a subscription.

use async_trait::async_trait;

use crate::batch::BatchLimit;
use crate::criteria::Criteria;
use crate::error::{Error, Result};
use crate::event::{Event, Seq};
use crate::names::LogName;

/// What was committed since a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tailed {
    /// The events with their positions in the log.
    pub events: Vec<(Seq, Event)>,
    /// Where to continue, in the store's own format and for this log only.
    pub place: String,
    /// Whether there may be more right now.
    pub more: bool,
}

/// A log as it grows, for people who watch it. A program that must not lose an event needs a
/// subscription.
///
/// Behaviour:
/// - Without a place it begins now: it returns no event, and the place after everything committed.
/// - From a place on it returns each event that was committed since, once, whatever its `seq`. An
///   event whose transaction commits late comes at that time. Events of one key come in commit
///   order, under the condition of [`Log`](crate::Log).
/// - It returns only events that match the criteria.
/// - An event that cannot be read is returned as far as possible.
/// - It writes nothing and holds up nothing, not even retention: events deleted before they were
///   read are not returned. Events it returns are committed, but may not be on disk yet, so a crash
///   of the store may take them back.
/// - An unknown log: `NotFound`, code `log_unknown`. A place of something else: `Invalid`, code
///   `place_invalid`.
#[async_trait]
pub trait Tail: Send + Sync + 'static {
    /// Returns the next events after a place, possibly none.
    async fn tail(&self, log: &LogName, which: &Criteria, place: Option<&str>, limit: BatchLimit) -> Result<Tailed>;
}

/// The error of a place that no tail returned.
pub fn place_invalid(place: &str) -> Error {
    Error::invalid("tail", "place_invalid", format!("{place:?} is not a place of a tail; begin without one"))
}
