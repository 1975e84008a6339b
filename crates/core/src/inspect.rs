//! The inspect contract: what an operator can see.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use serde::{Serialize, Serializer};

use crate::batch::BatchLimit;
use crate::criteria::Criteria;
use crate::error::{Error, Result};
use crate::event::{Event, EventId, Headers, Seq, header};
use crate::limits::{LIST_PAYLOAD_BYTES_MAX, LIST_RECORDS_MAX};
use crate::log::Epoch;
use crate::names::{LogName, OwnerId, SubscriptionName};
use crate::receive::Conflict;
use crate::state::State;
use crate::subscription::{Filter, Ordering};

/// Why a subscription does not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// When the pause ends by itself; `None`: until a person resumes.
    pub until: Option<Timestamp>,
    /// Who paused.
    pub by: String,
    /// Why.
    pub why: String,
}

impl Pause {
    /// Who paused, if a relay did because its destination is gone.
    pub const BY_RELAY: &str = "postbox";

    /// Checks that it would not end in the past. Stores call this with their own clock.
    pub fn validate(&self, now: Timestamp) -> Result<()> {
        match self.until {
            Some(until) if !self.holds_at(now) => {
                let text = format!(
                    "the pause would end at {until}, which has passed; give a later time, or leave it out to pause \
                     until somebody resumes; to end a pause, use resume"
                );
                Err(Error::invalid("pause", "until_past", text))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the pause is in force.
    pub fn holds_at(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// Counts of one subscription, taken in one snapshot.
///
/// A call costs the same for any size of the log and any number of subscriptions counted together.
/// They share [`LOOK_EVENTS_MAX`](crate::kit::LOOK_EVENTS_MAX), and each gets at least
/// [`LOOK_EVENTS_MIN`](crate::kit::LOOK_EVENTS_MIN). Up to its share of each kind is counted one by
/// one. Beyond that `is_estimate` is set: unread events are estimated from samples, and the count
/// of a state with rows is a lower bound.
///
/// As JSON it is part of `postbox stats --json`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Stats {
    /// Everything still to be delivered: unread + retrying + blocked + scheduled.
    pub pending: u64,
    /// Part of `pending`: failed, to be tried again.
    pub retrying: u64,
    /// Part of `pending`: waiting behind an earlier event of their key.
    pub blocked: u64,
    /// Part of `pending`: waiting for their delivery time.
    pub scheduled: u64,
    /// Waiting for a person.
    pub dead: u64,
    /// Taken out by a person.
    pub discarded: u64,
    /// Delivered since the subscription was created, whether the log still has them or not.
    pub dispatched: u64,
    /// Passed but never sent, because they were outside the filter of that time or before the
    /// subscription's start. Only events still in the log. Not part of `total`.
    pub skipped: u64,
    /// `dispatched + pending + dead + discarded`.
    pub total: u64,
    /// Whether there were too many events to count exactly.
    #[serde(rename = "estimated")]
    pub is_estimate: bool,
    /// Whether `skipped` is estimated from samples, because more was passed than is counted.
    /// Separate from `is_estimate`, because the pending counts are usually still exact.
    #[serde(rename = "skipped_estimated")]
    pub skipped_is_estimate: bool,
    /// Its share: up to this many of each kind were counted one by one.
    #[serde(skip)]
    pub share: u64,
    /// Age of the oldest pending event by the store's clock, from when it may be delivered: a
    /// delayed event does not age before its time. `None` if nothing is pending, or if it is not
    /// known because none of the first pending events looked at is wanted.
    #[serde(rename = "oldest_pending_seconds", serialize_with = "seconds")]
    pub oldest_pending: Option<Duration>,
    /// Pending depth and age per topic, deepest first, at most 100.
    pub topics: Vec<TopicStats>,
}

/// Pending events of one topic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TopicStats {
    /// The topic.
    pub topic: String,
    /// How many are pending.
    pub pending: u64,
    /// Age of the oldest, if known.
    #[serde(rename = "oldest_pending_seconds", serialize_with = "seconds")]
    pub oldest_pending: Option<Duration>,
}

/// No age is zero: then nothing is due yet.
fn seconds<S: Serializer>(age: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    age.filter(|age| !age.is_zero()).map(|age| age.as_secs_f64()).serialize(to)
}

/// The number of events in a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// The number.
    pub events: u64,
    /// Whether it is an estimate, because it exceeds
    /// [`LOOK_EVENTS_MAX`](crate::kit::LOOK_EVENTS_MAX).
    pub is_estimate: bool,
}

/// Events of one log that no subscription wants.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unrouted {
    /// The number, counted up to [`UNROUTED_COUNT_MAX`](crate::limits::UNROUTED_COUNT_MAX), oldest
    /// first.
    pub count: u64,
    /// The same by topic, most frequent first.
    pub topics: Vec<UnroutedTopic>,
}

/// Unrouted events of one topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnroutedTopic {
    /// The topic.
    pub topic: String,
    /// The number.
    pub count: u64,
    /// Age of the oldest.
    pub oldest: Duration,
}

/// The state of one lane in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneInfo {
    /// The lane's number.
    pub lane: u16,
    /// The fencing number.
    pub epoch: Epoch,
    /// Who holds or held it.
    pub owner: Option<OwnerId>,
    /// How long the lease still runs; `None`: nobody holds it.
    pub lease_left: Option<Duration>,
    /// Relays in a row that crashed while they held it; 0 once a relay has held it for long
    /// ([`Lease::LONG`](crate::Lease::LONG)).
    pub crashes: u32,
}

/// The state of one subscription in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubscriptionInfo {
    /// Its name.
    pub name: SubscriptionName,
    /// The log it reads.
    pub log: LogName,
    /// Which events it wants, as of the last `subscribe`.
    pub filter: Filter,
    /// The order of deliveries, as of the last `subscribe`.
    pub ordering: Ordering,
    /// Separates it from other subscriptions that had its name before.
    pub generation: i64,
    /// Its lanes.
    pub lanes: Vec<LaneInfo>,
    /// Set when it is paused.
    pub paused: Option<Pause>,
}

/// One event in one subscription, as an operator sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The event. Its payload is empty if the list was asked for without ([`ListQuery::payloads`]).
    pub event: Event,
    /// Its position in the log.
    pub seq: Seq,
    /// Its state.
    pub state: State,
    /// Counted attempts so far.
    pub attempts: u32,
    /// The number in its dedupe id (`-rN`) while it waits or is dead: a replay takes the next
    /// number of the subscription, a retry one more than the last of the event. 0 otherwise, also
    /// once it is delivered.
    pub replays: u32,
    /// When it is due, if it waits.
    pub due_at: Option<Timestamp>,
    /// The last reason code.
    pub code: Option<String>,
    /// The last error text.
    pub error: Option<String>,
    /// When the row last changed.
    pub updated_at: Option<Timestamp>,
    /// Its last attempts, the latest last, if it left the stream. An attempt is a call that failed,
    /// counted or not.
    pub last_attempts: Vec<Attempt>,
}

/// One call for an event that did not deliver it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// When it was recorded, by the store's clock.
    pub at: Timestamp,
    /// The reason code.
    pub code: String,
    /// How long the call took.
    pub took: Duration,
    /// What the destination said, cut to [`ANSWER_CHARS_MAX`](crate::limits::ANSWER_CHARS_MAX).
    pub answer: String,
    /// When it was to be tried again; `None`: never automatically.
    pub next_at: Option<Timestamp>,
}

/// Which records to list: those of one state oldest first, those of all states newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListQuery {
    /// The subscription.
    pub subscription: SubscriptionName,
    /// Only this state; `None`: the newest of the log, whatever their state.
    pub state: Option<State>,
    /// Only events that match. If this filters, events gone from the log do not match.
    pub which: Criteria,
    /// Only rows with this code.
    pub code: Option<String>,
    /// Only events with all of these, by their exact names as in a [`Filter`]; empty means all.
    pub headers: Headers,
    /// Only after this position (paging). If the newest come first, only before it.
    pub after: Option<Seq>,
    /// At most this many, up to [`LIST_RECORDS_MAX`](crate::limits::LIST_RECORDS_MAX); at least 1.
    pub limit: usize,
    /// Whether to read the payloads. Without them each is empty, whatever was appended, and
    /// [`LIST_PAYLOAD_BYTES_MAX`](crate::limits::LIST_PAYLOAD_BYTES_MAX) does not bound the list. A
    /// large payload takes long to read.
    pub payloads: bool,
}

impl ListQuery {
    /// Returns the limits of one list.
    pub fn page(&self) -> BatchLimit {
        let payload_bytes = if self.payloads { LIST_PAYLOAD_BYTES_MAX } else { usize::MAX };
        BatchLimit { events: self.limit.clamp(1, LIST_RECORDS_MAX), payload_bytes }
    }

    /// Returns whether an event has the requested headers.
    pub fn has_headers(&self, event: &Event) -> bool {
        header::has_all(&event.headers, &self.headers)
    }
}

/// What an operator can see. Each call reads one snapshot; only a long `list` may read several, so
/// that none lasts.
///
/// Behaviour:
/// - If the subscription does not exist: `NotFound`, code `subscription_unknown`, with the known
///   names in the message.
/// - `list` returns rows in `seq` order after `after`. Without a state it returns the events of the
///   log in the opposite order, each with its state in the subscription. `Pending` and `Dispatched`
///   are derived from the cursor. A list stops before its payloads exceed
///   [`LIST_PAYLOAD_BYTES_MAX`](crate::limits::LIST_PAYLOAD_BYTES_MAX). Only an empty list is the
///   end. Without payloads it reads none, however large, and so does not notice one that cannot be
///   read.
/// - An event that cannot be read, or that was deleted from the log, still has a record. Its
///   position is right, its fields are what could be read, and `code` and `error` say what is
///   wrong. No list fails because of one event.
#[async_trait]
pub trait Inspect: Send + Sync + 'static {
    /// Returns every subscription, by name.
    async fn subscriptions(&self) -> Result<Vec<SubscriptionInfo>>;
    /// Returns the counts of several subscriptions in the order given; they share what is looked
    /// at. If one cannot be counted, the others still are. For a single one:
    /// [`Store::stats`](crate::Store).
    async fn stats_of(&self, subscriptions: &[SubscriptionName]) -> Vec<Result<Stats>>;
    /// Returns records in one state, or in all.
    async fn list(&self, query: &ListQuery) -> Result<Vec<Record>>;
    /// Returns one event, if the log has it.
    async fn get(&self, subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>>;
    /// Returns messages that were refused because their id was known with another body: the latest
    /// first, at most `limit`. A store need not return more than
    /// [`LIST_RECORDS_MAX`](crate::limits::LIST_RECORDS_MAX).
    async fn conflicts(&self, limit: usize) -> Result<Vec<Conflict>>;
    /// Returns the existing logs, by name.
    async fn logs(&self) -> Result<Vec<LogName>>;
    /// Returns the events of a log that no subscription wants, as far as
    /// [`Maintain::note_unrouted`](crate::Maintain::note_unrouted) has looked.
    async fn unrouted(&self, log: &LogName) -> Result<Unrouted>;
    /// Returns the number of events in a log, whether or not anybody reads it. An unknown log:
    /// `NotFound`, code `log_unknown`.
    async fn count(&self, log: &LogName) -> Result<Count>;
}
