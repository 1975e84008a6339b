//! Going back to an earlier state: what a database loses in a crash or a failover. For simulations
//! and tests.

use std::fmt;
use std::time::Duration;

use postbox_core::{Delivery, Epoch, Event, Seq, State as EventState, SubscriptionName};

use crate::MemoryStore;
use crate::state::{Data, Lane, State};

/// Everything a store held at one moment.
#[derive(Clone)]
pub struct Snapshot(Box<Data>);

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").finish_non_exhaustive()
    }
}

/// The cursor of one lane in the store.
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

/// The state of one event in a subscription.
#[derive(Debug, Clone, Copy)]
pub struct Standing<'a> {
    /// The event.
    pub event: &'a Event,
    /// Its position in the log.
    pub seq: Seq,
    /// Its lane.
    pub lane: u16,
    /// Its state.
    pub state: EventState,
    /// [`Delivery::attempt`] minus one.
    pub attempts: u32,
    /// [`Delivery::replay`].
    pub replays: u32,
}

impl Standing<'_> {
    /// Returns whether a delivery belongs to the row in its present state.
    pub fn is_of(&self, delivery: &Delivery) -> bool {
        (self.seq, self.attempts + 1, self.replays) == (delivery.seq, delivery.attempt, delivery.replay)
    }
}

impl MemoryStore {
    /// From now on, the server tracks what a crash would take back: see [`Self::crash`].
    pub fn forget_unflushed(&self) {
        let mut state = self.server.lock();
        state.durable = Some(Box::new(state.data.clone()));
    }

    /// Marks everything so far as on disk. Windows and settlements with rows flush by themselves; a
    /// mere position and an append do not. A database with asynchronous commits gives up just that.
    pub fn flush(&self) {
        self.server.lock().flush();
    }

    /// Crashes and restarts the server. Everything that was not flushed is gone, and open
    /// transactions are rolled back.
    pub fn crash(&self) {
        let durable = self.server.lock().durable.clone();
        if let Some(data) = durable {
            self.restore(&Snapshot(data));
        }
    }

    /// Returns what the store holds now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot(Box::new(self.server.lock().data.clone()))
    }

    /// Another server takes over with this snapshot: `seq` and windows used since then are given
    /// out again, but no epoch is. Open transactions are gone.
    pub fn restore(&self, snapshot: &Snapshot) {
        let mut state = self.server.lock();
        state.data = (*snapshot.0).clone();
        state.incarnation += 1;
        State::flush_and_wake(state);
    }

    /// Returns the cursor of each lane, for a checker.
    pub fn cursors(&self, subscription: &SubscriptionName) -> Vec<Cursor> {
        let state = self.server.lock();
        let lanes = state.data.readers.get(subscription).map(|reader| &reader.lanes[..]).unwrap_or_default();
        let cursor = |it: &Lane| {
            let Lane { epoch, from, to, settled, lease_until, .. } = *it;
            Cursor { epoch, from, to, settled, lease_until }
        };
        lanes.iter().map(cursor).collect()
    }

    /// Shows the state of each committed event, in `seq` order.
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
