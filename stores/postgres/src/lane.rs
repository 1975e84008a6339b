//! What a lane remembers between calls: its window, how far it has read and how far it is settled.
//!
//! The database stores the window and the settled position. How far we have read is known only
//! here, so that reading a page costs no write, and after a crash everything unsettled is read
//! again. What is remembered belongs to one epoch: the next lease starts from the database.
//!
//! The window here is never ahead of the one in the database. A crash of the server loses
//! transaction ids that were not flushed, and assigns them again. A snapshot remembered from before
//! the crash would count those new transactions as seen, and their events would be lost.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use postbox_core::{Epoch, Lease, Seq, Settlement, lock};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::PostgresStore;

/// One lane of this process.
pub(crate) struct Lane {
    /// Allows one reader at a time. Settling does not take it.
    pub(crate) turn: tokio::sync::Mutex<()>,
    position: Mutex<Option<Position>>,
    /// The epoch of the last grant, if it was made through this store. After a failover it may be
    /// lower than an earlier one.
    granted: Mutex<Option<Epoch>>,
    /// Where the newest version of the lane's row was last seen, as a `ctid` in Postgres's
    /// notation. Only a hint: see `0001_settle.sql`.
    place: Mutex<Option<String>>,
    /// The local commits that the last read has seen.
    wakeups: Mutex<watch::Receiver<u64>>,
}

/// Where a lane stands.
#[derive(Debug, Clone)]
pub(crate) struct Position {
    pub(crate) epoch: Epoch,
    /// The snapshot that ends the window, in Postgres's notation. It differs between all windows of
    /// a lane.
    pub(crate) window: Arc<str>,
    /// The revision of the filter that the unsettled events were read with.
    pub(crate) revision: i32,
    /// Everything in the window up to here is settled.
    pub(crate) settled: i64,
    /// Everything in the window up to here was handed out; never below `settled`.
    pub(crate) read: i64,
    /// The `seq` of the events between the two, in order: one entry for each event that waits to be
    /// settled.
    pub(crate) given: VecDeque<i64>,
    /// Whether nothing of the window is left beyond `read`.
    pub(crate) drained: bool,
    /// When the window was opened, if under this lease.
    pub(crate) opened: Option<Instant>,
    /// Where the window's rows are, once known, and if it has no stragglers.
    pub(crate) bounds: Option<Bounds>,
    /// Incremented by every rewind, so that a read in progress does not undo it.
    rewinds: u64,
}

/// What the rows of a window without stragglers have in common.
#[derive(Debug, Clone)]
pub(crate) struct Bounds {
    /// Their `seq` is greater than this,
    pub(crate) low: i64,
    /// and at most this.
    pub(crate) high: i64,
    /// Their transactions are not older than this one, in Postgres's notation.
    pub(crate) xid_low: String,
}

impl Position {
    /// Starts from the position in the database, under a lease that has not read yet.
    pub(crate) fn at(epoch: Epoch, window: Arc<str>, revision: i32, settled: i64) -> Self {
        let (given, drained, opened, bounds, rewinds) = (VecDeque::new(), false, None, None, 0);
        Self { epoch, window, revision, settled, read: settled, given, drained, opened, bounds, rewinds }
    }

    /// Starts the next window, which was opened.
    pub(crate) fn enter(&mut self, window: Arc<str>) {
        (self.window, self.opened) = (window, Some(Instant::now()));
        (self.settled, self.read, self.drained, self.bounds) = (0, 0, false, None);
        self.given.clear();
    }

    /// Returns whether the settlement says that everything read so far is delivered, and nothing of
    /// the window is left.
    pub(crate) fn is_ended_by(&self, settlement: &Settlement<'_>) -> bool {
        let Settlement { position, entries, rewind, .. } = settlement;
        self.drained && *position == Some(Seq(self.read)) && self.settled < self.read && entries.is_empty() && !rewind
    }

    /// Marks everything up to `position` as settled.
    fn settle(&mut self, position: i64) {
        self.settled = self.settled.max(position);
        while self.given.front().is_some_and(|seq| *seq <= self.settled) {
            self.given.pop_front();
        }
    }
}

impl Lane {
    pub(crate) fn new(wakeups: watch::Receiver<u64>) -> Self {
        Self {
            turn: tokio::sync::Mutex::default(),
            position: Mutex::default(),
            granted: Mutex::default(),
            place: Mutex::default(),
            wakeups: Mutex::new(wakeups),
        }
    }

    /// Notes that a lane was granted. Nothing that was known of it before holds.
    pub(crate) fn begin(&self, epoch: Epoch) {
        *lock(&self.granted) = Some(epoch);
        *lock(&self.position) = None;
    }

    /// Whether reading is allowed under `epoch`: it is the last one granted here, or the lane was
    /// granted through another store.
    pub(crate) fn is_of(&self, epoch: Epoch) -> bool {
        lock(&self.granted).is_none_or(|granted| granted == epoch)
    }

    /// Whether this store ever granted or read the lane. A lease that was lost meanwhile does not
    /// change that.
    pub(crate) fn is_ours(&self) -> bool {
        lock(&self.granted).is_some() || lock(&self.position).is_some()
    }

    /// The position under `epoch`, if known.
    pub(crate) fn position(&self, epoch: Epoch) -> Option<Position> {
        lock(&self.position).clone().filter(|position| position.epoch == epoch)
    }

    /// Records how far was read, unless the lane was rewound meanwhile. Returns whether it did.
    pub(crate) fn advance(&self, mut position: Position) -> bool {
        if !self.is_of(position.epoch) {
            return false;
        }
        let mut known = lock(&self.position);
        let settled = match known.as_ref() {
            Some(now) if now.epoch > position.epoch => return false,
            Some(now) if now.epoch == position.epoch && now.rewinds != position.rewinds => return false,
            // A batch of this window may have been settled during the read.
            Some(now) if now.epoch == position.epoch && now.window == position.window => now.settled,
            _ => 0,
        };
        position.settle(settled);
        *known = Some(position);
        true
    }

    /// Records a settlement that was committed.
    pub(crate) fn settled(&self, epoch: Epoch, position: Option<i64>, rewind: bool) {
        let mut known = lock(&self.position);
        let Some(now) = known.as_mut().filter(|now| now.epoch == epoch) else { return };
        now.settle(position.unwrap_or_default());
        if rewind {
            (now.read, now.drained) = (now.settled, false);
            now.given.clear();
            now.rewinds += 1;
        }
    }

    /// Where the lane's row was last seen.
    pub(crate) fn place(&self) -> Option<String> {
        lock(&self.place).clone()
    }

    /// Records where the row is now.
    pub(crate) fn found_at(&self, place: &str) {
        *lock(&self.place) = Some(place.to_owned());
    }

    /// Forgets what was read under `epoch`. A late call of a former epoch keeps what is known under
    /// a newer one.
    pub(crate) fn forget(&self, epoch: Epoch) {
        let mut known = lock(&self.position);
        if known.as_ref().is_some_and(|position| position.epoch <= epoch) {
            *known = None;
        }
    }

    /// Marks local commits so far as seen; later ones end a wait.
    pub(crate) fn mark_wakeups_seen(&self) {
        lock(&self.wakeups).mark_unchanged();
    }

    /// A receiver that wakes for local commits since the last read.
    pub(crate) fn wakeups(&self) -> watch::Receiver<u64> {
        lock(&self.wakeups).clone()
    }
}

impl PostgresStore {
    pub(crate) fn lane(&self, lease: &Lease) -> Arc<Lane> {
        let mut lanes = lock(&self.inner.lanes);
        let lane = lanes
            .entry((lease.subscription.clone(), lease.lane))
            .or_insert_with(|| Arc::new(Lane::new(self.inner.wakeups.subscribe())));
        lane.clone()
    }
}
