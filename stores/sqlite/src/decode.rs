//! Decodes rows into events, and never fails on a row's contents. A row that breaks a rule SQL
//! could not check, or holds a value that no event can have, is still decoded, with its fault
//! named. So no plain INSERT can stop a lane.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use jiff::Timestamp;
use postbox_core::kit::lane_of;
use postbox_core::{
    Criteria, Delivery, Error, Event, EventId, Filter, Headers, Key, NewEvent, Seq, State, Tenant, Topic, Traits,
    Unreadable,
};
use rusqlite::types::ValueRef;
use rusqlite::{CachedStatement, Row, Transaction};

use crate::clock::timestamp;

/// A time of a log in microseconds, even if it was written as text. Text that is no time stays as
/// it is. Most are NULL, for which no function is called.
macro_rules! micros_of {
    ($column:literal) => {
        concat!(
            "CASE WHEN l.",
            $column,
            " IS NULL THEN NULL WHEN typeof(l.",
            $column,
            ") = 'text' THEN coalesce(CAST(round((julianday(l.",
            $column,
            ") - 2440587.5) * 86400000.0) AS INTEGER) * 1000, l.",
            $column,
            ") ELSE l.",
            $column,
            " END"
        )
    };
}

/// The columns of [`LOG_COLUMNS`], with this payload.
macro_rules! log_columns {
    ($payload:literal) => {
        concat!(
            "l.seq, l.topic, l.tenant, l.key, l.id, l.created_at, l.kind, l.aggregate, l.headers, l.version, ",
            "l.source, l.content_type, ",
            micros_of!("occurred_at"),
            ", ",
            micros_of!("deliver_at"),
            ", ",
            micros_of!("expires_at"),
            ", ",
            $payload
        )
    };
}

/// The columns of a log under the alias `l`, in the order in which this module reads them. The
/// payload is last, see [`crate::schema::log_ddl`].
pub(crate) const LOG_COLUMNS: &str = log_columns!("l.payload");
/// The same columns for a walk that passes rows: a payload that may have overflow pages is NULL.
/// The walk then reads a wanted row again, by `seq`.
///
/// SQLite loads every page of what is selected, and a payload may have thousands. `octet_length`
/// reads none of them. To read every wanted row again costs three times as much for small payloads
/// (measured).
pub(crate) const WALK_COLUMNS: &str = log_columns!("CASE WHEN octet_length(l.payload) <= 2000 THEN l.payload END");
/// The same columns for a walk that needs no payload: an empty one for each row. `typeof` reads no
/// page of it either.
pub(crate) const COLUMNS_WITHOUT_PAYLOAD: &str =
    log_columns!("CASE WHEN typeof(l.payload) IN ('text', 'blob') THEN x'' ELSE l.payload END");
/// The columns of [`Head`], which come first in the other lists.
pub(crate) const HEAD_COLUMNS: &str =
    "l.seq, l.topic, l.tenant, l.key, l.id, l.created_at, l.kind, l.aggregate, l.headers";
/// The number of these columns.
pub(crate) const HEAD_COLUMNS_COUNT: usize = 9;
/// The columns that counting a row needs: those of [`Head`], then the time from which it may be
/// delivered.
pub(crate) const LOOK_COLUMNS: &str = concat!(
    "l.seq, l.topic, l.tenant, l.key, l.id, l.created_at, l.kind, l.aggregate, l.headers, ",
    micros_of!("deliver_at")
);
/// The time at which an event expires.
pub(crate) const EXPIRES_AT: &str = micros_of!("expires_at");
/// The columns' names, for error texts.
const LOG_COLUMN_NAMES: [&str; LOG_COLUMNS_COUNT] = [
    "seq",
    "topic",
    "tenant",
    "key",
    "id",
    "created_at",
    "kind",
    "aggregate",
    "headers",
    "version",
    "source",
    "content_type",
    "occurred_at",
    "deliver_at",
    "expires_at",
    "payload",
];
/// The number of these columns.
pub(crate) const LOG_COLUMNS_COUNT: usize = 16;

const SEQ: usize = 0;
const TOPIC: usize = 1;
const TENANT: usize = 2;
const KEY: usize = 3;
const ID: usize = 4;
const CREATED_AT: usize = 5;
const KIND: usize = 6;
const AGGREGATE: usize = 7;
const HEADERS: usize = 8;
/// The place of `deliver_at` in [`LOOK_COLUMNS`].
pub(crate) const LOOK_DELIVER_AT: usize = HEAD_COLUMNS_COUNT;
/// The number of [`LOOK_COLUMNS`].
pub(crate) const LOOK_COLUMNS_COUNT: usize = 10;
const PAYLOAD: usize = 15;

/// The columns of a delivery row under the alias `d`, in the order [`DeliveryRow`] reads them.
pub(crate) const DELIVERY_COLUMNS: &str =
    "d.seq, d.id, d.topic, d.key, d.created_at, d.state, d.holds, d.attempts, d.replays, d.due_at, d.code, d.crashes";
/// The number of these columns.
pub(crate) const DELIVERY_COLUMNS_COUNT: usize = 12;

/// A delivery row, with what it knows of its event.
pub(crate) struct DeliveryRow {
    pub(crate) seq: i64,
    pub(crate) id: String,
    pub(crate) topic: String,
    pub(crate) key: Option<String>,
    pub(crate) created_at: i64,
    pub(crate) state: State,
    pub(crate) holds: bool,
    pub(crate) attempts: u32,
    pub(crate) replays: u32,
    pub(crate) due_at: Option<i64>,
    pub(crate) code: Option<String>,
    /// How many relays crashed while they sent it alone.
    pub(crate) crashes: u32,
}

impl DeliveryRow {
    /// Reads [`DELIVERY_COLUMNS`] from column `at` on.
    pub(crate) fn read(row: &Row<'_>, at: usize) -> rusqlite::Result<Self> {
        Ok(Self {
            seq: row.get(at)?,
            id: row.get(at + 1)?,
            topic: row.get(at + 2)?,
            key: row.get(at + 3)?,
            created_at: row.get(at + 4)?,
            // A CHECK constraint allows only these words.
            state: row.get::<_, String>(at + 5)?.parse().unwrap_or(State::Dead),
            holds: row.get(at + 6)?,
            attempts: row.get(at + 7)?,
            replays: row.get(at + 8)?,
            due_at: row.get(at + 9)?,
            code: row.get(at + 10)?,
            crashes: row.get(at + 11)?,
        })
    }

    /// Whether its time has come.
    pub(crate) fn is_due(&self, now: i64) -> bool {
        self.due_at.is_some_and(|at| at <= now)
    }
}

/// The `seq` of a row.
pub(crate) fn seq(row: &Row<'_>) -> rusqlite::Result<i64> {
    row.get(SEQ)
}

/// Whether an operator's criteria match a row of a log, whose first columns are those of
/// [`LOG_COLUMNS`].
pub(crate) fn is_meant(which: &Criteria, row: &Row<'_>, head: &Head<'_>) -> rusqlite::Result<bool> {
    if *which == Criteria::default() {
        return Ok(true);
    }
    let (key, created_at) = (lossy(row, KEY)?, timestamp(integer(row, CREATED_AT)?.unwrap_or(0)));
    Ok(which.mean(&head.topic, key.as_deref(), head.tenant.as_deref(), created_at))
}

/// The lane of a row, by its key or, if it has none, its id.
pub(crate) fn row_lane(row: &Row<'_>, lanes: u16) -> rusqlite::Result<u16> {
    let key = match bytes(row.get_ref(KEY)?) {
        Some(key) => key,
        None => bytes(row.get_ref(ID)?).unwrap_or_default(),
    };
    Ok(lane_of(key, lanes))
}

/// What decides whether a lane wants a row, without reading its payload.
pub(crate) struct Head<'a> {
    pub(crate) topic: Cow<'a, str>,
    pub(crate) tenant: Option<Cow<'a, str>>,
    key: Option<&'a [u8]>,
    id: &'a [u8],
    kind: Option<&'a [u8]>,
    aggregate: Option<&'a [u8]>,
    headers: Option<&'a [u8]>,
}

impl<'a> Head<'a> {
    pub(crate) fn read(row: &'a Row<'_>) -> rusqlite::Result<Self> {
        let text = |column| -> rusqlite::Result<_> { Ok(bytes(row.get_ref(column)?)) };
        Ok(Self {
            topic: lossy_text(text(TOPIC)?.unwrap_or_default()),
            tenant: text(TENANT)?.map(lossy_text),
            key: text(KEY)?,
            id: text(ID)?.unwrap_or_default(),
            kind: text(KIND)?,
            aggregate: text(AGGREGATE)?,
            headers: text(HEADERS)?,
        })
    }

    /// Whether a filter wants the row.
    pub(crate) fn is_wanted_by(&self, filter: &Filter) -> bool {
        let [kind, aggregate] = [self.kind, self.aggregate].map(|text| text.map(lossy_text));
        let (tenant, kind, aggregate) = (self.tenant.as_deref(), kind.as_deref(), aggregate.as_deref());
        filter.matches(Traits { topic: &self.topic, tenant, kind, aggregate }, || {
            // Whatever cannot be parsed is wanted, so that it is read, and dead with its code.
            let parsed = |json| text_headers(json).map_or(Cow::Borrowed(&filter.headers), Cow::Owned);
            self.headers.map(parsed).unwrap_or_default()
        })
    }

    /// Whether its headers cannot be parsed, so that it dies when it is read. In earlier versions a
    /// filter for headers skipped such a row.
    pub(crate) fn is_unparsable(&self) -> bool {
        self.headers.is_some_and(|json| text_headers(json).is_none())
    }

    /// The lane of a row, by its key or, if it has none, its id.
    pub(crate) fn lane(&self, lanes: u16) -> u16 {
        lane_of(self.key.unwrap_or(self.id), lanes)
    }
}

/// The size of a row's payload in bytes, without copying it.
pub(crate) fn payload_len(row: &Row<'_>) -> rusqlite::Result<usize> {
    Ok(bytes(row.get_ref(PAYLOAD)?).map_or(0, <[u8]>::len))
}

/// Whether a row of [`WALK_COLUMNS`] is without its payload, which is never NULL in a log.
pub(crate) fn is_payload_left_out(row: &Row<'_>) -> rusqlite::Result<bool> {
    Ok(row.get_ref(PAYLOAD)? == ValueRef::Null)
}

/// The statement that finds a row of [`LOG_COLUMNS`] by its `seq`.
pub(crate) fn log_find<'a>(tx: &'a Transaction<'_>, table: &str) -> rusqlite::Result<CachedStatement<'a>> {
    // By primary key; no lock.
    tx.prepare_cached(&format!("SELECT {LOG_COLUMNS} FROM {table} l WHERE l.seq = ?1"))
}

/// Reads a row of [`WALK_COLUMNS`] with its payload: finds it again if that was left out.
pub(crate) fn read_whole<T>(
    tx: &Transaction<'_>,
    table: &str,
    row: &Row<'_>,
    read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    if is_payload_left_out(row)? { log_find(tx, table)?.query_row([seq(row)?], read) } else { read(row) }
}

/// An event, and why it cannot be sent, if it cannot.
pub(crate) struct Decoded {
    pub(crate) seq: i64,
    pub(crate) event: Event,
    pub(crate) unreadable: Option<Unreadable>,
}

impl Decoded {
    /// Decodes a row of [`LOG_COLUMNS`].
    pub(crate) fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        let mut fields = Fields { row, unreadable: None };
        let topic = fields.text(TOPIC)?.unwrap_or_default();
        let tenant = fields.text(TENANT)?;
        let key = fields.text(KEY)?;
        let id = fields.text(ID)?.unwrap_or_default();
        let id = id.parse().unwrap_or_else(|_| {
            fields.refuse(ID);
            EventId::from_uuid(uuid::Uuid::nil())
        });
        let (aggregate, kind, source) = (fields.text(AGGREGATE)?, fields.text(KIND)?, fields.text(10)?);
        let content_type = fields.text(11)?;
        let headers = match fields.text(HEADERS)? {
            Some(json) if json != "{}" => decode_headers(&json).unwrap_or_else(|error| {
                let (code, error) = (error.code().to_owned().into(), error.message().to_owned());
                fields.unreadable.get_or_insert(Unreadable { code, error });
                Headers::new()
            }),
            _ => Headers::new(),
        };
        let created_at = fields.time(CREATED_AT)?.unwrap_or_default();
        let payload = bytes(row.get_ref(PAYLOAD)?);
        if payload.is_none() {
            fields.refuse(PAYLOAD);
        }
        let event = Event {
            id,
            topic: Topic::from_stored(topic),
            key: key.map(Key::from_stored),
            aggregate,
            version: fields.integer(9)?,
            kind,
            source,
            tenant: tenant.map(Tenant::from_stored),
            payload: Bytes::copy_from_slice(payload.unwrap_or_default()),
            content_type,
            headers,
            occurred_at: fields.time(12)?.unwrap_or(created_at),
            created_at,
            deliver_at: fields.time(13)?,
            expires_at: fields.time(14)?,
        };
        Ok(Self { seq: seq(row)?, event, unreadable: fields.unreadable })
    }

    /// A placeholder for an event that is no longer in the log, with what its delivery row knows of
    /// it.
    pub(crate) fn missing(row: &DeliveryRow) -> Self {
        let mut event = Delivery::placeholder(Seq(row.seq)).event;
        event.id = row.id.parse().unwrap_or(event.id);
        event.topic = Topic::from_stored(row.topic.as_str());
        event.key = row.key.as_deref().map(Key::from_stored);
        event.created_at = timestamp(row.created_at);
        Self { seq: row.seq, event, unreadable: Some(Unreadable::missing()) }
    }
}

/// A row that is decoded field by field, and the first field with a value that no event can have.
struct Fields<'a> {
    row: &'a Row<'a>,
    unreadable: Option<Unreadable>,
}

impl Fields<'_> {
    fn refuse(&mut self, column: usize) {
        let name = LOG_COLUMN_NAMES[column];
        let refused = || Unreadable::undecodable(format!("no event can have the value of {name}"));
        self.unreadable.get_or_insert_with(refused);
    }

    /// SQLite does not check that text is UTF-8, so it is checked here.
    fn text(&mut self, column: usize) -> rusqlite::Result<Option<String>> {
        let value = self.row.get_ref(column)?;
        let Some(bytes) = bytes(value) else {
            if value != ValueRef::Null {
                self.refuse(column);
            }
            return Ok(None);
        };
        Ok(Some(match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => {
                self.refuse(column);
                String::from_utf8_lossy(bytes).into_owned()
            }
        }))
    }

    fn integer(&mut self, column: usize) -> rusqlite::Result<Option<i64>> {
        let number = self.row.get_ref(column)?.as_i64_or_null();
        Ok(number.unwrap_or_else(|_| {
            self.refuse(column);
            None
        }))
    }

    fn time(&mut self, column: usize) -> rusqlite::Result<Option<Timestamp>> {
        let Some(micros) = self.integer(column)? else { return Ok(None) };
        let at = timestamp(micros);
        if at.as_microsecond() != micros {
            self.refuse(column);
        }
        Ok(Some(at))
    }
}

/// A text, whatever the column holds.
pub(crate) fn lossy(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<String>> {
    Ok(row.get_ref(column)?.as_bytes_or_null()?.map(|bytes| String::from_utf8_lossy(bytes).into_owned()))
}

/// A number of our own tables or a time of a log; `None` if the column holds anything else.
pub(crate) fn integer(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<i64>> {
    Ok(row.get_ref(column)?.as_i64_or_null().unwrap_or(None))
}

/// Like [`String::from_utf8_lossy`], which looks at each byte, but fast for valid UTF-8.
fn lossy_text(bytes: &[u8]) -> Cow<'_, str> {
    std::str::from_utf8(bytes).map_or_else(|_| String::from_utf8_lossy(bytes), Cow::Borrowed)
}

fn bytes(value: ValueRef<'_>) -> Option<&[u8]> {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(bytes),
        _ => None,
    }
}

/// Returns the headers whose values are texts, and ignores all others. `None` if they cannot be
/// parsed, though SQLite accepts them: half a surrogate pair, `1e999`, deep nesting.
pub(crate) fn text_headers(json: &[u8]) -> Option<Headers> {
    let all: BTreeMap<String, serde_json::Value> = serde_json::from_slice(json).ok()?;
    Some(all.into_iter().filter_map(|(name, value)| Some((name, value.as_str()?.to_owned()))).collect())
}

/// Decodes headers. Those of a plain INSERT may break rules that a CHECK cannot express: names,
/// counts, values that are not strings.
fn decode_headers(json: &str) -> Result<Headers, Error> {
    let headers: Headers = serde_json::from_str(json).map_err(|error| {
        Error::invalid("read", "headers_invalid", format!("the headers are no JSON object of strings: {error}"))
    })?;
    let probe = NewEvent { headers, ..NewEvent::json("t", Bytes::new()) };
    probe.validate()?;
    Ok(probe.headers)
}
