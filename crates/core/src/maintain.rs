//! The maintenance contract: the upkeep of a log and of its store.

use std::time::Duration;

use async_trait::async_trait;

use crate::admin::Changed;
use crate::criteria::Criteria;
use crate::error::Result;
use crate::event::Seq;
use crate::names::LogName;

/// What one step of [`Maintain::note_unrouted`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use = "there may be more to look at"]
pub struct Routed {
    /// How many events were found that nobody wants.
    pub unrouted: u64,
    /// Whether there is more to look at.
    pub more: bool,
}

/// Which events to delete.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prune {
    /// Only events older than this, by the store's clock.
    pub older_than: Duration,
    /// Only these events.
    pub which: Criteria,
    /// Only those that were taken out and whose row has this code.
    pub code: Option<String>,
    /// Those that no subscription wants, which are kept otherwise, instead of all others.
    pub unrouted: bool,
    /// At most this many, oldest first.
    pub limit: Option<usize>,
    /// Only after this place: where the step before ended.
    pub after: Option<Seq>,
    /// Only count what the step would delete. It locks nothing.
    pub dry_run: bool,
}

impl Prune {
    /// Whether it means everything that is old. Only then rows go, too, whose event is gone: they
    /// have no topic, no key and no place among others.
    pub fn means_all(&self) -> bool {
        self.which == Criteria::default() && self.code.is_none() && !self.unrouted && self.limit.is_none()
    }
}

/// The upkeep of a log and of its store.
///
/// Behaviour:
/// - `note_unrouted` finds events that no subscription of the log wants, one bounded step; they are
///   `unrouted` from then on. What lies before the beginning of all of them is skipped, no more.
///   And it hands unrouted ones to a subscription that has begun to want them. It looks only where
///   every subscription wants less than everything, and never beyond a transaction that is still
///   open.
/// - `prune` deletes, of a bounded number of events after a place, those older than the age that
///   every subscription of their log has passed and whose delivery rows, if any, are `discarded`;
///   dead and pending ones stay. Unrouted ones stay too, unless they are asked for, and then only
///   they go. Go on with [`Changed::next`] until there is none: it is there even where a step found
///   nothing to delete, so that what has to stay is looked at once in a run.
///   Where [`PRUNE_YOUNG_MAX`](crate::kit::PRUNE_YOUNG_MAX) of a step's events are too young,
///   nothing beyond is looked at: times rise with `seq`, nearly. Rows of events that are gone
///   ([`Unreadable::MISSING`](crate::Unreadable::MISSING)) go at that age too, at the end of a run
///   nothing else narrows ([`Prune::means_all`]).
///   With a limit, a step that has reached it is the last one: take what was deleted from the limit
///   of the next.
///   A log without subscriptions is not pruned. Calls at once take turns.
/// - `create_log` is idempotent.
#[async_trait]
pub trait Maintain: Send + Sync + 'static {
    /// Makes a log beside `outbox` and `inbox`.
    async fn create_log(&self, log: &LogName) -> Result<()>;
    /// Finds what no subscription of a log wants, one step.
    async fn note_unrouted(&self, log: &LogName) -> Result<Routed>;
    /// Deletes old dispatched and skipped events of one log, one step: those after a place, or from
    /// the start.
    async fn prune(&self, log: &LogName, prune: &Prune) -> Result<Changed>;
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
