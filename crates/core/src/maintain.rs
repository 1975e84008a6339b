//! The maintenance contract: the upkeep of a log and of its store.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use crate::admin::Changed;
use crate::criteria::Criteria;
use crate::error::Result;
use crate::event::Seq;
use crate::names::LogName;

/// The result of one step of [`Maintain::note_unrouted`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use = "there may be more to look at"]
pub struct Routed {
    /// Number of events found that no subscription wants.
    pub unrouted: u64,
    /// Whether there is more to look at.
    pub more: bool,
}

/// Which events to delete.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prune {
    /// Only events older than this, by the store's clock.
    pub older_than: Duration,
    /// Only events that match.
    pub which: Criteria,
    /// Only events that were discarded and whose row has this code.
    pub code: Option<String>,
    /// Delete events that no subscription wants. Otherwise these are kept and all others are
    /// deleted.
    pub unrouted: bool,
    /// At most this many, oldest first.
    pub limit: Option<usize>,
    /// Only after this position, which is where the previous step ended.
    pub after: Option<Seq>,
    /// Only count what the step would delete. Takes no locks.
    pub dry_run: bool,
}

impl Prune {
    /// Returns whether every old event matches. Only then are rows without an event deleted too:
    /// these have no topic, no key and no position among others.
    pub fn means_all(&self) -> bool {
        self.which == Criteria::default() && self.code.is_none() && !self.unrouted && self.limit.is_none()
    }
}

/// The upkeep of a log and of its store.
///
/// Behaviour:
/// - `note_unrouted` finds events that no subscription of the log wants, in one bounded step, and
///   marks them `unrouted`. Events before the start of every subscription are only skipped. It also
///   hands unrouted events to a subscription that has begun to want them. It looks only if every
///   subscription wants less than everything, and never beyond a transaction that is still open.
/// - `prune` looks at a bounded number of events after a position. It deletes those older than the
///   age that every subscription of their log has passed and whose delivery rows, if any, are
///   `discarded`. Dead and pending events stay. Unrouted events stay too; if they are requested,
///   only they are deleted. Continue with [`Changed::next`] until there is none. It is set even if
///   a step deleted nothing, so that events which have to stay are looked at only once in a run. If
///   [`PRUNE_YOUNG_MAX`](crate::kit::PRUNE_YOUNG_MAX) of a step's events are too young, the run
///   ends there, because times rise almost in step with `seq`. Events from the future do not count:
///   a clock was wrong. Rows of events that are gone
///   ([`Unreadable::MISSING`](crate::Unreadable::MISSING)) are deleted at that age too, at the end
///   of a run without other filters ([`Prune::means_all`]). With a limit, a step that reaches it is
///   the last one. Subtract the deleted events from the limit of the next step. A log without
///   subscriptions is not pruned. Concurrent calls take turns.
/// - `create_log` is idempotent.
#[async_trait]
pub trait Maintain: Send + Sync + 'static {
    /// Creates a log in addition to `outbox` and `inbox`.
    async fn create_log(&self, log: &LogName) -> Result<()>;
    /// Finds events of a log that no subscription wants, in one step.
    async fn note_unrouted(&self, log: &LogName) -> Result<Routed>;
    /// Deletes old dispatched and skipped events of one log, in one step: after a position, or from
    /// the start.
    async fn prune(&self, log: &LogName, prune: &Prune) -> Result<Changed>;
    /// Returns the time of the store's clock, which decides how old an event is and when a pause
    /// ends. The clock of another machine may differ.
    async fn time(&self) -> Result<Timestamp>;
    /// Checks that the store can receive messages: no setting prevents it, and it is no standby.
    /// Changes nothing. The error names the cure.
    async fn check_receiving(&self) -> Result<()>;
    /// Checks that the cursors fit their database, which they do not after a dump was restored into
    /// another one, that nothing of the schema was dropped or moved, that the role sees every log
    /// that is read, and that no other role may create objects in the schema, where a store can
    /// tell. Changes nothing. Errors: `Mismatch` `cursor_from_future`, `cursor_foreign`,
    /// `schema_damaged`, `log_hidden` or `schema_open`, with the cure.
    async fn check_integrity(&self) -> Result<()>;
    /// Makes rows and cursors fit their database after a dump was restored into another one: the
    /// cure of `cursor_from_future` and `cursor_foreign`. Delivered events stay delivered, pending
    /// ones stay pending.
    ///
    /// Errors: `Conflict` `lanes_held` while a relay runs; `Conflict` `schema_in_use` if writers
    /// keep the logs locked for seconds; `Invalid` `rebase_not_needed` if cursors are plain
    /// numbers.
    async fn rebase(&self) -> Result<()>;
}
