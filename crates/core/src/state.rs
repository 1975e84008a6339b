//! The one state enum and its one transition table. Drawn in `docs/state-machine.md`, mirrored by
//! CHECK constraints in SQL.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The state of one event in one subscription.
///
/// `Pending`, `Dispatched`, `Skipped` and `Unrouted` are derived from the cursor and the filters.
/// Only the other five have a delivery row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// In the log, not yet read by the subscription.
    Pending,
    /// Failed; will be tried again at `due_at`.
    Retrying,
    /// Behind an earlier unfinished event of its key.
    Blocked,
    /// Waits for its `deliver_at`.
    Scheduled,
    /// Out of attempts or refused for good. Waits for a person.
    Dead,
    /// A person decided that it must not be delivered.
    Discarded,
    /// It was delivered.
    Dispatched,
    /// Never meant to go out: before the subscription's start, or outside the filter of that time.
    Skipped,
    /// Skipped by every subscription of its log. It is kept, and goes to the first subscription
    /// that begins to want it.
    Unrouted,
}

impl State {
    /// Every state, in the order operators read them.
    pub const ALL: [Self; 9] = [
        Self::Pending,
        Self::Retrying,
        Self::Blocked,
        Self::Scheduled,
        Self::Dead,
        Self::Discarded,
        Self::Dispatched,
        Self::Skipped,
        Self::Unrouted,
    ];

    /// The transition table: returns whether an event in `self` may become `next`.
    ///
    /// Terminal states are left only by an explicit replay (to `Retrying`), `Unrouted` also when a
    /// filter begins to want the event.
    pub fn may_become(self, next: Self) -> bool {
        use State::*;
        match self {
            Pending => next != Pending,
            Retrying => matches!(next, Dispatched | Retrying | Blocked | Dead | Discarded),
            Blocked => matches!(next, Dispatched | Retrying | Dead | Discarded),
            Scheduled => matches!(next, Dispatched | Retrying | Blocked | Dead | Discarded),
            Dead => matches!(next, Retrying | Discarded),
            Dispatched => matches!(next, Retrying | Scheduled),
            // It may be in flight by the previous filter: its lane takes the new filter once that
            // is settled.
            Skipped => !matches!(next, Skipped | Discarded),
            Unrouted => matches!(next, Skipped | Pending | Retrying | Scheduled),
            Discarded => false,
        }
    }

    /// Returns whether an event in this state has a delivery row.
    pub fn has_row(self) -> bool {
        !matches!(self, Self::Pending | Self::Dispatched | Self::Skipped | Self::Unrouted)
    }

    /// Returns whether the summary counts it as pending.
    pub fn counts_as_pending(self) -> bool {
        matches!(self, Self::Pending | Self::Retrying | Self::Blocked | Self::Scheduled)
    }

    /// Returns the lower-case word, as stored and printed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Retrying => "retrying",
            Self::Blocked => "blocked",
            Self::Scheduled => "scheduled",
            Self::Dead => "dead",
            Self::Discarded => "discarded",
            Self::Dispatched => "dispatched",
            Self::Skipped => "skipped",
            Self::Unrouted => "unrouted",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for State {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == text).ok_or_else(|| {
            Error::invalid(
                "parse",
                "state_unknown",
                format!("{text:?} is not a known state; one of {}", Self::ALL.map(Self::as_str).join(", ")),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_states_are_left_only_by_replay_or_discard() {
        let after = |state: State| State::ALL.into_iter().filter(|next| state.may_become(*next)).collect::<Vec<_>>();
        assert_eq!(after(State::Dispatched), [State::Retrying, State::Scheduled]);
        assert_eq!(after(State::Discarded), []);
        assert_eq!(after(State::Dead), [State::Retrying, State::Discarded]);
    }

    #[test]
    fn words_round_trip() {
        for state in State::ALL {
            assert_eq!(state.as_str().parse::<State>().expect("a state"), state);
        }
    }
}
