//! An inbox that a test looks into and can break.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Error, ErrorKind, EventId, Inbound, LogName, Receive, Received, Result};
use uuid::Uuid;

/// An inbox that remembers everything and can be told to fail.
#[derive(Debug, Default)]
pub struct Inbox {
    /// By source and message id.
    pub stored: Mutex<BTreeMap<(String, String), Inbound>>,
    /// What calls come to.
    pub mode: Mutex<Mode>,
}

/// What calls of an [`Inbox`] come to.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Mode {
    /// Stored.
    #[default]
    Works,
    /// Refused as `Unavailable`.
    Down,
    /// Never answered.
    Hangs,
}

impl Inbox {
    /// From now on.
    pub fn set(&self, mode: Mode) {
        *self.mode.lock().expect("no panic while held") = mode;
    }

    /// Everything stored.
    pub fn all(&self) -> Vec<Inbound> {
        self.stored.lock().expect("no panic while held").values().cloned().collect()
    }
}

#[async_trait]
impl Receive for Inbox {
    async fn receive_many(&self, _log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        let mode = *self.mode.lock().expect("no panic while held");
        match mode {
            Mode::Works => {}
            Mode::Down => return Err(Error::new(ErrorKind::Unavailable, "receive", "database_down", "it is down")),
            Mode::Hangs => std::future::pending().await,
        }
        let mut stored = self.stored.lock().expect("no panic while held");
        let judge = |inbound: &Inbound| {
            let key = (inbound.source.to_string(), inbound.message_id.clone());
            match stored.get(&key) {
                Some(before) if before.digest == inbound.digest => Received::Duplicate,
                Some(_) => Received::Conflict,
                None => {
                    stored.insert(key, inbound.clone());
                    Received::Accepted(EventId::from_uuid(Uuid::from_u128(0x7000_8000 << 64 | stored.len() as u128)))
                }
            }
        };
        Ok(inbound.iter().map(judge).collect())
    }

    async fn forget(&self, _older_than: Duration) -> Result<u64> {
        Ok(0)
    }
}
