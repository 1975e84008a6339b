//! Reading one page of a window: its statements, and what they find out beside the rows.
//!
//! A page is one round trip: the transaction's beginning, a guard, one or two reads and its end are sent together. Two reads, because one
//! combined query lets the planner walk the whole primary key for the straggler half (20 times slower).

use std::collections::HashSet;
use std::pin::pin;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::TryStreamExt as _;
use postbox_core::limits::BATCH_EVENTS_MAX;
use postbox_core::{BatchLimit, Error, Lease, LogName, Result, Unreadable};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use super::reader::{Position, missed};
use super::subscribe::Reading;
use crate::PostgresStore;
use crate::classify::{classify, is_damage};
use crate::decode::{Raw, Stored, event_columns, stored};

/// Payloads up to this size may come along with their rows.
const INLINE_BYTES_MAX: usize = 16 * 1024;
/// Below this a second round trip costs more than the bytes.
const INLINE_BYTES_MIN: usize = 1024;
/// Batches read at once from a backlog. Four take most of the fixed cost of a page away; more would only cost memory.
const AHEAD_BATCHES: usize = 4;
/// Rows read at once, however large the batches.
const AHEAD_ROWS_MAX: usize = 4_096;
/// Larger payloads than this are fetched piece by piece, so that the driver's buffers stay small beside a payload of 16 MiB.
const SLICE_BYTES: usize = 1024 * 1024;

/// The rows of a log that the lane and subscription want; folded by the planner, because the parameters are known when it plans.
macro_rules! wanted {
    () => {
        "($4 = 1 OR l.slot % $4 = $3) AND ($5::text[] IS NULL OR l.topic LIKE ANY ($5)) AND ($6::text IS NULL OR l.tenant = $6)"
    };
}

/// (b) The rest of a window: a walk of the primary key between two bounds. Index: primary key. No lock.
///
/// Ordered by `seq`, not by `xid`: a transaction with an early id that writes late would come before what it follows.
pub(crate) const LOG_READ_REST: &str = concat!(
    "SELECT ",
    event_columns!(),
    " FROM {log} AS l
WHERE l.seq > $7 AND l.seq <= $8 AND l.xid >= $9 AND pg_visible_in_snapshot(l.xid, $10) AND ",
    wanted!(),
    " ORDER BY l.seq LIMIT $2"
);

/// (a) The stragglers: rows of transactions that were running when the window began and are over now, driven from the list of those
/// transactions. Index: `(xid, seq)`. No lock. The fence keeps the planner from joining the other way round, which walks the log; a range of one
/// id keeps it from taking the order from the primary key, which walks it too.
pub(crate) const LOG_READ_STRAGGLERS: &str = concat!(
    "SELECT late.*
FROM unnest($8::xid8[]) AS running(xid)
CROSS JOIN LATERAL (
  SELECT ",
    event_columns!(),
    " FROM {log} AS l
  WHERE l.xid >= running.xid AND l.xid <= running.xid AND l.seq > $7 AND ",
    wanted!(),
    " ORDER BY l.xid, l.seq LIMIT $2 OFFSET 0
) AS late
ORDER BY late.seq LIMIT $2"
);

/// How long until the first row of a lane is due, in microseconds. Index: `delivery_due`, then `delivery_held`.
/// Rows behind an unfinished one of their key are not due, whatever their time says.
macro_rules! due_in {
    () => {
        "(SELECT greatest(0, extract(epoch FROM d.due_at {-} pg_catalog.clock_timestamp()) {*} 1000000)::bigint
   FROM {s}.delivery AS d
   WHERE d.subscription {=} $1 AND d.lane {=} $2 AND d.due_at IS NOT NULL
     AND (NOT d.holds OR d.seq {=} (SELECT h.seq FROM {s}.delivery AS h
       WHERE h.subscription {=} d.subscription AND h.key {=} d.key AND h.holds ORDER BY h.seq LIMIT 1))
   ORDER BY d.due_at LIMIT 1)"
    };
}

/// What every page asks: is the lane ours, is its window still the one we read and no settlement of it taken back, has anything of the subscription left the stream, and
/// which filter is in force?
/// Nothing is ours on a standby: it may lack rows of a window that is settled as read. Indexes: primary keys of `lane` and `delivery`. No
/// lock. Cheap to plan, because it is planned for every page; the rest is asked only if there are rows.
pub(crate) const PAGE_GUARD: &str = "
SELECT coalesce(l.to_snap::pg_catalog.text {=} $4 AND l.last_seq {>=} $5, true), EXISTS (SELECT FROM {s}.delivery WHERE subscription {=} $1),
  (SELECT s.revision FROM {s}.subscription AS s WHERE s.id {=} $1)
FROM {s}.lane AS l
WHERE {place} l.subscription {=} $1 AND l.lane {=} $2 AND l.epoch {=} $3 AND l.lease_until {>} pg_catalog.clock_timestamp() AND NOT pg_catalog.pg_is_in_recovery()";

/// What left the stream in this lane: whether keys are held, whether unread events were discarded, and when the next is due.
/// Indexes: `delivery_held_lane`, `delivery_discarded`, `delivery_due`. No lock.
const LANE_EXCEPTIONS: &str = concat!(
    "SELECT EXISTS (SELECT FROM {s}.delivery WHERE subscription {=} $1 AND lane {=} $2 AND holds),
  EXISTS (SELECT FROM {s}.delivery WHERE subscription {=} $1 AND lane {=} $2 AND state {=} 'discarded' AND seq {>} $3), ",
    due_in!()
);

/// Which of some keys are held. Index: `delivery_held`.
const KEYS_HELD: &str = "
SELECT asked.key FROM pg_catalog.unnest($2::pg_catalog.text[]) AS asked(key)
WHERE EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription {=} $1 AND d.key {=} asked.key AND d.holds)";

/// Which of some events were discarded. Index: primary key of `delivery`.
const EVENTS_DISCARDED: &str = "
SELECT d.seq FROM pg_catalog.unnest($2::bigint[]) AS asked(seq) CROSS JOIN LATERAL (
  SELECT d.seq FROM {s}.delivery AS d WHERE d.subscription {=} $1 AND d.seq {=} asked.seq AND d.state {=} 'discarded' OFFSET 0) AS d";

/// The payloads that stayed behind. Index: primary key of the log.
const PAYLOAD_READ: &str = "SELECT seq, payload, payload_bytes FROM {log} WHERE seq {=} ANY ($1)";

/// A piece of one payload. Index: primary key of the log.
const PAYLOAD_SLICE: &str = "SELECT pg_catalog.substr(coalesce(payload_bytes, pg_catalog.textsend(payload)), $2, $3) FROM {log} WHERE seq {=} $1";

/// How many rows, in their order, a caller can hold. A single larger one still comes alone.
pub(crate) fn fitting<'a>(rows: impl IntoIterator<Item = &'a Stored>, limit: BatchLimit) -> usize {
    let mut room = limit.payload_bytes;
    let fit = rows.into_iter().take(limit.events).enumerate().take_while(|(index, row)| {
        let fits = *index == 0 || row.size() <= room;
        room = room.saturating_sub(row.size());
        fits
    });
    fit.count()
}

/// The parameters every read shares, `$1` to `$6`.
pub(crate) struct Shared<'a> {
    pub(crate) inline_bytes: i32,
    /// One row more than wanted: whether it comes says whether there is more.
    pub(crate) rows: i64,
    lane: i32,
    pub(crate) lanes: i32,
    pub(crate) likes: &'a Option<Vec<String>>,
    pub(crate) tenant: Option<&'a str>,
    /// What the caller can hold.
    pub(crate) limit: BatchLimit,
}

impl<'a> Shared<'a> {
    /// For reading as much as the caller can hold.
    pub(crate) fn new(lease: &Lease, reading: &'a Reading, limit: BatchLimit) -> Self {
        let events = limit.events.clamp(1, BATCH_EVENTS_MAX);
        Self::reading(lease, reading, BatchLimit { events, ..limit }, events)
    }

    /// For reading some batches ahead: most of what a page costs beside its rows, it costs once.
    pub(crate) fn ahead(lease: &Lease, reading: &'a Reading, limit: BatchLimit) -> Self {
        let events = limit.events.clamp(1, BATCH_EVENTS_MAX);
        let rows = events.saturating_mul(AHEAD_BATCHES).min(AHEAD_ROWS_MAX).max(events);
        Self::reading(lease, reading, BatchLimit { events, ..limit }, rows)
    }

    fn reading(lease: &Lease, reading: &'a Reading, limit: BatchLimit, rows: usize) -> Self {
        // All rows together stay within the caller's bound on bytes, whatever their payloads.
        let inline = (limit.payload_bytes / (rows + 1)).clamp(INLINE_BYTES_MIN, INLINE_BYTES_MAX);
        Self {
            inline_bytes: i32::try_from(inline).unwrap_or(i32::MAX),
            rows: rows as i64 + 1,
            lane: lease.lane.into(),
            lanes: reading.lanes.into(),
            likes: &reading.likes,
            tenant: reading.tenant(),
            limit,
        }
    }

    /// The most rows one read gives.
    pub(crate) fn rows_max(&self) -> usize {
        usize::try_from(self.rows - 1).unwrap_or_default()
    }

    /// No payload comes with its row: what the server cannot give of one then fails alone.
    pub(crate) fn leave_payloads_behind(&mut self) {
        self.inline_bytes = -1;
    }

    pub(crate) fn params(&self) -> Vec<(&(dyn ToSql + Sync), Type)> {
        vec![
            (&self.inline_bytes, Type::INT4),
            (&self.rows, Type::INT8),
            (&self.lane, Type::INT4),
            (&self.lanes, Type::INT4),
            (self.likes, Type::TEXT_ARRAY),
            (&self.tenant, Type::TEXT),
        ]
    }
}

/// What the guard of a page found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guarded {
    pub(crate) same_window: bool,
    /// Whether the subscription has delivery rows.
    pub(crate) left_stream: bool,
    /// The filter is the one we read by.
    pub(crate) same_filter: bool,
}

/// What left the stream in a lane.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Exceptions {
    pub(crate) holds: bool,
    pub(crate) discards: bool,
    pub(crate) due_in: Option<Duration>,
}

/// Rows in `seq` order.
pub(crate) async fn read_rows(
    client: &Client,
    sql: &str,
    params: Vec<(&(dyn ToSql + Sync), Type)>,
    capacity: usize,
) -> Result<Vec<Stored>, tokio_postgres::Error> {
    let mut rows = pin!(client.query_typed_raw(sql, params).await?);
    let mut page = Vec::with_capacity(capacity);
    while let Some(row) = rows.try_next().await? {
        page.push(stored(&row)?);
    }
    Ok(page)
}

impl PostgresStore {
    /// Asks the guard, and whether the cursor still is `at`, where one is named. `Stale` if the lane is not ours.
    pub(crate) async fn guard(
        &self,
        client: &Client,
        lease: &Lease,
        reading: &Reading,
        at: Option<&Position>,
    ) -> Result<Guarded> {
        let lane = lease.lane.cast_signed();
        let window = at.map(|at| at.window.to.to_string());
        let settled = at.map(|at| at.settled);
        let params: [(&(dyn ToSql + Sync), Type); 5] = [
            (&reading.id, Type::INT4),
            (&lane, Type::INT2),
            (&lease.epoch, Type::INT8),
            (&window, Type::TEXT),
            (&settled, Type::INT8),
        ];
        let ask = async |place: String| {
            let sql = self.schema().sql(PAGE_GUARD).replace("{place}", &place);
            let row = client.query_typed_opt(&sql, &params).await.map_err(|error| classify("next_batch", &error))?;
            let row = row.ok_or_else(|| Error::stale("next_batch"))?;
            let same_filter = row.get::<_, Option<i32>>(2) == Some(reading.revision);
            Ok(Guarded { same_window: row.get(0), left_stream: row.get(1), same_filter })
        };
        let place = self.reader(lease).place();
        let guarded = ask(place.clone()).await;
        if missed(&guarded, &place) {
            return ask(String::new()).await;
        }
        guarded
    }

    /// What left the stream in a lane, where something did.
    pub(crate) async fn exceptions(
        &self,
        client: &Client,
        lease: &Lease,
        reading: &Reading,
        any: bool,
        after: i64,
    ) -> Result<Exceptions> {
        if !any {
            return Ok(Exceptions::default());
        }
        let lane = lease.lane.cast_signed();
        let sql = self.schema().sql(LANE_EXCEPTIONS);
        let params: [(&(dyn ToSql + Sync), Type); 3] =
            [(&reading.id, Type::INT4), (&lane, Type::INT2), (&after, Type::INT8)];
        let row = client.query_typed_one(&sql, &params).await.map_err(|error| classify("next_batch", &error))?;
        Ok(Exceptions { holds: row.get(0), discards: row.get(1), due_in: wait(&row, 2) })
    }

    /// Fetches the payloads that stayed behind. One that is gone by now, or that the server cannot
    /// give, makes its own event unreadable.
    pub(crate) async fn fill_payloads(&self, client: &Client, log: &LogName, rows: &mut [Stored]) -> Result<()> {
        let behind: Vec<usize> = (0..rows.len()).filter(|index| rows[*index].is_behind()).collect();
        if behind.is_empty() {
            return Ok(());
        }
        let whole: Vec<i64> =
            behind.iter().filter(|index| rows[**index].behind <= SLICE_BYTES).map(|index| rows[*index].seq()).collect();
        if !whole.is_empty() {
            match self.fetch_whole(client, log, rows, &whole).await {
                // Which of them it is, only each alone can tell.
                Err(error) if is_damage(&error) => {
                    for seq in whole {
                        self.fetch_one(client, log, rows, seq).await?;
                    }
                }
                fetched => fetched.map_err(|error| classify("next_batch", &error))?,
            }
        }
        for row in rows.iter_mut().filter(|row| row.behind > SLICE_BYTES) {
            match self.fetch_sliced(client, log, row).await {
                Ok(Some(payload)) => row.fill(payload),
                Ok(None) => row.give_up(Unreadable::missing()),
                Err(error) if is_damage(&error) => row.give_up(damaged(&error)),
                Err(error) => return Err(classify("next_batch", &error)),
            }
        }
        rows.iter_mut().filter(|row| row.is_behind()).for_each(|row| row.give_up(Unreadable::missing()));
        Ok(())
    }

    async fn fetch_whole(
        &self,
        client: &Client,
        log: &LogName,
        rows: &mut [Stored],
        seqs: &[i64],
    ) -> Result<(), tokio_postgres::Error> {
        let sql = self.schema().log_sql(PAYLOAD_READ, log);
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&seqs, Type::INT8_ARRAY)];
        let mut found = pin!(client.query_typed_raw(&sql, params).await?);
        while let Some(row) = found.try_next().await? {
            let seq: i64 = row.get(0);
            let payload = row.get::<_, Option<Raw<'_>>>(1).or(row.get(2));
            if let (Ok(index), Some(payload)) = (rows.binary_search_by_key(&seq, Stored::seq), payload) {
                rows[index].fill(Bytes::copy_from_slice(payload.0));
            }
        }
        Ok(())
    }

    async fn fetch_one(&self, client: &Client, log: &LogName, rows: &mut [Stored], seq: i64) -> Result<()> {
        match self.fetch_whole(client, log, rows, &[seq]).await {
            Err(error) if is_damage(&error) => {
                if let Ok(index) = rows.binary_search_by_key(&seq, Stored::seq) {
                    rows[index].give_up(damaged(&error));
                }
                Ok(())
            }
            fetched => fetched.map_err(|error| classify("next_batch", &error)),
        }
    }

    /// `None`: the row is gone, or holds less than it did.
    async fn fetch_sliced(
        &self,
        client: &Client,
        log: &LogName,
        row: &Stored,
    ) -> Result<Option<Bytes>, tokio_postgres::Error> {
        let sql = self.schema().log_sql(PAYLOAD_SLICE, log);
        let (seq, slice) = (row.seq(), SLICE_BYTES as i32);
        let mut payload = BytesMut::with_capacity(row.behind);
        while payload.len() < row.behind {
            let start = i32::try_from(payload.len()).unwrap_or(i32::MAX - 1) + 1;
            let params: [(&(dyn ToSql + Sync), Type); 3] =
                [(&seq, Type::INT8), (&start, Type::INT4), (&slice, Type::INT4)];
            let piece = client.query_typed_opt(&sql, &params).await?;
            let Some(piece) = piece.as_ref().map(|piece| piece.get::<_, &[u8]>(0)).filter(|it| !it.is_empty()) else {
                return Ok(None);
            };
            payload.extend_from_slice(piece);
        }
        Ok(Some(payload.freeze()))
    }

    /// Which of the page's keys are held and which of its events were discarded; asks only if there are any.
    pub(crate) async fn held_and_discarded(
        &self,
        client: &Client,
        reading: &Reading,
        exceptions: Exceptions,
        rows: &[Stored],
    ) -> Result<(HashSet<String>, HashSet<i64>)> {
        let failed = |error: tokio_postgres::Error| classify("next_batch", &error);
        let (mut held, mut discarded) = (HashSet::new(), HashSet::new());
        if exceptions.holds {
            let keys: HashSet<&str> =
                rows.iter().filter_map(|row| row.delivery.event.key.as_ref()).map(|key| key.as_str()).collect();
            let keys: Vec<&str> = keys.into_iter().collect();
            let sql = self.schema().sql(KEYS_HELD);
            let found = client
                .query_typed(&sql, &[(&reading.id, Type::INT4), (&keys, Type::TEXT_ARRAY)])
                .await
                .map_err(failed)?;
            held = found.iter().map(|row| row.get(0)).collect();
        }
        if exceptions.discards {
            let seqs: Vec<i64> = rows.iter().map(Stored::seq).collect();
            let sql = self.schema().sql(EVENTS_DISCARDED);
            let found = client
                .query_typed(&sql, &[(&reading.id, Type::INT4), (&seqs, Type::INT8_ARRAY)])
                .await
                .map_err(failed)?;
            discarded = found.iter().map(|row| row.get(0)).collect();
        }
        Ok((held, discarded))
    }
}

/// A wait in microseconds, if there is one.
fn wait(row: &Row, column: usize) -> Option<Duration> {
    row.get::<_, Option<i64>>(column).map(|micros| Duration::from_micros(micros.unsigned_abs()))
}

fn damaged(error: &tokio_postgres::Error) -> Unreadable {
    Unreadable::undecodable(error.as_db_error().map_or_else(String::new, |said| said.message().to_owned()))
}
