//! Rejected messages: `list --state conflict --json`.

use postbox_core::{Conflict, SourceName, hex};
use serde::Serialize;

/// A message id that arrived again with another body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ConflictJson<'a> {
    /// The source.
    pub source: &'a SourceName,
    /// The tenant.
    pub tenant: Option<&'a str>,
    /// The sender's id.
    pub message_id: &'a str,
    /// How often it arrived with another body.
    pub times: u64,
    /// When that first happened.
    pub first_at: String,
    /// When that last happened.
    pub last_at: String,
    /// SHA-256 of the stored body, in hexadecimal digits.
    pub digest_stored: String,
    /// SHA-256 of the body that was rejected last.
    pub digest_refused: String,
}

impl<'a> From<&'a Conflict> for ConflictJson<'a> {
    fn from(conflict: &'a Conflict) -> Self {
        Self {
            source: &conflict.source,
            tenant: conflict.tenant.as_deref(),
            message_id: &conflict.message_id,
            times: conflict.times,
            first_at: conflict.first_at.to_string(),
            last_at: conflict.last_at.to_string(),
            digest_stored: hex(&conflict.digest_stored),
            digest_refused: hex(&conflict.digest_refused),
        }
    }
}
