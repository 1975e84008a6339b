//! A finding of the doctor: a stable code, a severity, what was found, and the cure.

use postbox_core::{Count, Error, LogName, SubscriptionName};
use serde::Serialize;

use crate::text::estimated;

/// The cure of a store that waited for too long, where another command reports it.
const DOCTOR_NAMES: &str = "postbox doctor names";
/// The same, where the doctor does.
const NAMED_HERE: &str = "if it waits for a lock, the session that holds it is a finding of its own; otherwise find out what keeps the database busy";

/// How serious a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Fine,
    /// Worth knowing.
    Note,
    /// A person has to act.
    Problem,
}

/// One thing that was found, and its cure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The kind of finding. Stable.
    pub code: String,
    /// The code that a destination or a store gave as the reason. Stable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How serious it is.
    pub severity: Severity,
    /// The subscription concerned; `None`: the store.
    pub subscription: Option<String>,
    /// What was found.
    pub message: String,
    /// The cure.
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
    pub fn note(code: &str, message: impl Into<String>) -> Self {
        Self::new(Severity::Note, code, message)
    }

    /// Something is wrong, with its cure.
    pub fn problem(code: &str, message: impl Into<String>, cure: impl Into<String>) -> Self {
        Self::new(Severity::Problem, code, message).cure(cure)
    }

    /// A log with events that no subscription reads.
    pub fn unread(log: &LogName, count: Count, cure: String) -> Self {
        let count = estimated(count.events, count.is_estimate);
        Self::problem("log_unread", format!("nobody reads the {log}: {count} event(s) wait there"), cure)
    }

    /// A finding from an error's text: the cure follows the first semicolon, unless that is the
    /// last reason of a fault.
    pub(super) fn failed(code: &str, text: &str) -> Self {
        let ends = text.match_indices("; ").map(|(at, _)| text.split_at(at));
        let mut ends = ends.map(|(message, rest)| (message, rest.trim_start_matches("; ")));
        match ends.find(|(_, rest)| !rest.starts_with("last reason: ")) {
            Some((message, cure)) => Self::problem(
                code,
                message,
                // Who reads it has just asked the doctor.
                match cure.split_once(DOCTOR_NAMES) {
                    Some((first, _)) => format!("{first}{NAMED_HERE}"),
                    None => cure.to_owned(),
                },
            ),
            None => Self::new(Severity::Problem, code, text),
        }
    }

    pub(in crate::status) fn cure(self, cure: impl Into<String>) -> Self {
        Self { cure: Some(cure.into()), ..self }
    }

    pub(super) fn reason(self, reason: &str) -> Self {
        Self { reason: Some(reason.to_owned()), ..self }
    }

    /// Assigns the finding to this subscription.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cure_is_what_a_person_can_do() {
        let of = |text: &str| {
            let found = Finding::failed("code", text);
            (found.message, found.cure)
        };
        let cured = |message: &str, cure: &str| (message.to_owned(), Some(cure.to_owned()));
        assert_eq!(of("it is gone; bring it back; then wait"), cured("it is gone", "bring it back; then wait"));
        let reason = "no lane can be taken; last reason: table_locked";
        assert_eq!(of(reason), (reason.to_owned(), None));
        assert_eq!(of(&format!("{reason}; wait")), cured(reason, "wait"));
        assert_eq!(of("it waits; postbox doctor names the locks it may wait for"), cured("it waits", NAMED_HERE));
    }
}
