//! The find contract: events by the start of their id.

use std::fmt;
use std::str::FromStr;

use async_trait::async_trait;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::event::EventId;
use crate::names::LogName;

/// Minimum hexadecimal digits of a prefix. Shorter ones are probably typing errors.
const DIGITS_MIN: usize = 8;
/// Hexadecimal digits of an id.
const DIGITS: usize = 32;

/// The start of an event's id, or all of it. Dashes may be left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdPrefix {
    text: String,
    first: EventId,
    last: EventId,
}

impl IdPrefix {
    /// Returns the id if the prefix is a whole id.
    pub fn whole(&self) -> Option<EventId> {
        (self.first == self.last).then_some(self.first)
    }

    /// Returns the first and the last id with this prefix.
    pub fn range(&self) -> (EventId, EventId) {
        (self.first, self.last)
    }
}

impl From<EventId> for IdPrefix {
    fn from(id: EventId) -> Self {
        Self { text: id.to_string(), first: id, last: id }
    }
}

impl fmt::Display for IdPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for IdPrefix {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Ok(id) = text.parse::<EventId>() {
            return Ok(id.into());
        }
        let digits: String = text.chars().filter(|digit| *digit != '-').collect();
        let filled = |with: &str| Uuid::parse_str(&format!("{digits}{}", with.repeat(DIGITS - digits.len())));
        let range = match (DIGITS_MIN..DIGITS).contains(&digits.len()) {
            true => filled("0").ok().zip(filled("f").ok()),
            false => None,
        };
        let (first, last) = range.ok_or_else(|| {
            let message =
                format!("{text:?} is not a valid event id: a UUID, or its first {DIGITS_MIN} digits at least");
            Error::invalid("parse", "event_id_invalid", message)
        })?;
        let text = text.to_ascii_lowercase();
        Ok(Self { text, first: EventId::from_uuid(first), last: EventId::from_uuid(last) })
    }
}

/// Finds events by the start of their id, for people who type it.
///
/// Behaviour:
/// - `ids` returns committed events only, the smallest ids first. It costs the same at any size of
///   the log.
/// - An unknown log: `NotFound`, code `log_unknown`.
#[async_trait]
pub trait Find: Send + Sync + 'static {
    /// Returns the ids in a log with this prefix, at most `limit`.
    async fn ids(&self, log: &LogName, prefix: &IdPrefix, limit: usize) -> Result<Vec<EventId>>;
}

const _: Option<&dyn Find> = None;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_has_eight_digits_at_least() {
        let range = |text: &str| text.parse::<IdPrefix>().map(|prefix| prefix.range());
        let (first, last) = range("01890000-AB").expect("a beginning");
        assert_eq!(first.to_string(), "01890000-ab00-0000-0000-000000000000");
        assert_eq!(last.to_string(), "01890000-abff-ffff-ffff-ffffffffffff");
        let whole: IdPrefix = "01890000-0000-7000-8000-000000000001".parse().expect("an id");
        assert_eq!(whole.whole().map(|id| id.to_string()), Some(whole.to_string()));
        for bad in ["", "0189000", "0189-000", "0189000g", "01890000-0000-7000-8000-0000000000012", "żżżżżżżżżżżż"]
        {
            assert_eq!(range(bad).expect_err(bad).code(), "event_id_invalid", "{bad}");
        }
    }
}
