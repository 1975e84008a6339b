//! The administration contract: changes that an operator makes to a subscription and its events.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use crate::batch::Disposition;
use crate::criteria::Criteria;
use crate::error::{Error, Result};
use crate::event::{Event, EventId, Seq};
use crate::inspect::Pause;
use crate::limits::{CHANGE_EVENTS_MAX, WHY_BYTES_MAX};
use crate::names::SubscriptionName;
use crate::state::State;

/// What happens to the selected events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Dead events are sent again, and retrying ones are sent now.
    Retry,
    /// Events are taken out and not delivered.
    Discard,
    /// Events become dead: no further attempt until a retry.
    MarkDead {
        /// Why, for people who read it later. Cut at [`WHY_BYTES_MAX`].
        why: Option<String>,
    },
}

impl Change {
    /// Returns its name in errors and in SQL.
    pub fn operation(&self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Discard => "discard",
            Self::MarkDead { .. } => "mark_dead",
        }
    }

    /// Returns the state a row gets.
    pub fn state(&self) -> State {
        match self {
            Self::Retry => State::Retrying,
            Self::Discard => State::Discarded,
            Self::MarkDead { .. } => State::Dead,
        }
    }

    /// Returns whether a row in this state may be changed, whatever the selection says. A scheduled
    /// event can be cancelled but not marked dead, because a retry would then send it before its
    /// time.
    pub fn takes(&self, from: State) -> bool {
        from.may_become(self.state()) && !(from == State::Scheduled && self.state() == State::Dead)
    }

    /// Returns the code it writes, if any.
    pub fn code(&self) -> Option<&'static str> {
        matches!(self, Self::MarkDead { .. }).then_some(Disposition::MARKED_DEAD)
    }

    /// Returns who decided, as text that is written before a row's old error and `; before: `.
    pub fn note(&self, selection: &Selection) -> Option<String> {
        match self {
            Self::Retry => None,
            Self::Discard => selection.given_up(),
            Self::MarkDead { why } => {
                let why = why.as_deref().unwrap_or_default();
                let why = why[..why.floor_char_boundary(WHY_BYTES_MAX)].replace('\0', "\u{fffd}");
                Some(if why.is_empty() { BY_A_PERSON.to_owned() } else { format!("{BY_A_PERSON}: {why}") })
            }
        }
    }
}

/// The start of the error of an event that was marked dead.
const BY_A_PERSON: &str = "marked dead by a person";

/// Which delivery rows to change. A field that is `None` does not filter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selection {
    /// Only these events; at most [`CHANGE_EVENTS_MAX`].
    pub ids: Option<Vec<EventId>>,
    /// Only rows of events that match. If this filters, rows whose event is gone from the log do
    /// not match.
    pub which: Criteria,
    /// Only rows with this code.
    pub code: Option<String>,
    /// Only rows that have been dead for this long, by the store's clock, and do not hold their
    /// key. A row that holds its key waits for a person.
    pub dead_for: Option<Duration>,
    /// Only after this position, which is where the previous step ended.
    pub after: Option<Seq>,
    /// At most this many, oldest first. One step changes at most [`CHANGE_EVENTS_MAX`].
    pub limit: Option<usize>,
    /// Only count what the step would change.
    pub dry_run: bool,
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

    /// Returns whether a row with this code matches. A row without a code does not match if one is
    /// set.
    pub fn means_code(&self, code: Option<&str>) -> bool {
        self.code.is_none() || self.code.as_deref() == code
    }

    /// Returns whether a row matches by its state, by whether it holds its key, and by the time
    /// since its last change.
    pub fn means_state(&self, state: State, holds: bool, unchanged_for: Duration) -> bool {
        self.dead_for.is_none_or(|least| state == State::Dead && !holds && unchanged_for >= least)
    }

    /// Returns whether events without a row match, if they are named by id.
    pub fn means_unread(&self) -> bool {
        self.code.is_none() && self.dead_for.is_none()
    }

    /// Returns the note for events that are given up by age, which no person decided.
    fn given_up(&self) -> Option<String> {
        const DAY_SECS: u64 = 24 * 3_600;
        let age = self.dead_for?;
        let text = match age.as_secs() {
            secs if secs > 0 && secs.is_multiple_of(DAY_SECS) => format!("{} d", secs / DAY_SECS),
            _ => format!("{age:?}"),
        };
        Some(format!("given up by retention after {text} as a dead event"))
    }

    /// Returns the maximum number of events one step changes.
    pub fn step_max(&self) -> usize {
        self.limit.unwrap_or(usize::MAX).min(CHANGE_EVENTS_MAX)
    }
}

/// The result of one step of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use = "there may be more: continue with `next` as `Selection::after`"]
pub struct Changed {
    /// Number of events this step changed.
    pub count: u64,
    /// Where the next step begins; `None` if no selected event is left.
    pub next: Option<Seq>,
}

/// Which events to send again. A field that is `None` does not filter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Replay {
    /// Only these events, whether the subscription wants them or not. At most
    /// [`CHANGE_EVENTS_MAX`].
    pub ids: Option<Vec<EventId>>,
    /// Only events that match.
    pub which: Criteria,
    /// Only after this position, which is where the previous step ended.
    pub after: Option<Seq>,
    /// Only up to this position; `None`: to the current end of the log.
    pub through: Option<Seq>,
    /// At most this many, oldest first. One step sends at most [`CHANGE_EVENTS_MAX`].
    pub limit: Option<usize>,
    /// Only count what the step would send.
    pub dry_run: bool,
}

impl Replay {
    /// Checks the number of ids. Stores call this first.
    pub fn validate(&self) -> Result<()> {
        Selection { ids: self.ids.clone(), ..Selection::default() }.validate("replay")
    }

    /// Returns whether an event at this position matches. An expired event never does.
    pub fn means(&self, seq: Seq, event: &Event, now: Timestamp) -> bool {
        event.expires_at.is_none_or(|end| end > now)
            && self.ids.as_ref().is_none_or(|ids| ids.contains(&event.id))
            && self.which.mean_event(Some(event))
            && self.after.is_none_or(|after| seq > after)
            && self.through.is_none_or(|through| seq <= through)
    }

    /// Returns the maximum number of events one step sends.
    pub fn step_max(&self) -> usize {
        self.limit.unwrap_or(usize::MAX).min(CHANGE_EVENTS_MAX)
    }
}

/// The result of one step of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "there may be more: continue with `next` as `Replay::after` and `through` as `Replay::through`"]
pub struct Replayed {
    /// Number of events that are sent again.
    pub count: u64,
    /// Where the next step begins; `None` if no selected event is left.
    pub next: Option<Seq>,
    /// Where the range ends. Events that are appended or delivered again meanwhile are beyond it.
    pub through: Seq,
}

/// Where a subscription continues after a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetTo {
    /// With the oldest event that is still in the log.
    Beginning,
    /// With events that commit from now on.
    Now,
    /// With the first event that was appended at this time or later, by the store's clock.
    Time(Timestamp),
    /// With the event at this position.
    Seq(Seq),
}

/// The effect of a reset.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ResetPlan {
    /// Events that were passed and go out again, including dead ones and ones with a delivery row.
    pub again: u64,
    /// Unread events that are skipped.
    pub skipped: u64,
    /// Whether the counts are lower bounds, because one of them exceeds
    /// [`LOOK_EVENTS_MAX`](crate::kit::LOOK_EVENTS_MAX), or the log is too large to look at all.
    pub is_estimate: bool,
    /// The epochs of all lanes when this was counted. Shows whether a lane was taken since.
    pub stamp: String,
}

/// Changes that an operator makes to a subscription and its events.
///
/// Behaviour:
/// - If the subscription does not exist: `NotFound`, code `subscription_unknown`, with the known
///   names in the message.
/// - `change` takes one bounded step with its own commit, so that no relay waits for long. A step
///   changes at most [`CHANGE_EVENTS_MAX`] events. Continue with [`Changed::next`] until there is
///   none. Events before `next` that die again during the run are not retried twice.
/// - A dry run of `change` or `replay` counts in the same steps and changes nothing. It reports
///   what a run right after it would change, unless something moves in between. It takes no locks.
/// - [`Change::Retry`] makes dead rows due now, with attempts 0 and one more replay, and retrying
///   rows due now. It is idempotent: a second call finds nothing dead. It never touches events that
///   are pending, dispatched or discarded. Nor does it touch an event that was marked dead before
///   it was read, until its lane has passed it: otherwise the event would go out twice.
/// - [`Change::Discard`] takes out events that are retrying, blocked, scheduled, dead or still
///   pending, and releases the next of their keys. Discarded events are never delivered (except one
///   already in flight). Pending ones must be named by id. A row keeps its code and its error; with
///   [`Selection::dead_for`], the error then begins with [`Change::note`].
/// - [`Change::MarkDead`] makes events dead that are retrying, blocked or still pending. Pending
///   ones must be named by id, and have no `deliver_at`. Attempts and replays stay, the code
///   becomes [`Disposition::MARKED_DEAD`], and the error begins with [`Change::note`]. The events
///   are then dead like any other: they become dead letters, are never due, and a retry revives
///   them. They hold their key if the subscription says so ([`OnDead::Halt`](crate::OnDead::Halt));
///   otherwise the next of the key is released. An event in flight may still arrive, and its
///   outcome then changes nothing.
/// - `replay` sends events again that were delivered or skipped, in one bounded step beside the
///   live stream. Each gets a delivery row that is due now, with a fresh
///   [`Delivery::replay`](crate::Delivery::replay) and therefore its own dedupe id. Only events
///   that the subscription wants now are sent, unless they are named by id. Events that are pending
///   or have a delivery row are skipped. A step that finds nothing may still have a next one.
/// - `pause(None)` resumes. A pause that would end in the past, by the store's clock, changes
///   nothing: `Invalid`, code `until_past` ([`Pause::validate`]).
/// - `rename` keeps everything but the name. A relay of the former name loses its lanes. Nobody
///   gets them before its lease would have ended. `Conflict` `subscription_exists` if the new name
///   is taken. A repeated call finds it done and succeeds. A store whose rows have the name
///   (SQLite) changes all of them in one transaction: `Conflict` `rows_many` beyond
///   [`ROWS_MOVED_MAX`](crate::kit::ROWS_MOVED_MAX).
/// - `remove` ends a subscription. Its cursor, rows and dead letters are deleted, and events that
///   only it still had to deliver may be pruned. If the same name is created again, it starts like
///   any new subscription, and no earlier lease counts.
/// - `rename` and `remove` apply to the subscription that was looked at
///   ([`SubscriptionInfo::generation`](crate::SubscriptionInfo::generation)). If the name belongs
///   to another one by now: `Conflict` `subscription_changed`.
/// - `reset` without a stamp only counts. With the stamp of that count it moves all lanes at once.
///   To an earlier position: everything passed since is read again, with a fresh
///   [`Delivery::replay`](crate::Delivery::replay), whatever its state was (except discarded
///   events). To a later position: everything in between is skipped. Rows that wait or are dead
///   before the position stay. `Conflict` `lanes_held` while a relay holds a lane;
///   `subscription_changed` if a lane was taken since the count, or if the reset is done already.
/// - `set_lanes` changes the number of lanes, even while relays run. Each key keeps its order, and
///   nobody gets a lane before the leases of the former lanes would have ended. Events that one
///   lane has passed and another has not leave the stream. `Conflict` `lanes_apart` if they are
///   more than [`LANES_APART_MAX`](crate::limits::LANES_APART_MAX). A repeated call finds it done
///   and succeeds.
#[async_trait]
pub trait Admin: Send + Sync + 'static {
    /// Changes undelivered events, in one step.
    async fn change(&self, subscription: &SubscriptionName, change: &Change, selection: &Selection) -> Result<Changed>;
    /// Sends events again that were delivered or skipped, in one step.
    async fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed>;
    /// Pauses or resumes. A pause ends running leases at their next renewal.
    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()>;
    /// Renames a subscription.
    async fn rename(&self, subscription: &SubscriptionName, generation: i64, to: &SubscriptionName) -> Result<()>;
    /// Removes a subscription.
    async fn remove(&self, subscription: &SubscriptionName, generation: i64) -> Result<()>;
    /// Moves a subscription to another position, or counts what that would do.
    async fn reset(&self, subscription: &SubscriptionName, to: ResetTo, stamp: Option<&str>) -> Result<ResetPlan>;
    /// Changes the number of lanes, and with it how many replicas can work at once.
    async fn set_lanes(&self, subscription: &SubscriptionName, lanes: u16) -> Result<()>;
}
