//! What the doctor says: a code to go by, how bad it is, what it is, and what to do.

use postbox_core::{Count, Error, LogName, SubscriptionName};
use serde::Serialize;

use crate::text::estimated;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Fine,
    /// Worth knowing.
    Note,
    /// Somebody has to do something.
    Problem,
}

/// One thing that was found, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable: what kind of thing it is.
    pub code: String,
    /// Stable: why, where a destination or a store said so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How bad it is.
    pub severity: Severity,
    /// Whose it is; `None`: the store's.
    pub subscription: Option<String>,
    /// What was found.
    pub message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
}

impl Finding {
    fn new(severity: Severity, code: &str, message: impl Into<String>) -> Self {
        let (code, message) = (code.to_owned(), message.into());
        Self { code, reason: None, severity, subscription: None, message, cure: None }
    }

    /// As it should be.
    pub(super) fn fine(code: &str, message: impl Into<String>) -> Self {
        Self::new(Severity::Fine, code, message)
    }

    /// Worth knowing.
    pub(in crate::status) fn note(code: &str, message: impl Into<String>) -> Self {
        Self::new(Severity::Note, code, message)
    }

    /// Something is wrong, and this would help.
    pub fn problem(code: &str, message: impl Into<String>, cure: impl Into<String>) -> Self {
        Self::new(Severity::Problem, code, message).cure(cure)
    }

    /// Nobody reads this log, though it has events.
    pub fn unread(log: &LogName, count: Count, cure: String) -> Self {
        let count = estimated(count.events, count.is_estimate);
        Self::problem("log_unread", format!("nobody reads the {log}: {count} event(s) wait there"), cure)
    }

    /// Something that an error says, whose text has its cure after the first semicolon.
    pub(super) fn failed(code: &str, text: &str) -> Self {
        match text.split_once("; ") {
            Some((message, cure)) => Self::problem(code, message, cure),
            None => Self::new(Severity::Problem, code, text),
        }
    }

    pub(in crate::status) fn cure(self, cure: impl Into<String>) -> Self {
        Self { cure: Some(cure.into()), ..self }
    }

    pub(super) fn reason(self, reason: &str) -> Self {
        Self { reason: Some(reason.to_owned()), ..self }
    }

    /// It is this subscription's.
    #[must_use]
    pub fn of(self, subscription: &SubscriptionName) -> Self {
        Self { subscription: Some(subscription.to_string()), ..self }
    }
}

impl From<Error> for Finding {
    fn from(error: Error) -> Self {
        Self::failed(error.code(), error.message())
    }
}
