//! What a client remembers of a lane between calls: its window, how far it has read and how far it
//! is settled.
//!
//! The server knows the window and the settled position; how far was read is only the client's, so
//! that reading writes nothing and a crash gives everything unsettled again. What is remembered
//! belongs to one epoch: another lease begins from the server.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::MemoryStore;
use super::read::Page;
use super::state::Window;
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
    pub(super) window: Arc<Window>,
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

impl Position {
    fn of(lease: &Lease, page: &Page, window: Arc<Window>, settled: i64) -> Self {
        let read = page.end.unwrap_or(settled);
        let (drained, wakeups) = (!page.batch.more, page.wakeups);
        Self { epoch: lease.epoch, window, settled, read, drained, rewinds: 0, wakeups }
    }
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
    fn advance(&self, lease: &Lease, before: Option<&Position>, after: Position) -> bool {
        let mut positions = self.lock();
        let now = positions.get(&key(lease));
        let settled = match (now, before) {
            (Some(now), Some(before)) if now.epoch == lease.epoch => {
                let as_before = Arc::ptr_eq(&now.window, &before.window)
                    && (now.read, now.rewinds) == (before.read, before.rewinds);
                if !as_before {
                    return false;
                }
                // A batch of this window may have been settled while the next was being read.
                if Arc::ptr_eq(&now.window, &after.window) { now.settled } else { after.settled }
            }
            (Some(now), None) if now.epoch == lease.epoch => return false,
            (_, Some(_)) => return false,
            (_, None) => after.settled,
        };
        positions.insert(key(lease), Position { settled, ..after });
        true
    }

    /// Notes a settlement that was written.
    pub(super) fn settled(&self, lease: &Lease, position: Option<i64>, rewind: bool) {
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
        let called = lease.clone();
        loop {
            let Some(mut at) = self.client.position(lease) else {
                self.load(lease).await?;
                continue;
            };
            let open = at.read > at.settled;
            if !at.drained || open {
                let (called, window, place) = (called.clone(), at.window.clone(), (at.settled, at.read));
                let read = move |server: &super::Server| server.page(&called, &window, place, limit);
                let page = match self.call("page", Some(lease), read).await {
                    // What else was given out of that window must not be settled either: the lane
                    // is to be given back.
                    Err(error) if error.is_stale() => {
                        self.client.forget(lease);
                        return Err(error);
                    }
                    page => page?,
                };
                let (read, drained) = (page.end.unwrap_or(at.read), !page.batch.more);
                let after = Position { read, drained, wakeups: page.wakeups, ..at.clone() };
                if !self.client.advance(lease, Some(&at), after.clone()) {
                    continue;
                }
                at = after;
                // No window is opened over an unsettled one.
                if open || !page.batch.is_empty() {
                    return Ok(page.batch);
                }
            }
            let (called, to, settled) = (called.clone(), at.window.to, at.settled);
            let open = move |server: &super::Server| server.open(&called, to, settled, limit);
            match self.call("open", Some(lease), open).await {
                Ok((None, page)) => {
                    if self.client.advance(lease, Some(&at), Position { wakeups: page.wakeups, ..at.clone() }) {
                        return Ok(page.batch);
                    }
                }
                Ok((Some(window), page)) => {
                    let after = Position::of(lease, &page, window, 0);
                    if self.client.advance(lease, Some(&at), after) && !page.batch.is_empty() {
                        return Ok(page.batch);
                    }
                }
                // The call before this one was executed and its answer lost, or the store went
                // back. Calls of the destination may be in flight whose rows are of another past,
                // so the lane is given back instead of read on under the same epoch.
                Err(error) => {
                    if error.is_stale() {
                        self.client.forget(lease);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Begins where the server says.
    async fn load(&self, lease: &Lease) -> Result<()> {
        let called = lease.clone();
        let (window, settled, wakeups) =
            self.call("load", Some(lease), move |server: &super::Server| server.load(&called)).await?;
        let (epoch, read) = (lease.epoch, settled);
        let at = Position { epoch, window, settled, read, drained: false, rewinds: 0, wakeups };
        self.client.advance(lease, None, at);
        Ok(())
    }
}
