//! Appending: in one step, or in a transaction whose commit comes later.

use std::collections::HashSet;
use std::task::Waker;

use async_trait::async_trait;
use jiff::Timestamp;

use super::MemoryStore;
use super::state::{LogState, State};
use crate::append::Append;
use crate::error::{Error, ErrorKind, Result};
use crate::event::{EventId, NewEvent};
use crate::names::LogName;

#[async_trait]
impl Append for MemoryStore {
    async fn append(&self, log: &LogName, events: &[NewEvent]) -> Result<Vec<EventId>> {
        let mut transaction = self.begin();
        let ids = transaction.append(log, events)?;
        transaction.commit();
        Ok(ids)
    }
}

/// An open transaction. Dropping it rolls it back.
///
/// ```
/// # use postbox_core::{LogName, MemoryStore, NewEvent};
/// # fn example(store: &MemoryStore) -> postbox_core::Result<()> {
/// let mut early = store.begin();
/// early.append(&LogName::outbox(), &[NewEvent::json("order.placed", "{}")])?; // takes the lower seq …
/// let mut late = store.begin();
/// late.append(&LogName::outbox(), &[NewEvent::json("order.paid", "{}")])?;
/// late.commit();
/// early.commit(); // … and becomes visible later
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a transaction that is not committed is rolled back"]
pub struct MemoryTransaction {
    store: MemoryStore,
    written: Vec<(LogName, i64)>,
}

impl MemoryTransaction {
    pub(super) fn new(store: MemoryStore) -> Self {
        Self { store, written: Vec::new() }
    }

    /// Appends without making visible: the twin of [`Append::append`].
    pub fn append(&mut self, log: &LogName, events: &[NewEvent]) -> Result<Vec<EventId>> {
        let now = self.store.clock().now();
        let rows = self.store.state("append")?.insert(log, events, now)?;
        self.written.extend(rows.iter().map(|(_, seq)| (log.clone(), *seq)));
        Ok(rows.into_iter().map(|(id, _)| id).collect())
    }

    /// A mark to roll back to.
    pub fn savepoint(&self) -> usize {
        self.written.len()
    }

    /// Takes back what was appended after the mark.
    pub fn rollback_to(&mut self, savepoint: usize) {
        let mut state = self.store.lock();
        for (log, seq) in self.written.drain(savepoint.min(self.written.len())..) {
            // The schema may have been taken down meanwhile.
            if let Some(log) = state.logs.get_mut(&log) {
                log.remove(seq);
            }
        }
    }

    /// Makes everything visible at once and wakes local relays.
    pub fn commit(mut self) {
        let store = self.store.clone();
        let mut state = store.lock();
        let wakers = self.commit_in(&mut state);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Takes everything back.
    pub fn rollback(self) {}

    /// Commits under a lock the caller holds, and gives the relays to wake once it is released.
    #[must_use]
    pub(super) fn commit_in(&mut self, state: &mut State) -> Vec<Waker> {
        let mut written = std::mem::take(&mut self.written);
        written.sort();
        for of_log in written.chunk_by(|(one, _), (other, _)| one == other) {
            // The schema may have been taken down meanwhile.
            if let Some(log) = state.logs.get_mut(&of_log[0].0) {
                log.commit(of_log.iter().map(|(_, seq)| *seq).collect());
            }
        }
        state.stir()
    }
}

impl Drop for MemoryTransaction {
    fn drop(&mut self) {
        self.rollback_to(0);
    }
}

impl State {
    /// Validates all events, then writes rows that nobody sees yet.
    pub(super) fn insert(&mut self, log: &LogName, events: &[NewEvent], now: Timestamp) -> Result<Vec<(EventId, i64)>> {
        events.iter().try_for_each(NewEvent::validate)?;
        refuse_taken_ids(self.log("append", log)?, events)?;
        let mut rows = Vec::with_capacity(events.len());
        for event in events {
            let id = event.id.unwrap_or_else(|| self.next_id(now));
            let of_log = self.logs.get_mut(log).expect("looked up above");
            rows.push((id, of_log.insert(event.clone(), id, now)));
        }
        Ok(rows)
    }
}

/// Refuses ids that are in the log already or twice in the call. An open transaction's ids count: a database would wait for it.
fn refuse_taken_ids(log: &LogState, events: &[NewEvent]) -> Result<()> {
    let mut seen = HashSet::new();
    for id in events.iter().filter_map(|event| event.id) {
        if log.ids.contains_key(&id) || !seen.insert(id) {
            let message = format!("event {id} is in the log already; nothing was appended");
            return Err(Error::new(ErrorKind::Conflict, "append", "event_id_taken", message));
        }
    }
    Ok(())
}
