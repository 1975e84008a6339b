//! Going back: what a crash of a database takes with it, and what a failover does. For simulations
//! and tests.

use std::fmt;
use std::time::Duration;

use super::MemoryStore;
use super::state::{Data, Lane, State};
use crate::batch::Delivery;
use crate::event::{Event, Seq};
use crate::log::Epoch;
use crate::names::SubscriptionName;
use crate::state::State as EventState;

/// Everything a store held at one moment.
#[derive(Clone)]
pub struct Snapshot(Box<Data>);

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").finish_non_exhaustive()
    }
}

/// Where one lane stands in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// The fencing number of its last grant.
    pub epoch: Epoch,
    /// The window: commits after `from`, up to `to`.
    pub from: u64,
    /// The last commit of the window.
    pub to: u64,
    /// Every event of the window up to here is dealt with.
    pub settled: i64,
    /// When its lease ends, by the store's clock.
    pub lease_until: Option<Duration>,
}

/// Where one event stands.
#[derive(Debug, Clone, Copy)]
pub struct Standing<'a> {
    /// The event.
    pub event: &'a Event,
    /// Its place in the log.
    pub seq: Seq,
    /// Its lane.
    pub lane: u16,
    /// Where it stands.
    pub state: EventState,
    /// As [`Delivery::attempt`], less one.
    pub attempts: u32,
    /// As [`Delivery::replay`].
    pub replays: u32,
}

impl Standing<'_> {
    /// Whether a delivery is of the row as it stands.
    pub fn is_of(&self, delivery: &Delivery) -> bool {
        (self.seq, self.attempts + 1, self.replays) == (delivery.seq, delivery.attempt, delivery.replay)
    }
}

impl MemoryStore {
    /// From now on the server knows what a crash would take back: see [`Self::crash`].
    pub fn forget_unflushed(&self) {
        let mut state = self.server.lock();
        state.durable = Some(Box::new(state.data.clone()));
    }

    /// Everything so far is on disk. Windows and settlements with rows flush by themselves, a mere
    /// position and an append do not: a database with that setting gives up just that.
    pub fn flush(&self) {
        self.server.lock().flush();
    }

    /// The server crashes and starts again: what was not flushed is gone, transactions that were
    /// open are rolled back.
    pub fn crash(&self) {
        let durable = self.server.lock().durable.clone();
        if let Some(data) = durable {
            self.restore(&Snapshot(data));
        }
    }

    /// What the store holds now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot(Box::new(self.server.lock().data.clone()))
    }

    /// Another server takes over, with what it had: `seq`, epochs and windows since then are given
    /// out again. Open transactions are gone.
    pub fn restore(&self, snapshot: &Snapshot) {
        let mut state = self.server.lock();
        state.data = (*snapshot.0).clone();
        state.incarnation += 1;
        State::flush_and_wake(state);
    }

    /// Where each lane stands, as a checker sees it.
    pub fn cursors(&self, subscription: &SubscriptionName) -> Vec<Cursor> {
        let state = self.server.lock();
        let lanes = state.data.readers.get(subscription).map(|reader| &reader.lanes[..]).unwrap_or_default();
        let cursor = |it: &Lane| {
            let Lane { epoch, from, to, settled, lease_until, .. } = *it;
            Cursor { epoch, from, to, settled, lease_until }
        };
        lanes.iter().map(cursor).collect()
    }

    /// Shows where each committed event stands, in `seq` order.
    pub fn each_standing(&self, subscription: &SubscriptionName, mut see: impl FnMut(Standing<'_>)) {
        let state = self.server.lock();
        let Some(reader) = state.data.readers.get(subscription) else { return };
        let Some(log) = state.data.logs.get(&reader.subscription.log) else { return };
        for (seq, commit, event) in log.committed() {
            let row = reader.delivery(seq);
            see(Standing {
                event,
                seq: Seq(seq),
                lane: reader.lane_of(event),
                state: reader.state_of(log, seq, commit, event),
                attempts: row.map_or(0, |row| row.attempts),
                replays: row.map_or(0, |row| row.replays),
            });
        }
    }
}
