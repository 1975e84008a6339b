//! The last outcome of a part that works beside the relays: retention, the search for unrouted
//! events.

use std::sync::Mutex;

use jiff::Timestamp;
use postbox_core::{Result, lock};

/// Since when a part fails at every try, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailingPart {
    /// When the first of these tries failed.
    pub since: Timestamp,
    /// Number of these tries.
    pub tries: u64,
    /// The code of the last failure.
    pub code: String,
    /// Its text. The cure follows the first semicolon.
    pub what: String,
}

/// Since when a part fails; nothing if its last try succeeded.
#[derive(Debug, Default)]
pub(crate) struct LastOutcome(Mutex<Option<FailingPart>>);

impl LastOutcome {
    pub(crate) fn note<T>(&self, tried: &Result<T>, now: Timestamp) {
        let mut failing = lock(&self.0);
        let Err(error) = tried else {
            *failing = None;
            return;
        };
        let (since, tries) = failing.as_ref().map_or((now, 0), |it| (it.since, it.tries));
        let (code, what) = (error.code().to_owned(), error.message().to_owned());
        *failing = Some(FailingPart { since, tries: tries + 1, code, what });
    }

    pub(crate) fn failing(&self) -> Option<FailingPart> {
        lock(&self.0).clone()
    }
}
