//! What a lane remembers between calls: its window, how far it has read and how far it is settled.
//!
//! The database knows the window and the settled position; how far we have read is only ours, so that a page costs no write and a crash
//! gives everything unsettled again. What is remembered belongs to one epoch: another lease begins from the database.
//!
//! The window here is never ahead of the one in the database. A crash takes back transaction ids that were not flushed, and gives them
//! out again: a snapshot remembered from before it would take the new transactions for seen, and lose their events.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use postbox_core::{Epoch, Error, Lease, Result};
use tokio::sync::watch;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::subscribe::Reading;
use crate::PostgresStore;
use crate::classify::classify;
use crate::decode::Stored;
use crate::snapshot::Snapshot;

/// The cursor of a lane under its epoch. Index: primary key of `lane`.
const LANE_LOAD: &str = "
SELECT from_snap::pg_catalog.text, to_snap::pg_catalog.text, low, high, last_seq
FROM {s}.lane
WHERE subscription {=} $1 AND lane {=} $2 AND epoch {=} $3 AND lease_until {>} pg_catalog.clock_timestamp()";

/// One lane of this process.
pub(crate) struct LaneReader {
    /// One reader at a time; settling does not wait for it.
    pub(crate) turn: tokio::sync::Mutex<()>,
    position: Mutex<Option<Position>>,
    /// The epoch of the last grant, if this store asked for it. After a failover it may be lower than one before.
    granted: Mutex<Option<Epoch>>,
    /// Rows that were read and not given out yet.
    ahead: Mutex<Option<Ahead>>,
    /// Where the newest version of the lane's row was last seen, as Postgres writes a `ctid`.
    place: Mutex<Option<String>>,
    /// Which local commits the last read has seen.
    stirs: Mutex<watch::Receiver<u64>>,
}

/// Where a lane stands.
#[derive(Debug, Clone)]
pub(crate) struct Position {
    pub(crate) epoch: Epoch,
    pub(crate) window: Window,
    /// Everything of the window up to here is dealt with.
    pub(crate) settled: i64,
    /// Everything of the window up to here was given out; never below `settled`.
    pub(crate) read: i64,
    /// Nothing of the window is left beyond `read`.
    pub(crate) drained: bool,
    /// Rises with every rewind, so that a read that was under way does not undo it.
    pub(crate) rewinds: u64,
}

/// The rows not visible in `from` and visible in `to`; those from transactions at or above `from.xmax` lie in `low < seq <= high`.
#[derive(Debug, Clone)]
pub(crate) struct Window {
    pub(crate) from: Arc<Snapshot>,
    pub(crate) to: Arc<Snapshot>,
    /// Derived from the rows themselves, never from a sequence: a transaction not over yet may hold any lower `seq`.
    pub(crate) low: i64,
    pub(crate) high: i64,
}

/// What was read beyond the last batch, in `seq` order. Bounded by a page; empty for most of a lane's life.
struct Ahead {
    epoch: Epoch,
    rewinds: u64,
    window: Arc<Snapshot>,
    /// The rows come right after this place.
    after: i64,
    rows: VecDeque<Stored>,
    /// The window has more beyond them.
    more: bool,
}

impl LaneReader {
    fn new(stirs: watch::Receiver<u64>) -> Self {
        Self {
            turn: tokio::sync::Mutex::default(),
            position: Mutex::default(),
            granted: Mutex::default(),
            ahead: Mutex::default(),
            place: Mutex::default(),
            stirs: Mutex::new(stirs),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Position>> {
        self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lane was granted: nothing that was known of it holds.
    pub(crate) fn begin(&self, epoch: Epoch) {
        *self.granted.lock().unwrap_or_else(PoisonError::into_inner) = Some(epoch);
        *self.lock() = None;
        *self.ahead.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether an epoch may be read under: it is the one that was granted, or was granted through another store.
    pub(crate) fn is_of(&self, epoch: Epoch) -> bool {
        self.granted.lock().unwrap_or_else(PoisonError::into_inner).is_none_or(|granted| granted == epoch)
    }

    /// The position under an epoch, if it is known.
    pub(crate) fn position(&self, epoch: Epoch) -> Option<Position> {
        self.lock().clone().filter(|position| position.epoch == epoch)
    }

    /// Remembers how far was read, unless the lane was rewound meanwhile. Says whether it did.
    pub(crate) fn advance(&self, position: Position) -> bool {
        if !self.is_of(position.epoch) {
            return false;
        }
        let mut known = self.lock();
        match known.as_mut() {
            Some(now) if now.epoch == position.epoch && now.rewinds != position.rewinds => false,
            Some(now) if now.epoch > position.epoch => false,
            Some(now) if now.epoch == position.epoch && Arc::ptr_eq(&now.window.to, &position.window.to) => {
                // A batch of this window may have been settled while the next was being read.
                let settled = now.settled.max(position.settled);
                *now = Position { settled, ..position };
                true
            }
            _ => {
                *known = Some(position);
                true
            }
        }
    }

    /// Keeps rows for the call that reads on from here.
    pub(crate) fn keep_ahead(&self, at: &Position, rows: VecDeque<Stored>, more: bool) {
        let ahead =
            Ahead { epoch: at.epoch, rewinds: at.rewinds, window: at.window.to.clone(), after: at.read, rows, more };
        *self.ahead.lock().unwrap_or_else(PoisonError::into_inner) = Some(ahead).filter(|ahead| !ahead.rows.is_empty());
    }

    /// The rows that were kept for here, and whether the window has more beyond them. Anything else that was kept is thrown away.
    pub(crate) fn take_ahead(&self, at: &Position) -> Option<(VecDeque<Stored>, bool)> {
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let fits = ahead.epoch == at.epoch
            && ahead.rewinds == at.rewinds
            && ahead.after == at.read
            && Arc::ptr_eq(&ahead.window, &at.window.to);
        fits.then_some((ahead.rows, ahead.more))
    }

    /// Notes a settlement that was committed.
    pub(crate) fn settled(&self, epoch: Epoch, position: Option<i64>, rewind: bool) {
        let mut known = self.lock();
        let Some(now) = known.as_mut().filter(|now| now.epoch == epoch) else { return };
        if let Some(position) = position {
            now.settled = now.settled.max(position);
        }
        if rewind {
            now.read = now.settled;
            now.drained = false;
            now.rewinds += 1;
        }
    }

    /// The condition that leads right to the lane's row, or nothing when its place is not known.
    ///
    /// Every settlement writes a new version of the row. While anybody in the database holds a snapshot, no old version can be removed, and
    /// a look-up by key walks over all of them: 1 ms after 20,000 batches (measured), and so on without end. Only a hint: the other conditions
    /// stand beside it, and where it leads to no row the caller asks again by key: see [`missed`].
    pub(crate) fn place(&self) -> String {
        self.ctid().map(|ctid| format!("ctid OPERATOR(pg_catalog.=) '{ctid}' AND")).unwrap_or_default()
    }

    /// The row's place itself, if it is known.
    pub(crate) fn ctid(&self) -> Option<String> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Remembers where a new version of the row is.
    pub(crate) fn found_at(&self, ctid: &str) {
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = Some(ctid.to_owned());
    }

    /// Forgets what was read under an epoch. A call of a former epoch that ends late leaves what is known under a newer one.
    pub(crate) fn forget(&self, epoch: Epoch) {
        let mut known = self.lock();
        if known.as_ref().is_some_and(|position| position.epoch <= epoch) {
            *known = None;
            *self.ahead.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// From here on, local commits are news again.
    pub(crate) fn mark_stirs_seen(&self) {
        self.stirs.lock().unwrap_or_else(PoisonError::into_inner).mark_unchanged_now();
    }

    /// A receiver that knows which local commits were seen by the last read.
    pub(crate) fn stirs(&self) -> watch::Receiver<u64> {
        self.stirs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

trait MarkUnchanged {
    fn mark_unchanged_now(&mut self);
}

impl MarkUnchanged for watch::Receiver<u64> {
    fn mark_unchanged_now(&mut self) {
        drop(self.borrow_and_update());
    }
}

/// Whether a guarded statement only missed the lane's row at its place, and must be asked again by key.
///
/// Reads, settlements and renewals of one lane run side by side, and each of the latter two moves the row: not to find it where it was says
/// nothing, however often it happens. Only by key a lost lease is lost.
pub(crate) fn missed<T>(answer: &Result<T>, place: &str) -> bool {
    !place.is_empty() && answer.as_ref().is_err_and(|error| error.code() == "stale_lease")
}

impl PostgresStore {
    pub(crate) fn reader(&self, lease: &Lease) -> Arc<LaneReader> {
        let mut readers = self.readers();
        let reader = readers
            .entry((lease.subscription.clone(), lease.lane))
            .or_insert_with(|| Arc::new(LaneReader::new(self.inner.stirs.subscribe())));
        reader.clone()
    }

    /// Begins where the database says.
    pub(crate) async fn load_position(&self, client: &Client, lease: &Lease, reading: &Reading) -> Result<Position> {
        let lane = lease.lane.cast_signed();
        let rows = client
            .query_typed(
                &self.schema().sql(LANE_LOAD),
                &[(&reading.id, Type::INT4), (&lane, Type::INT2), (&lease.epoch, Type::INT8)],
            )
            .await
            .map_err(|error| classify("next_batch", &error))?;
        let row = rows.first().ok_or_else(|| Error::stale("next_batch"))?;
        let settled = row.get(4);
        Ok(Position {
            epoch: lease.epoch,
            window: Window {
                from: Arc::new(Snapshot::parse(row.get(0))?),
                to: Arc::new(Snapshot::parse(row.get(1))?),
                low: row.get(2),
                high: row.get(3),
            },
            settled,
            read: settled,
            drained: false,
            rewinds: 0,
        })
    }
}
