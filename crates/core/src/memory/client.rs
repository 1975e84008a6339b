//! What a client remembers of a lane between calls: its window, how far it has read and how far it
//! is settled.
//!
//! The server knows the window and the settled position; how far was read is only the client's, so
//! that reading writes nothing and a crash gives everything unsettled again. What is remembered
//! belongs to one epoch: another lease begins from the server.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{MemoryStore, Server};
use crate::batch::{Batch, BatchLimit};
use crate::error::Result;
use crate::log::{Epoch, Lease};
use crate::names::SubscriptionName;

/// What one client remembers, by lane.
#[derive(Default)]
pub(super) struct Client {
    positions: Mutex<HashMap<(SubscriptionName, u16), Position>>,
}

/// Where a lane stands.
#[derive(Clone)]
pub(super) struct Position {
    epoch: Epoch,
    /// The last commit of the window. No two windows of a lane have the same.
    pub(super) window: u64,
    /// The revision of the filter that what is not settled was read by.
    pub(super) revision: usize,
    /// Everything of the window up to here is dealt with.
    pub(super) settled: i64,
    /// Everything of the window up to here was given out; never below `settled`.
    pub(super) read: i64,
    /// Nothing of the window is left beyond `read`.
    drained: bool,
    /// Rises with every rewind, so that a read that was under way does not undo it.
    rewinds: u64,
    /// What the last read saw of [`super::state::State::wakeups`].
    pub(super) wakeups: u64,
}

impl Client {
    fn lock(&self) -> MutexGuard<'_, HashMap<(SubscriptionName, u16), Position>> {
        self.positions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The position under a lease, if it is known.
    pub(super) fn position(&self, lease: &Lease) -> Option<Position> {
        self.lock().get(&key(lease)).filter(|at| at.epoch == lease.epoch).cloned()
    }

    /// Goes on from `before` (`None`: nothing was known) to `after`, unless something else happened
    /// meanwhile. Says whether it did.
    fn advance(&self, lease: &Lease, before: Option<&Position>, mut after: Position) -> bool {
        let mut positions = self.lock();
        let now = positions.get(&key(lease)).filter(|now| now.epoch == lease.epoch);
        let place = |at: &Position| (at.window, at.read, at.rewinds);
        if now.map(place) != before.map(place) {
            return false;
        }
        // A batch of this window may have been settled while the next was being read.
        if let Some(now) = now.filter(|now| now.window == after.window) {
            after.settled = now.settled;
        }
        positions.insert(key(lease), after);
        true
    }

    /// Notes what came of a settlement.
    pub(super) fn note_settled(&self, lease: &Lease, position: Option<i64>, rewind: bool, settled: &Result<()>) {
        if let Err(error) = settled {
            if error.is_stale() {
                self.forget(lease);
            }
            return;
        }
        let mut positions = self.lock();
        let Some(now) = positions.get_mut(&key(lease)).filter(|now| now.epoch == lease.epoch) else { return };
        now.settled = now.settled.max(position.unwrap_or_default());
        if rewind {
            (now.read, now.drained) = (now.settled, false);
            now.rewinds += 1;
        }
    }

    /// A lane was granted: what was known of it is of another lease, even if a store that went back
    /// gave it the same epoch.
    pub(super) fn begin(&self, lease: &Lease) {
        self.lock().remove(&key(lease));
    }

    /// The next read begins from the server. Of this lease only: another one may have the lane by
    /// now.
    pub(super) fn forget(&self, lease: &Lease) {
        let mut positions = self.lock();
        if positions.get(&key(lease)).is_some_and(|now| now.epoch == lease.epoch) {
            positions.remove(&key(lease));
        }
    }
}

fn key(lease: &Lease) -> (SubscriptionName, u16) {
    (lease.subscription.clone(), lease.lane)
}

impl MemoryStore {
    /// The next events of the lane's window; a window that is dealt with makes room for the next
    /// one.
    pub(super) async fn read_on(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        loop {
            let Some(at) = self.client.position(lease) else {
                self.load(lease).await?;
                continue;
            };
            // No window is opened over an unsettled one.
            let unsettled = at.read > at.settled;
            let opens = at.drained && !unsettled;
            let (called, known) = (lease.clone(), (at.window, at.settled, at.revision));
            let after = (!opens).then_some(at.read);
            let read = move |server: &Server| server.window(&called, known, after, limit);
            let page = match self.call(if opens { "open" } else { "page" }, Some(lease), read).await {
                // An earlier call was executed and its answer lost, or the store went back. What
                // else was given out must not be settled either, and calls of the destination may
                // be in flight whose rows are of another past: the lane is to be given back.
                Err(error) if error.is_stale() => {
                    self.client.forget(lease);
                    return Err(error);
                }
                page => page?,
            };
            let entered = page.window != at.window;
            let (read, settled) = if entered { (0, 0) } else { (at.read, at.settled) };
            let after = Position {
                window: page.window,
                revision: page.revision,
                settled,
                read: page.end.unwrap_or(read),
                drained: !page.batch.more,
                wakeups: page.wakeups,
                ..at.clone()
            };
            if self.client.advance(lease, Some(&at), after)
                && (unsettled || !page.batch.is_empty() || (opens && !entered))
            {
                return Ok(page.batch);
            }
        }
    }

    /// Begins where the server says.
    async fn load(&self, lease: &Lease) -> Result<()> {
        let called = lease.clone();
        let (window, settled, revision, wakeups) =
            self.call("load", Some(lease), move |server: &Server| server.load(&called)).await?;
        let (epoch, read) = (lease.epoch, settled);
        let at = Position { epoch, window, revision, settled, read, drained: false, rewinds: 0, wakeups };
        self.client.advance(lease, None, at);
        Ok(())
    }
}
