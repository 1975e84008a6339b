//! A subscription: a named reader of one log.

use crate::error::Result;
use crate::kit::check_lanes;
use crate::names::{LogName, SubscriptionName, Tenant, TopicPattern};

/// In which order events reach the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ordering {
    /// Events of one key in commit order, one unacknowledged at a time; different keys
    /// concurrently.
    #[default]
    Key,
    /// Everything at once.
    None,
}

/// Where a new subscription begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartAt {
    /// With the oldest event still in the log.
    #[default]
    Beginning,
    /// With events committed after the subscription was made.
    Now,
}

/// Which events of the log a subscription wants. Events it does not want are passed over, never
/// counted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Filter {
    /// Any of these; empty means all topics.
    pub topics: Vec<TopicPattern>,
    /// Only this tenant's events.
    pub tenant: Option<Tenant>,
}

impl Filter {
    /// Whether an event with this topic and tenant is wanted.
    pub fn matches(&self, topic: &str, tenant: Option<&str>) -> bool {
        let topic_wanted = self.topics.is_empty() || self.topics.iter().any(|pattern| pattern.matches(topic));
        let tenant_wanted = self.tenant.as_ref().is_none_or(|wanted| tenant == Some(wanted.as_str()));
        topic_wanted && tenant_wanted
    }
}

/// A named reader of one log. Replicas that name the same subscription share its work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subscription {
    /// Its name, unique in the store.
    pub name: SubscriptionName,
    /// The log it reads.
    pub log: LogName,
    /// Which events it wants.
    pub filter: Filter,
    /// In which order they go out.
    pub ordering: Ordering,
    /// How many replicas can work at once; 1 is a single active relay with hot standbys. Of a new
    /// subscription: then [`Admin::set_lanes`](crate::Admin::set_lanes) changes it.
    pub lanes: u16,
    /// Where it begins when it is new.
    pub start: StartAt,
}

impl Subscription {
    /// A subscription to everything in `log`, in key order, from the beginning, with two lanes: a
    /// second replica takes half of the work, and one that drives both is as fast as with one lane
    /// (`cargo xtask bench replicas`, `drain`).
    pub fn new(name: SubscriptionName, log: LogName) -> Self {
        Self {
            name,
            log,
            filter: Filter::default(),
            ordering: Ordering::default(),
            lanes: 2,
            start: StartAt::default(),
        }
    }

    /// Checks the number of lanes.
    pub fn validate(&self) -> Result<()> {
        check_lanes("subscribe", &self.name, self.lanes)
    }
}
