//! The receive contract: the inbox's write side.

use std::slice;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use serde::{Serialize, Serializer};

use crate::error::{Error, ErrorKind, Result};
use crate::event::{EventId, NewEvent};
use crate::hex::hex;
use crate::kit;
use crate::names::{LogName, SourceName};

/// A verified message from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inbound {
    /// The source it came from. Ids are unique per source (and tenant, if the event has one).
    pub source: SourceName,
    /// The sender's id of the message: 1 to 255 bytes, no NUL.
    pub message_id: String,
    /// SHA-256 of what was signed, usually the raw body. A known id with another digest is a
    /// conflict.
    pub digest: [u8; 32],
    /// The event to store: payload = the raw body.
    pub event: NewEvent,
}

impl Inbound {
    /// Checks the message id and the event. Stores call this before the round trip.
    pub fn validate(&self) -> Result<()> {
        kit::check_message_id("receive", &self.message_id)?;
        self.event.validate()
    }
}

/// The result for an inbound message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// Stored, durably.
    Accepted(EventId),
    /// The same id with the same body was stored before; nothing changed.
    Duplicate,
    /// The same id with *another* body was stored before. Refused, and recorded as a conflict.
    Conflict,
}

/// The record of a refused message whose id was known with another body. As JSON it is what
/// `postbox list --state conflict --json` prints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Conflict {
    /// Where it came from.
    pub source: SourceName,
    /// Its tenant, if it had one.
    pub tenant: Option<String>,
    /// The id.
    pub message_id: String,
    /// SHA-256 of the body that was stored first.
    #[serde(serialize_with = "digits")]
    pub digest_stored: Vec<u8>,
    /// SHA-256 of the body that came later.
    #[serde(serialize_with = "digits")]
    pub digest_refused: Vec<u8>,
    /// How often that body came.
    pub times: u64,
    /// When it came first.
    #[serde(serialize_with = "text")]
    pub first_at: Timestamp,
    /// When it came last.
    #[serde(serialize_with = "text")]
    pub last_at: Timestamp,
}

fn digits<S: Serializer>(digest: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&hex(digest))
}

fn text<S: Serializer>(at: &Timestamp, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(at)
}

/// Stores messages from outside once.
///
/// Behaviour:
/// - `(source, tenant, message_id)` is stored once, with the digest. The event goes to the log in
///   the same transaction. Once `Accepted` is returned, it is durable.
/// - The messages of one call are one commit, and their events are in the log in the order given. A
///   failure applies to the whole call and stores nothing. To find out which message caused it,
///   receive each alone. A call without messages does nothing.
/// - If k concurrent calls have one id, exactly one gets `Accepted`. Within a call it is the first
///   one.
/// - A conflict leaves a record ([`Conflict`]) and no event. The same body again only raises its
///   count, so that a sender who repeats a message does not fill the disk. Records are forgotten
///   together with ids of the same age.
/// - Call it only with verified messages. Nothing else may create a row, not even for the id.
/// - If the store is down: `Unavailable`. The sender must send again.
///
/// Cancel-safety: a dropped future may or may not have stored, but all or nothing of a call.
/// Receiving again then returns `Duplicate`.
#[async_trait]
pub trait Receive: Send + Sync + 'static {
    /// Stores messages in one commit. Returns one result each, in the order given. Sets no limit on
    /// their number; the caller must.
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>>;

    /// Stores one message.
    async fn receive(&self, log: &LogName, inbound: Inbound) -> Result<Received> {
        let received = self.receive_many(log, slice::from_ref(&inbound)).await?;
        received
            .first()
            .copied()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "receive", "store_protocol", "the store gave no answer"))
    }

    /// Forgets ids and records of conflicts older than `older_than`, a bounded number per call, and
    /// returns how many of both: none are left once it returns 0. Ids must be remembered for longer
    /// than the sender keeps retrying, and no shorter than
    /// [`MESSAGE_IDS_AGE_MIN`](crate::limits::MESSAGE_IDS_AGE_MIN).
    async fn forget(&self, older_than: Duration) -> Result<u64>;
}
