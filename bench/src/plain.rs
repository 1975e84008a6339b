//! The limit of a drain: reads the same rows, page by page, with one plain SELECT of the same
//! columns and the same driver, and makes the same events. It keeps no position, takes no lease and
//! promises nothing.

use anyhow::Context as _;
use bytes::Bytes;
use jiff::Timestamp;
use postbox_core::{Event, EventId, Headers, Key, Seq, Tenant, Topic};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};
use uuid::Uuid;

use crate::bed::connect;

/// Walks the primary key. Takes no lock.
const POSTGRES_PAGE: &str = "SELECT seq, id, topic, key, aggregate, version, kind, source, tenant, payload, payload_bytes, \
     content_type, headers::text, occurred_at, created_at, deliver_at \
     FROM postbox.outbox WHERE seq > $1 ORDER BY seq LIMIT $2";

/// Reads everything; returns the number of events.
pub(crate) async fn postgres(url: &str, batch: usize) -> anyhow::Result<usize> {
    let client = connect(url).await?;
    let page = client.prepare(POSTGRES_PAGE).await?;
    let (mut last, mut count) = (0_i64, 0);
    loop {
        let rows = client.query(&page, &[&last, &i64::try_from(batch)?]).await?;
        let events = rows.iter().map(postgres_event).collect::<anyhow::Result<Vec<_>>>()?;
        let Some((seq, _)) = events.last() else { return Ok(count) };
        last = seq.0;
        count += std::hint::black_box(&events).len();
    }
}

fn postgres_event(row: &Row) -> anyhow::Result<(Seq, Event)> {
    let text = |column: usize| row.get::<_, Option<String>>(column);
    let payload = row.get::<_, Option<Raw<'_>>>(9).or(row.get(10)).context("one of the two is set")?;
    let event = Event {
        id: EventId::from_uuid(row.get::<_, Uuid>(1)),
        topic: Topic::from_stored(row.get::<_, String>(2)),
        key: text(3).map(Key::from_stored),
        aggregate: text(4),
        version: row.get(5),
        kind: text(6),
        source: text(7),
        tenant: text(8).map(Tenant::from_stored),
        payload: Bytes::copy_from_slice(payload.0),
        content_type: text(11),
        headers: headers(row.get::<_, Option<&str>>(12))?,
        occurred_at: row.get::<_, Timestamp>(13),
        created_at: row.get::<_, Timestamp>(14),
        deliver_at: row.get(15),
        expires_at: None,
    };
    Ok((Seq(row.get(0)), event))
}

/// The bytes of a text or bytea column, without a check for UTF-8.
struct Raw<'a>(&'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(column: &Type) -> bool {
        matches!(*column, Type::TEXT | Type::BYTEA)
    }
}

fn headers(json: Option<&str>) -> anyhow::Result<Headers> {
    Ok(json.map(serde_json::from_str).transpose()?.unwrap_or_default())
}

/// Walks the primary key. Takes a read transaction.
const SQLITE_PAGE: &str = "SELECT seq, id, topic, key, aggregate, version, kind, source, tenant, payload, content_type, headers, \
     occurred_at, created_at, deliver_at FROM postbox_outbox WHERE seq > ?1 ORDER BY seq LIMIT ?2";

/// The same on a SQLite file.
pub(crate) fn sqlite(path: &str, batch: usize) -> anyhow::Result<usize> {
    let connection = rusqlite::Connection::open(path)?;
    let mut page = connection.prepare(SQLITE_PAGE)?;
    let (mut last, mut count) = (0_i64, 0);
    loop {
        let rows = page.query_and_then((last, i64::try_from(batch)?), sqlite_event)?;
        let events = rows.collect::<anyhow::Result<Vec<_>>>()?;
        let Some((seq, _)) = events.last() else { return Ok(count) };
        last = seq.0;
        count += std::hint::black_box(&events).len();
    }
}

fn sqlite_event(row: &rusqlite::Row<'_>) -> anyhow::Result<(Seq, Event)> {
    let time = |column: usize| -> anyhow::Result<Option<Timestamp>> {
        Ok(row.get::<_, Option<i64>>(column)?.map(Timestamp::from_microsecond).transpose()?)
    };
    let created_at = time(13)?.context("created_at is never null")?;
    let payload = match row.get_ref(9)? {
        rusqlite::types::ValueRef::Text(bytes) | rusqlite::types::ValueRef::Blob(bytes) => {
            Bytes::copy_from_slice(bytes)
        }
        _ => anyhow::bail!("a payload is text or a blob"),
    };
    let event = Event {
        id: row.get_ref(1)?.as_str()?.parse()?,
        topic: Topic::from_stored(row.get::<_, String>(2)?),
        key: row.get::<_, Option<String>>(3)?.map(Key::from_stored),
        aggregate: row.get(4)?,
        version: row.get(5)?,
        kind: row.get(6)?,
        source: row.get(7)?,
        tenant: row.get::<_, Option<String>>(8)?.map(Tenant::from_stored),
        payload,
        content_type: row.get(10)?,
        headers: headers(row.get::<_, Option<String>>(11)?.as_deref())?,
        occurred_at: time(12)?.unwrap_or(created_at),
        created_at,
        deliver_at: time(14)?,
        expires_at: None,
    };
    Ok((Seq(row.get(0)?), event))
}
