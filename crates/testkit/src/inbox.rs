//! An inbox that a test can inspect and break.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Error, ErrorKind, EventId, Inbound, LogName, Receive, Received, Result};
use tokio::sync::watch;
use uuid::Uuid;

/// An inbox that remembers everything and can be made to fail.
#[derive(Debug, Default)]
pub struct Inbox {
    mode: watch::Sender<Mode>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By source and message id.
    digests: BTreeMap<(String, String), [u8; 32]>,
    stored: Vec<Inbound>,
    refused: Vec<String>,
    counts: Counts,
}

/// How an [`Inbox`] answers calls.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Mode {
    /// Messages are stored.
    #[default]
    Works,
    /// Calls are refused as `Unavailable`.
    Down,
    /// Calls are not answered until the mode changes.
    Hangs,
}

/// The counts of an [`Inbox`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls.
    pub calls: usize,
    /// Messages in calls that have not been answered yet.
    pub in_flight: usize,
    /// The most messages there were in calls at one time.
    pub in_flight_peak: usize,
    /// Messages that were known already.
    pub duplicates: usize,
    /// Messages with a known id and another digest.
    pub conflicts: usize,
}

impl Inbox {
    /// Sets how calls are answered from now on.
    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Refuses messages of this id as `Invalid`, as a database may refuse certain characters.
    pub fn refuse(&self, message_id: &str) {
        self.state().refused.push(message_id.to_owned());
    }

    /// Returns everything stored, in order.
    pub fn all(&self) -> Vec<Inbound> {
        self.state().stored.clone()
    }

    /// Returns the counts.
    pub fn counts(&self) -> Counts {
        self.state().counts
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }
}

impl State {
    fn receive(&mut self, inbound: &Inbound) -> Received {
        let key = (inbound.source.to_string(), inbound.message_id.clone());
        match self.digests.get(&key) {
            Some(digest) if *digest == inbound.digest => {
                self.counts.duplicates += 1;
                Received::Duplicate
            }
            Some(_) => {
                self.counts.conflicts += 1;
                Received::Conflict
            }
            None => {
                self.digests.insert(key, inbound.digest);
                self.stored.push(inbound.clone());
                Received::Accepted(EventId::from_uuid(Uuid::from_u128(0x7000_8000 << 64 | self.stored.len() as u128)))
            }
        }
    }
}

/// Subtracts a call's messages at its end, even if the call is dropped.
struct InFlight<'a>(&'a Inbox, usize);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.state().counts.in_flight -= self.1;
    }
}

#[async_trait]
impl Receive for Inbox {
    async fn receive_many(&self, _log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        let _in_flight = {
            let mut state = self.state();
            state.counts.calls += 1;
            state.counts.in_flight += inbound.len();
            state.counts.in_flight_peak = state.counts.in_flight_peak.max(state.counts.in_flight);
            InFlight(self, inbound.len())
        };
        let answers = |mode: &Mode| *mode != Mode::Hangs;
        let mode = *self.mode.subscribe().wait_for(answers).await.expect("we hold the sender");
        if mode == Mode::Down {
            return Err(Error::new(ErrorKind::Unavailable, "receive", "database_down", "it is down"));
        }
        inbound.iter().try_for_each(Inbound::validate)?;
        let mut state = self.state();
        if inbound.iter().any(|message| state.refused.contains(&message.message_id)) {
            return Err(Error::invalid("receive", "text_invalid", "the database dislikes it"));
        }
        Ok(inbound.iter().map(|message| state.receive(message)).collect())
    }

    async fn forget(&self, _older_than: Duration) -> Result<u64> {
        Ok(0)
    }
}
