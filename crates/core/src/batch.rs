//! What a lane reads and what it writes back.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use jiff::Timestamp;

use crate::context::Context;
use crate::event::{Event, Headers, Seq, header};
use crate::names::Key;
use crate::trace_context::{TraceContext, is_trace};

/// Limits of one read. Both apply. A batch has at least one event if there is any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimit {
    /// Maximum number of events.
    pub events: usize,
    /// Maximum payload bytes in total. A single larger event still comes, alone.
    pub payload_bytes: usize,
}

impl Default for BatchLimit {
    /// 500 events: where the measured throughput curve flattens. 8 MiB: two such batches and their
    /// copies stay far below 64 MiB.
    fn default() -> Self {
        Self { events: 500, payload_bytes: 8 * 1024 * 1024 }
    }
}

/// One event on its way to a sink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The event.
    pub event: Event,
    /// Its position in the log.
    pub seq: Seq,
    /// The number of this attempt, from 1. Attempts that were not counted (destination down) do not
    /// raise it.
    pub attempt: u32,
    /// How many times a person asked to send it again; usually 0.
    pub replay: u32,
    /// The span that it is sent or handled in; `None` without tracing.
    pub trace: Option<Box<TraceContext>>,
}

impl Delivery {
    /// Creates a stand-in for an event of which only the position could be read.
    pub fn placeholder(seq: Seq) -> Self {
        let id = crate::event::EventId::from_uuid(uuid::Uuid::nil());
        let event = crate::event::NewEvent::json("", "").into_event(id, Timestamp::UNIX_EPOCH);
        Self { event, seq, attempt: 1, replay: 0, trace: None }
    }

    /// Returns the headers that a destination gets beside the message: the event's, with the trace
    /// context of the span it is sent in.
    ///
    /// An envelope contains the event's own trace context instead. It is the same for each attempt,
    /// so that a receiver can recognise a repeated message.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        let trace = self.trace.as_deref();
        let own = self.event.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let of_span = trace.map(|trace| (header::TRACEPARENT, trace.traceparent.as_str()));
        let state = trace.and_then(|trace| Some((header::TRACESTATE, trace.tracestate.as_deref()?)));
        own.filter(move |(name, _)| trace.is_none() || !is_trace(name)).chain(of_span).chain(state)
    }

    /// Returns the context for its handler: that of the event, inside the span it is handled in.
    pub fn context(&self) -> Context {
        let context = Context::of(&self.event);
        match self.trace.as_deref() {
            Some(TraceContext { traceparent, tracestate }) => {
                Context { traceparent: Some(traceparent.clone()), tracestate: tracestate.clone(), ..context }
            }
            None => context,
        }
    }

    /// Returns the id that a broker may deduplicate by: the event id, or a fresh id for each
    /// replay.
    ///
    /// It has no dot, because Standard Webhooks forbids dots in ids.
    pub fn dedupe_id(&self) -> String {
        match self.replay {
            0 => self.event.id.to_string(),
            replay => format!("{}-r{replay}", self.event.id),
        }
    }
}

/// A bounded piece of a lane's work, in delivery order (`seq`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// The events.
    pub deliveries: Vec<Delivery>,
    /// The position to settle once every delivery of a stream batch has its disposition. `None` for
    /// due batches and for empty ones. A batch without deliveries may have one: the store has
    /// looked through a long stretch without events for the lane.
    pub end: Option<Seq>,
    /// Keys among `deliveries` with an earlier unfinished event outside this batch. Their events
    /// must be settled as [`Disposition::Block`], not sent. Always empty for due batches.
    pub held: HashSet<Key>,
    /// Events among `deliveries` that a person discarded or marked dead before they were read. They
    /// must be settled without sending.
    pub discarded: HashSet<Seq>,
    /// Events among `deliveries` that cannot be read, for whatever reason. They must be settled as
    /// [`Disposition::Dead`] without sending. Their deliveries are placeholders: the position is
    /// right, every other field is what could be read, or empty.
    pub unreadable: BTreeMap<Seq, Unreadable>,
    /// More of the same window is ready: `next_batch` may be called again before this batch is
    /// settled (prefetch). With an empty batch: the read passed a long stretch without events for
    /// the lane.
    pub more: bool,
    /// Everything that was committed before the first read under this lease is in this batch or in
    /// earlier ones. A bounded run ends here, so a store must get here however many events arrive.
    pub caught_up: bool,
    /// How long until the lane's earliest retrying or scheduled event is due, if the store happened
    /// to look. Zero means to call `due` now.
    pub due_in: Option<Duration>,
    /// How long each of `deliveries` that has an `expires_at` may still be sent, by the store's
    /// clock. Zero means it has expired and must be settled as [`Disposition::Expired`].
    pub expires: BTreeMap<Seq, Duration>,
    /// Due batches: for events of `deliveries`, how many relays ended while they sent that event
    /// alone ([`Disposition::Alone`]). Events without a crash are left out.
    pub crashes: BTreeMap<Seq, u32>,
}

impl Batch {
    /// Appends a delivery. Also records why it cannot be sent, if it cannot, and how long it may
    /// still be sent, if it expires. `now` is the store's clock. It may be `None` if the event does
    /// not expire.
    pub fn push(&mut self, delivery: Delivery, unreadable: Option<Unreadable>, now: Option<Timestamp>) {
        let left = |at: Timestamp, now| Duration::try_from(at.duration_since(now)).unwrap_or_default();
        self.expires.extend(delivery.event.expires_at.zip(now).map(|(at, now)| (delivery.seq, left(at, now))));
        let unreadable = unreadable.or_else(|| Unreadable::poison(&delivery.event.headers));
        self.unreadable.extend(unreadable.map(|why| (delivery.seq, why)));
        self.deliveries.push(delivery);
    }

    /// Cuts a stream batch into pieces of at most `events` events, each with its own position. They
    /// are delivered and settled one after the other, as if each had been read alone. If an
    /// exception in an earlier piece holds a key, the caller must block later events of that key.
    pub fn pieces(mut self, events: usize) -> impl Iterator<Item = Self> {
        let mut left = Some(std::mem::take(&mut self.deliveries).into_iter());
        std::iter::from_fn(move || {
            let deliveries = left.as_mut()?;
            let piece: Vec<Delivery> = deliveries.by_ref().take(events.max(1)).collect();
            let due_in = self.due_in.take();
            if deliveries.len() == 0 {
                left = None;
                return Some(Self { deliveries: piece, due_in, ..std::mem::take(&mut self) });
            }
            let end = piece.last().map(|delivery| delivery.seq);
            let (held, discarded, unreadable) = (self.held.clone(), self.discarded.clone(), self.unreadable.clone());
            let expires = self.expires.clone();
            let more = true;
            Some(Self { deliveries: piece, end, held, discarded, unreadable, expires, more, due_in, ..Self::default() })
        })
    }

    /// Returns whether there is nothing to deliver and no position to settle.
    pub fn is_empty(&self) -> bool {
        self.deliveries.is_empty() && self.end.is_none()
    }
}

/// Why an event cannot be read. This concerns a single event; events around it are read as usual.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// The stable reason: [`Self::UNDECODABLE`], [`Self::MISSING`], or the rule that the stored
    /// event breaks.
    pub code: Cow<'static, str>,
    /// What is wrong with it.
    pub error: String,
}

impl Unreadable {
    /// Code of a row with a value that no event can have: an infinite time, text that is not UTF-8,
    /// damaged storage.
    pub const UNDECODABLE: &'static str = "row_undecodable";

    /// Code of a delivery row whose event was deleted from the log.
    pub const MISSING: &'static str = "event_missing";

    /// Creates the reason for a row with such a value.
    pub fn undecodable(error: impl Into<String>) -> Self {
        Self { code: Self::UNDECODABLE.into(), error: error.into() }
    }

    /// Creates the reason for an event that is no longer in the log.
    pub fn missing() -> Self {
        Self { code: Self::MISSING.into(), error: "the event was deleted from the log before it was delivered".into() }
    }

    /// Returns the reason if the event keeps an outside message that could not be decoded
    /// ([`header::POISON`]).
    pub fn poison(headers: &Headers) -> Option<Self> {
        let (code, error) = headers.get(header::POISON)?.split_once(": ").unwrap_or(("poison", ""));
        Some(Self { code: code.to_owned().into(), error: error.to_owned() })
    }

    /// Returns the disposition that the event must get.
    pub fn disposition(&self) -> Disposition {
        Disposition::Dead { code: self.code.clone(), error: self.error.clone(), halt: false, took: None }
    }
}

/// What is written about one delivery that does not simply go out with its batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disposition {
    /// The event was delivered. Due batches: the row is deleted, and the next of its key is
    /// released. Stream batches need no entry: every event up to the position without an entry
    /// counts as delivered.
    Delivered,
    /// Try again `after` a wait on the store's clock. Until then the key is held (ordering by key).
    Retry {
        /// The wait.
        after: Duration,
        /// Whether this counts as an attempt; `false` if the destination was down or throttled it.
        counted: bool,
        /// The stable reason.
        code: Cow<'static, str>,
        /// The last error text.
        error: String,
        /// How long the call took; `None` without a call.
        took: Option<Duration>,
    },
    /// Its call goes on without the batch, and the outcome is written when it ends. This is an
    /// uncounted [`Retry`](Self::Retry), which [`Log::acquire`](crate::Log::acquire) makes due at
    /// once for the next holder of the lane, because that one has no call of it in flight.
    InFlight {
        /// When the event is due if nobody writes the outcome.
        after: Duration,
    },
    /// It is about to be sent, and no other event of its lane that could end the relay is. This is
    /// an uncounted [`Retry`](Self::Retry), written before the call and replaced by its outcome. If
    /// the next holder of the lane finds it, the relay ended during the call: [`Log::acquire`] then
    /// counts a crash in [`Batch::crashes`].
    ///
    /// [`Log::acquire`]: crate::Log::acquire
    Alone {
        /// When the event is due if nobody writes the outcome.
        after: Duration,
    },
    /// Sending stopped before its turn came. An uncounted [`Retry`](Self::Retry), due now.
    NotSent,
    /// Waits behind the earlier unfinished events of its key. If there is none any more, the store
    /// makes it due now.
    Block,
    /// Waits until its delivery time. Does not hold its key.
    Schedule {
        /// The time, on the store's clock.
        at: Timestamp,
    },
    /// Out of attempts, or refused for good.
    Dead {
        /// The stable reason.
        code: Cow<'static, str>,
        /// The last error text.
        error: String,
        /// `on_dead = "halt"`: the key stays held until a person retries or discards the event.
        halt: bool,
        /// How long the call took; `None` without a call.
        took: Option<Duration>,
    },
    /// Its `expires_at` has passed, so it was not sent. It becomes dead without an attempt. It
    /// never holds its key, because its producer said that it may be left out.
    Expired {
        /// Its `expires_at`.
        at: Timestamp,
    },
    /// Confirms what a person decided before the event was read ([`Batch::discarded`]). Changes
    /// nothing else.
    Discarded,
}

/// The row of an event that is sent again. Stores write it for [`Disposition::Retry`],
/// [`Disposition::InFlight`], [`Disposition::Alone`] and [`Disposition::NotSent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retrying<'a> {
    /// The wait until it is due.
    pub after: Duration,
    /// Whether an attempt is counted.
    pub counted: bool,
    /// The stable reason.
    pub code: &'a str,
    /// The last error text.
    pub error: &'a str,
}

impl Disposition {
    /// Stored code of [`InFlight`](Self::InFlight), for the statement that makes such rows due.
    pub const IN_FLIGHT: &'static str = "in_flight";
    /// Stored code of [`Alone`](Self::Alone), for the statement that counts crashes.
    pub const ALONE: &'static str = "alone";
    /// Code of an event whose relay crashed, once the next holder of the lane has found it.
    pub const RELAY_CRASHED: &'static str = "relay_crashed";
    /// Error text of such an event.
    pub const RELAY_CRASHED_ERROR: &'static str = "the relay ended while it sent this event alone";
    const NOT_SENT: &'static str = "not_sent";
    /// Code of an event that was not sent before it expired.
    pub const EXPIRED: &'static str = "expired";
    /// Code of an event that a person marked dead.
    pub const MARKED_DEAD: &'static str = "marked_dead";

    /// Returns the row to write if the event is sent again.
    pub fn retrying(&self) -> Option<Retrying<'_>> {
        let uncounted = |after, code, error| Retrying { after, counted: false, code, error };
        match self {
            Self::Retry { after, counted, code, error, .. } => {
                Some(Retrying { after: *after, counted: *counted, code, error })
            }
            Self::InFlight { after } => {
                Some(uncounted(*after, Self::IN_FLIGHT, "the destination has not answered yet"))
            }
            Self::Alone { after } => {
                Some(uncounted(*after, Self::ALONE, "it is sent alone, and has not come back yet"))
            }
            Self::NotSent => {
                let error = "the relay stopped sending before this event's turn";
                Some(uncounted(Duration::ZERO, Self::NOT_SENT, error))
            }
            _ => None,
        }
    }

    /// Returns how long its call took, if there was one. A call is an attempt, counted or not.
    pub fn took(&self) -> Option<Duration> {
        match self {
            Self::Retry { took, .. } | Self::Dead { took, .. } => *took,
            _ => None,
        }
    }

    /// Returns whether a stored code is one of the relay, which says nothing about the destination.
    pub fn is_own_code(code: &str) -> bool {
        [Self::IN_FLIGHT, Self::ALONE, Self::RELAY_CRASHED, Self::NOT_SENT].contains(&code)
    }
}

/// One delivery and its disposition.
#[derive(Debug, Clone)]
pub struct Entry<'a> {
    /// The delivery, as it came in a batch.
    pub delivery: &'a Delivery,
    /// What is written for it.
    pub disposition: Disposition,
}

/// Everything one lane writes at once. Commits wholly or not at all, under the lease's epoch.
#[derive(Debug, Clone, Default)]
pub struct Settlement<'a> {
    /// Moves the lane's position: every event of the window up to here is dealt with. `None` for
    /// due batches.
    pub position: Option<Seq>,
    /// The exceptions (stream batches) or every delivery (due batches).
    pub entries: Vec<Entry<'a>>,
    /// The position stops short of what was read. Reading starts again right after `position` (or
    /// after the last settled position if `position` is `None`), and prefetched batches must be
    /// discarded.
    pub rewind: bool,
    /// Whether failed events hold their key (`Ordering::Key`).
    pub hold_keys: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_give_every_delivery_once_each_with_its_end() {
        let whole = |count: i64| Batch {
            deliveries: (1..=count).map(|seq| Delivery::placeholder(Seq(seq * 10))).collect(),
            end: Some(Seq(count * 10 + 5)),
            held: HashSet::from([Key::from_stored("a".to_owned())]),
            due_in: Some(Duration::ZERO),
            caught_up: true,
            ..Batch::default()
        };
        for (count, sizes) in [(7, vec![3, 3, 1]), (6, vec![3, 3]), (2, vec![2]), (0, vec![0])] {
            let batch = whole(count);
            let pieces: Vec<Batch> = batch.clone().pieces(3).collect();
            assert_eq!(pieces.iter().map(|piece| piece.deliveries.len()).collect::<Vec<_>>(), sizes);
            let seqs = pieces.iter().flat_map(|piece| &piece.deliveries);
            assert!(seqs.eq(&batch.deliveries));
            let (last, earlier) = pieces.split_last().expect("there is one piece at least");
            assert_eq!((last.end, last.more), (batch.end, batch.more));
            assert!(earlier.iter().all(|piece| piece.more && piece.end == piece.deliveries.last().map(|it| it.seq)));
            assert!(last.caught_up && !earlier.iter().any(|piece| piece.caught_up));
            assert!(pieces.iter().all(|piece| piece.held == batch.held));
            assert_eq!(pieces.iter().filter(|piece| piece.due_in.is_some()).count(), 1);
        }
    }
}
