//! How many deliveries a bounded run may still try.
//!
//! A read takes from it, because what is read goes out. What then has to wait is given back: taken out, or for a later time, at once; behind its key,
//! only for rows that are due. So a slow target does not make the run read, and put aside, the whole log behind a key, and when the key is free the
//! next of it goes out within the limit. Only when nothing more comes of that, others are read in its place.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What of a limit is left, over all lanes of a run.
pub(crate) struct Budget(Option<Limited>);

struct Limited {
    pots: Mutex<Pots>,
    /// One lane after the other: another one cannot know what this one gives back.
    turn: tokio::sync::Mutex<()>,
}

struct Pots {
    /// For whatever comes.
    left: usize,
    /// For due rows: as many as had to wait behind their key.
    blocked: usize,
}

/// What a read may bring, and from where it was taken.
#[derive(Clone, Copy)]
pub(super) struct Grant {
    pub(super) events: usize,
    of_blocked: usize,
}

/// What of a batch did not go out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Unsent {
    /// Waits behind its key, or for a call of its own that is in flight.
    pub(super) blocked: usize,
    /// Taken out, for a later time, or read again.
    pub(super) other: usize,
}

impl Budget {
    pub(crate) fn new(limit: Option<usize>) -> Self {
        let limited =
            |left| Limited { pots: Mutex::new(Pots { left, blocked: 0 }), turn: tokio::sync::Mutex::default() };
        Self(limit.map(limited))
    }

    /// Waits until the lanes before are done, where there is a limit to share.
    pub(super) async fn turn(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        match &self.0 {
            Some(limited) => Some(limited.turn.lock().await),
            None => None,
        }
    }

    /// For a read of the stream; `None`: nothing is left.
    pub(super) fn take(&self, wanted: usize) -> Option<Grant> {
        self.grant(wanted, false)
    }

    /// For a read of due rows; `None`: nothing is left.
    pub(super) fn take_for_due(&self, wanted: usize) -> Option<Grant> {
        self.grant(wanted, true)
    }

    fn grant(&self, wanted: usize, for_due: bool) -> Option<Grant> {
        let Some(mut pots) = self.pots() else { return Some(Grant { events: wanted, of_blocked: 0 }) };
        let of_blocked = if for_due { pots.blocked.min(wanted) } else { 0 };
        let of_left = pots.left.min(wanted - of_blocked);
        pots.blocked -= of_blocked;
        pots.left -= of_left;
        let events = of_left + of_blocked;
        (events > 0).then_some(Grant { events, of_blocked })
    }

    /// The read brought only so many.
    pub(super) fn give_back(&self, grant: Grant, used: usize) {
        let unused = grant.events.saturating_sub(used);
        let to_left = unused.min(grant.events - grant.of_blocked);
        if let Some(mut pots) = self.pots() {
            pots.left += to_left;
            pots.blocked += unused - to_left;
        }
    }

    /// These were read and did not go out.
    pub(super) fn give_back_unsent(&self, unsent: Unsent) {
        if let Some(mut pots) = self.pots() {
            pots.left += unsent.other;
            pots.blocked += unsent.blocked;
        }
    }

    /// Gives what waits behind its key to others; whether there was any.
    pub(super) fn replace_blocked(&self) -> bool {
        self.pots().is_some_and(|mut pots| {
            let blocked = std::mem::take(&mut pots.blocked);
            pots.left += blocked;
            blocked > 0
        })
    }

    fn pots(&self) -> Option<MutexGuard<'_, Pots>> {
        self.0.as_ref().map(|limited| limited.pots.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_behind_its_key_is_for_due_rows_first() {
        let budget = Budget::new(Some(3));
        let grant = budget.take(5).expect("three are left");
        assert_eq!(grant.events, 3);
        assert!(budget.take(1).is_none());
        budget.give_back_unsent(Unsent { blocked: 1, other: 1 });
        let due = budget.take_for_due(5).expect("two are left");
        budget.give_back(due, 0);
        assert_eq!(budget.take(5).map(|grant| grant.events), Some(1), "not the one of the blocked");
        assert!(budget.take(1).is_none());
        assert!(budget.replace_blocked() && !budget.replace_blocked());
        assert_eq!(budget.take(5).map(|grant| grant.events), Some(1));
    }

    #[test]
    fn without_a_limit_there_is_always_enough() {
        let budget = Budget::new(None);
        budget.give_back_unsent(Unsent { blocked: 7, other: 7 });
        assert_eq!(budget.take(500).map(|grant| grant.events), Some(500));
        assert!(!budget.replace_blocked());
    }
}
