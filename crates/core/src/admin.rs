//! The administration contract: what an operator changes.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, Result};
use crate::event::{EventId, Seq};
use crate::inspect::Pause;
use crate::limits::CHANGE_EVENTS_MAX;
use crate::names::{LogName, SubscriptionName, TopicPattern};

/// Which delivery rows to change. `None` fields do not narrow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selection {
    /// Only these events; at most [`CHANGE_EVENTS_MAX`].
    pub ids: Option<Vec<EventId>>,
    /// Only rows with a topic matching this pattern.
    pub topic: Option<TopicPattern>,
    /// Only rows with this code.
    pub code: Option<String>,
    /// Only after this place: where the step before ended.
    pub after: Option<Seq>,
    /// At most this many, oldest first. One step takes no more than [`CHANGE_EVENTS_MAX`].
    pub limit: Option<usize>,
}

impl Selection {
    /// Checks the number of ids. Stores call this first.
    pub fn validate(&self, operation: &'static str) -> Result<()> {
        let ids = self.ids.as_ref().map_or(0, Vec::len);
        if ids > CHANGE_EVENTS_MAX {
            let text = format!("{ids} ids are too many for one call; give at most {CHANGE_EVENTS_MAX} at a time");
            return Err(Error::invalid(operation, "too_many_ids", text));
        }
        Ok(())
    }

    /// Whether it means a row with this topic and code. What has none is not meant where one is
    /// asked for.
    pub fn means(&self, topic: Option<&str>, code: Option<&str>) -> bool {
        self.topic.as_ref().is_none_or(|pattern| topic.is_some_and(|topic| pattern.matches(topic)))
            && (self.code.is_none() || self.code.as_deref() == code)
    }

    /// The most that one step changes.
    pub fn step_max(&self) -> usize {
        self.limit.unwrap_or(usize::MAX).min(CHANGE_EVENTS_MAX)
    }
}

/// What one step of a change did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use = "there may be more: go on with `next` as `Selection::after`"]
pub struct Changed {
    /// How many events this step changed.
    pub count: u64,
    /// Where the next step begins; `None`: nothing that is meant is left.
    pub next: Option<Seq>,
}

/// What an operator changes.
///
/// Behaviour:
/// - A subscription that does not exist: `NotFound`, code `subscription_unknown`, with the known
///   names in the message.
/// - `retry` and `discard` take one bounded step, committed by itself, so that no relay waits for
///   long: at most [`CHANGE_EVENTS_MAX`] events. Go on with [`Changed::next`] until there is none.
///   Events before `next` that die again during the run are not retried twice.
/// - `retry` makes dead rows due now with attempts 0 and one more replay, and retrying rows due
///   now; idempotent: a second call finds nothing dead. It never touches events that are pending,
///   dispatched or discarded.
/// - `discard` takes events out that are retrying, blocked, scheduled, dead or still pending, and
///   releases the next of their keys; discarded events are never delivered (except one already in
///   flight). Pending ones must be named by id.
/// - `prune` deletes, of a bounded number of events after a place, those older than the age that
///   every subscription of their log has passed and whose delivery rows, if any, are `discarded`;
///   dead and pending ones stay. Go on with [`Changed::next`] until there is none: it is there even
///   where a step found nothing to delete, so that what has to stay is looked at once in a run.
///   Where [`PRUNE_YOUNG_MAX`](crate::kit::PRUNE_YOUNG_MAX) of a step's events are too young,
///   nothing beyond is looked at: times rise with `seq`, nearly. Rows of events that are gone
///   ([`Unreadable::MISSING`](crate::Unreadable::MISSING)) go at that age too, at the end of a run.
///   A log without subscriptions is not pruned. Calls at once take turns.
/// - `pause(None)` resumes.
/// - `create_log` is idempotent.
#[async_trait]
pub trait Admin: Send + Sync + 'static {
    /// Sends dead (and retrying) events again now, one step.
    async fn retry(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed>;
    /// Takes events out, one step.
    async fn discard(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed>;
    /// Deletes old dispatched events of one log, one step: those after a place, or from the start.
    async fn prune(&self, log: &LogName, older_than: Duration, after: Option<Seq>) -> Result<Changed>;
    /// Pauses or resumes. A pause ends running leases at their next renewal.
    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()>;
    /// Makes a log beside `outbox` and `inbox`.
    async fn create_log(&self, log: &LogName) -> Result<()>;
    /// Checks that nothing in the store's settings keeps messages from being received. Changes
    /// nothing; the error names the cure.
    async fn check_receiving(&self) -> Result<()>;
    /// Makes rows and cursors fit the database they are in, after a dump was restored into another
    /// one: the cure of `cursor_from_future` and `cursor_foreign`. What was delivered stays
    /// delivered, what was pending stays pending.
    ///
    /// Errors: `Conflict` `lanes_held` while a relay runs; `Invalid` `rebase_not_needed` where
    /// cursors are plain numbers.
    async fn rebase(&self) -> Result<()>;
}
