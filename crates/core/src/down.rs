//! A destination or a source that cannot be reached.

use crate::error::{Error, ErrorKind};
use crate::outcome::Outcome;

/// Nobody to talk to, or a refusal of everything. A sink says it as an outcome of each event, a
/// source as an error.
#[derive(Debug, Clone)]
pub struct Down {
    kind: ErrorKind,
    code: &'static str,
    text: String,
}

impl Down {
    /// `code` is a stable snake_case word, `text` one line with the cure.
    pub fn new(kind: ErrorKind, code: &'static str, text: impl Into<String>) -> Self {
        Self { kind, code, text: text.into() }
    }

    /// The stable snake_case code.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Of an event that was not sent.
    pub fn outcome(self) -> Outcome {
        Outcome::unavailable(self.code, self.text)
    }

    /// Of an event that was sent, or where others of its call fared better.
    pub fn ambiguous(self) -> Outcome {
        Outcome::ambiguous(self.code, self.text)
    }

    /// Of whoever connects, receives or settles. `operation` is a verb.
    pub fn error(self, operation: &'static str) -> Error {
        Error::new(self.kind, operation, self.code, self.text)
    }
}
