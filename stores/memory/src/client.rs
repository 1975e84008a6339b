//! What a client remembers about a lane between calls: its window, how far it has read and how far
//! it is settled.
//!
//! The server knows the window and the settled position. Only the client knows how far it has read.
//! So reading writes nothing, and after a crash everything unsettled is read again. The memory
//! belongs to one epoch: another lease starts from the server's state.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use postbox_core::{Batch, BatchLimit, Epoch, Lease, Result, Seq, Settlement, SubscriptionName, lock};

use crate::{MemoryStore, Server};

/// The positions one client remembers, by lane.
#[derive(Default)]
pub(crate) struct Client {
    positions: Mutex<HashMap<(SubscriptionName, u16), Position>>,
}

/// The position of a lane.
#[derive(Clone)]
pub(crate) struct Position {
    epoch: Epoch,
    /// The last commit of the window. Unique among the windows of a lane.
    pub(crate) window: u64,
    /// The revision of the filter by which the unsettled events were read.
    pub(crate) revision: usize,
    /// Everything of the window up to here is dealt with.
    pub(crate) settled: i64,
    /// Everything of the window up to here was returned; never below `settled`.
    pub(crate) read: i64,
    /// Nothing of the window is left beyond `read`.
    drained: bool,
    /// The window was opened under this lease.
    opened: bool,
    /// Rises with every rewind, so that a read which was under way does not undo it.
    rewinds: u64,
    /// Value of [`crate::state::State::wakeups`] at the last read.
    pub(crate) wakeups: u64,
}

impl Client {
    fn lock(&self) -> MutexGuard<'_, HashMap<(SubscriptionName, u16), Position>> {
        lock(&self.positions)
    }

    /// Returns the position under a lease, if known.
    pub(crate) fn position(&self, lease: &Lease) -> Option<Position> {
        self.lock().get(&key(lease)).filter(|at| at.epoch == lease.epoch).cloned()
    }

    /// Moves on from `before` (`None`: nothing was known) to `after`, unless something else
    /// happened meanwhile. Returns whether it did.
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

    /// Returns the window, if the settlement says that everything of it is delivered and nothing is
    /// left.
    pub(crate) fn window_ended_by(&self, lease: &Lease, settlement: &Settlement<'_>) -> Option<u64> {
        let at = self.position(lease)?;
        let ends = at.drained && at.settled < at.read && settlement.position == Some(Seq(at.read));
        (ends && settlement.entries.is_empty() && !settlement.rewind).then_some(at.window)
    }

    /// Notes that a look found nothing after the window.
    pub(crate) fn note_look(&self, lease: &Lease, wakeups: u64) {
        if let Some(now) = self.lock().get_mut(&key(lease)).filter(|now| now.epoch == lease.epoch) {
            now.wakeups = wakeups;
        }
    }

    /// Notes the result of a settlement.
    pub(crate) fn note_settled(&self, lease: &Lease, position: Option<i64>, rewind: bool, settled: &Result<()>) {
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

    /// Starts a granted lane. Anything known belongs to an earlier lease.
    pub(crate) fn begin(&self, lease: &Lease) {
        self.lock().remove(&key(lease));
    }

    /// Makes the next read start from the server. Affects only this lease: another one may have the
    /// lane by now.
    pub(crate) fn forget(&self, lease: &Lease) {
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
    /// Returns the next events of the lane's window. Once the window is dealt with, opens the next
    /// one.
    pub(crate) async fn read_on(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        loop {
            let Some(at) = self.client.position(lease) else {
                self.load(lease).await?;
                continue;
            };
            // No window is opened while this one is unsettled.
            let unsettled = at.read > at.settled;
            let opens = at.drained && !unsettled;
            let (called, known) = (lease.clone(), (at.window, at.settled, at.revision));
            let after = (!opens).then_some(at.read);
            let read = move |server: &Server| server.window(&called, known, after, limit);
            let mut page = match self.call(if opens { "open" } else { "page" }, Some(lease), read).await {
                // An earlier call was executed and its answer lost, or the store went back to an
                // earlier state. Other events that were returned must not be settled either, and
                // calls to the destination may be in flight whose rows belong to that other past.
                // So the lane must be released.
                Err(error) if error.is_stale() => {
                    self.client.forget(lease);
                    return Err(error);
                }
                page => page?,
            };
            let entered = page.window != at.window;
            let (read, settled) = if entered { (0, 0) } else { (at.read, at.settled) };
            let opened = at.opened || entered;
            page.batch.caught_up = opened && !page.batch.more;
            let after = Position {
                window: page.window,
                revision: page.revision,
                settled,
                read: page.end.unwrap_or(read),
                drained: !page.batch.more,
                opened,
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

    /// Starts where the server says.
    async fn load(&self, lease: &Lease) -> Result<()> {
        let called = lease.clone();
        let (window, settled, revision, wakeups) =
            self.call("load", Some(lease), move |server: &Server| server.load(&called)).await?;
        let (epoch, read) = (lease.epoch, settled);
        let (drained, opened, rewinds) = (false, false, 0);
        let at = Position { epoch, window, revision, settled, read, drained, opened, rewinds, wakeups };
        self.client.advance(lease, None, at);
        Ok(())
    }
}
