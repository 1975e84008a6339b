//! Selects events by fields that never change.

use jiff::Timestamp;

use crate::event::Event;
use crate::names::{Key, Tenant, TopicPattern};

/// Used by everything that lists or changes many events. A field that is `None` does not filter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Criteria {
    /// Only topics matching this pattern.
    pub topic: Option<TopicPattern>,
    /// Only events of this key.
    pub key: Option<Key>,
    /// Only events of this tenant.
    pub tenant: Option<Tenant>,
    /// Only events that were appended at this time or later, by the store's clock.
    pub since: Option<Timestamp>,
    /// Only events that were appended before this time.
    pub until: Option<Timestamp>,
}

impl Criteria {
    /// Returns whether an event with these fields matches.
    pub fn mean(&self, topic: &str, key: Option<&str>, tenant: Option<&str>, created_at: Timestamp) -> bool {
        self.topic.as_ref().is_none_or(|pattern| pattern.matches(topic))
            && self.key.as_ref().is_none_or(|wanted| key == Some(wanted.as_str()))
            && self.tenant.as_ref().is_none_or(|wanted| tenant == Some(wanted.as_str()))
            && self.since.is_none_or(|since| created_at >= since)
            && self.until.is_none_or(|until| created_at < until)
    }

    /// Returns whether an event matches. If any field filters, an event that is gone does not
    /// match.
    pub fn mean_event(&self, event: Option<&Event>) -> bool {
        match event {
            Some(event) => {
                let (key, tenant) = (event.key.as_ref().map(Key::as_str), event.tenant.as_ref().map(Tenant::as_str));
                self.mean(event.topic.as_str(), key, tenant, event.created_at)
            }
            None => *self == Self::default(),
        }
    }
}
