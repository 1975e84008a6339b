//! The inbox's write side: a message id is stored once.

use std::collections::HashMap;
use std::task::Waker;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use super::MemoryStore;
use crate::error::Result;
use crate::names::{LogName, SourceName};
use crate::receive::{Inbound, Receive, Received};

/// Ids forgotten per call: the bounded step the contract asks for.
const FORGET_IDS_MAX: usize = 1_000;
/// Conflict records kept; the oldest go first. An attacker who resends one id with many bodies must not fill the memory.
const CONFLICTS_MAX: usize = 1_000;

/// Which message: ids are unique per source and tenant.
type Identity = (SourceName, Option<String>, String);

#[derive(Default)]
pub(super) struct Inbox {
    seen: HashMap<Identity, (/* digest */ [u8; 32], /* when */ Timestamp)>,
    conflicts: Vec<MemoryConflict>,
}

/// The record of a message that came with a known id and another body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryConflict {
    /// Where it came from.
    pub source: SourceName,
    /// The id.
    pub message_id: String,
    /// The digest stored first.
    pub digest_stored: [u8; 32],
    /// The digest that came later and was kept out.
    pub digest_refused: [u8; 32],
    /// When it came.
    pub at: Timestamp,
}

impl MemoryStore {
    /// Messages that were kept out because their id was known with another body, oldest first.
    pub fn conflicts(&self) -> Vec<MemoryConflict> {
        self.lock().inbox.conflicts.clone()
    }
}

impl Inbox {
    fn note_conflict(&mut self, identity: Identity, stored: [u8; 32], refused: [u8; 32], at: Timestamp) {
        let (source, _, message_id) = identity;
        if self.conflicts.len() == CONFLICTS_MAX {
            self.conflicts.remove(0);
        }
        self.conflicts.push(MemoryConflict { source, message_id, digest_stored: stored, digest_refused: refused, at });
    }
}

#[async_trait]
impl Receive for MemoryStore {
    async fn receive(&self, log: &LogName, inbound: Inbound) -> Result<Received> {
        inbound.validate()?;
        let now = self.clock().now();
        let Inbound { source, message_id, digest, event } = inbound;
        let identity = (source, event.tenant.clone(), message_id);
        let mut state = self.state("receive")?;
        match state.inbox.seen.get(&identity).copied() {
            Some((stored, _)) if stored == digest => return Ok(Received::Duplicate),
            Some((stored, _)) => {
                state.inbox.note_conflict(identity, stored, digest, now);
                return Ok(Received::Conflict);
            }
            None => {}
        }
        let (id, seq) = state.insert(log, &[event], now)?[0];
        state.logs.get_mut(log).expect("just inserted into").commit(vec![seq]);
        state.inbox.seen.insert(identity, (digest, now));
        let wakers = state.stir();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        Ok(Received::Accepted(id))
    }

    async fn forget(&self, older_than: Duration) -> Result<u64> {
        let oldest_kept = self.clock().now().checked_sub(older_than).unwrap_or(Timestamp::MIN);
        let mut state = self.state("forget")?;
        let seen = &mut state.inbox.seen;
        let old = seen.iter().filter(|(_, (_, at))| *at <= oldest_kept).map(|(identity, _)| identity.clone());
        let old: Vec<Identity> = old.take(FORGET_IDS_MAX).collect();
        for identity in &old {
            seen.remove(identity);
        }
        Ok(old.len() as u64)
    }
}
