//! The event, as it is appended and as it is read.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use jiff::Timestamp;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::error::{Error, Result, check};
use crate::limits::{
    APPEND_BYTES_MAX, HEADER_BYTES_MAX, HEADERS_MAX, MESSAGE_ID_BYTES_MAX, NAME_BYTES_MAX, OCCURRED_AT_MIN,
    PAYLOAD_BYTES_MAX,
};
use crate::names::{Key, Tenant, Topic};
use crate::subscription::Traits;

/// An event's globally unique id, a UUID. Ids created by Postbox have version 7, so that they sort
/// by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct EventId(Uuid);

impl EventId {
    /// Creates a UUID v7 (RFC 9562). It begins with the time, so that new rows are neighbours in an
    /// index.
    pub fn now_v7() -> Self {
        Self(Uuid::now_v7())
    }

    /// Returns the id for an idempotency key. The same key always gives the same id: a UUID v8 (RFC
    /// 9562) made of the first bytes of the key's SHA-256. `postbox.event_id(key)` does the same in
    /// SQL.
    ///
    /// An event under such an id is appended once, however often its producer tries. The key must
    /// name the event, not only its subject (`order-42-paid`, not `order-42`). Ids are shared by
    /// all tenants, so with several tenants, put the tenant into the key. An empty or blank key is
    /// refused (`idempotency_key_blank`), because two events with it would be taken for one.
    ///
    /// ```
    /// # use postbox_core::{EventId, NewEvent};
    /// let paid = NewEvent::json("order.paid", r#"{"order":42}"#).id(EventId::from_key("order-42-paid")?);
    /// # assert_eq!(paid.id.unwrap().to_string(), "fc2ad250-63a8-8653-ab47-ace46ecc075c");
    /// # Ok::<_, postbox_core::Error>(())
    /// ```
    pub fn from_key(key: impl AsRef<str>) -> Result<Self> {
        let key = key.as_ref();
        // Only ASCII white space, as in SQL. Beyond ASCII, definitions of blank differ.
        if key.bytes().all(|byte| byte.is_ascii_whitespace()) {
            let message = "the idempotency key is blank: name the event, e.g. order-42-paid";
            return Err(Error::invalid("from_key", "idempotency_key_blank", message));
        }
        let digest: [u8; 32] = Sha256::digest(key).into();
        let first = *digest.first_chunk().expect("32 bytes are more than 16");
        Ok(Self(uuid::Builder::from_custom_bytes(first).into_uuid()))
    }

    /// Wraps a UUID.
    pub fn from_uuid(uuid: Uuid) -> Self {
        Self(uuid)
    }

    /// Returns the UUID.
    pub fn as_uuid(&self) -> Uuid {
        self.0
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

impl FromStr for EventId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Uuid::parse_str(text).map(Self).map_err(|_| {
            Error::invalid("parse", "event_id_invalid", format!("{text:?} is not a valid event id (a UUID)"))
        })
    }
}

/// An event's position in its log. Positive; larger is later *within one key*. Gaps are normal
/// (rollbacks).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Seq(pub i64);

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Free headers, sorted by name.
pub type Headers = BTreeMap<String, String>;

/// Names of the headers that Postbox itself understands, and what a header can be.
pub mod header {
    use super::Headers;

    /// The conversation that an event belongs to.
    pub const CORRELATION_ID: &str = "correlation-id";
    /// The event or command that caused this one.
    pub const CAUSATION_ID: &str = "causation-id";
    /// Who acted: a user, a service, a job. A webhook's sender cannot set it: the inbox drops its
    /// headers with this prefix.
    pub const ACTOR: &str = "postbox-actor";
    /// W3C trace context: the parent span.
    pub const TRACEPARENT: &str = "traceparent";
    /// W3C trace context: vendor state.
    pub const TRACESTATE: &str = "tracestate";
    /// The schema version of the payload, a number from 1; absent means 1. Set for typed events.
    pub const SCHEMA_VERSION: &str = "schema-version";
    /// The sender's id of a message from outside, added by the inbox. It does not count towards the
    /// header limits: an event from another Postbox may already have as many headers as allowed,
    /// and must not lose one to this note.
    pub const MESSAGE_ID: &str = "postbox-message-id";
    /// Marks an event that keeps an outside message that could not be decoded: `code: reason`. Such
    /// an event is never sent; relays settle it as dead.
    pub const POISON: &str = "postbox-poison";

    /// Returns whether an event can have a header of this name: a token (RFC 9110 §5.6.2).
    pub fn is_name(name: &str) -> bool {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
    }

    /// Returns whether a header can have this value: no control character except the tab.
    pub fn is_value(value: &str) -> bool {
        !value.chars().any(|c| c.is_control() && c != '\t')
    }

    /// Returns whether headers have all of these, by their exact names and with exactly these
    /// values.
    pub(crate) fn has_all(headers: &Headers, wanted: &Headers) -> bool {
        wanted.iter().all(|(name, value)| headers.get(name) == Some(value))
    }

    /// Adds a header of a message from outside, if an event can have it. Several values of one name
    /// are joined, in place: one message may have 100,000 of them.
    pub fn join(headers: &mut Headers, name: &str, value: &str) {
        if !(is_name(name) && is_value(value)) {
            return;
        }
        match headers.get_mut(name) {
            Some(before) => before.extend([", ", value]),
            None => _ = headers.insert(name.to_owned(), value.to_owned()),
        }
    }

    /// Finds a header by its name in any case: a second spelling of a name is a duplicate in HTTP.
    /// The exact name goes first.
    pub fn find<'h>(headers: &'h Headers, name: &str) -> Option<&'h str> {
        let other_case = || headers.iter().find(|(its, _)| its.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        headers.get(name).or_else(other_case).map(String::as_str)
    }
}

/// The content type of an event that names none.
pub(crate) const CONTENT_TYPE_DEFAULT: &str = "application/json";
/// The kind of an event that names none.
pub(crate) const KIND_DEFAULT: &str = "domain";

/// An event about to be appended. Build it, then pass it to [`Postbox::append`] inside your
/// transaction.
///
/// [`Postbox::append`]: crate::Postbox::append
///
/// The store fills in fields left empty: `id` becomes a fresh UUIDv7, `occurred_at` the time on the
/// database's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "an event that is not appended tells nobody"]
pub struct NewEvent {
    /// The id. Set it if an append may be repeated: an event that is in the log already, with the
    /// same topic, key, tenant and payload, is not appended again. See [`EventId::from_key`].
    pub id: Option<EventId>,
    /// What happened.
    pub topic: String,
    /// Events of one key are delivered in commit order. `None`: no order.
    pub key: Option<String>,
    /// The kind of aggregate `key` names, e.g. `order`.
    pub aggregate: Option<String>,
    /// The aggregate's version after the change.
    pub version: Option<i64>,
    /// `domain` (default), `integration`, …
    pub kind: Option<String>,
    /// The service that produced it, e.g. `billing`.
    pub source: Option<String>,
    /// The tenant the event belongs to.
    pub tenant: Option<String>,
    /// The bytes, delivered exactly as they are here.
    pub payload: Bytes,
    /// Default `application/json`.
    pub content_type: Option<String>,
    /// Free headers; see [`header`] for the names Postbox understands.
    pub headers: Headers,
    /// When it happened, in business time.
    pub occurred_at: Option<Timestamp>,
    /// Not delivered before this time.
    pub deliver_at: Option<Timestamp>,
    /// Not delivered from this time on.
    pub expires_at: Option<Timestamp>,
}

impl NewEvent {
    /// Creates an event with a payload of any content type.
    pub fn new(topic: impl Into<String>, payload: impl Into<Bytes>, content_type: impl Into<String>) -> Self {
        let content_type = content_type.into();
        Self {
            id: None,
            topic: topic.into(),
            key: None,
            aggregate: None,
            version: None,
            kind: None,
            source: None,
            tenant: None,
            payload: payload.into(),
            content_type: (content_type != CONTENT_TYPE_DEFAULT).then_some(content_type),
            headers: Headers::new(),
            occurred_at: None,
            deliver_at: None,
            expires_at: None,
        }
    }

    /// Creates an event whose payload is JSON text. The bytes are kept as they are, never parsed
    /// and re-encoded.
    pub fn json(topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self::new(topic, payload, CONTENT_TYPE_DEFAULT)
    }

    /// Sets the id.
    pub fn id(mut self, id: EventId) -> Self {
        self.id = Some(id);
        self
    }

    /// Sets the ordering key.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets the kind of aggregate the key names.
    pub fn aggregate(mut self, aggregate: impl Into<String>) -> Self {
        self.aggregate = Some(aggregate.into());
        self
    }

    /// Sets the aggregate's version after the change.
    pub fn version(mut self, version: i64) -> Self {
        self.version = Some(version);
        self
    }

    /// Sets the kind.
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    /// Sets the service that produced it.
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Sets the tenant.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = Some(tenant.into());
        self
    }

    /// Adds a header; a second value for the same name replaces the first.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Sets the conversation it belongs to: the header [`header::CORRELATION_ID`].
    pub fn correlation_id(self, id: impl Into<String>) -> Self {
        self.header(header::CORRELATION_ID, id)
    }

    /// Sets the event or command that caused it: the header [`header::CAUSATION_ID`].
    pub fn causation_id(self, id: impl Into<String>) -> Self {
        self.header(header::CAUSATION_ID, id)
    }

    /// Sets the version of the payload's schema, from 1: the header [`header::SCHEMA_VERSION`].
    pub fn schema_version(self, version: u32) -> Self {
        self.header(header::SCHEMA_VERSION, version.to_string())
    }

    /// Sets who acts: the header [`header::ACTOR`].
    pub fn actor(self, actor: impl Into<String>) -> Self {
        self.header(header::ACTOR, actor)
    }

    /// Sets when it happened.
    pub fn occurred_at(mut self, at: Timestamp) -> Self {
        self.occurred_at = Some(at);
        self
    }

    /// Delays delivery. A delayed event leaves its key's order: later events of the key do not wait
    /// for it.
    pub fn deliver_at(mut self, at: Timestamp) -> Self {
        self.deliver_at = Some(at);
        self
    }

    /// Sets when it expires. From then on it is not sent and becomes dead (`expired`). The store's
    /// clock decides. A call under way is not cut short. The time must be later than
    /// [`Self::deliver_at`].
    pub fn expires_at(mut self, at: Timestamp) -> Self {
        self.expires_at = Some(at);
        self
    }

    /// Checks the events of one append, each and together. Stores call this before the round trip.
    pub fn validate_all<'a>(events: impl IntoIterator<Item = &'a Self>) -> Result<()> {
        let mut bytes = 0;
        for event in events {
            event.validate()?;
            bytes += event.payload.len() + header_bytes(&event.headers);
        }
        check(bytes <= APPEND_BYTES_MAX, "append_too_large", || {
            format!(
                "the events of one append have {bytes} bytes; at most {APPEND_BYTES_MAX} are allowed: append them \
                 in several calls, in the same transaction if they belong together"
            )
        })
    }

    /// Checks every limit of [`crate::limits`].
    pub fn validate(&self) -> Result<()> {
        Topic::new(self.topic.as_str())?;
        self.key.as_deref().map(Key::new).transpose()?;
        self.tenant.as_deref().map(Tenant::new).transpose()?;
        let texts = [&self.kind, &self.aggregate, &self.source, &self.content_type];
        for (what, text) in ["kind", "aggregate", "source", "content_type"].into_iter().zip(texts) {
            text.as_ref().map_or(Ok(()), |text| check_word_of(what, text))?;
        }
        let bytes = self.payload.len();
        check(bytes <= PAYLOAD_BYTES_MAX, "payload_too_large", || {
            format!(
                "the payload has {bytes} bytes; at most {PAYLOAD_BYTES_MAX} are allowed: store it elsewhere and send its address"
            )
        })?;
        self.check_times()?;
        check_headers(&self.headers)
    }

    fn check_times(&self) -> Result<()> {
        let Self { occurred_at, deliver_at, expires_at, .. } = *self;
        let since = |what, code, at: Option<Timestamp>, least: Timestamp| {
            check(at.is_none_or(|at| at >= least), code, || {
                format!("{what} is {}; times from {least} on are allowed", at.unwrap_or_default())
            })
        };
        since("occurred_at", "occurred_at_invalid", occurred_at, OCCURRED_AT_MIN)?;
        since("deliver_at", "deliver_at_invalid", deliver_at, Timestamp::UNIX_EPOCH)?;
        since("expires_at", "expires_at_invalid", expires_at, Timestamp::UNIX_EPOCH)?;
        let Some((from, end)) = deliver_at.zip(expires_at) else { return Ok(()) };
        // Compared in microseconds, the precision of the stores.
        check(end.as_microsecond() > from.as_microsecond(), "expires_too_early", || {
            format!(
                "the event expires at {end} and is not delivered before {from}, so nobody would get it; let it \
                 expire later, or leave one of the two out"
            )
        })
    }

    /// Returns the event as a store without SQL defaults records it.
    pub fn into_event(self, id: EventId, now: Timestamp) -> Event {
        Event {
            id: self.id.unwrap_or(id),
            topic: Topic::from_stored(self.topic),
            key: self.key.map(Key::from_stored),
            aggregate: self.aggregate,
            version: self.version,
            kind: self.kind,
            source: self.source,
            tenant: self.tenant.map(Tenant::from_stored),
            payload: self.payload,
            content_type: self.content_type,
            headers: self.headers,
            occurred_at: self.occurred_at.unwrap_or(now),
            created_at: now,
            deliver_at: self.deliver_at,
            expires_at: self.expires_at,
        }
    }
}

/// An event as it is in a log. Never changed after the append.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Globally unique.
    pub id: EventId,
    /// What happened.
    pub topic: Topic,
    /// The ordering key.
    pub key: Option<Key>,
    /// The kind of aggregate the key names.
    pub aggregate: Option<String>,
    /// The aggregate's version after the change.
    pub version: Option<i64>,
    /// `None` means `domain`; read it through [`Event::kind`].
    pub kind: Option<String>,
    /// The service that produced it.
    pub source: Option<String>,
    /// The tenant.
    pub tenant: Option<Tenant>,
    /// The bytes as appended.
    pub payload: Bytes,
    /// `None` means `application/json`; read it through [`Event::content_type`].
    pub content_type: Option<String>,
    /// Free headers.
    pub headers: Headers,
    /// When it happened, in business time.
    pub occurred_at: Timestamp,
    /// When it was appended, by the database's clock.
    pub created_at: Timestamp,
    /// Not delivered before this time.
    pub deliver_at: Option<Timestamp>,
    /// Not delivered from this time on.
    pub expires_at: Option<Timestamp>,
}

impl Event {
    /// Returns the kind: `domain`, `integration`, …
    pub fn kind(&self) -> &str {
        self.kind.as_deref().unwrap_or(KIND_DEFAULT)
    }

    /// Returns the payload's media type.
    pub fn content_type(&self) -> &str {
        self.content_type.as_deref().unwrap_or(CONTENT_TYPE_DEFAULT)
    }

    /// Returns whether the content type is JSON (`application/json` or any `+json`), ignoring
    /// parameters.
    pub fn is_json(&self) -> bool {
        let media = self.content_type().split(';').next().unwrap_or_default().trim();
        media.eq_ignore_ascii_case("application/json") || media.to_ascii_lowercase().ends_with("+json")
    }

    /// Returns what a filter compares, except the headers.
    pub fn traits(&self) -> Traits<'_> {
        Traits {
            topic: self.topic.as_str(),
            tenant: self.tenant.as_ref().map(Tenant::as_str),
            kind: self.kind.as_deref(),
            aggregate: self.aggregate.as_deref(),
        }
    }

    /// Returns a header's value by its exact name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Returns the schema version of the payload from the header [`header::SCHEMA_VERSION`]; 1
    /// without the header, `None` if it is not a number.
    pub fn schema_version(&self) -> Option<u32> {
        schema_version(&self.headers)
    }

    /// Returns the conversation it belongs to.
    pub fn correlation_id(&self) -> Option<&str> {
        header::find(&self.headers, header::CORRELATION_ID)
    }

    /// Returns the event or command that caused it.
    pub fn causation_id(&self) -> Option<&str> {
        header::find(&self.headers, header::CAUSATION_ID)
    }

    /// Returns who acted.
    pub fn actor(&self) -> Option<&str> {
        header::find(&self.headers, header::ACTOR)
    }
}

/// See [`Event::schema_version`].
pub(crate) fn schema_version(headers: &Headers) -> Option<u32> {
    header::find(headers, header::SCHEMA_VERSION).unwrap_or("1").parse().ok()
}

/// Whether an event can have this text as its kind, aggregate, source or content type.
pub fn is_word(text: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&text.len()) && !text.chars().any(char::is_control)
}

/// Checks a kind, an aggregate, a source or a content type.
pub(crate) fn check_word_of(what: &'static str, text: &str) -> Result<()> {
    if is_word(text) {
        return Ok(());
    }
    let message = format!("the {what} must have 1 to {NAME_BYTES_MAX} bytes and no control characters");
    Err(Error::invalid("validate", format!("{what}_invalid"), message))
}

pub(crate) fn check_headers(headers: &Headers) -> Result<()> {
    let noted = headers.get(header::MESSAGE_ID).filter(|id| id.len() <= MESSAGE_ID_BYTES_MAX);
    let count = headers.len();
    check(count - usize::from(noted.is_some()) <= HEADERS_MAX, "headers_too_many", || {
        format!("{count} headers are too many; at most {HEADERS_MAX} are allowed")
    })?;
    let noted_bytes = noted.map_or(0, |id| header::MESSAGE_ID.len() + id.len());
    let bytes = header_bytes(headers) - noted_bytes;
    check(bytes <= HEADER_BYTES_MAX, "headers_too_large", || {
        format!("the headers have {bytes} bytes together; at most {HEADER_BYTES_MAX} are allowed")
    })?;
    for (name, value) in headers {
        check(header::is_name(name), "header_name_invalid", || {
            format!("{name:?} is not a valid header name: letters, digits and !#$%&'*+-.^_`|~ only (RFC 9110)")
        })?;
        check(header::is_value(value), "header_value_invalid", || {
            format!("the value of header {name} has a control character; line breaks and NUL are refused")
        })?;
    }
    Ok(())
}

pub(crate) fn header_bytes(headers: &Headers) -> usize {
    headers.iter().map(|(name, value)| name.len() + value.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(event: NewEvent) -> String {
        event.validate().expect_err("refused").code().to_owned()
    }

    #[test]
    fn every_limit_has_a_code_of_its_own() {
        let event = || NewEvent::json("t", "{}");
        assert!(event().validate().is_ok());
        assert_eq!(code(NewEvent::json("t", vec![0; PAYLOAD_BYTES_MAX + 1])), "payload_too_large");
        assert_eq!(code(event().header("a\r\nb", "x")), "header_name_invalid");
        assert_eq!(code(event().header("a", "x\r\nb: y")), "header_value_invalid");
        assert_eq!(code(event().header("a", "x".repeat(HEADER_BYTES_MAX))), "headers_too_large");
        assert_eq!(code((0..65).fold(event(), |event, n| event.header(format!("h{n}"), ""))), "headers_too_many");
        assert_eq!(code(event().kind("")), "kind_invalid");
        assert_eq!(code(event().key("k".repeat(1025))), "key_too_long");
        let time = |text: &str| text.parse::<Timestamp>().expect("a time");
        assert_eq!(code(event().occurred_at(time("0000-12-31T23:59:59Z"))), "occurred_at_invalid");
        assert_eq!(code(event().deliver_at(time("1969-12-31T23:59:59Z"))), "deliver_at_invalid");
        assert_eq!(code(event().expires_at(time("-004000-01-01T00:00:00Z"))), "expires_at_invalid");
        let (at, end) = (time("2031-01-01T00:00:00.000001Z"), time("2031-01-01T00:00:00.000002Z"));
        assert!(event().deliver_at(at).expires_at(end).validate().is_ok());
        // Stores keep microseconds.
        for end in [at, time("2031-01-01T00:00:00.0000019Z")] {
            assert_eq!(code(event().deliver_at(at).expires_at(end)), "expires_too_early");
        }
    }

    #[test]
    fn the_inbox_s_note_takes_no_header_s_place() {
        let full =
            (0..64).fold(NewEvent::json("t", "{}"), |event, n| event.header(format!("h{n:02}"), "v".repeat(253)));
        assert!(full.validate().is_ok());
        assert!(full.clone().header(header::MESSAGE_ID, "i".repeat(255)).validate().is_ok());
        assert_eq!(code(full.clone().header("h64", "")), "headers_too_many");
        // Longer than any id, so it counts like every other header.
        assert_eq!(code(full.header(header::MESSAGE_ID, "i".repeat(256))), "headers_too_many");
    }

    #[test]
    fn a_payload_at_the_limit_is_accepted() {
        assert!(NewEvent::json("t", vec![b' '; PAYLOAD_BYTES_MAX]).validate().is_ok());
    }

    #[test]
    fn json_is_known_by_its_media_type() {
        let event = |content_type: &str| {
            NewEvent::new("t", "", content_type)
                .into_event(EventId::from_uuid(Uuid::nil()), Timestamp::UNIX_EPOCH)
                .is_json()
        };
        assert!(event("application/json"));
        assert!(event("application/cloudevents+json; charset=utf-8"));
        assert!(!event("text/plain"));
    }
}
