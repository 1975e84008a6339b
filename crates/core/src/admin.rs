//! The administration contract: what an operator changes.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use crate::error::{Error, Result};
use crate::event::{Event, EventId, Seq};
use crate::inspect::Pause;
use crate::limits::CHANGE_EVENTS_MAX;
use crate::names::{Key, LogName, SubscriptionName, TopicPattern};

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

/// Which events to send again. `None` fields do not narrow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Replay {
    /// Only these events, whether the subscription wants them or not; at most
    /// [`CHANGE_EVENTS_MAX`].
    pub ids: Option<Vec<EventId>>,
    /// Only events with a topic matching this pattern.
    pub topic: Option<TopicPattern>,
    /// Only events of this key.
    pub key: Option<Key>,
    /// Only events that were appended at this time or later, by the store's clock.
    pub since: Option<Timestamp>,
    /// Only events that were appended before this time.
    pub until: Option<Timestamp>,
    /// Only after this place: where the step before ended.
    pub after: Option<Seq>,
    /// Only up to this place; `None`: to the end of the log as it is now.
    pub through: Option<Seq>,
    /// At most this many, oldest first. One step takes no more than [`CHANGE_EVENTS_MAX`].
    pub limit: Option<usize>,
}

impl Replay {
    /// Checks the number of ids. Stores call this first.
    pub fn validate(&self) -> Result<()> {
        Selection { ids: self.ids.clone(), ..Selection::default() }.validate("replay")
    }

    /// Whether it means an event at this place.
    pub fn means(&self, seq: Seq, event: &Event) -> bool {
        self.ids.as_ref().is_none_or(|ids| ids.contains(&event.id))
            && self.topic.as_ref().is_none_or(|pattern| pattern.matches(event.topic.as_str()))
            && (self.key.is_none() || self.key == event.key)
            && self.since.is_none_or(|since| event.created_at >= since)
            && self.until.is_none_or(|until| event.created_at < until)
            && self.after.is_none_or(|after| seq > after)
            && self.through.is_none_or(|through| seq <= through)
    }

    /// The most that one step sends.
    pub fn step_max(&self) -> usize {
        self.limit.unwrap_or(usize::MAX).min(CHANGE_EVENTS_MAX)
    }
}

/// What one step of a replay did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "there may be more: go on with `next` as `Replay::after` and `through` as `Replay::through`"]
pub struct Replayed {
    /// How many events are on their way again.
    pub count: u64,
    /// Where the next step begins; `None`: nothing that is meant is left.
    pub next: Option<Seq>,
    /// Where the range ends. What is appended, or delivered again, meanwhile is beyond it.
    pub through: Seq,
}

/// What one step of [`Admin::note_unrouted`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use = "there may be more to look at"]
pub struct Routed {
    /// How many events were found that nobody wants.
    pub unrouted: u64,
    /// Whether there is more to look at.
    pub more: bool,
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
/// - `replay` sends events again that went out or were skipped, one bounded step, beside the live
///   stream: each gets a delivery row that is due now, with a fresh
///   [`Delivery::replay`](crate::Delivery::replay), and so a dedupe id of its own. Of those that
///   the subscription wants now, unless they are named by id. It passes over what is pending or has
///   a delivery row. A step that finds nothing may still have a next one.
/// - `note_unrouted` finds events that no subscription of the log wants, one bounded step; they are
///   `unrouted` from then on. What lies before the beginning of all of them is skipped, no more.
///   And it hands unrouted ones to a subscription that has begun to want them. It looks only where
///   every subscription wants less than everything, and never beyond a transaction that is still
///   open.
/// - `prune` deletes, of a bounded number of events after a place, those older than the age that
///   every subscription of their log has passed and whose delivery rows, if any, are `discarded`;
///   dead and pending ones stay, and unrouted ones: `give_up_unrouted` comes first. Go on with
///   [`Changed::next`] until there is none: it is there even
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
    /// Sends events again that went out or were skipped, one step.
    async fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed>;
    /// Finds what no subscription of a log wants, one step.
    async fn note_unrouted(&self, log: &LogName) -> Result<Routed>;
    /// Gives up unrouted events of one log that are older than an age: they are skipped from then
    /// on, and `prune` takes them. One step; how many.
    async fn give_up_unrouted(&self, log: &LogName, older_than: Duration) -> Result<u64>;
    /// Deletes old dispatched and skipped events of one log, one step: those after a place, or from
    /// the start.
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
