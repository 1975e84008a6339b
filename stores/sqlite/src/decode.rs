//! From a row to an event. Total: a row that breaks a rule SQL could not check is still read, with the fault named, so that no
//! INSERT of anybody can stop a lane.

use std::borrow::Cow;

use bytes::Bytes;
use postbox_core::{Error, Event, EventId, Headers, Key, NewEvent, Tenant, Topic};
use rusqlite::Row;
use rusqlite::types::ValueRef;

use crate::clock::timestamp;

/// The columns of a log under the alias `l`, in the order this module reads them; payload last, see [`crate::schema::log_ddl`].
pub(crate) const LOG_COLUMNS: &str = "l.seq, l.topic, l.tenant, l.key, l.id, l.created_at, l.aggregate, l.version, l.kind, l.source, \
l.content_type, l.headers, \
CASE typeof(l.occurred_at) WHEN 'text' THEN CAST(round((julianday(l.occurred_at) - 2440587.5) * 86400000.0) AS INTEGER) * 1000 ELSE l.occurred_at END, \
CASE typeof(l.deliver_at) WHEN 'text' THEN CAST(round((julianday(l.deliver_at) - 2440587.5) * 86400000.0) AS INTEGER) * 1000 ELSE l.deliver_at END, \
l.payload";
/// How many columns those are.
pub(crate) const LOG_COLUMNS_COUNT: usize = 15;

const SEQ: usize = 0;
const TOPIC: usize = 1;
const TENANT: usize = 2;
const KEY: usize = 3;
const ID: usize = 4;
const CREATED_AT: usize = 5;
const PAYLOAD: usize = 14;

/// The place of a row.
pub(crate) fn seq(row: &Row<'_>) -> rusqlite::Result<i64> {
    row.get(SEQ)
}

/// What decides whether a lane wants a row, without touching its payload.
pub(crate) struct Head<'a> {
    pub(crate) topic: Cow<'a, str>,
    pub(crate) tenant: Option<Cow<'a, str>>,
    key: Option<&'a [u8]>,
    id: &'a [u8],
}

impl<'a> Head<'a> {
    pub(crate) fn read(row: &'a Row<'_>) -> rusqlite::Result<Self> {
        let text = |column| -> rusqlite::Result<_> { Ok(bytes(row.get_ref(column)?)) };
        Ok(Self {
            topic: String::from_utf8_lossy(text(TOPIC)?.unwrap_or_default()),
            tenant: text(TENANT)?.map(String::from_utf8_lossy),
            key: text(KEY)?,
            id: text(ID)?.unwrap_or_default(),
        })
    }

    /// The lane of a row: its key decides, or its id when it has none.
    pub(crate) fn lane(&self, lanes: u16) -> u16 {
        let slot = fnv1a(self.key.unwrap_or(self.id)) % u64::from(lanes.max(1));
        u16::try_from(slot).expect("a remainder of a u16 fits one")
    }
}

/// How many bytes of payload a row has, without copying them.
pub(crate) fn payload_len(row: &Row<'_>) -> rusqlite::Result<usize> {
    Ok(bytes(row.get_ref(PAYLOAD)?).map_or(0, <[u8]>::len))
}

/// An event, and the rule it breaks if it breaks one.
pub(crate) struct Decoded {
    pub(crate) seq: i64,
    pub(crate) event: Event,
    pub(crate) fault: Option<Error>,
}

impl Decoded {
    /// Reads a row of [`LOG_COLUMNS`].
    pub(crate) fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        let mut fault = None;
        let mut text = |column: usize| text(row, column, &mut fault);
        let topic = text(TOPIC)?.unwrap_or_default();
        let tenant = text(TENANT)?;
        let key = text(KEY)?;
        let id = text(ID)?.unwrap_or_default();
        let (aggregate, kind, source) = (text(6)?, text(8)?, text(9)?);
        let content_type = text(10)?;
        let headers = text(11)?;
        let headers = match headers {
            Some(json) if json != "{}" => decode_headers(&json).unwrap_or_else(|error| {
                fault.get_or_insert(error);
                Headers::new()
            }),
            _ => Headers::new(),
        };
        let id = id.parse().unwrap_or_else(|error| {
            fault.get_or_insert(error);
            EventId::from_uuid(uuid::Uuid::nil())
        });
        let created_at = timestamp(row.get::<_, Option<i64>>(CREATED_AT)?.unwrap_or(0));
        let event = Event {
            id,
            topic: Topic::from_stored(topic),
            key: key.map(Key::from_stored),
            aggregate,
            version: row.get_ref(7)?.as_i64_or_null().unwrap_or(None),
            kind,
            source,
            tenant: tenant.map(Tenant::from_stored),
            payload: Bytes::copy_from_slice(bytes(row.get_ref(PAYLOAD)?).unwrap_or_default()),
            content_type,
            headers,
            occurred_at: row.get::<_, Option<i64>>(12)?.map_or(created_at, timestamp),
            created_at,
            deliver_at: row.get::<_, Option<i64>>(13)?.map(timestamp),
        };
        Ok(Self { seq: seq(row)?, event, fault })
    }
}

/// FNV-1a, 64 bits: small, stable, and spreads short keys well.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn bytes(value: ValueRef<'_>) -> Option<&[u8]> {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(bytes),
        _ => None,
    }
}

/// SQLite does not check that text is UTF-8; we do.
fn text(row: &Row<'_>, column: usize, fault: &mut Option<Error>) -> rusqlite::Result<Option<String>> {
    let Some(bytes) = bytes(row.get_ref(column)?) else { return Ok(None) };
    Ok(Some(match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            fault.get_or_insert_with(|| Error::invalid("read", "text_not_utf8", "a text column is not UTF-8"));
            String::from_utf8_lossy(bytes).into_owned()
        }
    }))
}

/// Headers of a plain INSERT may break rules that a CHECK cannot see: names, counts, values that are no strings.
fn decode_headers(json: &str) -> Result<Headers, Error> {
    let headers: Headers = serde_json::from_str(json).map_err(|error| {
        Error::invalid("read", "headers_invalid", format!("the headers are no JSON object of strings: {error}"))
    })?;
    let probe = NewEvent { headers, ..NewEvent::json("t", Bytes::new()) };
    probe.validate()?;
    Ok(probe.headers)
}
