//! An operator's criteria as parameters of an SQL condition.

use jiff::Timestamp;
use postbox_core::{Criteria, Headers, Key, Tenant, TopicPattern};

/// The parameters of the condition.
pub(crate) struct Meant<'a> {
    pub(crate) topic: Option<String>,
    pub(crate) key: Option<&'a str>,
    pub(crate) since: Option<Timestamp>,
    pub(crate) until: Option<Timestamp>,
    pub(crate) tenant: Option<&'a str>,
}

impl<'a> Meant<'a> {
    pub(crate) fn by(which: &'a Criteria) -> Self {
        Self {
            topic: which.topic.as_ref().map(TopicPattern::to_like),
            key: which.key.as_ref().map(Key::as_str),
            since: which.since,
            until: which.until,
            tenant: which.tenant.as_ref().map(Tenant::as_str),
        }
    }
}

/// Headers that an event must have, as JSON; `None` means any.
pub(crate) fn headers_json(headers: &Headers) -> Option<String> {
    (!headers.is_empty()).then(|| serde_json::to_string(headers).expect("a map of strings is JSON"))
}
