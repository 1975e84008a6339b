//! The administration contract: what an operator changes of a subscription and its events.

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

/// What becomes of the events that a person means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Dead events are sent again, and retrying ones now.
    Retry,
    /// They are taken out, and not delivered.
    Discard,
    /// They are dead now: no attempt more, until a retry.
    MarkDead {
        /// Why, for whoever reads it later; cut at [`WHY_BYTES_MAX`].
        why: Option<String>,
    },
}

impl Change {
    /// The word for it, in errors and in SQL.
    pub fn operation(&self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Discard => "discard",
            Self::MarkDead { .. } => "mark_dead",
        }
    }

    /// What a row becomes.
    pub fn state(&self) -> State {
        match self {
            Self::Retry => State::Retrying,
            Self::Discard => State::Discarded,
            Self::MarkDead { .. } => State::Dead,
        }
    }

    /// Whether a row in this state may be meant, whatever the selection says. What waits for its
    /// time is cancelled, not marked: a retry would send it before that.
    pub fn takes(&self, from: State) -> bool {
        from.may_become(self.state()) && !(from == State::Scheduled && self.state() == State::Dead)
    }

    /// The code it writes, if it writes one.
    pub fn code(&self) -> Option<&'static str> {
        matches!(self, Self::MarkDead { .. }).then_some(Disposition::MARKED_DEAD)
    }

    /// What it writes before a row's error and `; before: `: who decided.
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

/// How the error of a marked event begins.
const BY_A_PERSON: &str = "marked dead by a person";

/// Which delivery rows to change. `None` fields do not narrow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selection {
    /// Only these events; at most [`CHANGE_EVENTS_MAX`].
    pub ids: Option<Vec<EventId>>,
    /// Only rows of these events. What is gone from the log is not meant where they narrow.
    pub which: Criteria,
    /// Only rows with this code.
    pub code: Option<String>,
    /// Only rows that have been dead for this long, by the store's clock, and hold no key: what
    /// holds one waits for a person.
    pub dead_for: Option<Duration>,
    /// Only after this place: where the step before ended.
    pub after: Option<Seq>,
    /// At most this many, oldest first. One step takes no more than [`CHANGE_EVENTS_MAX`].
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

    /// Whether it means a row with this code. What has none is not meant where one is asked for.
    pub fn means_code(&self, code: Option<&str>) -> bool {
        self.code.is_none() || self.code.as_deref() == code
    }

    /// Whether it means a row in this state, that holds its key or not, and last changed so long
    /// ago.
    pub fn means_state(&self, state: State, holds: bool, unchanged_for: Duration) -> bool {
        self.dead_for.is_none_or(|least| state == State::Dead && !holds && unchanged_for >= least)
    }

    /// Whether it means events without a row, if it names them.
    pub fn means_unread(&self) -> bool {
        self.code.is_none() && self.dead_for.is_none()
    }

    /// Who decided on a row that died so long ago: nobody.
    fn given_up(&self) -> Option<String> {
        const DAY_SECS: u64 = 24 * 3_600;
        let age = self.dead_for?;
        let text = match age.as_secs() {
            secs if secs > 0 && secs.is_multiple_of(DAY_SECS) => format!("{} d", secs / DAY_SECS),
            _ => format!("{age:?}"),
        };
        Some(format!("given up by retention after {text} as a dead event"))
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
    /// Only these events.
    pub which: Criteria,
    /// Only after this place: where the step before ended.
    pub after: Option<Seq>,
    /// Only up to this place; `None`: to the end of the log as it is now.
    pub through: Option<Seq>,
    /// At most this many, oldest first. One step takes no more than [`CHANGE_EVENTS_MAX`].
    pub limit: Option<usize>,
    /// Only count what the step would send.
    pub dry_run: bool,
}

impl Replay {
    /// Checks the number of ids. Stores call this first.
    pub fn validate(&self) -> Result<()> {
        Selection { ids: self.ids.clone(), ..Selection::default() }.validate("replay")
    }

    /// Whether it means an event at this place: not one that has an end, and has it behind it.
    pub fn means(&self, seq: Seq, event: &Event, now: Timestamp) -> bool {
        event.expires_at.is_none_or(|end| end > now)
            && self.ids.as_ref().is_none_or(|ids| ids.contains(&event.id))
            && self.which.mean_event(Some(event))
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

/// Where a subscription goes on after a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetTo {
    /// With the oldest event that is still in the log.
    Beginning,
    /// With events that are committed from now on.
    Now,
    /// With the first event that was appended at this time or later, by the store's clock.
    Time(Timestamp),
    /// With the event at this place.
    Seq(Seq),
}

/// What a reset does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ResetPlan {
    /// Events that were passed, and go out again; those that are dead or wait among them.
    pub again: u64,
    /// Unread events that are skipped.
    pub skipped: u64,
    /// Whether there was too much to count: more than
    /// [`LOOK_EVENTS_MAX`](crate::kit::LOOK_EVENTS_MAX) of the one or the other.
    pub is_estimate: bool,
    /// Who had which lane how often, when this was counted.
    pub stamp: String,
}

/// What an operator changes of a subscription and its events.
///
/// Behaviour:
/// - A subscription that does not exist: `NotFound`, code `subscription_unknown`, with the known
///   names in the message.
/// - `change` takes one bounded step, committed by itself, so that no relay waits for long: at most
///   [`CHANGE_EVENTS_MAX`] events. Go on with [`Changed::next`] until there is none. Events before
///   `next` that die again during the run are not retried twice.
/// - A dry run of `change` or `replay` counts in the same steps and changes nothing: what a run
///   right after it changes, unless something moves in between. It locks nothing.
/// - [`Change::Retry`] makes dead rows due now with attempts 0 and one more replay, and retrying
///   rows due now; idempotent: a second call finds nothing dead. It never touches events that are
///   pending, dispatched or discarded, nor one that was marked dead before it was read, as long as
///   its lane has not passed it: it would go out twice.
/// - [`Change::Discard`] takes events out that are retrying, blocked, scheduled, dead or still
///   pending, and releases the next of their keys; discarded events are never delivered (except one
///   already in flight). Pending ones must be named by id. The code of a row stays, and so does its
///   error; where [`Selection::dead_for`] is asked for, that begins with [`Change::note`].
/// - [`Change::MarkDead`] makes events dead that are retrying, blocked or still pending; pending
///   ones must be named by id, and have no `deliver_at`. Attempts and replays stay, the code is
///   [`Disposition::MARKED_DEAD`], the error begins with [`Change::note`]. They are dead like any
///   other: letters, never due, revived by a retry. Their key is held where the subscription says
///   so ([`OnDead::Halt`](crate::OnDead::Halt)); otherwise its next is released. One in flight may
///   arrive all the same, and what its relay says of it then changes nothing.
/// - `replay` sends events again that went out or were skipped, one bounded step, beside the live
///   stream: each gets a delivery row that is due now, with a fresh
///   [`Delivery::replay`](crate::Delivery::replay), and so a dedupe id of its own. Of those that
///   the subscription wants now, unless they are named by id. It passes over what is pending or has
///   a delivery row. A step that finds nothing may still have a next one.
/// - `pause(None)` resumes.
/// - `rename` keeps everything but the name. A relay of the former name loses its lanes; nobody
///   gets them before its lease would have ended. `Conflict` `subscription_exists` where the new
///   name is taken. Asked again, it is done already.
/// - `remove` ends a subscription: its cursor, its rows and its dead letters go, and what only it
///   had to deliver may be pruned. The same name made again begins like any new one, and no lease
///   of before counts.
/// - `rename` and `remove` are of the subscription that was looked at
///   ([`SubscriptionInfo::generation`](crate::SubscriptionInfo::generation)); where the name is
///   another one's by now: `Conflict` `subscription_changed`.
/// - `reset` without a stamp only counts. With the stamp of that look it moves all lanes at once:
///   to an earlier place, and what was passed since is read again, with a fresh
///   [`Delivery::replay`](crate::Delivery::replay), whatever became of it before (not what was
///   discarded); to a later one, and what lies between is skipped. What waits or is dead before
///   the place stays. `Conflict` `lanes_held` while a relay holds a lane; `subscription_changed`
///   where a lane was taken since the look, or the reset is done already.
/// - `set_lanes` changes the number of lanes, also while relays run. Each key keeps its order, and
///   nobody gets a lane before the leases of the former ones would have ended. Events that one lane
///   has passed and another not leave the stream; `Conflict` `lanes_apart` where they are more than
///   [`LANES_APART_MAX`](crate::limits::LANES_APART_MAX). Asked again, it is done already.
#[async_trait]
pub trait Admin: Send + Sync + 'static {
    /// Decides on events that are not delivered, one step.
    async fn change(&self, subscription: &SubscriptionName, change: &Change, selection: &Selection) -> Result<Changed>;
    /// Sends events again that went out or were skipped, one step.
    async fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed>;
    /// Pauses or resumes. A pause ends running leases at their next renewal.
    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()>;
    /// Gives a subscription another name.
    async fn rename(&self, subscription: &SubscriptionName, generation: i64, to: &SubscriptionName) -> Result<()>;
    /// Takes a subscription out.
    async fn remove(&self, subscription: &SubscriptionName, generation: i64) -> Result<()>;
    /// Lets a subscription go on from another place, or says what that would do.
    async fn reset(&self, subscription: &SubscriptionName, to: ResetTo, stamp: Option<&str>) -> Result<ResetPlan>;
    /// Changes how many replicas can work at once.
    async fn set_lanes(&self, subscription: &SubscriptionName, lanes: u16) -> Result<()>;
}
