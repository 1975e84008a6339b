//! Subscriptions: `subscription list` and `show`.

use postbox_core::{Filter, LogName, Ordering, OwnerId, SubscriptionInfo, SubscriptionName};
use serde::Serialize;

use super::stats::StatsJson;

/// A subscription as it stands in the store.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SubscriptionJson {
    /// Its name.
    pub subscription: SubscriptionName,
    /// The log it reads.
    pub log: LogName,
    /// The events it wants.
    #[serde(flatten)]
    pub filter: Filter,
    /// The order in which events are delivered.
    pub ordering: Ordering,
    /// Its lanes.
    pub lanes: Vec<LaneJson>,
    /// Its pause, if a person or a destination paused it.
    pub paused: Option<PauseJson>,
    /// Its counts, if they were available in time.
    pub counts: Option<StatsJson>,
}

/// A lane.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaneJson {
    /// Its number.
    pub lane: u16,
    /// Number of the latest lease.
    pub epoch: i64,
    /// The relay that holds it.
    pub relay: Option<OwnerId>,
    /// Remaining time of the lease.
    pub lease_seconds: Option<f64>,
}

/// A pause.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PauseJson {
    /// When it ends; `None`: when a person resumes.
    pub until: Option<String>,
    /// Who paused it.
    pub by: String,
    /// The reason.
    pub why: String,
}

impl SubscriptionJson {
    /// Builds it, with its counts if known.
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
            filter: info.filter.clone(),
            ordering: info.ordering,
            lanes: lanes.collect(),
            paused,
            counts,
        }
    }

    /// Returns the number of relays that drive its lanes.
    pub fn relays(&self) -> usize {
        let mut relays: Vec<_> = self.lanes.iter().filter_map(|lane| lane.relay.as_ref()).collect();
        relays.sort();
        relays.dedup();
        relays.len()
    }
}
