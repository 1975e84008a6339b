//! The delivery row after a disposition.

use std::borrow::Cow;
use std::time::Duration;

use jiff::Timestamp;

use crate::batch::{Disposition, Retrying};
use crate::limits::ERROR_BYTES_MAX;
use crate::state::State;

/// When a row is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// It waits for something other than time.
    Never,
    /// After a wait on the store's clock.
    After(Duration),
    /// At a time on the store's clock.
    At(Timestamp),
}

/// A delivery row after a disposition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowAfter<'a> {
    /// Its state.
    pub state: State,
    /// Counted attempts so far.
    pub attempts: u32,
    /// When it is due.
    pub due: Due,
    /// Whether it is dead and its key stays held until a person retries or discards it.
    pub halt: bool,
    /// The reason code; `None` keeps the existing one.
    pub code: Option<&'a str>,
    /// The error text, within its limit; `None` keeps the existing one.
    pub error: Option<Cow<'a, str>>,
    /// How long the attempt took, if there was one. [`note_attempt`](super::note_attempt) records
    /// it.
    pub took: Option<Duration>,
}

impl<'a> RowAfter<'a> {
    /// Returns the row of an event with `attempts` so far; `None` if the event is done and its row
    /// is deleted. `holds_key`: the event has a key, and failed events hold theirs.
    ///
    /// A blocked row that is the first of its key is due at once. Only the store knows that, after
    /// everything is written.
    pub fn of(disposition: &'a Disposition, attempts: u32, holds_key: bool) -> Option<Self> {
        let row = Self {
            state: State::Retrying,
            attempts,
            due: Due::Never,
            halt: false,
            code: None,
            error: None,
            took: None,
        };
        Some(match disposition {
            Disposition::Delivered | Disposition::Discarded => return None,
            Disposition::Retry { .. }
            | Disposition::InFlight { .. }
            | Disposition::Alone { .. }
            | Disposition::NotSent => {
                let Retrying { after, counted, code, error } = disposition.retrying()?;
                Self {
                    attempts: attempts.saturating_add(u32::from(counted)),
                    due: Due::After(after),
                    code: Some(code),
                    error: Some(error_text(error)),
                    took: disposition.took(),
                    ..row
                }
            }
            Disposition::Block if holds_key => Self { state: State::Blocked, ..row },
            // Without order there is nothing to wait behind.
            Disposition::Block => Self { due: Due::After(Duration::ZERO), ..row },
            Disposition::Schedule { at } => Self { state: State::Scheduled, due: Due::At(*at), ..row },
            Disposition::Expired { at } => Self {
                state: State::Dead,
                code: Some(Disposition::EXPIRED),
                error: Some(format!("its expires_at, {at}, passed before it was delivered").into()),
                ..row
            },
            Disposition::Dead { code, error, halt, took } => Self {
                state: State::Dead,
                attempts: attempts.saturating_add(1),
                took: *took,
                halt: *halt,
                code: Some(code),
                error: Some(error_text(error)),
                ..row
            },
        })
    }
}

/// Cuts an error text to its limit, at a character boundary. Replaces NUL, which some databases
/// refuse.
fn error_text(error: &str) -> Cow<'_, str> {
    let cut = |text: &str| text.floor_char_boundary(ERROR_BYTES_MAX);
    if error.contains('\0') {
        let mut replaced = error.replace('\0', "\u{fffd}");
        replaced.truncate(cut(&replaced));
        return Cow::Owned(replaced);
    }
    Cow::Borrowed(&error[..cut(error)])
}
