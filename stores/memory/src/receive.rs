//! The inbox's write side: a message id is stored once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::kit::STEP_ROWS_MAX;
use postbox_core::{Conflict, Error, ErrorKind, Inbound, LogName, NewEvent, Receive, Received, Result, SourceName};

use crate::state::State;
use crate::{MemoryStore, Server};

/// Maximum conflict records; the oldest go first. An attacker who sends one id with many bodies
/// must not fill the memory.
const CONFLICTS_MAX: usize = 1_000;

/// Identifies a message: ids are unique per source and tenant.
type Identity = (SourceName, Option<String>, String);

#[derive(Clone, Default)]
pub(crate) struct Inbox {
    seen: HashMap<Identity, (/* digest */ [u8; 32], /* when */ Timestamp)>,
    conflicts: Vec<Conflict>,
    /// Messages that were applied, or will be if the asking transaction commits.
    applied: HashMap<(SourceName, String), Applied>,
}

#[derive(Clone, Copy)]
struct Applied {
    at: Timestamp,
    is_committed: bool,
}

impl Inbox {
    /// Notes that a message is applied; `false` if it was already.
    pub(crate) fn once(&mut self, source: &SourceName, message_id: &str, now: Timestamp) -> Result<bool> {
        match self.applied.entry((source.clone(), message_id.to_owned())) {
            Entry::Vacant(entry) => {
                entry.insert(Applied { at: now, is_committed: false });
                Ok(true)
            }
            Entry::Occupied(entry) if entry.get().is_committed => Ok(false),
            Entry::Occupied(_) => {
                let message = "another open transaction applies this message; try again once it has ended";
                Err(Error::new(ErrorKind::Unavailable, "once", "store_contention", message))
            }
        }
    }

    /// The asking transaction has committed.
    pub(crate) fn commit_once(&mut self, source: SourceName, message_id: String) {
        if let Some(applied) = self.applied.get_mut(&(source, message_id)) {
            applied.is_committed = true;
        }
    }

    /// The asking transaction was rolled back.
    pub(crate) fn forget_once(&mut self, source: SourceName, message_id: String) {
        self.applied.remove(&(source, message_id));
    }

    /// Returns conflicts, the latest first.
    pub(crate) fn conflicts(&self, limit: usize) -> Vec<Conflict> {
        let mut latest = self.conflicts.clone();
        latest.sort_by_key(|conflict| std::cmp::Reverse(conflict.last_at));
        latest.truncate(limit);
        latest
    }

    fn note_conflict(&mut self, identity: Identity, stored: [u8; 32], refused: [u8; 32], at: Timestamp) {
        let (source, tenant, message_id) = identity;
        let known = self.conflicts.iter_mut().find(|known| {
            known.source == source
                && known.tenant == tenant
                && known.message_id == message_id
                && known.digest_refused == refused
        });
        if let Some(known) = known {
            known.times += 1;
            known.last_at = at;
            return;
        }
        if self.conflicts.len() == CONFLICTS_MAX {
            self.conflicts.remove(0);
        }
        self.conflicts.push(Conflict {
            source,
            tenant,
            message_id,
            digest_stored: stored.into(),
            digest_refused: refused.into(),
            times: 1,
            first_at: at,
            last_at: at,
        });
    }
}

/// The verdicts on a call's messages, before anything is stored.
#[derive(Default)]
struct Judged {
    /// `None`: to be accepted.
    verdicts: Vec<Option<Received>>,
    fresh: HashMap<Identity, [u8; 32]>,
    events: Vec<NewEvent>,
    conflicts: Vec<(Identity, /* stored */ [u8; 32], /* refused */ [u8; 32])>,
}

impl Judged {
    fn of(inbox: &Inbox, inbound: &[Inbound]) -> Self {
        let mut judged = Self::default();
        for Inbound { source, message_id, digest, event } in inbound {
            let identity = (source.clone(), event.tenant.clone(), message_id.clone());
            let known = inbox.seen.get(&identity).map(|(stored, _)| stored).or_else(|| judged.fresh.get(&identity));
            judged.verdicts.push(match known.copied() {
                Some(stored) if stored == *digest => Some(Received::Duplicate),
                Some(stored) => {
                    judged.conflicts.push((identity, stored, *digest));
                    Some(Received::Conflict)
                }
                None => {
                    judged.fresh.insert(identity, *digest);
                    judged.events.push(event.clone());
                    None
                }
            });
        }
        judged
    }
}

#[async_trait]
impl Receive for MemoryStore {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        if inbound.is_empty() {
            return Ok(Vec::new());
        }
        inbound.iter().try_for_each(Inbound::validate)?;
        let (log, inbound) = (log.clone(), inbound.to_vec());
        self.call("receive", None, move |server| server.receive(&log, &inbound)).await
    }

    async fn forget(&self, older_than: Duration) -> Result<u64> {
        self.call("forget", None, move |server| server.forget(older_than)).await
    }
}

impl Server {
    fn receive(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        let now = self.clock.now();
        let mut state = self.state("receive")?;
        let judged = Judged::of(&state.data.inbox, inbound);
        let rows = state.insert(log, &judged.events, now)?;
        let (ids, seqs): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
        if let Some(log) = state.data.logs.get_mut(log) {
            log.commit(seqs);
        }
        state.data.inbox.seen.extend(judged.fresh.into_iter().map(|(identity, digest)| (identity, (digest, now))));
        for (identity, stored, refused) in judged.conflicts {
            state.data.inbox.note_conflict(identity, stored, refused, now);
        }
        state.flush();
        if !ids.is_empty() {
            State::wake(state);
        }
        let mut ids = ids.into_iter();
        let verdicts = judged.verdicts.into_iter();
        Ok(verdicts
            .map(|known| known.or_else(|| ids.next().map(Received::Accepted)).expect("one id for each"))
            .collect())
    }

    fn forget(&self, older_than: Duration) -> Result<u64> {
        let oldest_kept = self.clock.now().checked_sub(older_than).unwrap_or(Timestamp::MIN);
        let mut state = self.state("forget")?;
        let seen = &mut state.data.inbox.seen;
        let old = seen.iter().filter(|(_, (_, at))| *at <= oldest_kept).map(|(identity, _)| identity.clone());
        let old: Vec<Identity> = old.take(STEP_ROWS_MAX).collect();
        for identity in &old {
            seen.remove(identity);
        }
        let inbox = &mut state.data.inbox;
        let before = inbox.applied.len() + inbox.conflicts.len();
        inbox.conflicts.retain(|conflict| conflict.last_at > oldest_kept);
        inbox.applied.retain(|_, applied| !applied.is_committed || applied.at > oldest_kept);
        Ok((old.len() + before - inbox.applied.len() - inbox.conflicts.len()) as u64)
    }
}
