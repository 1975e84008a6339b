//! One subscription at work in a program, and what keeps it at work.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postbox_core::{Clock, Error, ErrorKind, Result, SubscriptionName};
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::context::SUBSCRIPTION_REMOVED;
use crate::metrics::{FailingLane, Outage};
use crate::relay::Relay;
use crate::schedule::Schedule;
use crate::supervise::supervise;

/// A relay that is started again when it fails, and how it fares.
pub struct SupervisedRelay {
    relay: Relay,
    /// `None`: it runs all the time.
    schedule: Option<Box<dyn Schedule>>,
    /// Why it does not run right now.
    ended: Mutex<Option<Arc<Error>>>,
}

impl SupervisedRelay {
    /// A relay that runs all the time, or when the schedule says so.
    pub fn new(relay: Relay, schedule: Option<Box<dyn Schedule>>) -> Arc<Self> {
        Arc::new(Self { relay, schedule, ended: Mutex::new(None) })
    }

    /// The relay.
    pub fn relay(&self) -> &Relay {
        &self.relay
    }

    /// The name of its subscription.
    pub fn name(&self) -> &SubscriptionName {
        &self.relay.subscription().name
    }

    /// What keeps its events from flowing, if something does, with the code of the reason: it does
    /// not run, a lane fails, or the destination is down.
    pub fn fault(&self) -> Option<Error> {
        let fault = |code: String, what: String| Error::new(ErrorKind::Unavailable, "relay", code, what);
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(error) = ended {
            return Some(fault(error.code().to_owned(), error.to_string()));
        }
        if let Some(FailingLane { lane, since, code }) = self.relay.failing_lanes().into_iter().next() {
            let what = format!("lane {lane} cannot be read or settled since {since:.0}; last reason: {code}");
            return Some(fault(code, what));
        }
        // The destination, the way there or our own limits may be at fault: the code says which.
        let Outage { since, code } = self.relay.metrics().outage()?;
        let what = format!("the breaker is open since {since:.0}, nothing is sent; last reason: {code}");
        Some(fault(code, what))
    }

    fn set_ended(&self, ended: Option<Arc<Error>>) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = ended;
    }

    async fn run(self: Arc<Self>, stop: CancellationToken) -> Result<()> {
        match &self.schedule {
            Some(schedule) => self.relay.run_on(&**schedule, stop).await,
            None => self.relay.run(stop).await,
        }
    }

    /// Runs until `stop`; starts again after an error or a panic, but not where its subscription
    /// was removed or renamed. Dropping this ends the relay without settling.
    pub async fn supervise(self: Arc<Self>, clock: Arc<dyn Clock>, stop: CancellationToken) {
        let ended = |ended: Option<(Error, Option<Duration>)>| {
            match &ended {
                Some((error, Some(wait))) => {
                    error!(subscription = %self.name(), %error, restart_in = ?wait, "relay failed; restarting");
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
