//! Subscriptions: `subscription list` and `show`.

use postbox_core::{
    Filter, Headers, LogName, Ordering, OwnerId, SubscriptionInfo, SubscriptionName, Tenant, TopicPattern,
};
use serde::Serialize;

use super::stats::StatsJson;

/// A subscription as it stands in the store.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SubscriptionJson {
    /// Its name.
    pub subscription: SubscriptionName,
    /// The log it reads.
    pub log: LogName,
    /// The topics it wants; none: all.
    pub topics: Vec<TopicPattern>,
    /// The tenant whose events it wants; `None`: everybody's.
    pub tenant: Option<Tenant>,
    /// The kinds it wants; none: all.
    pub kinds: Vec<String>,
    /// The aggregates it wants; none: all.
    pub aggregates: Vec<String>,
    /// The headers that its events have.
    pub headers: Headers,
    /// In which order events go out.
    pub ordering: Ordering,
    /// Its lanes.
    pub lanes: Vec<LaneJson>,
    /// Why it does not run, if it is paused.
    pub paused: Option<PauseJson>,
    /// Its counts, if they were there in time.
    pub counts: Option<StatsJson>,
}

/// A lane.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaneJson {
    /// Which one.
    pub lane: u16,
    /// How often it was granted.
    pub epoch: i64,
    /// Who holds it.
    pub relay: Option<OwnerId>,
    /// How long the lease still runs.
    pub lease_seconds: Option<f64>,
}

/// A pause.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PauseJson {
    /// Until when; `None`: until a person resumes.
    pub until: Option<String>,
    /// Who.
    pub by: String,
    /// Why.
    pub why: String,
}

impl SubscriptionJson {
    /// Which events it wants.
    pub fn filter(&self) -> Filter {
        let Self { topics, tenant, kinds, aggregates, headers, .. } = self.clone();
        Filter { topics, tenant, kinds, aggregates, headers }
    }

    /// With its counts.
    pub fn new(info: &SubscriptionInfo, counts: Option<StatsJson>) -> Self {
        let lanes = info.lanes.iter().map(|lane| LaneJson {
            lane: lane.lane,
            epoch: lane.epoch,
            relay: lane.lease_left.and(lane.owner.clone()),
            lease_seconds: lane.lease_left.map(|left| left.as_secs_f64()),
        });
        let paused = info.paused.clone().map(|pause| PauseJson {
            until: pause.until.map(|at| at.to_string()),
            by: pause.by,
            why: pause.why,
        });
        Self {
            subscription: info.name.clone(),
            log: info.log.clone(),
            topics: info.filter.topics.clone(),
            tenant: info.filter.tenant.clone(),
            kinds: info.filter.kinds.clone(),
            aggregates: info.filter.aggregates.clone(),
            headers: info.filter.headers.clone(),
            ordering: info.ordering,
            lanes: lanes.collect(),
            paused,
            counts,
        }
    }

    /// How many relays drive it.
    pub fn relays(&self) -> usize {
        let mut relays: Vec<_> = self.lanes.iter().filter_map(|lane| lane.relay.as_ref()).collect();
        relays.sort();
        relays.dedup();
        relays.len()
    }
}
