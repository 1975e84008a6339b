//! The tail contract: a log as it grows, looked at without a subscription.

use async_trait::async_trait;

use crate::batch::BatchLimit;
use crate::criteria::Criteria;
use crate::error::{Error, Result};
use crate::event::{Event, Seq};
use crate::names::LogName;

/// What was committed since a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tailed {
    /// The events with their places in the log.
    pub events: Vec<(Seq, Event)>,
    /// Where to go on, in the store's own words and for this log only.
    pub place: String,
    /// Whether there may be more at once.
    pub more: bool,
}

/// A log as it grows. For people who watch: whoever must not lose an event subscribes.
///
/// Behaviour:
/// - Without a place it begins now: no event, and the place beyond all that is committed.
/// - From a place on it gives each event that was committed since, once, whatever its `seq`: one
///   whose transaction commits late comes then. Those of one key come in commit order, under the
///   condition of [`Log`](crate::Log).
/// - Only what the criteria mean; the rest is passed.
/// - An event that cannot be read is given as far as it can be.
/// - It writes nothing and holds up nobody, retention neither: what is deleted before it was read
///   is not given. What it gives is committed, and may not be on disk yet: a crash of the store may
///   take it back.
/// - An unknown log: `NotFound`, code `log_unknown`. A place of something else: `Invalid`, code
///   `place_invalid`.
#[async_trait]
pub trait Tail: Send + Sync + 'static {
    /// The next events after a place, possibly none.
    async fn tail(&self, log: &LogName, which: &Criteria, place: Option<&str>, limit: BatchLimit) -> Result<Tailed>;
}

/// The error of a place that no tail gave.
pub fn place_invalid(place: &str) -> Error {
    Error::invalid("tail", "place_invalid", format!("{place:?} is no place of a tail; begin without one"))
}
