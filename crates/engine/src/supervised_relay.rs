//! A relay that is kept running in a program.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postbox_core::{Clock, Error, Outage, Result, SubscriptionName, lock};
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::context::SUBSCRIPTION_REMOVED;
use crate::metrics::FailingLane;
use crate::relay::Relay;
use crate::schedule::Schedule;
use crate::supervise::supervise;

/// A relay that is restarted when it fails, and its state.
pub struct SupervisedRelay {
    relay: Relay,
    /// `None`: it runs all the time.
    schedule: Option<Box<dyn Schedule>>,
    /// Why it does not run right now.
    ended: Mutex<Option<Arc<Error>>>,
}

/// Why the events of a relay do not flow. Its text says since when and why.
#[derive(Debug, Clone)]
pub enum RelayFault {
    /// The relay does not run right now.
    Ended(Arc<Error>),
    /// A lane cannot be read or settled.
    Lane(FailingLane),
    /// No lane can be taken or kept, for longer than a lease lasts.
    Lease(Outage),
    /// The breaker is open. The cause may be the destination, the way there or our own limits; the
    /// code says which.
    Destination(Outage),
}

impl RelayFault {
    /// Returns the stable code of the reason.
    pub fn code(&self) -> &str {
        match self {
            Self::Ended(error) => error.code(),
            Self::Lane(lane) => &lane.code,
            Self::Lease(outage) | Self::Destination(outage) => &outage.code,
        }
    }
}

impl fmt::Display for RelayFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(error) => error.fmt(f),
            Self::Lane(FailingLane { lane, since, code }) => {
                write!(f, "lane {lane} has failed to read or settle since {since:.0}; last reason: {code}")
            }
            Self::Lease(Outage { since, code }) => {
                write!(f, "no lane can be taken or kept since {since:.0}; last reason: {code}")
            }
            Self::Destination(Outage { since, code }) => {
                write!(f, "the breaker has been open since {since:.0}, nothing is sent; last reason: {code}")
            }
        }
    }
}

impl SupervisedRelay {
    /// Creates a relay that runs all the time, or on a schedule.
    pub fn new(relay: Relay, schedule: Option<Box<dyn Schedule>>) -> Arc<Self> {
        Arc::new(Self { relay, schedule, ended: Mutex::new(None) })
    }

    /// Returns the relay.
    pub fn relay(&self) -> &Relay {
        &self.relay
    }

    /// Returns the name of its subscription.
    pub fn name(&self) -> &SubscriptionName {
        &self.relay.subscription().name
    }

    /// Returns whether events wait although all is well: for the schedule, or for a destination. A
    /// scheduled run that cannot go on is not well.
    pub fn waits_by_configuration(&self) -> bool {
        !self.relay.has_destination() || self.schedule.is_some() && self.fault(true).is_none()
    }

    /// Returns why its events do not flow, if they do not. Failing lanes and leases are left out if
    /// the store is down: that is the reason, and the caller knows it already.
    pub fn fault(&self, store_is_up: bool) -> Option<RelayFault> {
        let ended = lock(&self.ended).clone();
        let lane = || store_is_up.then(|| self.relay.failing_lanes().into_iter().next()).flatten();
        let lease = || store_is_up.then(|| self.relay.lease_outage()).flatten();
        ended
            .map(RelayFault::Ended)
            .or_else(|| lane().map(RelayFault::Lane))
            .or_else(|| lease().map(RelayFault::Lease))
            .or_else(|| self.relay.metrics().outage().map(RelayFault::Destination))
    }

    fn set_ended(&self, ended: Option<Arc<Error>>) {
        *lock(&self.ended) = ended;
    }

    async fn run(self: Arc<Self>, stop: CancellationToken) -> Result<()> {
        match &self.schedule {
            Some(schedule) => self.relay.run_on(&**schedule, stop).await,
            None => self.relay.run(stop).await,
        }
    }

    /// Runs until `stop`. Restarts after an error or a panic, except if the subscription was
    /// removed or renamed. Dropping this ends the relay without settling.
    pub async fn supervise(self: Arc<Self>, clock: Arc<dyn Clock>, stop: CancellationToken) {
        let ended = |ended: Option<(Error, Option<Duration>)>| {
            match &ended {
                Some((error, Some(wait))) => {
                    error!(subscription = %self.name(), %error, restart_in = ?wait, "relay failed");
                }
                Some((error, None)) => error!(subscription = %self.name(), %error, "relay ended"),
                None => {}
            }
            self.set_ended(ended.map(|(error, _)| Arc::new(error)));
        };
        supervise(
            "relay",
            || Arc::clone(&self).run(stop.clone()),
            ended,
            &[SUBSCRIPTION_REMOVED],
            clock.as_ref(),
            &stop,
        )
        .await;
    }
}
