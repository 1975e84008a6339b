//! `settle`: writes the position, the delivery rows, and what is next of each key, in one
//! transaction.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use postbox_core::kit::{Due, RowAfter, settled_already, window_undone};
use postbox_core::{Delivery, Disposition, Entry, Error, Lease, Result, Settlement};
use postbox_postgres_sql::{Bound, bound};

use crate::PostgresStore;
use crate::execute::Execute;
use crate::lane;
use crate::log::micros;
use crate::session::Session;
use crate::subscription::SubscriptionRow;

/// Locks the lane and moves its position: see `0001_settle.sql`. Index: primary key of `lane`.
/// Locks the row until the transaction ends. If the lease expires meanwhile, the lane still cannot
/// be granted to anyone else.
pub(crate) const LANE_SETTLE: &str = "SELECT verdict, place FROM {s}.settle_lane($1, $2, $3, $4, $5, $6, $7, $8, $9)";

/// Adds rows of events that leave the stream. Index: all of `delivery`. Locks the rows. An existing
/// row is kept: an operator discarded the event before it was read.
const DELIVERY_INSERT: &str = "
INSERT INTO {s}.delivery AS d (subscription, lane, ordered, seq, key, state, halt, attempts, replays, code, error, due_at, last_attempts)
SELECT $1, $2, $3, e.seq, e.key, e.state, e.halt, e.attempts, e.replays, e.code, e.error, e.due_at,
  CASE WHEN e.took IS NULL THEN '[]' ELSE {attempt} END FROM {entries}
ON CONFLICT (subscription, seq) DO NOTHING";

/// Updates existing rows; a row that vanished is not added again. Index: primary key of `delivery`.
/// Locks the rows.
///
/// A row that was blocked and stays blocked is not rewritten: every attempt of a failing event also
/// reports the events behind it.
pub(crate) const DELIVERY_UPDATE: &str = "
UPDATE {s}.delivery AS d SET state = e.state, halt = e.halt, ordered = $3, attempts = e.attempts, code = coalesce(e.code, d.code),
  error = coalesce(e.error, d.error), due_at = e.due_at, updated_at = clock_timestamp(),
  last_attempts = CASE WHEN e.took IS NULL THEN d.last_attempts WHEN jsonb_array_length(d.last_attempts) < 8 THEN d.last_attempts || {attempt}
    ELSE (d.last_attempts - 0) || {attempt} END
FROM {entries} CROSS JOIN LATERAL {row_of_entry}
WHERE d.ctid = found.place AND d.lane = $2 AND {is_as_read} AND NOT (d.state = 'blocked' AND e.state = 'blocked')";

/// Deletes the rows of delivered events, and counts them. Index: primary key of `delivery`; the
/// lane by its `ctid`, where it was just locked. Locks the rows.
pub(crate) const DELIVERY_DELETE: &str = "
WITH gone AS (
  DELETE FROM {s}.delivery AS d
  USING unnest($2::bigint[], $3::int[], $4::int[]) AS e(seq, before, replays) CROSS JOIN LATERAL {row_of_entry}
  WHERE d.ctid = found.place AND {is_as_read} RETURNING d.seq)
UPDATE {s}.lane AS l SET delivered = least(l.delivered, 1000000000000000) + (SELECT count(*) FROM gone)
WHERE l.ctid = $6::tid AND l.subscription = $1 AND l.lane = $5 AND EXISTS (SELECT FROM gone) RETURNING l.ctid::text";

/// The number of rows that still are as they were read, with none ahead of them in their key but
/// those that are settled with them: a person may have made an earlier event due again, or a
/// failover undone its effect. Indexes:
/// primary key of `delivery`, `delivery_held`. The lane's lock keeps them so.
pub(crate) const DELIVERY_COUNT: &str = "
SELECT count(*)::text FROM unnest($2::bigint[], $3::int[], $4::int[]) AS e(seq, before, replays)
CROSS JOIN LATERAL {row_of_entry} JOIN {s}.delivery AS d ON d.ctid = found.place WHERE {is_as_read}
  AND (NOT d.holds OR (SELECT h.seq FROM {s}.delivery AS h
    WHERE h.subscription = $1 AND h.key = d.key AND h.holds ORDER BY h.key, h.seq LIMIT 1) = ANY ($5::bigint[]))";

/// Makes the next row of each key due, if it was only waiting for its turn. Index: `delivery_held`,
/// then the primary key. Locks the rows.
///
/// Updates by `ctid`, for the reason given at `{row_of_entry}`.
pub(crate) const DELIVERY_RELEASE: &str = "{delivery_release}";

/// A settlement, grouped by what has to be written.
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
    tooks: Vec<Option<i64>>,
    done: AsRead,
    touched: Vec<&'a str>,
}

/// Rows, and the attempts and replays they were read with.
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

    fn bound<'p>(&'p self, subscription: &'p i32) -> [Bound<'p>; 4] {
        bound![*subscription, self.seqs, self.befores, self.replays]
    }
}

fn count(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

impl<'a> Writes<'a> {
    fn of(settlement: &'a Settlement<'_>) -> Self {
        let mut writes = Self::default();
        let mut touched = HashSet::new();
        // The last entry of an event counts; a statement with two rows for one event would fail.
        let entries: BTreeMap<i64, &Entry<'_>> =
            settlement.entries.iter().map(|entry| (entry.delivery.seq.0, entry)).collect();
        for entry in entries.into_values() {
            let key = entry.delivery.event.key.as_ref().map(|key| key.as_str());
            // Also without order: rows from a time with order may be behind it.
            touched.extend(key);
            writes.add(key, entry, settlement.hold_keys);
        }
        writes.touched = touched.into_iter().collect();
        writes
    }

    fn add(&mut self, key: Option<&'a str>, entry: &'a Entry<'_>, hold_keys: bool) {
        let attempts = entry.delivery.attempt.saturating_sub(1);
        let Some(row) = RowAfter::of(&entry.disposition, attempts, hold_keys && key.is_some()) else {
            return self.done.add(entry.delivery);
        };
        let (wait, at) = match row.due {
            Due::Never => (None, None),
            Due::After(wait) => (Some(micros(wait)), None),
            Due::At(at) => (None, Some(at)),
        };
        self.kept.add(entry.delivery);
        self.keys.push(key);
        self.states.push(row.state.as_str());
        self.halts.push(row.halt);
        self.attempts.push(count(row.attempts));
        self.codes.push(row.code);
        self.errors.push(row.error);
        self.waits.push(wait);
        self.ats.push(at);
        self.tooks.push(row.took.map(micros));
    }
}

pub(crate) async fn settle(
    store: &PostgresStore,
    session: &Session,
    lease: &Lease,
    settlement: &Settlement<'_>,
) -> Result<()> {
    let subscription = store.leased(session, lease).await?;
    let call = SettleCall { store, on: session.client(), lease, subscription: &subscription, settlement };
    let modes = &store.inner.modes;
    let settled = match settlement.entries.is_empty() {
        // Everything was delivered: one update, sent together with BEGIN and COMMIT in one round
        // trip.
        true => session.at_once(&modes.settle, async |_: &Session| call.move_position().await).await.map(drop),
        false => call.write_all(session).await,
    };
    let lane = store.lane(lease);
    match &settled {
        Ok(()) => lane.settled(lease.epoch, settlement.position.map(|seq| seq.0), settlement.rewind),
        // After a lost window every settlement is refused until the lane is given back: nothing
        // else that was handed out from it may be settled either.
        Err(error) if error.is_lease_lost() => lane.forget(lease.epoch),
        Err(_) => {}
    }
    settled
}

/// Settles inside the transaction in which `handled` was handed to handlers: their effect and the
/// position commit together.
pub(crate) async fn settle_in(
    store: &PostgresStore,
    on: &impl Execute,
    lease: &Lease,
    subscription: &SubscriptionRow,
    handled: &[&Delivery],
    settlement: &Settlement<'_>,
) -> Result<()> {
    let call = SettleCall { store, on, lease, subscription, settlement };
    if call.move_position().await? == Position::Written || !call.is_as_read(handled).await? {
        return Err(settled_already());
    }
    call.write_rows().await
}

/// The answer of the lane's row to a settlement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    /// The lane is locked, and its position is the settlement's.
    Moved,
    /// This same settlement was written before.
    Written,
}

/// One settlement on one connection.
struct SettleCall<'a, E> {
    store: &'a PostgresStore,
    on: &'a E,
    lease: &'a Lease,
    subscription: &'a SubscriptionRow,
    settlement: &'a Settlement<'a>,
}

impl<E: Execute> SettleCall<'_, E> {
    async fn write_all(&self, session: &Session) -> Result<()> {
        // Not sent together: if only BEGIN were refused, the position would be committed alone, and
        // the repetition would find it written, without the rows.
        session.begin(&self.store.inner.modes.relay).await?;
        let position = self.move_position().await?;
        let writing = async {
            match position {
                Position::Moved => self.write_rows().await,
                Position::Written => Ok(()),
            }
        };
        let (written, committed) = futures::join!(writing, session.commit());
        written.and(committed)
    }

    /// Locks the lane under the lease's epoch. Nothing else of a settlement may be written before
    /// this succeeded.
    async fn move_position(&self) -> Result<Position> {
        let Self { lease, settlement, .. } = self;
        let lane = self.store.lane(lease);
        let known = lane.position(lease.epoch);
        let (window, settled) = (known.as_ref().map(|at| &*at.window), known.as_ref().map(|at| at.settled));
        let (number, place) = (i32::from(lease.lane), lane.place());
        let revision = known.as_ref().map(|at| at.revision);
        let position = settlement.position.map(|seq| seq.0);
        let delivered = known.as_ref().zip(position).map_or(0, |(at, position)| self.delivered(at, position));
        let bound =
            bound![self.subscription.id, number, lease.epoch, place, window, revision, settled, position, delivered];
        let rows = self.on.rows(&self.store.schema().sql(LANE_SETTLE), &bound).await?;
        let said = |column: usize| rows.first()?.get(column)?.as_deref();
        if let Some(place) = said(1) {
            lane.found_at(place);
        }
        match said(0).unwrap_or_default() {
            "open" => Ok(Position::Moved),
            "written" => Ok(Position::Written),
            // A settlement that only rewinds belongs to no window.
            "undone" if position.is_none() && settlement.entries.is_empty() => Ok(Position::Moved),
            "undone" => Err(window_undone("settle")),
            _ => Err(Error::stale("settle")),
        }
    }

    /// Returns how many of the events up to a position were delivered: handed out, and without any
    /// other entry.
    fn delivered(&self, at: &lane::Position, position: i64) -> i64 {
        let passed = at.given.iter().take_while(|seq| **seq <= position).count();
        let excepted = self.settlement.entries.iter().filter(|entry| {
            let seq = entry.delivery.seq.0;
            entry.disposition != Disposition::Delivered && at.settled < seq && seq <= position
        });
        passed.saturating_sub(excepted.count()) as i64
    }

    /// Whether every due row still is as it was read and next of its key, so that a handler's
    /// effect counts once and in order.
    async fn is_as_read(&self, handled: &[&Delivery]) -> Result<bool> {
        if self.settlement.position.is_some() {
            return Ok(true);
        }
        let mut rows = AsRead::default();
        handled.iter().for_each(|delivery| rows.add(delivery));
        let settled: Vec<i64> = self.settlement.entries.iter().map(|entry| entry.delivery.seq.0).collect();
        let sql = self.store.schema().sql(DELIVERY_COUNT);
        let [id, seqs, befores, replays] = rows.bound(&self.subscription.id);
        let [settled] = bound![settled];
        let counted = self.on.rows(&sql, &[id, seqs, befores, replays, settled]).await?;
        Ok(counted == [[Some(rows.seqs.len().to_string())]])
    }

    async fn write_rows(&self) -> Result<()> {
        let Self { lease, subscription, settlement, .. } = self;
        let writes = Writes::of(settlement);
        let schema = self.store.schema();
        // Only events of the stream may add a row. A due row that vanished was removed by an
        // operator.
        let keep = schema.sql(if settlement.position.is_some() { DELIVERY_INSERT } else { DELIVERY_UPDATE });
        let (lane, place) = (lease.lane.cast_signed(), self.store.lane(lease).place());
        let keeping = async {
            if writes.kept.seqs.is_empty() {
                return Ok(Vec::new());
            }
            let Writes { keys, states, halts, attempts, codes, errors, waits, ats, tooks, .. } = &writes;
            let AsRead { seqs, befores, replays } = &writes.kept;
            let (id, ordered) = (subscription.id, settlement.hold_keys);
            let bound = bound![
                id, lane, ordered, seqs, keys, states, halts, attempts, codes, errors, waits, ats, befores, replays,
                tooks
            ];
            self.on.rows(&keep, &bound).await
        };
        let (delete, release) = (schema.sql(DELIVERY_DELETE), schema.sql(DELIVERY_RELEASE));
        let deleting = async {
            if writes.done.seqs.is_empty() {
                return Ok(());
            }
            let [id, seqs, befores, replays] = writes.done.bound(&subscription.id);
            let [lane, place] = bound![lane, place];
            let moved = self.on.rows(&delete, &[id, seqs, befores, replays, lane, place]).await?;
            moved.iter().flatten().flatten().for_each(|place| self.store.lane(lease).found_at(place));
            Ok(())
        };
        let releasing = async {
            if writes.touched.is_empty() {
                return Ok(Vec::new());
            }
            self.on.rows(&release, &bound![subscription.id, writes.touched]).await
        };
        let (kept, deleted, released) = futures::join!(keeping, deleting, releasing);
        kept?;
        deleted?;
        released.map(drop)
    }
}
