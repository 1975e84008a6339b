//! A destination or a source that cannot be reached.

use jiff::Timestamp;

use crate::error::{Error, ErrorKind};
use crate::outcome::Outcome;

/// The peer cannot be reached or refuses everything. A sink reports it as an outcome of each event,
/// a source as an error.
#[derive(Debug, Clone)]
pub struct Down {
    kind: ErrorKind,
    code: &'static str,
    text: String,
}

impl Down {
    /// Creates one. `code` is a stable snake_case word, `text` one line with the cure.
    pub fn new(kind: ErrorKind, code: &'static str, text: impl Into<String>) -> Self {
        Self { kind, code, text: text.into() }
    }

    /// Returns the stable snake_case code.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Returns the outcome of an event that was not sent.
    pub fn outcome(self) -> Outcome {
        Outcome::unavailable(self.code, self.text)
    }

    /// Returns the outcome of an event that was sent, or whose call had other events that
    /// succeeded.
    pub fn ambiguous(self) -> Outcome {
        Outcome::ambiguous(self.code, self.text)
    }

    /// Returns the error for connecting, receiving or settling. `operation` is a verb.
    pub fn error(self, operation: &'static str) -> Error {
        Error::new(self.kind, operation, self.code, self.text)
    }
}

/// A destination that is down, or a source or a store that fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outage {
    /// When the breaker opened, or when the first call failed.
    pub since: Timestamp,
    /// The reason at the last try, e.g. `connect_refused`.
    pub code: String,
}
