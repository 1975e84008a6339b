//! What a lane remembers between calls: its window, how far it has read and how far it is settled.
//!
//! The database knows the window and the settled position; how far we have read is only ours, so
//! that a page costs no write and a crash gives everything unsettled again. What is remembered
//! belongs to one epoch: another lease begins from the database.
//!
//! The window here is never ahead of the one in the database. A crash takes back transaction ids
//! that were not flushed, and gives them out again: a snapshot remembered from before it would take
//! the new transactions for seen, and lose their events.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use postbox_core::{Epoch, Lease};
use tokio::sync::watch;

use crate::PostgresStore;

/// One lane of this process.
pub(crate) struct Lane {
    /// One reader at a time; settling does not wait for it.
    pub(crate) turn: tokio::sync::Mutex<()>,
    position: Mutex<Option<Position>>,
    /// The epoch of the last grant, if this store asked for it. After a failover it may be lower
    /// than one before.
    granted: Mutex<Option<Epoch>>,
    /// Where the newest version of the lane's row was last seen, as Postgres writes a `ctid`. Only
    /// a hint: see `0001_settle.sql`.
    place: Mutex<Option<String>>,
    /// Which local commits the last read has seen.
    wakeups: Mutex<watch::Receiver<u64>>,
}

/// Where a lane stands.
#[derive(Debug, Clone)]
pub(crate) struct Position {
    pub(crate) epoch: Epoch,
    /// The snapshot that ends the window, as Postgres writes it. No two windows of a lane have the
    /// same.
    pub(crate) window: Arc<str>,
    /// The revision of the filter that what is not settled was read by.
    pub(crate) revision: i32,
    /// Everything of the window up to here is dealt with.
    pub(crate) settled: i64,
    /// Everything of the window up to here was given out; never below `settled`.
    pub(crate) read: i64,
    /// The events between the two, in their order: as many as wait for their settlement.
    pub(crate) given: VecDeque<i64>,
    /// Nothing of the window is left beyond `read`.
    pub(crate) drained: bool,
    /// Where its rows are, once that is known and if it has no stragglers.
    pub(crate) bounds: Option<Bounds>,
    /// Rises with every rewind, so that a read that was under way does not undo it.
    rewinds: u64,
}

/// The rows of a window without stragglers: what they have in common.
#[derive(Debug, Clone)]
pub(crate) struct Bounds {
    /// Their numbers are greater,
    pub(crate) low: i64,
    /// and not greater than this.
    pub(crate) high: i64,
    /// Their transactions began no earlier than this one; as text, as Postgres writes it.
    pub(crate) xid_low: String,
}

impl Position {
    /// Begins where the database says, under a lease that has not read.
    pub(crate) fn at(epoch: Epoch, window: Arc<str>, revision: i32, settled: i64) -> Self {
        let (given, drained, bounds, rewinds) = (VecDeque::new(), false, None, 0);
        Self { epoch, window, revision, settled, read: settled, given, drained, bounds, rewinds }
    }

    /// The next window was opened.
    pub(crate) fn enter(&mut self, window: Arc<str>) {
        self.window = window;
        (self.settled, self.read, self.drained, self.bounds) = (0, 0, false, None);
        self.given.clear();
    }

    /// Everything up to a place is settled.
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

    /// A lane was granted: nothing that was known of it holds.
    pub(crate) fn begin(&self, epoch: Epoch) {
        *lock(&self.granted) = Some(epoch);
        *lock(&self.position) = None;
    }

    /// Whether an epoch may be read under: it is the one that was granted, or was granted through
    /// another store.
    pub(crate) fn is_of(&self, epoch: Epoch) -> bool {
        lock(&self.granted).is_none_or(|granted| granted == epoch)
    }

    /// The position under an epoch, if it is known.
    pub(crate) fn position(&self, epoch: Epoch) -> Option<Position> {
        lock(&self.position).clone().filter(|position| position.epoch == epoch)
    }

    /// Remembers how far was read, unless the lane was rewound meanwhile. Says whether it did.
    pub(crate) fn advance(&self, mut position: Position) -> bool {
        if !self.is_of(position.epoch) {
            return false;
        }
        let mut known = lock(&self.position);
        let settled = match known.as_ref() {
            Some(now) if now.epoch > position.epoch => return false,
            Some(now) if now.epoch == position.epoch && now.rewinds != position.rewinds => return false,
            // A batch of this window may have been settled while the next was being read.
            Some(now) if now.epoch == position.epoch && now.window == position.window => now.settled,
            _ => 0,
        };
        position.settle(settled);
        *known = Some(position);
        true
    }

    /// Notes a settlement that was committed.
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

    /// Remembers where the row is now.
    pub(crate) fn found_at(&self, place: &str) {
        *lock(&self.place) = Some(place.to_owned());
    }

    /// Forgets what was read under an epoch. A call of a former epoch that ends late leaves what is
    /// known under a newer one.
    pub(crate) fn forget(&self, epoch: Epoch) {
        let mut known = lock(&self.position);
        if known.as_ref().is_some_and(|position| position.epoch <= epoch) {
            *known = None;
        }
    }

    /// From here on, local commits are news again.
    pub(crate) fn mark_wakeups_seen(&self) {
        lock(&self.wakeups).mark_unchanged();
    }

    /// A receiver that knows which local commits were seen by the last read.
    pub(crate) fn wakeups(&self) -> watch::Receiver<u64> {
        lock(&self.wakeups).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while it was locked would have been between two whole changes.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
