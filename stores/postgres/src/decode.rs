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
         coalesce(octet_length(l.payload), octet_length(l.payload_bytes)) AS size, \
         l.content_type, l.headers::text AS headers, l.occurred_at, l.created_at, l.deliver_at"
    };
}
pub(crate) use event_columns;

/// How many columns [`event_columns`] has: further ones begin here.
pub(crate) const EVENT_COLUMNS: usize = 17;

/// A row as it was read.
pub(crate) struct Stored {
    pub(crate) delivery: Delivery,
    /// The payload's size in bytes, whether it came along or not.
    pub(crate) size: usize,
    /// Whether the payload stayed behind.
    pub(crate) large: bool,
}

impl Stored {
    pub(crate) fn seq(&self) -> i64 {
        self.delivery.seq.0
    }
}

/// Reads one row of [`event_columns`], as a first attempt.
pub(crate) fn stored(row: &Row) -> Result<Stored, tokio_postgres::Error> {
    let text: Option<Raw<'_>> = row.try_get(9)?;
    let bytes: Option<Raw<'_>> = row.try_get(10)?;
    let size: i32 = row.try_get(11)?;
    let payload = text.or(bytes);
    let event = Event {
        id: EventId::from_uuid(row.try_get(1)?),
        topic: Topic::from_stored(row.try_get::<_, String>(2)?),
        key: row.try_get::<_, Option<String>>(3)?.map(Key::from_stored),
        aggregate: row.try_get(4)?,
        version: row.try_get(5)?,
        kind: row.try_get(6)?,
        source: row.try_get(7)?,
        tenant: row.try_get::<_, Option<String>>(8)?.map(Tenant::from_stored),
        payload: payload.as_ref().map_or_else(Bytes::new, |raw| Bytes::copy_from_slice(raw.0)),
        content_type: row.try_get(12)?,
        headers: row.try_get::<_, Option<&str>>(13)?.map(headers).unwrap_or_default(),
        occurred_at: row.try_get::<_, Timestamp>(14)?,
        created_at: row.try_get::<_, Timestamp>(15)?,
        deliver_at: row.try_get(16)?,
    };
    let delivery = Delivery { event, seq: Seq(row.try_get(0)?), attempt: 1, replay: 0 };
    Ok(Stored { delivery, size: usize::try_from(size).unwrap_or_default(), large: payload.is_none() })
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
