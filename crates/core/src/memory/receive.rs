//! The inbox's write side: a message id is stored once.

use std::collections::HashMap;
use std::task::Waker;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

use super::MemoryStore;
use crate::error::Result;
use crate::names::{LogName, SourceName};
use crate::receive::{Conflict, Inbound, Receive, Received};

/// Ids forgotten per call: the bounded step the contract asks for.
const FORGET_IDS_MAX: usize = 1_000;
/// Conflict records kept; the oldest go first. An attacker who resends one id with many bodies must not fill the memory.
const CONFLICTS_MAX: usize = 1_000;

/// Which message: ids are unique per source and tenant.
type Identity = (SourceName, Option<String>, String);

#[derive(Default)]
pub(super) struct Inbox {
    seen: HashMap<Identity, (/* digest */ [u8; 32], /* when */ Timestamp)>,
    conflicts: Vec<Conflict>,
}

impl Inbox {
    /// The latest first.
    pub(super) fn conflicts(&self, limit: usize) -> Vec<Conflict> {
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
        state.inbox.conflicts.retain(|conflict| conflict.last_at > oldest_kept);
        Ok(old.len() as u64)
    }
}
