//! The last attempts of an event, as its delivery row stores them.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::RowAfter;
use crate::inspect::Attempt;
use crate::limits::{ANSWER_CHARS_MAX, LAST_ATTEMPTS_MAX};

/// Adds the attempt that a row describes, if it describes one, recorded at `now`. Drops the oldest
/// ones.
pub fn note_attempt(attempts: &mut Vec<Attempt>, row: &RowAfter<'_>, now: Timestamp, next_at: Option<Timestamp>) {
    let Some(took) = row.took else { return };
    let answer = row.error.as_deref().unwrap_or_default().chars().take(ANSWER_CHARS_MAX).collect();
    attempts.push(Attempt { at: now, code: row.code.unwrap_or_default().to_owned(), took, answer, next_at });
    attempts.drain(..attempts.len().saturating_sub(LAST_ATTEMPTS_MAX));
}

/// Encodes attempts for a row.
pub fn attempts_to_json(attempts: &[Attempt]) -> String {
    let attempt = |it: &Attempt| {
        let took_us = u64::try_from(it.took.as_micros()).unwrap_or(u64::MAX);
        let (at, next_at) = (it.at.to_string(), it.next_at.map(|at| at.to_string()));
        json!({ "at": at, "code": it.code, "took_us": took_us, "answer": it.answer, "next_at": next_at })
    };
    Value::Array(attempts.iter().map(attempt).collect()).to_string()
}

/// Decodes the attempts of a row. Unreadable ones are left out, because they are only shown to
/// people.
pub fn attempts_from_json(json: &str) -> Vec<Attempt> {
    let Ok(Value::Array(all)) = serde_json::from_str(json) else { return Vec::new() };
    let attempt = |it: &Value| {
        let text = |name: &str| it.get(name).and_then(Value::as_str);
        Some(Attempt {
            at: text("at")?.parse().ok()?,
            code: text("code")?.to_owned(),
            took: Duration::from_micros(it.get("took_us")?.as_u64()?),
            answer: text("answer").unwrap_or_default().to_owned(),
            next_at: text("next_at").and_then(|at| at.parse().ok()),
        })
    };
    all.iter().filter_map(attempt).collect()
}
