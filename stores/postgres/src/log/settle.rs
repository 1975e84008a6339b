//! Writing down what became of a batch: the position, the exceptions, and the next of each key, in one transaction.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use postbox_core::limits::ERROR_BYTES_MAX;
use postbox_core::{Disposition, Entry, Error, Lease, Result, Settlement, State};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::micros;
use super::reader::missed;
use super::subscribe::Reading;
use super::window::undone;
use crate::PostgresStore;
use crate::classify::classify;
use crate::session::COMMIT;

/// Moves the position, if the lease is ours. Index: primary key of `lane`. Locks the row: everything that writes delivery rows of the lane
/// takes this lock first, so that nobody decides on a key's next row while somebody else changes its rows. Never moves back.
///
/// Only in the window it belongs to: after a failover that lost the window, the same number would pass events of the one before.
pub(crate) const LANE_SETTLE: &str = "
UPDATE {s}.lane SET last_seq = CASE WHEN coalesce(to_snap::text = $5, true) THEN greatest(last_seq, $4) ELSE last_seq END
WHERE {place} subscription = $1 AND lane = $2 AND epoch = $3 AND lease_until > clock_timestamp()
RETURNING ctid::text, coalesce(to_snap::text = $5, true)";

/// The same guard and lock without a position. Index: primary key of `lane`. Locks the row.
const LANE_GUARD: &str = "
SELECT ctid::text, true FROM {s}.lane
WHERE {place} subscription = $1 AND lane = $2 AND epoch = $3 AND lease_until > clock_timestamp()
FOR NO KEY UPDATE";

/// What every disposition that keeps a row says of it, as `e`. Waits count from now, by the database's clock.
macro_rules! entries {
    () => {
        "(SELECT u.seq, u.key, u.state, u.halt, u.attempts, u.code, u.error,
    CASE WHEN u.wait IS NULL THEN u.at ELSE clock_timestamp() + u.wait * interval '1 microsecond' END AS due_at
  FROM unnest($4::bigint[], $5::text[], $6::text[], $7::bool[], $8::int[], $9::text[], $10::text[], $11::bigint[], $12::timestamptz[])
    AS u(seq, key, state, halt, attempts, code, error, wait, at)) AS e"
    };
}

/// Rows of events that leave the stream. Index: all of `delivery`. Locks the rows. A person's discard stands.
const DELIVERY_UPSERT: &str = concat!(
    "INSERT INTO {s}.delivery AS d (subscription, lane, ordered, seq, key, state, halt, attempts, code, error, due_at)
SELECT $1, $2, $3, e.seq, e.key, e.state, e.halt, e.attempts, e.code, e.error, e.due_at FROM ",
    entries!(),
    " ON CONFLICT (subscription, seq) DO UPDATE SET state = excluded.state, halt = excluded.halt, ordered = excluded.ordered,
  attempts = excluded.attempts, code = coalesce(excluded.code, d.code), error = coalesce(excluded.error, d.error),
  due_at = excluded.due_at, updated_at = clock_timestamp()
WHERE d.state NOT IN ('discarded', 'dead')"
);

/// Rows that are there already; one that vanished stays away. Index: primary key of `delivery`. Locks the rows.
///
/// A row that was blocked and stays so is not rewritten: a poison key's followers come along at every attempt of its head.
const DELIVERY_UPDATE: &str = concat!(
    "UPDATE {s}.delivery AS d SET state = e.state, halt = e.halt, ordered = $3, attempts = e.attempts, code = coalesce(e.code, d.code),
  error = coalesce(e.error, d.error), due_at = e.due_at, updated_at = clock_timestamp()
FROM ",
    entries!(),
    " WHERE d.subscription = $1 AND d.lane = $2 AND d.seq = e.seq AND d.state NOT IN ('discarded', 'dead')
  AND NOT (d.state = 'blocked' AND e.state = 'blocked')"
);

/// Rows of events that arrived. Index: primary key of `delivery`. Locks the rows.
const DELIVERY_DELETE: &str = "
DELETE FROM {s}.delivery WHERE subscription = $1 AND seq = ANY ($2::bigint[]) AND state NOT IN ('discarded', 'dead')";

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
    seqs: Vec<i64>,
    keys: Vec<Option<&'a str>>,
    states: Vec<&'static str>,
    halts: Vec<bool>,
    attempts: Vec<i32>,
    codes: Vec<Option<&'a str>>,
    errors: Vec<Option<Cow<'a, str>>>,
    waits: Vec<Option<i64>>,
    ats: Vec<Option<Timestamp>>,
    delivered: Vec<i64>,
    touched: Vec<&'a str>,
}

impl<'a> Writes<'a> {
    fn of(settlement: &'a Settlement<'_>) -> Self {
        let mut writes = Self::default();
        let mut touched = HashSet::new();
        // The last word on an event counts; two rows of one in a statement would be an error.
        let entries: BTreeMap<i64, &Entry<'_>> =
            settlement.entries.iter().map(|entry| (entry.delivery.seq.0, entry)).collect();
        for (seq, entry) in entries {
            let key = entry.delivery.event.key.as_ref().map(|key| key.as_str());
            if settlement.hold_keys {
                touched.extend(key);
            }
            writes.add(seq, key, entry, settlement.hold_keys);
        }
        writes.touched = touched.into_iter().collect();
        writes
    }

    fn add(&mut self, seq: i64, key: Option<&'a str>, entry: &'a Entry<'_>, hold_keys: bool) {
        let before = entry.delivery.attempt.saturating_sub(1);
        let (state, attempts, wait, at, reason, halt) = match &entry.disposition {
            Disposition::Delivered => return self.delivered.push(seq),
            // The row is there and stays.
            Disposition::Discarded => return,
            Disposition::Retry { after, counted, code, error } => {
                let attempts = before + u32::from(*counted);
                (State::Retrying, attempts, Some(micros(*after)), None, Some((code, error)), false)
            }
            // Without order there is nothing to wait behind.
            Disposition::Block if key.is_none() || !hold_keys => (State::Retrying, before, Some(0), None, None, false),
            Disposition::Block => (State::Blocked, before, None, None, None, false),
            Disposition::Schedule { at } => (State::Scheduled, before, None, Some(*at), None, false),
            Disposition::Dead { code, error, halt } => {
                (State::Dead, before + 1, None, None, Some((code, error)), *halt)
            }
        };
        self.seqs.push(seq);
        self.keys.push(key);
        self.states.push(state.as_str());
        self.halts.push(halt);
        self.attempts.push(i32::try_from(attempts).unwrap_or(i32::MAX));
        self.codes.push(reason.map(|(code, _)| code.as_ref()));
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
            Err(error) if error.code() == "stale_lease" => reader.forget(),
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
        fenced?;
        call.write_rows().await.map_err(|error| classify("apply", &error))
    }
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
        let (begun, fenced, committed) = futures::join!(
            self.client.batch_execute(&self.store.inner.preambles.change),
            self.fence(),
            self.client.batch_execute(COMMIT),
        );
        begun.map_err(|error| classify("settle", &error))?;
        fenced?;
        committed.map_err(|error| classify("settle", &error))
    }

    async fn write_entries(&self) -> Result<()> {
        let (begun, fenced) =
            futures::join!(self.client.batch_execute(&self.store.inner.preambles.write), self.fence(),);
        begun.map_err(|error| classify("settle", &error))?;
        fenced?;
        let (written, committed) = futures::join!(self.write_rows(), self.client.batch_execute(COMMIT),);
        written.map_err(|error| classify("settle", &error))?;
        committed.map_err(|error| classify("settle", &error))
    }

    /// Moves the position under the lease's epoch. Nothing else of a settlement may be written before this said yes.
    async fn fence(&self) -> Result<()> {
        let Self { lease, reading, settlement, .. } = self;
        let lane = lease.lane.cast_signed();
        let position = settlement.position.map(|seq| seq.0).unwrap_or_default();
        let reader = self.store.reader(lease);
        let window = reader.position(lease.epoch).map(|at| at.window.to.to_string());
        let lane_params: [(&(dyn ToSql + Sync), Type); 5] = [
            (&reading.id, Type::INT4),
            (&lane, Type::INT2),
            (&lease.epoch, Type::INT8),
            (&position, Type::INT8),
            (&window, Type::TEXT),
        ];
        let (template, params) = match settlement.position {
            Some(_) => (LANE_SETTLE, &lane_params[..]),
            None => (LANE_GUARD, &lane_params[..3]),
        };
        let sql = self.store.schema().sql(template).replace("{place}", self.place);
        let held = self.client.query_typed_opt(&sql, params).await.map_err(|error| classify("settle", &error))?;
        let row = held.ok_or_else(|| Error::stale("settle"))?;
        reader.found_at(row.get(0));
        if !row.get::<_, bool>(1) {
            return Err(undone("settle"));
        }
        Ok(())
    }

    async fn write_rows(&self) -> Result<(), tokio_postgres::Error> {
        let Self { lease, reading, settlement, .. } = self;
        let writes = Writes::of(settlement);
        let schema = self.store.schema();
        // Only what comes from the stream may make a row: a due row that vanished was taken away by a person.
        let keep = schema.sql(if settlement.position.is_some() { DELIVERY_UPSERT } else { DELIVERY_UPDATE });
        let lane = lease.lane.cast_signed();
        let keeping = async {
            if writes.seqs.is_empty() {
                return Ok(0);
            }
            let params: [(&(dyn ToSql + Sync), Type); 12] = [
                (&reading.id, Type::INT4),
                (&lane, Type::INT2),
                (&settlement.hold_keys, Type::BOOL),
                (&writes.seqs, Type::INT8_ARRAY),
                (&writes.keys, Type::TEXT_ARRAY),
                (&writes.states, Type::TEXT_ARRAY),
                (&writes.halts, Type::BOOL_ARRAY),
                (&writes.attempts, Type::INT4_ARRAY),
                (&writes.codes, Type::TEXT_ARRAY),
                (&writes.errors, Type::TEXT_ARRAY),
                (&writes.waits, Type::INT8_ARRAY),
                (&writes.ats, Type::TIMESTAMPTZ_ARRAY),
            ];
            self.client.execute_typed(&keep, &params).await
        };
        let (delete, release) = (schema.sql(DELIVERY_DELETE), schema.sql(DELIVERY_RELEASE));
        let deleting = async {
            if writes.delivered.is_empty() {
                return Ok(0);
            }
            self.client
                .execute_typed(&delete, &[(&reading.id, Type::INT4), (&writes.delivered, Type::INT8_ARRAY)])
                .await
        };
        let releasing = async {
            if writes.touched.is_empty() {
                return Ok(0);
            }
            self.client.execute_typed(&release, &[(&reading.id, Type::INT4), (&writes.touched, Type::TEXT_ARRAY)]).await
        };
        let (kept, deleted, released) = futures::join!(keeping, deleting, releasing);
        kept.and(deleted).and(released).map(drop)
    }
}
