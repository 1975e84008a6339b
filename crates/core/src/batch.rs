//! What a lane reads, and what it writes back.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use jiff::Timestamp;

use crate::context::Context;
use crate::event::{Event, Headers, Seq, header};
use crate::names::Key;
use crate::trace_context::{TraceContext, is_trace};

/// Bounds of one read. Both hold; a batch has at least one event if there is any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimit {
    /// Most events.
    pub events: usize,
    /// Most payload bytes together (a single larger event still comes alone).
    pub payload_bytes: usize,
}

impl Default for BatchLimit {
    /// 500 events: the knee of the measured curve. 8 MiB: two such batches and their copies stay
    /// far below 64 MiB.
    fn default() -> Self {
        Self { events: 500, payload_bytes: 8 * 1024 * 1024 }
    }
}

/// One event on its way to a sink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The event.
    pub event: Event,
    /// Its place in the log.
    pub seq: Seq,
    /// Which attempt this is: 1 the first time. Attempts that were not counted (destination down)
    /// do not raise it.
    pub attempt: u32,
    /// How often a person asked for it to be sent again; 0 normally.
    pub replay: u32,
    /// The span that it is sent or handled in; `None` where nothing is traced.
    pub trace: Option<Box<TraceContext>>,
}

impl Delivery {
    /// Stands for an event of which nothing could be read but its place.
    pub fn placeholder(seq: Seq) -> Self {
        let id = crate::event::EventId::from_uuid(uuid::Uuid::nil());
        let event = crate::event::NewEvent::json("", "").into_event(id, Timestamp::UNIX_EPOCH);
        Self { event, seq, attempt: 1, replay: 0, trace: None }
    }

    /// The headers that a destination gets beside the message: the event's, with the context of the
    /// span it is sent in.
    ///
    /// An envelope has the event's own. It is the same at each attempt, by which a receiver knows
    /// that it has the message.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        let trace = self.trace.as_deref();
        let own = self.event.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let of_span = trace.map(|trace| (header::TRACEPARENT, trace.traceparent.as_str()));
        let state = trace.and_then(|trace| Some((header::TRACESTATE, trace.tracestate.as_deref()?)));
        own.filter(move |(name, _)| trace.is_none() || !is_trace(name)).chain(of_span).chain(state)
    }

    /// What a handler of it works in: that of the event, within the span it is handled in.
    pub fn context(&self) -> Context {
        let context = Context::of(&self.event);
        match self.trace.as_deref() {
            Some(TraceContext { traceparent, tracestate }) => {
                Context { traceparent: Some(traceparent.clone()), tracestate: tracestate.clone(), ..context }
            }
            None => context,
        }
    }

    /// The id a broker may deduplicate by: the event id, or a fresh one for each replay a person
    /// asked for.
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
    /// Stream batches: settle with this position once every delivery has its disposition. `None`
    /// for due batches and for empty ones.
    pub end: Option<Seq>,
    /// Keys among `deliveries` that have an earlier unfinished event outside this batch: their
    /// events must be settled as [`Disposition::Block`], not sent. Always empty for due batches.
    pub held: HashSet<Key>,
    /// Events among `deliveries` that a person discarded or marked dead before they were read:
    /// settle without sending.
    pub discarded: HashSet<Seq>,
    /// Events among `deliveries` that cannot be read, whatever the reason: settle as
    /// [`Disposition::Dead`] without sending. Their deliveries are placeholders: the place is
    /// right, every other field is what could be read of it, or empty.
    pub unreadable: BTreeMap<Seq, Unreadable>,
    /// More of the same window is ready: `next_batch` may be called again before this one is
    /// settled (prefetch).
    pub more: bool,
    /// How long until the lane's earliest retrying or scheduled event is due, when the store
    /// happened to look: zero means call `due` now.
    pub due_in: Option<Duration>,
    /// How long each of `deliveries` that has an `expires_at` may still be sent, by the store's
    /// clock: zero means never. Then it must be settled as [`Disposition::Expired`].
    pub expires: BTreeMap<Seq, Duration>,
    /// Due batches: how many relays ended while they sent one of `deliveries` alone, where any did
    /// ([`Disposition::Alone`]).
    pub crashes: BTreeMap<Seq, u32>,
}

impl Batch {
    /// Puts a delivery at the end, and notes why it cannot be sent if it cannot, and until when it
    /// may be if that has an end. `now` is the store's; it may be left out where there is no end.
    pub fn push(&mut self, delivery: Delivery, unreadable: Option<Unreadable>, now: Option<Timestamp>) {
        let left = |at: Timestamp, now| Duration::try_from(at.duration_since(now)).unwrap_or_default();
        self.expires.extend(delivery.event.expires_at.zip(now).map(|(at, now)| (delivery.seq, left(at, now))));
        let unreadable = unreadable.or_else(|| Unreadable::poison(&delivery.event.headers));
        self.unreadable.extend(unreadable.map(|why| (delivery.seq, why)));
        self.deliveries.push(delivery);
    }

    /// Cuts a stream batch into several of at most so many events, each with a position of its own:
    /// they are delivered and settled one after the other, as if each had been read alone. An event
    /// whose key is held by an exception of an earlier piece must be blocked by the caller.
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

    /// Whether there is nothing to deliver and no position to settle.
    pub fn is_empty(&self) -> bool {
        self.deliveries.is_empty() && self.end.is_none()
    }
}

/// Why an event cannot be read. It concerns this one event: whatever surrounds it is given as ever.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// Stable reason: [`Self::UNDECODABLE`], [`Self::MISSING`], or the rule that the stored event
    /// breaks.
    pub code: Cow<'static, str>,
    /// What is wrong with it.
    pub error: String,
}

impl Unreadable {
    /// The code of a row with a value that no event can have: a time without end, text that is no
    /// UTF-8, storage that is damaged.
    pub const UNDECODABLE: &'static str = "row_undecodable";

    /// The code of a delivery row whose event is no longer in the log: somebody deleted it there.
    pub const MISSING: &'static str = "event_missing";

    /// A row with such a value.
    pub fn undecodable(error: impl Into<String>) -> Self {
        Self { code: Self::UNDECODABLE.into(), error: error.into() }
    }

    /// An event that is no longer in the log.
    pub fn missing() -> Self {
        Self { code: Self::MISSING.into(), error: "the event was deleted from the log before it was delivered".into() }
    }

    /// An event that keeps a message from outside which could not be decoded ([`header::POISON`]).
    pub fn poison(headers: &Headers) -> Option<Self> {
        let (code, error) = headers.get(header::POISON)?.split_once(": ").unwrap_or(("poison", ""));
        Some(Self { code: code.to_owned().into(), error: error.to_owned() })
    }

    /// What the event must become.
    pub fn disposition(&self) -> Disposition {
        Disposition::Dead { code: self.code.clone(), error: self.error.clone(), halt: false, took: None }
    }
}

/// What becomes of one delivery that does not simply go out with its batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disposition {
    /// The destination has it. Due batches: the row goes, the next of its key is released. In
    /// stream batches it needs no entry: everything up to the position without an entry is
    /// delivered.
    Delivered,
    /// Try again `after` a wait on the store's clock. The key is held meanwhile (ordering by key).
    Retry {
        /// The wait.
        after: Duration,
        /// Whether this was an attempt; `false` when the destination was down or throttled it.
        counted: bool,
        /// Stable reason.
        code: Cow<'static, str>,
        /// Last error text.
        error: String,
        /// How long the call took; `None`: there was none.
        took: Option<Duration>,
    },
    /// Its call goes on without the batch, and its outcome is written when it ends: an uncounted
    /// [`Retry`](Self::Retry) that [`Log::acquire`](crate::Log::acquire) makes due at once for the
    /// next holder of the lane, who finds no call of it in flight.
    InFlight {
        /// When the event is due, should nobody write the outcome.
        after: Duration,
    },
    /// It is about to be sent, and nothing else of its lane that could end the relay: an uncounted
    /// [`Retry`](Self::Retry), written before the call and followed by its outcome. Where the next
    /// holder of the lane finds it, the relay ended with the call: [`Log::acquire`] counts that in
    /// [`Batch::crashes`].
    ///
    /// [`Log::acquire`]: crate::Log::acquire
    Alone {
        /// When the event is due, should nobody write the outcome.
        after: Duration,
    },
    /// Its turn did not come before sending stopped: an uncounted [`Retry`](Self::Retry), due now.
    NotSent,
    /// Waits behind the earlier unfinished events of its key. If there is none any more, the store
    /// makes it due now.
    Block,
    /// Waits until its time. Does not hold its key.
    Schedule {
        /// The time, on the store's clock.
        at: Timestamp,
    },
    /// Out of attempts, or refused for good.
    Dead {
        /// Stable reason.
        code: Cow<'static, str>,
        /// Last error text.
        error: String,
        /// `on_dead = "halt"`: the key stays held until a person retries or discards the event.
        halt: bool,
        /// How long the call took; `None`: there was none.
        took: Option<Duration>,
    },
    /// Its `expires_at` has passed, so it was not sent: dead, and no attempt. It never holds its
    /// key: whoever wrote it said that it may be left out.
    Expired {
        /// Its `expires_at`.
        at: Timestamp,
    },
    /// Confirms what a person decided before the event was read ([`Batch::discarded`]); changes
    /// nothing else.
    Discarded,
}

/// The row of an event that is sent again: what a store writes of [`Disposition::Retry`],
/// [`Disposition::InFlight`], [`Disposition::Alone`] and [`Disposition::NotSent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retrying<'a> {
    /// The wait until it is due.
    pub after: Duration,
    /// Whether an attempt is counted.
    pub counted: bool,
    /// Stable reason.
    pub code: &'a str,
    /// Last error text.
    pub error: &'a str,
}

impl Disposition {
    /// The stored code of [`InFlight`](Self::InFlight), for the statement that makes such rows due.
    pub const IN_FLIGHT: &'static str = "in_flight";
    /// The stored code of [`Alone`](Self::Alone), for the statement that counts what a relay ended
    /// with.
    pub const ALONE: &'static str = "alone";
    /// The code of an event that a relay ended with, once the next holder of the lane found it.
    pub const RELAY_CRASHED: &'static str = "relay_crashed";
    /// The error text beside it.
    pub const RELAY_CRASHED_ERROR: &'static str = "the relay ended while it sent this event alone";
    const NOT_SENT: &'static str = "not_sent";
    /// The code of an event that was not sent in its time.
    pub const EXPIRED: &'static str = "expired";
    /// The code of an event that a person marked dead.
    pub const MARKED_DEAD: &'static str = "marked_dead";

    /// The row to write if the event is sent again.
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

    /// How long its call took, if there was one: then it is an attempt, counted or not.
    pub fn took(&self) -> Option<Duration> {
        match self {
            Self::Retry { took, .. } | Self::Dead { took, .. } => *took,
            _ => None,
        }
    }

    /// Whether a stored code is the relay's own, which says nothing of the destination.
    pub fn is_own_code(code: &str) -> bool {
        [Self::IN_FLIGHT, Self::ALONE, Self::RELAY_CRASHED, Self::NOT_SENT].contains(&code)
    }
}

/// One delivery and its disposition.
#[derive(Debug, Clone)]
pub struct Entry<'a> {
    /// The delivery, as it came in a batch.
    pub delivery: &'a Delivery,
    /// What becomes of it.
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
    /// The position stops short of what was read: reading starts again right after `position` (or
    /// after the last settled position when `position` is `None`), and prefetched batches must be
    /// thrown away.
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
            assert!(pieces.iter().all(|piece| piece.held == batch.held));
            assert_eq!(pieces.iter().filter(|piece| piece.due_in.is_some()).count(), 1);
        }
    }
}
