//! Rows to deliveries. This is the hot path of a drain: nothing is looked up by name, nothing is copied twice.

use bytes::Bytes;
use jiff::Timestamp;
use postbox_core::{Delivery, Event, EventId, Headers, Key, Seq, Tenant, Topic};
use tokio_postgres::Row;
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{Format, FromSql, IsNull, ToSql, Type, to_sql_checked};

use postbox_core::BoxError;

/// The columns of an event in the order [`stored`] reads them, from a log called `l`; `$1` is the largest payload to send along.
///
/// A larger payload stays behind and only its size comes: `octet_length` of a stored value reads nothing but its header.
macro_rules! event_columns {
    () => {
        "l.seq, l.id, l.topic, l.key, l.aggregate, l.version, l.kind, l.source, l.tenant, \
         CASE WHEN octet_length(l.payload) <= $1 THEN l.payload END AS payload, \
         CASE WHEN octet_length(l.payload_bytes) <= $1 THEN l.payload_bytes END AS payload_bytes, \
         CASE WHEN coalesce(octet_length(l.payload), octet_length(l.payload_bytes)) > $1 \
           THEN coalesce(octet_length(l.payload), octet_length(l.payload_bytes)) END AS behind, \
         l.content_type, l.headers::text AS headers, l.occurred_at, l.created_at, l.deliver_at"
    };
}
pub(crate) use event_columns;

/// How many columns [`event_columns`] has: further ones begin here.
pub(crate) const EVENT_COLUMNS: usize = 17;

/// A row as it was read.
pub(crate) struct Stored {
    pub(crate) delivery: Delivery,
    /// The size in bytes of a payload that stayed behind; zero when it came along.
    pub(crate) behind: usize,
}

impl Stored {
    pub(crate) fn seq(&self) -> i64 {
        self.delivery.seq.0
    }

    /// The payload's size in bytes, whether it came along or not.
    pub(crate) fn size(&self) -> usize {
        self.behind.max(self.delivery.event.payload.len())
    }

    pub(crate) fn is_behind(&self) -> bool {
        self.behind > 0
    }

    /// The payload has arrived.
    pub(crate) fn fill(&mut self, payload: Bytes) {
        self.delivery.event.payload = payload;
        self.behind = 0;
    }
}

/// Reads one row of [`event_columns`], as a first attempt.
pub(crate) fn stored(row: &Row) -> Result<Stored, tokio_postgres::Error> {
    let behind: Option<i32> = row.try_get(11)?;
    let payload = match behind {
        Some(_) => Bytes::new(),
        None => Bytes::copy_from_slice(row.try_get::<_, Option<Raw<'_>>>(9)?.map_or_else(|| row.try_get(10), Ok)?.0),
    };
    let event = Event {
        id: EventId::from_uuid(row.try_get(1)?),
        topic: Topic::from_stored(row.try_get::<_, String>(2)?),
        key: row.try_get::<_, Option<String>>(3)?.map(Key::from_stored),
        aggregate: row.try_get(4)?,
        version: row.try_get(5)?,
        kind: row.try_get(6)?,
        source: row.try_get(7)?,
        tenant: row.try_get::<_, Option<String>>(8)?.map(Tenant::from_stored),
        payload,
        content_type: row.try_get(12)?,
        headers: row.try_get::<_, Option<&str>>(13)?.map(headers).unwrap_or_default(),
        occurred_at: row.try_get::<_, Stamp>(14)?.0,
        created_at: row.try_get::<_, Stamp>(15)?.0,
        deliver_at: row.try_get(16)?,
    };
    let delivery = Delivery { event, seq: Seq(row.try_get(0)?), attempt: 1, replay: 0 };
    Ok(Stored { delivery, behind: behind.unwrap_or_default().unsigned_abs() as usize })
}

/// The table's CHECK guarantees an object of strings.
fn headers(json: &str) -> Headers {
    serde_json::from_str(json).unwrap_or_default()
}

/// The bytes of a text or bytea column, as they came.
pub(crate) struct Raw<'a>(pub(crate) &'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, BoxError> {
        Ok(Self(raw))
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TEXT | Type::BYTEA)
    }
}

/// A time, decoded without the detour over a signed duration that the driver's own conversion takes.
struct Stamp(Timestamp);

impl<'a> FromSql<'a> for Stamp {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, BoxError> {
        /// From Postgres's epoch, the year 2000, to everybody else's.
        const EPOCH_MICROS: i64 = 946_684_800_000_000;
        let micros = i64::from_be_bytes(raw.try_into()?);
        let micros = micros.checked_add(EPOCH_MICROS).ok_or("a time out of range")?;
        // Not from_microsecond: it refuses the last second of the range.
        let nanos = i32::try_from(micros.rem_euclid(1_000_000))? * 1_000;
        Ok(Self(Timestamp::new(micros.div_euclid(1_000_000), nanos)?))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

/// A value in its text form, for types the driver does not know (`xid8`, `pg_snapshot`): the server parses it once, as a constant.
#[derive(Debug)]
pub(crate) struct AsText(pub(crate) String);

impl AsText {
    /// An array of plain numbers.
    pub(crate) fn numbers(numbers: &[String]) -> Self {
        Self(format!("{{{}}}", numbers.join(",")))
    }
}

impl ToSql for AsText {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, BoxError> {
        out.extend_from_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    fn encode_format(&self, _: &Type) -> Format {
        Format::Text
    }

    to_sql_checked!();
}
