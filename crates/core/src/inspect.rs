//! The inspect contract: what an operator sees.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use crate::batch::BatchLimit;
use crate::criteria::Criteria;
use crate::error::Result;
use crate::event::{Event, EventId, Seq};
use crate::limits::{LIST_PAYLOAD_BYTES_MAX, LIST_RECORDS_MAX};
use crate::log::Epoch;
use crate::names::{LogName, OwnerId, SubscriptionName};
use crate::receive::Conflict;
use crate::state::State;
use crate::subscription::{Filter, Ordering};

/// Why a subscription does not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// Ends by itself then; `None`: until a person resumes.
    pub until: Option<Timestamp>,
    /// Who.
    pub by: String,
    /// Why.
    pub why: String,
}

impl Pause {
    /// Whether it is in force.
    pub fn holds_at(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// Counts of one subscription, taken in one snapshot.
///
/// A look costs the same however many events the log keeps, and however many subscriptions are
/// counted together: they share [`LOOK_EVENTS_MAX`](crate::kit::LOOK_EVENTS_MAX), and each has
/// [`LOOK_EVENTS_MIN`](crate::kit::LOOK_EVENTS_MIN) at least. Up to its share of each kind is
/// counted one by one; beyond that `is_estimate` is set: unread events are estimated from samples,
/// and of a state with rows there are that many or more.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stats {
    /// Everything still to be delivered: unread + retrying + blocked + scheduled.
    pub pending: u64,
    /// Part of `pending`: failed, to be tried again.
    pub retrying: u64,
    /// Part of `pending`: behind their key.
    pub blocked: u64,
    /// Part of `pending`: waiting for their time.
    pub scheduled: u64,
    /// Waiting for a person.
    pub dead: u64,
    /// Taken out by a person.
    pub discarded: u64,
    /// Delivered since the subscription began, whether the log still has them or not.
    pub dispatched: u64,
    /// Passed and never sent, because it was not wanted: outside the filter of its time, or before
    /// the subscription began. Of what the log still has; no part of `total`.
    pub skipped: u64,
    /// `dispatched + pending + dead + discarded`.
    pub total: u64,
    /// Whether there was too much to count.
    pub is_estimate: bool,
    /// Whether `skipped` is estimated from samples: more was passed than is counted. Apart from
    /// `is_estimate`, because what is pending is as a rule exact all the same.
    pub skipped_is_estimate: bool,
    /// Its share: up to so many of each kind were counted one by one.
    pub share: u64,
    /// Age of the oldest pending event by the store's clock, from when it may be delivered: one
    /// that is delayed does not age before its time. `None` also where it is not known: events are
    /// pending, and none of the first is wanted.
    pub oldest_pending: Option<Duration>,
    /// Pending depth and age per topic, deepest first, at most 100.
    pub topics: Vec<TopicStats>,
}

/// Pending events of one topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicStats {
    /// The topic.
    pub topic: String,
    /// How many are pending.
    pub pending: u64,
    /// Age of the oldest, if it is known.
    pub oldest_pending: Option<Duration>,
}

/// How many events a log has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// How many.
    pub events: u64,
    /// Whether there were too many to count: more than
    /// [`LOOK_EVENTS_MAX`](crate::kit::LOOK_EVENTS_MAX).
    pub is_estimate: bool,
}

/// Events of one log that no subscription wants.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unrouted {
    /// How many; counted up to [`UNROUTED_COUNT_MAX`](crate::limits::UNROUTED_COUNT_MAX), oldest
    /// first.
    pub count: u64,
    /// The same by topic, most first.
    pub topics: Vec<UnroutedTopic>,
}

/// Unrouted events of one topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnroutedTopic {
    /// The topic.
    pub topic: String,
    /// How many.
    pub count: u64,
    /// Age of the oldest.
    pub oldest: Duration,
}

/// One lane as it stands in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneInfo {
    /// Which lane.
    pub lane: u16,
    /// The fencing number.
    pub epoch: Epoch,
    /// Who holds or held it.
    pub owner: Option<OwnerId>,
    /// How long the lease still runs; `None`: nobody holds it.
    pub lease_left: Option<Duration>,
}

/// One subscription as it stands in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubscriptionInfo {
    /// Its name.
    pub name: SubscriptionName,
    /// The log it reads.
    pub log: LogName,
    /// What it wants, as of the last `subscribe`.
    pub filter: Filter,
    /// In which order events go out, as of the last `subscribe`.
    pub ordering: Ordering,
    /// Tells it from others that had its name before.
    pub generation: i64,
    /// Its lanes.
    pub lanes: Vec<LaneInfo>,
    /// Set when it is paused.
    pub paused: Option<Pause>,
}

/// One event as an operator sees it in one subscription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The event, payload included.
    pub event: Event,
    /// Its place in the log.
    pub seq: Seq,
    /// Where it stands.
    pub state: State,
    /// Counted attempts so far.
    pub attempts: u32,
    /// Replays asked for so far.
    pub replays: u32,
    /// When it is due, if it waits.
    pub due_at: Option<Timestamp>,
    /// Last reason code.
    pub code: Option<String>,
    /// Last error text.
    pub error: Option<String>,
    /// When the row last changed.
    pub updated_at: Option<Timestamp>,
    /// Its last attempts, the latest last: of an event that left the stream. An attempt is a call
    /// that failed, whether it counts or not.
    pub last_attempts: Vec<Attempt>,
}

/// One call for an event, which did not deliver it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// When it was written down, by the store's clock.
    pub at: Timestamp,
    /// What came of it.
    pub code: String,
    /// How long the call took.
    pub took: Duration,
    /// What the destination said, cut to [`ANSWER_CHARS_MAX`](crate::limits::ANSWER_CHARS_MAX).
    pub answer: String,
    /// When it was to be tried again; `None`: not by itself.
    pub next_at: Option<Timestamp>,
}

/// Which records to list: oldest first, or of all states the newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListQuery {
    /// Of which subscription.
    pub subscription: SubscriptionName,
    /// In which state; `None`: the newest of the log, whatever their state.
    pub state: Option<State>,
    /// Only these events. What is gone from the log is not meant where they narrow.
    pub which: Criteria,
    /// Only rows with this code.
    pub code: Option<String>,
    /// Only events of this conversation ([`correlation_id`](Event::correlation_id)).
    pub correlation: Option<String>,
    /// Only after this place (paging); where the newest come first, only before it.
    pub after: Option<Seq>,
    /// At most this many, and [`LIST_RECORDS_MAX`](crate::limits::LIST_RECORDS_MAX); at least 1.
    pub limit: usize,
}

impl ListQuery {
    /// How much a list takes.
    pub fn page(&self) -> BatchLimit {
        BatchLimit { events: self.limit.clamp(1, LIST_RECORDS_MAX), payload_bytes: LIST_PAYLOAD_BYTES_MAX }
    }

    /// Whether an event is of the conversation that is asked for.
    pub fn is_of_conversation(&self, event: &Event) -> bool {
        self.correlation.is_none() || self.correlation.as_deref() == event.correlation_id()
    }
}

/// What an operator sees. Reads one snapshot per call.
///
/// Behaviour:
/// - A subscription that does not exist: `NotFound`, code `subscription_unknown`, with the known
///   names in the message.
/// - `list` gives rows in `seq` order after `after`. Without a state it gives what the log has, in
///   the opposite order, each as it stands in the subscription. `Pending` and `Dispatched` are
///   derived from the cursor. A list ends before the payload that is one too many
///   ([`LIST_PAYLOAD_BYTES_MAX`](crate::limits::LIST_PAYLOAD_BYTES_MAX)); only an empty one is the
///   end.
/// - An event that cannot be read, or that somebody deleted from the log, is a record all the same:
///   its place is right, its fields are what could be read, `code` and `error` say what is wrong.
///   No list fails because of one event.
#[async_trait]
pub trait Inspect: Send + Sync + 'static {
    /// Every subscription, by name.
    async fn subscriptions(&self) -> Result<Vec<SubscriptionInfo>>;
    /// Counts of several subscriptions, which share what is looked at, in the order of their names.
    /// One that cannot be counted leaves the others alone. Of one: [`Store::stats`](crate::Store).
    async fn stats_of(&self, subscriptions: &[SubscriptionName]) -> Vec<Result<Stats>>;
    /// Records in one state.
    async fn list(&self, query: &ListQuery) -> Result<Vec<Record>>;
    /// One event, if the log has it.
    async fn get(&self, subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>>;
    /// Messages that were kept out because their id was known with another body: the latest first,
    /// at most `limit`.
    async fn conflicts(&self, limit: usize) -> Result<Vec<Conflict>>;
    /// The logs there are, by name.
    async fn logs(&self) -> Result<Vec<LogName>>;
    /// Events of a log that no subscription wants, as far as
    /// [`Maintain::note_unrouted`](crate::Maintain::note_unrouted) has looked.
    async fn unrouted(&self, log: &LogName) -> Result<Unrouted>;
    /// How many events a log has, whoever reads it or nobody. An unknown log: `NotFound`, code
    /// `log_unknown`.
    async fn count(&self, log: &LogName) -> Result<Count>;
}
