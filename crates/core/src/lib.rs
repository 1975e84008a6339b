//! The nouns and contracts of Postbox: what an event is, and what a log, a sink, a source and an
//! inbox promise.
//!
//! Everything else is an implementation of something declared here:
//!
//! | contract | promise in one line | implemented by |
//! |---|---|---|
//! | [`Append`] | both the change and its events commit, or neither | every store |
//! | [`Log`] | a leased lane reads every committed event once, in order, and never a phantom | every store |
//! | [`DeadLetters`] | every dead event is handed to a second sink; the store knows which still are not | every store |
//! | [`Inspect`] | an operator sees every event and its state | every store |
//! | [`Find`] | an event is found by the start of its id | every store |
//! | [`Diagnose`] | an operator sees recent events, and who holds locks that others wait for | every store |
//! | [`Admin`] | an operator changes a subscription and its events, in bounded steps | every store |
//! | [`Maintain`] | a log is created, checked and pruned, in bounded steps | every store |
//! | [`Receive`] | a message from outside is stored once | every store |
//! | [`Tail`] | a person watches a log grow without changing anything | every store |
//! | [`Migrate`] | the schema is created, removed and checked | every store |
//! | [`Apply`] | a handler's effect, the position and the delivery row commit together | stores with transactions |
//! | [`Sink`] | one [`Outcome`] per event, never a hidden retry | every broker, your handler |
//! | [`Source`] | a message comes until it is settled, and is settled only once it is stored | every broker, the memory queue |
//!
//! ```
//! use postbox_core::{NewEvent, TopicPattern};
//!
//! let event = NewEvent::json("order.paid", br#"{"id":1}"#.to_vec()).key("42").header("traceparent", "00-…");
//! event.validate()?;
//! assert!(TopicPattern::new("order.*")?.matches("order.paid"));
//! # Ok::<(), postbox_core::Error>(())
//! ```
//!
//! # What this crate deliberately does not do
//!
//! It has no async runtime, no database driver and no network client. It never reads the clock or a
//! random number generator ([`Clock`] and [`Random`] are passed in). It does not decide when to
//! retry (the engine does, with [`RetryPolicy`]).

mod admin;
mod append;
mod apply;
mod batch;
mod clock;
mod context;
mod criteria;
mod database;
mod dead_letter;
mod diagnose;
mod down;
pub mod envelope;
mod error;
mod event;
mod find;
mod hex;
mod inspect;
pub mod kit;
mod lock;
mod log;
mod maintain;
mod migrate;
mod names;
mod outcome;
mod rate;
mod receive;
mod recorded;
mod retry;
mod schemas;
mod sink;
mod source;
mod state;
mod subscription;
mod tail;
pub mod template;
pub mod trace;
mod trace_context;
mod transaction;
pub mod typed;

pub use admin::{Admin, Change, Changed, Replay, Replayed, ResetPlan, ResetTo, Selection};
pub use append::{Append, Appended};
pub use apply::{Apply, Decide, Destination};
/// The macro for implementations of the async contracts.
pub use async_trait::async_trait;
pub use batch::{Batch, BatchLimit, Delivery, Disposition, Entry, Retrying, Settlement, Unreadable};
pub use clock::{Clock, Random};
pub use context::Context;
pub use criteria::Criteria;
pub use database::{Database, HandledFuture, Handlers, Transact, Tx};
pub use dead_letter::{DeadLetter, DeadLetters, Handover, dead_header, death_of, is_death};
pub use diagnose::{Arrival, Blocker, Diagnose, Hold};
pub use down::{Down, Outage};
pub use envelope::Envelope;
pub use error::{BoxError, Error, ErrorKind, Result};
pub use event::{Event, EventId, Headers, NewEvent, Seq, header};
pub use find::{Find, IdPrefix};
pub use hex::hex;
pub use inspect::{
    Attempt, Count, Inspect, LaneInfo, ListQuery, Pause, Record, Stats, SubscriptionInfo, TopicStats, Unrouted,
    UnroutedTopic,
};
pub use lock::lock;
pub use log::{Acquired, Epoch, Lease, Log, ReadOn};
pub use maintain::{Maintain, Prune, Routed};
pub use migrate::{Migrate, Store, events_undelivered};
pub use names::{Key, LogName, OwnerId, SourceName, StoreName, SubscriptionName, Tenant, Topic, TopicPattern};
pub use outcome::{Outcome, excerpt};
pub use rate::{Bucket, Rate};
pub use receive::{Conflict, Inbound, Receive, Received};
pub use recorded::{Aggregate, Recorded};
pub use retry::RetryPolicy;
pub use schemas::Schemas;
pub use sink::{Capabilities, HighWaterMark, HighWaterMarks, Sink};
pub use source::{AckToken, RawMessage, Source, SourceCapabilities, SourceMessage};
pub use state::State;
pub use subscription::{Filter, OnDead, Ordering, StartAt, Subscription, Traits};
pub use tail::{Tail, Tailed, place_invalid};
pub use template::Template;
pub use transaction::{AppendFuture, Postbox, Transaction};
pub use typed::{IntoEvents, TypedEvent};

/// Limits every store enforces, in Rust before the round trip and in SQL as named constraints.
pub mod limits {
    use std::time::Duration;

    use jiff::Timestamp;

    /// Earliest `occurred_at`: the year 1, because RFC 3339 has no earlier years. `deliver_at` and
    /// `expires_at` begin with 1970, because future times cannot be older than clocks.
    pub const OCCURRED_AT_MIN: Timestamp = Timestamp::constant(-62_135_596_800, 0);
    /// Longest topic in bytes: what every broker we know accepts as a subject, topic or routing
    /// key.
    pub const TOPIC_BYTES_MAX: usize = 255;
    /// Longest ordering key in bytes. Fits safely into an index entry and a Kafka key.
    pub const KEY_BYTES_MAX: usize = 1_024;
    /// Largest payload in bytes (16 MiB). Put larger data into an object store, and its address
    /// into the event.
    pub const PAYLOAD_BYTES_MAX: usize = 16 * 1024 * 1024;
    /// Most bytes of payloads and headers in one append (256 MiB). Postgres takes messages of up to
    /// 1 GiB, and a driver that binds texts needs up to twice the size.
    pub const APPEND_BYTES_MAX: usize = 256 * 1024 * 1024;
    /// Maximum headers on one event. Together with those a sink adds, this stays below the 100 that
    /// HTTP servers commonly accept.
    pub const HEADERS_MAX: usize = 64;
    /// Maximum bytes of all header names and values of one event: the usual limit of HTTP servers.
    pub const HEADER_BYTES_MAX: usize = 16 * 1024;
    /// Longest name (subscription, log, source, tenant, kind, aggregate) in bytes.
    pub const NAME_BYTES_MAX: usize = 128;
    /// Longest id of a message from outside, in bytes.
    pub const MESSAGE_ID_BYTES_MAX: usize = 255;
    /// Shortest time for which ids of messages from outside are remembered: 7 days. The most
    /// patient sender whose documentation we know retries for about half of that. A message that
    /// comes again after its id was forgotten is applied again.
    pub const MESSAGE_IDS_AGE_MIN: Duration = Duration::from_hours(7 * 24);
    /// Shortest time for which dead events wait for a person before retention gives them up: a day,
    /// so that the person on duty has seen them.
    pub const DEAD_AGE_MIN: Duration = Duration::from_hours(24);
    /// Longest error text stored with a delivery, in bytes. The rest is cut.
    pub const ERROR_BYTES_MAX: usize = 2_048;
    /// Longest reason code that is stored with a delivery.
    pub const CODE_BYTES_MAX: usize = 128;
    /// Longest reason that a person gives for a change, in bytes. The rest is cut.
    pub const WHY_BYTES_MAX: usize = 512;
    /// Number of last attempts stored for an event that failed. Enough to see how its waits grow.
    pub const LAST_ATTEMPTS_MAX: usize = 8;
    /// Longest answer stored with an attempt, in characters. The last answer is also stored in
    /// full.
    pub const ANSWER_CHARS_MAX: usize = 256;
    /// Maximum lanes of one subscription: more than any deployment has replicas.
    pub const LANES_MAX: u16 = 256;
    /// Maximum events that a change of lanes takes out of the stream: a few hundred milliseconds of
    /// the database. Lanes of running relays are closer together than that.
    pub const LANES_APART_MAX: usize = 10_000;
    /// Maximum events in one batch. Beyond 1,000 a larger batch only adds latency (measured).
    pub const BATCH_EVENTS_MAX: usize = 10_000;
    /// Maximum events that one call of `change` changes, and maximum ids it takes. A relay whose
    /// lane is locked for it waits for 0.4 s at worst (measured, 100,000 dead events of 1,000
    /// keys), far below a lease.
    pub const CHANGE_EVENTS_MAX: usize = 1_000;
    /// Maximum records in one list.
    pub const LIST_RECORDS_MAX: usize = 10_000;
    /// Payload bytes that one list may hold, beyond its first record: a page for an operator, not
    /// an export.
    pub const LIST_PAYLOAD_BYTES_MAX: usize = 64 * 1024 * 1024;
    /// Unrouted events are counted up to this many.
    pub const UNROUTED_COUNT_MAX: usize = 10_000;
}
