//! One subscription at work in this service, and the task that keeps it at work.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postbox_core::{Clock, Error, Result, SubscriptionName};
use postbox_engine::{FailingLane, Metrics, Outage, Relay, SUBSCRIPTION_REMOVED};
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::cron::Cron;
use crate::fault::Fault;
use crate::supervise::supervise;

/// All relays of a service.
pub(crate) type Relays = Arc<[Arc<SupervisedRelay>]>;

/// A relay and how it fares.
pub(crate) struct SupervisedRelay {
    pub(crate) name: SubscriptionName,
    pub(crate) relay: Relay,
    pub(crate) schedule: Option<Cron>,
    /// Why it does not run right now.
    ended: Mutex<Option<Arc<Error>>>,
}

impl SupervisedRelay {
    pub(crate) fn new(relay: Relay, schedule: Option<Cron>) -> Arc<Self> {
        let name = relay.subscription().name.clone();
        Arc::new(Self { name, relay, schedule, ended: Mutex::new(None) })
    }

    pub(crate) fn metrics(&self) -> Arc<Metrics> {
        self.relay.metrics()
    }

    /// Why it is not ready, if it is not. Where the store is down, that is why its lanes fail, and
    /// said elsewhere.
    pub(crate) fn fault(&self, store_is_up: bool) -> Option<Fault> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (code, what) = if let Some(error) = ended {
            (error.code().to_owned(), error.to_string())
        } else if store_is_up
            && let Some(FailingLane { lane, since, code }) = self.relay.failing_lanes().into_iter().next()
        {
            let what = format!("lane {lane} cannot be read or settled since {since:.0}; last reason: {code}");
            (code, what)
        } else {
            // The destination, the way there or our own limits may be at fault: the code says
            // which.
            let Outage { since, code } = self.metrics().outage()?;
            let what = format!("the breaker is open since {since:.0}, nothing is sent; last reason: {code}");
            (code, what)
        };
        Some(Fault { subscription: Some(self.name.clone()), source: None, code, what })
    }

    fn set_ended(&self, ended: Option<Arc<Error>>) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = ended;
    }

    async fn run(self: Arc<Self>, stop: CancellationToken) -> Result<()> {
        match &self.schedule {
            Some(schedule) => self.relay.run_on(schedule, stop).await,
            None => self.relay.run(stop).await,
        }
    }

    /// Runs until `stop`; starts again after an error or a panic. Dropping this ends the relay
    /// without settling.
    pub(crate) async fn supervise(self: Arc<Self>, clock: Arc<dyn Clock>, stop: CancellationToken) {
        let ended = |ended: Option<(Error, Option<Duration>)>| {
            match &ended {
                Some((error, Some(wait))) => {
                    error!(subscription = %self.name, %error, restart_in = ?wait, "relay failed; restarting");
                }
                Some((error, None)) => error!(subscription = %self.name, %error, "relay ended"),
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
