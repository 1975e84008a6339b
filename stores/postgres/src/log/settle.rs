//! Writing down what became of a batch: the position, the exceptions, and the next of each key, in one transaction.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use postbox_core::limits::ERROR_BYTES_MAX;
use postbox_core::{Delivery, Disposition, Entry, Error, ErrorKind, Lease, Result, Retrying, Settlement, State};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::micros;
use super::reader::missed;
use super::subscribe::Reading;
use super::window::undone;
use crate::PostgresStore;
use crate::classify::classify;
use crate::session::COMMIT;

/// Moves the position, if the lease is ours. Index: primary key of `lane`. Locks the row. Never moves back.
///
/// Only in the window it belongs to, and only from where it begins (`$6`, what was settled before): after a failover that lost the window, the same
/// number would pass events of the one before, and after one that lost a settlement, the events whose rows went with it. A window we do not know
/// is none. docs/cursor.md, write W2.
pub(crate) const LANE_SETTLE: &str = "
UPDATE {s}.lane SET last_seq = CASE WHEN to_snap::text = $5 AND last_seq >= $6 THEN greatest(last_seq, $4) ELSE last_seq END
WHERE {place} subscription = $1 AND lane = $2 AND epoch = $3 AND lease_until > clock_timestamp()
RETURNING ctid::text, coalesce(to_snap::text = $5 AND last_seq >= $6, false), false";

/// The same under the lock of [`LANE_GUARD`], which was taken while the lease lasted. It may run out before this is done, but nobody else gets the
/// lane until we commit: asking again could leave the rows without the position. Index: primary key of `lane`.
const LANE_MOVE: &str = "
UPDATE {s}.lane SET last_seq = greatest(last_seq, $4)
WHERE {place} subscription = $1 AND lane = $2 AND epoch = $3 AND to_snap::text = $5 AND last_seq >= $6
RETURNING ctid::text, true, false";

/// The same guard and lock without a write: everything that writes delivery rows of the lane takes this lock first, so that nobody decides on a
/// key's next row while somebody else changes its rows. Index: primary key of `lane`. Locks the row.
///
/// It says whether the position was reached already: then an earlier call whose answer was lost wrote this very settlement, and the rows it left
/// may have gone on since.
///
/// Due rows are known by their `seq`, which a database that went back may have given to another event: they too are settled only while the
/// cursor is the one we know, or the next that we are just about to learn of.
const LANE_GUARD: &str = "
SELECT ctid::text,
  CASE WHEN $5 IS NULL THEN $4 IS NULL ELSE (to_snap::text = $5 AND last_seq >= $6) OR ($4 IS NULL AND from_snap::text = $5) END,
  coalesce(last_seq >= $4, false) FROM {s}.lane
WHERE {place} subscription = $1 AND lane = $2 AND epoch = $3 AND lease_until > clock_timestamp()
FOR NO KEY UPDATE";

/// What every disposition that keeps a row says of it, as `e`. Waits count from now, by the database's clock.
macro_rules! entries {
    () => {
        "(SELECT u.seq, u.key, u.state, u.halt, u.attempts, u.code, u.error, u.before, u.replays,
    CASE WHEN u.wait IS NULL THEN u.at ELSE clock_timestamp() + u.wait * interval '1 microsecond' END AS due_at
  FROM unnest($4::bigint[], $5::text[], $6::text[], $7::bool[], $8::int[], $9::text[], $10::text[], $11::bigint[], $12::timestamptz[],
    $13::int[], $14::int[]) AS u(seq, key, state, halt, attempts, code, error, wait, at, before, replays)) AS e"
    };
}

/// Rows of events that leave the stream. Index: all of `delivery`. Locks the rows. A row that is there stays: a person discarded the event
/// before it was read.
const DELIVERY_INSERT: &str = concat!(
    "INSERT INTO {s}.delivery AS d (subscription, lane, ordered, seq, key, state, halt, attempts, code, error, due_at)
SELECT $1, $2, $3, e.seq, e.key, e.state, e.halt, e.attempts, e.code, e.error, e.due_at FROM ",
    entries!(),
    " ON CONFLICT (subscription, seq) DO NOTHING"
);

/// True for a row that still is as the delivery says it was read: every change of it that counts raises one of the two numbers or ends it.
macro_rules! is_as_read {
    () => {
        "d.attempts = e.before AND d.replays = e.replays AND d.state NOT IN ('discarded', 'dead')"
    };
}

/// Rows that are there already; one that vanished stays away. Index: primary key of `delivery`. Locks the rows.
///
/// A row that was blocked and stays so is not rewritten: a poison key's followers come along at every attempt of its head.
const DELIVERY_UPDATE: &str = concat!(
    "UPDATE {s}.delivery AS d SET state = e.state, halt = e.halt, ordered = $3, attempts = e.attempts, code = coalesce(e.code, d.code),
  error = coalesce(e.error, d.error), due_at = e.due_at, updated_at = clock_timestamp()
FROM ",
    entries!(),
    " WHERE d.subscription = $1 AND d.lane = $2 AND d.seq = e.seq AND ",
    is_as_read!(),
    " AND NOT (d.state = 'blocked' AND e.state = 'blocked')"
);

/// Rows of events that arrived. Index: primary key of `delivery`. Locks the rows.
const DELIVERY_DELETE: &str = concat!(
    "DELETE FROM {s}.delivery AS d USING unnest($2::bigint[], $3::int[], $4::int[]) AS e(seq, before, replays)
WHERE d.subscription = $1 AND d.seq = e.seq AND ",
    is_as_read!()
);

/// How many rows are as they were read. Index: primary key of `delivery`. The lane's lock keeps them so.
const DELIVERY_COUNT: &str = concat!(
    "SELECT count(*) FROM unnest($2::bigint[], $3::int[], $4::int[]) AS e(seq, before, replays)
JOIN {s}.delivery AS d ON d.subscription = $1 AND d.seq = e.seq WHERE ",
    is_as_read!()
);

/// The next of each key becomes due, if it was only waiting for its turn. Index: `delivery_held`, then the primary key. Locks the rows.
pub(crate) const DELIVERY_RELEASE: &str = "
UPDATE {s}.delivery AS d SET state = 'retrying', due_at = clock_timestamp(), updated_at = clock_timestamp()
FROM unnest($2::text[]) AS touched(key)
CROSS JOIN LATERAL (
  SELECT h.seq, h.state, h.due_at FROM {s}.delivery AS h
  WHERE h.subscription = $1 AND h.key = touched.key AND h.holds ORDER BY h.seq LIMIT 1 OFFSET 0) AS head
WHERE d.subscription = $1 AND d.seq = head.seq AND head.due_at IS NULL AND head.state IN ('blocked', 'retrying')";

/// A settlement, sorted by what has to be written.
#[derive(Debug, Default)]
struct Writes<'a> {
    kept: AsRead,
    keys: Vec<Option<&'a str>>,
    states: Vec<&'static str>,
    halts: Vec<bool>,
    attempts: Vec<i32>,
    codes: Vec<Option<&'a str>>,
    errors: Vec<Option<Cow<'a, str>>>,
    waits: Vec<Option<i64>>,
    ats: Vec<Option<Timestamp>>,
    delivered: AsRead,
    touched: Vec<&'a str>,
}

/// Rows, and what was read of them.
#[derive(Debug, Default)]
struct AsRead {
    seqs: Vec<i64>,
    befores: Vec<i32>,
    replays: Vec<i32>,
}

impl AsRead {
    fn add(&mut self, delivery: &Delivery) {
        self.seqs.push(delivery.seq.0);
        self.befores.push(count(delivery.attempt.saturating_sub(1)));
        self.replays.push(count(delivery.replay));
    }

    fn params<'p>(&'p self, subscription: &'p i32) -> [(&'p (dyn ToSql + Sync), Type); 4] {
        [
            (subscription, Type::INT4),
            (&self.seqs, Type::INT8_ARRAY),
            (&self.befores, Type::INT4_ARRAY),
            (&self.replays, Type::INT4_ARRAY),
        ]
    }
}

fn count(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

impl<'a> Writes<'a> {
    fn of(settlement: &'a Settlement<'_>) -> Self {
        let mut writes = Self::default();
        let mut touched = HashSet::new();
        // The last word on an event counts; two rows of one in a statement would be an error.
        let entries: BTreeMap<i64, &Entry<'_>> =
            settlement.entries.iter().map(|entry| (entry.delivery.seq.0, entry)).collect();
        for entry in entries.into_values() {
            let key = entry.delivery.event.key.as_ref().map(|key| key.as_str());
            if settlement.hold_keys {
                touched.extend(key);
            }
            writes.add(key, entry, settlement.hold_keys);
        }
        writes.touched = touched.into_iter().collect();
        writes
    }

    fn add(&mut self, key: Option<&'a str>, entry: &'a Entry<'_>, hold_keys: bool) {
        let before = entry.delivery.attempt.saturating_sub(1);
        let (state, attempts, wait, at, reason, halt) = match &entry.disposition {
            Disposition::Delivered => return self.delivered.add(entry.delivery),
            // The row is there and stays.
            Disposition::Discarded => return,
            Disposition::Retry { .. } | Disposition::InFlight { .. } | Disposition::NotSent => {
                let Some(Retrying { after, counted, code, error }) = entry.disposition.retrying() else { return };
                let attempts = before + u32::from(counted);
                (State::Retrying, attempts, Some(micros(after)), None, Some((code, error)), false)
            }
            // Without order there is nothing to wait behind.
            Disposition::Block if key.is_none() || !hold_keys => (State::Retrying, before, Some(0), None, None, false),
            Disposition::Block => (State::Blocked, before, None, None, None, false),
            Disposition::Schedule { at } => (State::Scheduled, before, None, Some(*at), None, false),
            Disposition::Dead { code, error, halt } => {
                (State::Dead, before + 1, None, None, Some((code.as_ref(), error.as_str())), *halt)
            }
        };
        self.kept.add(entry.delivery);
        self.keys.push(key);
        self.states.push(state.as_str());
        self.halts.push(halt);
        self.attempts.push(count(attempts));
        self.codes.push(reason.map(|(code, _)| code));
        self.errors.push(reason.map(|(_, error)| cut(error)));
        self.waits.push(wait);
        self.ats.push(at);
    }
}

/// An error text within its limit, cut between characters; Postgres cannot keep NUL.
fn cut(error: &str) -> Cow<'_, str> {
    let cut = |text: &str| text.floor_char_boundary(ERROR_BYTES_MAX);
    if error.contains('\0') {
        let replaced = error.replace('\0', "\u{fffd}");
        return Cow::Owned(replaced[..cut(&replaced)].to_owned());
    }
    Cow::Borrowed(&error[..cut(error)])
}

impl PostgresStore {
    pub(crate) async fn write_settlement(&self, lease: &Lease, settlement: &Settlement<'_>) -> Result<()> {
        let reading = self.reading("settle", &lease.subscription).await?;
        let reader = self.reader(lease);
        let place = reader.place();
        let mut written = self.try_settlement(lease, &reading, settlement, &place).await;
        if missed(&written, &place) {
            written = self.try_settlement(lease, &reading, settlement, "").await;
        }
        match &written {
            Ok(()) => reader.settled(lease.epoch, settlement.position.map(|seq| seq.0), settlement.rewind),
            // Of a lost window everything stays refused until the lane is given back: what else of it was given out must not be settled either.
            Err(error) if error.code() == "stale_lease" => reader.forget(lease.epoch),
            Err(_) => {}
        }
        written
    }

    async fn try_settlement(
        &self,
        lease: &Lease,
        reading: &Reading,
        settlement: &Settlement<'_>,
        place: &str,
    ) -> Result<()> {
        let session = self.session("settle").await?;
        let call = SettleCall { store: self, client: session.client(), lease, reading, settlement, place };
        let written =
            if settlement.entries.is_empty() { call.write_position().await } else { call.write_entries().await };
        // After an error the connection may still be in the transaction.
        session.end_after(written.is_ok());
        written
    }

    /// Settles inside somebody else's transaction: what a handler did and its position become one fact.
    pub(crate) async fn settle_in(
        &self,
        client: &Client,
        lease: &Lease,
        reading: &Reading,
        settlement: &Settlement<'_>,
    ) -> Result<()> {
        let place = self.reader(lease).place();
        let mut call = SettleCall { store: self, client, lease, reading, settlement, place: &place };
        let mut fenced = call.fence().await;
        if missed(&fenced, &place) {
            call.place = "";
            fenced = call.fence().await;
        }
        if fenced? == Fence::Written || !call.is_as_read().await? {
            return Err(settled_already());
        }
        call.write_rows().await
    }
}

/// What the lane's row says to a settlement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fence {
    /// The lane is ours, and its lock too.
    Open,
    /// This very settlement is there.
    Written,
}

/// One settlement on one connection.
struct SettleCall<'a> {
    store: &'a PostgresStore,
    client: &'a Client,
    lease: &'a Lease,
    reading: &'a Reading,
    settlement: &'a Settlement<'a>,
    /// Where the lane's row is looked for.
    place: &'a str,
}

impl SettleCall<'_> {
    /// All went well: one update, sent with the transaction's ends in one round trip.
    async fn write_position(&self) -> Result<()> {
        let template = if self.settlement.position.is_some() { LANE_SETTLE } else { LANE_GUARD };
        let (begun, fenced, committed) = futures::join!(
            self.client.batch_execute(&self.store.inner.preambles.change),
            self.ask_lane(template),
            self.client.batch_execute(COMMIT),
        );
        begun.map_err(|error| classify("settle", &error))?;
        fenced?;
        committed.map_err(|error| classify("settle", &error))
    }

    async fn write_entries(&self) -> Result<()> {
        let (begun, fenced) =
            futures::join!(self.client.batch_execute(&self.store.inner.preambles.write), self.fence());
        begun.map_err(|error| classify("settle", &error))?;
        let fence = fenced?;
        let writing = async {
            match fence {
                Fence::Open => self.write_rows().await,
                Fence::Written => Ok(()),
            }
        };
        let (written, committed) = futures::join!(writing, self.client.batch_execute(COMMIT));
        written?;
        committed.map_err(|error| classify("settle", &error))
    }

    /// Locks the lane under the lease's epoch. Nothing of a settlement may be written before this said yes.
    async fn fence(&self) -> Result<Fence> {
        self.ask_lane(LANE_GUARD).await
    }

    async fn ask_lane(&self, template: &str) -> Result<Fence> {
        let Self { lease, reading, settlement, .. } = self;
        let lane = lease.lane.cast_signed();
        let position = settlement.position.map(|seq| seq.0);
        let reader = self.store.reader(lease);
        let known = reader.position(lease.epoch);
        let window = known.as_ref().map(|at| at.window.to.to_string());
        let settled = known.map(|at| at.settled);
        let params: [(&(dyn ToSql + Sync), Type); 6] = [
            (&reading.id, Type::INT4),
            (&lane, Type::INT2),
            (&lease.epoch, Type::INT8),
            (&position, Type::INT8),
            (&window, Type::TEXT),
            (&settled, Type::INT8),
        ];
        let sql = self.store.schema().sql(template).replace("{place}", self.place);
        let held = self.client.query_typed_opt(&sql, &params).await.map_err(|error| classify("settle", &error))?;
        let row = held.ok_or_else(|| Error::stale("settle"))?;
        reader.found_at(row.get(0));
        let (same_window, written): (bool, bool) = (row.get(1), row.get(2));
        // A mere rewind belongs to no window.
        if !same_window && (position.is_some() || !settlement.entries.is_empty()) {
            return Err(undone("settle"));
        }
        Ok(if written { Fence::Written } else { Fence::Open })
    }

    /// Whether every due row still is as it was read, so that what a handler did for it counts once.
    async fn is_as_read(&self) -> Result<bool> {
        if self.settlement.position.is_some() {
            return Ok(true);
        }
        let mut rows = AsRead::default();
        self.settlement.entries.iter().for_each(|entry| rows.add(entry.delivery));
        let sql = self.store.schema().sql(DELIVERY_COUNT);
        let counted = self.client.query_typed_one(&sql, &rows.params(&self.reading.id)).await;
        let counted = counted.map_err(|error| classify("apply", &error))?;
        Ok(counted.get::<_, i64>(0) == rows.seqs.len() as i64)
    }

    async fn write_rows(&self) -> Result<()> {
        let Self { lease, reading, settlement, .. } = self;
        let writes = Writes::of(settlement);
        let schema = self.store.schema();
        // Only what comes from the stream may make a row: a due row that vanished was taken away by a person.
        let keep = schema.sql(if settlement.position.is_some() { DELIVERY_INSERT } else { DELIVERY_UPDATE });
        let lane = lease.lane.cast_signed();
        let moving = async {
            match settlement.position {
                Some(_) => self.ask_lane(LANE_MOVE).await.map(drop),
                None => Ok(()),
            }
        };
        let keeping = async {
            if writes.kept.seqs.is_empty() {
                return Ok(0);
            }
            let params: [(&(dyn ToSql + Sync), Type); 14] = [
                (&reading.id, Type::INT4),
                (&lane, Type::INT2),
                (&settlement.hold_keys, Type::BOOL),
                (&writes.kept.seqs, Type::INT8_ARRAY),
                (&writes.keys, Type::TEXT_ARRAY),
                (&writes.states, Type::TEXT_ARRAY),
                (&writes.halts, Type::BOOL_ARRAY),
                (&writes.attempts, Type::INT4_ARRAY),
                (&writes.codes, Type::TEXT_ARRAY),
                (&writes.errors, Type::TEXT_ARRAY),
                (&writes.waits, Type::INT8_ARRAY),
                (&writes.ats, Type::TIMESTAMPTZ_ARRAY),
                (&writes.kept.befores, Type::INT4_ARRAY),
                (&writes.kept.replays, Type::INT4_ARRAY),
            ];
            self.client.execute_typed(&keep, &params).await
        };
        let (delete, release) = (schema.sql(DELIVERY_DELETE), schema.sql(DELIVERY_RELEASE));
        let deleting = async {
            if writes.delivered.seqs.is_empty() {
                return Ok(0);
            }
            self.client.execute_typed(&delete, &writes.delivered.params(&reading.id)).await
        };
        let releasing = async {
            if writes.touched.is_empty() {
                return Ok(0);
            }
            self.client.execute_typed(&release, &[(&reading.id, Type::INT4), (&writes.touched, Type::TEXT_ARRAY)]).await
        };
        let (moved, kept, deleted, released) = futures::join!(moving, keeping, deleting, releasing);
        moved?;
        kept.and(deleted).and(released).map(drop).map_err(|error| classify("settle", &error))
    }
}

/// An earlier call whose answer was lost did this, or a person changed a row meanwhile. What handlers did in this transaction must go with it.
fn settled_already() -> Error {
    let message = "the events were settled or changed meanwhile; what this call did is rolled back";
    Error::new(ErrorKind::Stale, "apply", "settled_already", message)
}
