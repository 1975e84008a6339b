//! Decodes rows into deliveries. This is the hot path of reading a backlog: no column is looked up
//! by name, nothing is copied twice.

use bytes::Bytes;
use jiff::Timestamp;
use postbox_core::{Batch, BoxError, Delivery, Event, EventId, Headers, Key, Seq, Tenant, Topic, Unreadable};
use postbox_postgres_sql::EVENT_COLUMNS;
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};

/// A row as it was read.
pub(crate) struct Stored {
    pub(crate) delivery: Delivery,
    /// Why the event cannot be sent, if it cannot. `delivery` then holds what could be read of it.
    pub(crate) unreadable: Option<Unreadable>,
    /// The size in bytes of a payload that was left out; zero if it was read.
    pub(crate) behind: usize,
    /// When the row was read, by the database's clock, if the event expires.
    looked_at: Option<Timestamp>,
}

impl Stored {
    pub(crate) fn seq(&self) -> i64 {
        self.delivery.seq.0
    }

    pub(crate) fn id(&self) -> uuid::Uuid {
        self.delivery.event.id.as_uuid()
    }

    /// The payload's size in bytes, whether it was read or not.
    pub(crate) fn size(&self) -> usize {
        self.behind.max(self.delivery.event.payload.len())
    }

    pub(crate) fn is_behind(&self) -> bool {
        self.behind > 0
    }

    /// Decodes the event of a delivery row, whose `seq` and key are in column `at` and the next.
    /// The event may no longer be in the log.
    pub(crate) fn of_delivery(row: &Row, at: usize) -> Self {
        stored(row).unwrap_or_else(|| {
            let mut delivery = Delivery::placeholder(Seq(row.get(at)));
            delivery.event.key = row.try_get::<_, Option<String>>(at + 1).ok().flatten().map(Key::from_stored);
            Self { delivery, unreadable: Some(Unreadable::missing()), behind: 0, looked_at: None }
        })
    }

    /// Appends it to a batch.
    pub(crate) fn into_batch(self, batch: &mut Batch) {
        batch.push(self.delivery, self.unreadable, self.looked_at);
    }

    /// Marks the event unreadable: its payload cannot be read, and is no longer waited for.
    pub(crate) fn give_up(&mut self, why: Unreadable) {
        self.unreadable.get_or_insert(why);
        self.behind = 0;
    }

    /// Sets the payload that was left out before.
    pub(crate) fn fill(&mut self, payload: Bytes) {
        self.delivery.event.payload = payload;
        self.behind = 0;
    }
}

/// Decodes one row of [`EVENT_COLUMNS`] as a first attempt; `None` if the row holds no event. A
/// value that no event can have makes this event unreadable, not the whole page.
pub(crate) fn stored(row: &Row) -> Option<Stored> {
    let seq = row.try_get::<_, Option<i64>>(0).ok()?.map(Seq)?;
    // Valid rows, which are nearly all, are decoded without any preparation for faults.
    if let Some((event, behind, looked_at)) = whole(row) {
        let delivery = Delivery { event, seq, attempt: 1, replay: 0, trace: None };
        return Some(Stored { delivery, unreadable: None, behind, looked_at });
    }
    let mut delivery = Delivery::placeholder(seq);
    let fault = salvage(row, &mut delivery.event);
    Some(Stored { delivery, unreadable: Some(Unreadable::undecodable(fault)), behind: 0, looked_at: None })
}

fn whole(row: &Row) -> Option<(Event, usize, Option<Timestamp>)> {
    let behind: Option<i32> = row.try_get(11).ok()?;
    let payload = match behind {
        Some(_) => Bytes::new(),
        None => {
            let text: Option<Raw<'_>> = row.try_get(9).ok()?;
            Bytes::copy_from_slice(text.map_or_else(|| row.try_get(10), Ok).ok()?.0)
        }
    };
    let event = Event {
        id: EventId::from_uuid(row.try_get(1).ok()?),
        topic: Topic::from_stored(row.try_get::<_, String>(2).ok()?),
        key: row.try_get::<_, Option<String>>(3).ok()?.map(Key::from_stored),
        aggregate: row.try_get(4).ok()?,
        version: row.try_get(5).ok()?,
        kind: row.try_get(6).ok()?,
        source: row.try_get(7).ok()?,
        tenant: row.try_get::<_, Option<String>>(8).ok()?.map(Tenant::from_stored),
        payload,
        content_type: row.try_get(12).ok()?,
        headers: headers(row)?,
        occurred_at: row.try_get::<_, Stamp>(14).ok()?.0,
        created_at: row.try_get::<_, Stamp>(15).ok()?.0,
        deliver_at: row.try_get::<_, Option<Stamp>>(16).ok()?.map(|at| at.0),
        expires_at: row.try_get::<_, Option<Stamp>>(17).ok()?.map(|at| at.0),
    };
    let looked_at = row.try_get::<_, Option<Stamp>>(18).ok()?.map(|at| at.0);
    Some((event, behind.unwrap_or_default().unsigned_abs() as usize, looked_at))
}

/// Reads what it can of a damaged row: what an operator finds the event by, and its key, which has
/// to go on. Returns what is wrong with the row.
fn salvage(row: &Row, event: &mut Event) -> String {
    let text = |column: usize| row.try_get::<_, Option<String>>(column).ok().flatten();
    let stamp = |column: usize| row.try_get::<_, Option<Stamp>>(column).ok().flatten().map(|at| at.0);
    event.id = row.try_get(1).map_or(event.id, EventId::from_uuid);
    event.topic = text(2).map_or_else(|| event.topic.clone(), Topic::from_stored);
    event.key = text(3).map(Key::from_stored);
    (event.aggregate, event.kind, event.source) = (text(4), text(6), text(7));
    event.tenant = text(8).map(Tenant::from_stored);
    event.created_at = stamp(15).unwrap_or(event.created_at);
    event.occurred_at = stamp(14).unwrap_or(event.created_at);
    let is_well = |column: usize| match column {
        1 => row.try_get::<_, uuid::Uuid>(column).is_ok(),
        5 | 11 => row.try_get::<_, Option<i64>>(column).is_ok() || row.try_get::<_, Option<i32>>(column).is_ok(),
        9 | 10 => row.try_get::<_, Option<Raw<'_>>>(column).is_ok(),
        13 => headers(row).is_some(),
        14..=18 => row.try_get::<_, Option<Stamp>>(column).is_ok(),
        _ => row.try_get::<_, Option<&str>>(column).is_ok(),
    };
    let faulty: Vec<&str> =
        (1..EVENT_COLUMNS.len()).filter(|column| !is_well(*column)).map(|column| EVENT_COLUMNS[column].0).collect();
    match faulty.is_empty() {
        true => "the row lacks a value that every event has".to_owned(),
        false => format!("no event can have the value of {}", faulty.join(", ")),
    }
}

/// `None` if the headers do not parse; an event without its headers would be a different event. The
/// table's CHECK guarantees an object of strings.
fn headers(row: &Row) -> Option<Headers> {
    match row.try_get::<_, Option<&str>>(13).ok()? {
        Some(json) => serde_json::from_str(json).ok(),
        None => Some(Headers::new()),
    }
}

/// The bytes of a text or bytea column, as received.
pub(crate) struct Raw<'a>(pub(crate) &'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, BoxError> {
        Ok(Self(raw))
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TEXT | Type::BYTEA)
    }
}

/// A timestamp, decoded without the detour through a signed duration that the driver's own
/// conversion takes.
struct Stamp(Timestamp);

impl<'a> FromSql<'a> for Stamp {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, BoxError> {
        /// The distance from Postgres's epoch, the year 2000, to the Unix epoch.
        const EPOCH_MICROS: i64 = 946_684_800_000_000;
        let micros = i64::from_be_bytes(raw.try_into()?);
        let micros = micros.checked_add(EPOCH_MICROS).ok_or("a time out of range")?;
        // Not `from_microsecond`, which refuses the last second of the range.
        let nanos = i32::try_from(micros.rem_euclid(1_000_000))? * 1_000;
        Ok(Self(Timestamp::new(micros.div_euclid(1_000_000), nanos)?))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}
