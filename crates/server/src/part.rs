//! One subscription at work in this service, and the task that keeps it at work.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postbox_core::{Clock, Result, SubscriptionName};
use postbox_engine::{FailingLane, Metrics, Relay};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::error;

use crate::cron::Cron;

/// First and longest wait before a relay that ended by itself is started again. The cap keeps the log readable and the
/// relay within half a minute of a schema that a person has put right.
const RESTART_MIN: Duration = Duration::from_millis(500);
const RESTART_MAX: Duration = Duration::from_secs(30);
/// A relay that has worked for so long is not in a crash loop.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);

/// A relay and how it fares.
pub(crate) struct Part {
    pub(crate) name: SubscriptionName,
    pub(crate) relay: Relay,
    pub(crate) schedule: Option<Cron>,
    /// Why it does not run right now.
    fault: Mutex<Option<String>>,
}

impl Part {
    pub(crate) fn new(relay: Relay, schedule: Option<Cron>) -> Arc<Self> {
        let name = relay.subscription().name.clone();
        Arc::new(Self { name, relay, schedule, fault: Mutex::new(None) })
    }

    pub(crate) fn metrics(&self) -> Arc<Metrics> {
        self.relay.metrics()
    }

    /// Why it is not ready, if it is not.
    pub(crate) fn fault(&self) -> Option<String> {
        if let Some(fault) = self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            return Some(fault);
        }
        if let Some(failing) = self.relay.failing_lanes().first() {
            let FailingLane { lane, since, code } = failing;
            return Some(format!("lane {lane} cannot be read or settled since {since:.0}; last reason: {code}"));
        }
        // What is wrong may be the destination, the way there or what we allow ourselves: the code says which.
        let outage = self.metrics().outage()?;
        Some(format!("the breaker is open since {:.0}, nothing is sent; last reason: {}", outage.since, outage.code))
    }

    fn set_fault(&self, fault: Option<String>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    async fn run(self: Arc<Self>, stop: CancellationToken) -> Result<()> {
        match &self.schedule {
            Some(schedule) => self.relay.run_on(schedule, stop).await,
            None => self.relay.run(stop).await,
        }
    }

    /// Runs until `stop`; starts again after an error or a panic. Dropping this ends the relay without settling.
    pub(crate) async fn supervise(self: Arc<Self>, clock: Arc<dyn Clock>, stop: CancellationToken) {
        let mut wait = RESTART_MIN;
        while !stop.is_cancelled() {
            let began = clock.monotonic();
            // A task of its own, so that a panic ends only this relay.
            let running = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&self).run(stop.clone())));
            let fault = match running.await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "the relay panicked; this is a defect".to_owned(),
            };
            if clock.monotonic().saturating_sub(began) > HEALTHY_AFTER {
                wait = RESTART_MIN;
            }
            error!(subscription = %self.name, error = fault, again_in = ?wait, "relay ended; it is started again");
            self.set_fault(Some(fault));
            tokio::select! {
                () = stop.cancelled() => return,
                () = clock.sleep(wait) => {}
            }
            self.set_fault(None);
            wait = (wait * 2).min(RESTART_MAX);
        }
    }
}
