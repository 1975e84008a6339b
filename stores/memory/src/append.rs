//! Appending, either in one step or in a transaction that commits later.

use std::collections::{BTreeMap, HashSet};
use std::sync::MutexGuard;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::kit::{check_message_id, in_context};
use postbox_core::{
    Append, Appended, Error, ErrorKind, EventId, Key, LogName, NewEvent, Result, SourceName, Tenant, Transaction,
};

use crate::state::{LogState, State};
use crate::{MemoryStore, Server};

#[async_trait]
impl Append for MemoryStore {
    async fn append(&self, log: &LogName, events: &[NewEvent]) -> Result<Appended> {
        let (log, events) = (log.clone(), in_context(events).into_owned());
        let append = move |server: &Server| {
            let now = server.clock.now();
            let mut state = server.state("append")?;
            let (appended, seqs) = state.append(&log, &events, now, |_| false)?;
            if let Some(log) = state.data.logs.get_mut(&log).filter(|_| !seqs.is_empty()) {
                log.commit(seqs);
            }
            State::wake(state);
            Ok(appended)
        };
        self.call("append", None, append).await
    }
}

/// An open transaction. Dropping it rolls it back.
///
/// ```
/// # use postbox_core::{LogName, NewEvent};
/// # use postbox_memory::MemoryStore;
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
    written: Vec<Written>,
    /// The incarnation of the store's state when it began; see [`MemoryStore::restore`].
    incarnation: u64,
}

/// What a transaction has written. Until the commit only the transaction itself sees it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Written {
    Event(LogName, i64),
    Once(SourceName, String),
}

impl MemoryTransaction {
    pub(crate) fn new(store: MemoryStore) -> Self {
        let incarnation = store.server.lock().incarnation;
        Self { store, written: Vec::new(), incarnation }
    }

    /// Appends without making events visible: the twin of [`Append::append`]. An id that another
    /// open transaction has appended is `Unavailable`, where a database would wait.
    pub fn append(&mut self, log: &LogName, events: &[NewEvent]) -> Result<Appended> {
        let now = self.store.server.clock.now();
        let is_own = |seq| self.written.contains(&Written::Event(log.clone(), seq));
        let (appended, seqs) = self.state("append")?.append(log, &in_context(events), now, is_own)?;
        self.written.extend(seqs.into_iter().map(|seq| Written::Event(log.clone(), seq)));
        Ok(appended)
    }

    /// Returns whether a message is applied for the first time, like `once_in` of the databases. An
    /// id that another open transaction has asked for is `Unavailable`, where a database would
    /// wait.
    pub fn once(&mut self, source: &SourceName, message_id: &str) -> Result<bool> {
        check_message_id("once", message_id)?;
        let now = self.store.server.clock.now();
        let is_first = self.state("once")?.data.inbox.once(source, message_id, now)?;
        if is_first {
            self.written.push(Written::Once(source.clone(), message_id.to_owned()));
        }
        Ok(is_first)
    }

    /// Returns the state, if this transaction is still open in it.
    fn state(&self, operation: &'static str) -> Result<MutexGuard<'_, State>> {
        let state = self.store.server.state(operation)?;
        if state.incarnation == self.incarnation {
            return Ok(state);
        }
        let message = "the store went back to an earlier state, which rolled this transaction back; begin again";
        Err(Error::new(ErrorKind::Unavailable, operation, "transaction_gone", message))
    }

    /// Returns a mark to roll back to.
    pub fn savepoint(&self) -> usize {
        self.written.len()
    }

    /// Rolls back everything appended after the mark.
    pub fn rollback_to(&mut self, savepoint: usize) {
        let mut state = self.store.server.lock();
        let written = self.written.drain(savepoint.min(self.written.len())..);
        if state.incarnation != self.incarnation {
            return;
        }
        for written in written {
            match written {
                // The schema may have been removed meanwhile.
                Written::Event(log, seq) => _ = state.data.logs.get_mut(&log).map(|log| log.remove(seq)),
                Written::Once(source, message_id) => state.data.inbox.forget_once(source, message_id),
            }
        }
    }

    /// Makes everything visible at once and wakes local relays. Does nothing if the store went back
    /// to an earlier state meanwhile.
    pub fn commit(mut self) {
        let store = self.store.clone();
        let mut state = store.server.lock();
        self.commit_in(&mut state);
        State::wake(state);
    }

    /// Rolls everything back.
    pub fn rollback(self) {}

    /// Commits under a lock that the caller holds.
    pub(crate) fn commit_in(&mut self, state: &mut State) {
        let mut written = std::mem::take(&mut self.written);
        if state.incarnation != self.incarnation {
            return;
        }
        written.sort();
        let mut events: BTreeMap<LogName, Vec<i64>> = BTreeMap::new();
        for written in written {
            match written {
                Written::Event(log, seq) => events.entry(log).or_default().push(seq),
                Written::Once(source, message_id) => state.data.inbox.commit_once(source, message_id),
            }
        }
        for (log, seqs) in events {
            // The schema may have been removed meanwhile.
            if let Some(log) = state.data.logs.get_mut(&log) {
                log.commit(seqs);
            }
        }
    }
}

impl Drop for MemoryTransaction {
    fn drop(&mut self) {
        self.rollback_to(0);
    }
}

impl State {
    /// Writes invisible rows for events that are not known yet. Also returns their positions.
    fn append(
        &mut self,
        log: &LogName,
        events: &[NewEvent],
        now: Timestamp,
        is_own: impl Fn(i64) -> bool,
    ) -> Result<(Appended, Vec<i64>)> {
        NewEvent::validate_all(events)?;
        self.data.log("append", log)?;
        let (mut ids, mut seqs) = (Vec::with_capacity(events.len()), Vec::new());
        for event in events {
            let id = event.id.unwrap_or_else(|| self.next_id(now));
            let of_log = self.data.logs.get_mut(log).expect("looked up above");
            match is_known(of_log, id, event, |seq| seqs.contains(&seq) || is_own(seq)) {
                Ok(true) => {}
                Ok(false) => seqs.push(of_log.insert(event.clone(), id, now)),
                Err(error) => {
                    seqs.into_iter().for_each(|seq| of_log.remove(seq));
                    return Err(error);
                }
            }
            ids.push(id);
        }
        let known = ids.len() - seqs.len();
        Ok((Appended::new(ids, known), seqs))
    }

    /// Validates all events, then writes invisible rows.
    pub(crate) fn insert(&mut self, log: &LogName, events: &[NewEvent], now: Timestamp) -> Result<Vec<(EventId, i64)>> {
        NewEvent::validate_all(events)?;
        refuse_taken_ids(self.data.log("append", log)?, events)?;
        let mut rows = Vec::with_capacity(events.len());
        for event in events {
            let id = event.id.unwrap_or_else(|| self.next_id(now));
            let of_log = self.data.logs.get_mut(log).expect("looked up above");
            rows.push((id, of_log.insert(event.clone(), id, now)));
        }
        Ok(rows)
    }
}

/// Returns whether the log has this very event. Another event under its id is a conflict.
fn is_known(log: &LogState, id: EventId, event: &NewEvent, is_own: impl Fn(i64) -> bool) -> Result<bool> {
    let Some((seq, row)) = log.ids.get(&id).and_then(|seq| Some((*seq, log.rows.get(seq)?))) else { return Ok(false) };
    if row.commit.is_none() && !is_own(seq) {
        let message = format!("another open transaction appends event {id}; try again once it has ended");
        return Err(Error::new(ErrorKind::Unavailable, "append", "store_contention", message));
    }
    let there = &row.event;
    let is_same = there.topic.as_str() == event.topic
        && there.key.as_ref().map(Key::as_str) == event.key.as_deref()
        && there.tenant.as_ref().map(Tenant::as_str) == event.tenant.as_deref()
        && there.payload == event.payload;
    if is_same { Ok(true) } else { Err(event_id_taken(id)) }
}

/// Refuses ids that are in the log already or twice in the call. Ids of an open transaction count,
/// where a database would wait for it.
fn refuse_taken_ids(log: &LogState, events: &[NewEvent]) -> Result<()> {
    let mut seen = HashSet::new();
    for id in events.iter().filter_map(|event| event.id) {
        if log.ids.contains_key(&id) || !seen.insert(id) {
            return Err(event_id_taken(id));
        }
    }
    Ok(())
}

fn event_id_taken(id: EventId) -> Error {
    let message =
        format!("the log has another event under the id {id}; nothing was appended: give each an id of its own");
    Error::new(ErrorKind::Conflict, "append", "event_id_taken", message)
}

impl<'a> Transaction<'a, MemoryStore, MemoryStore> for MemoryTransaction {
    type Appended = Result<Appended>;

    fn append(&'a mut self, _: &'a MemoryStore, log: &'a LogName, events: Result<Vec<NewEvent>>) -> Self::Appended {
        MemoryTransaction::append(self, log, &events?)
    }
}
