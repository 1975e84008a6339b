//! One subscription at work in this service, and the task that keeps it at work.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postbox_core::{Clock, Error, ErrorKind, Result, SubscriptionName};
use postbox_engine::{FailingLane, Metrics, Outage, Relay};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::error;

use crate::cron::Cron;
use crate::status::Fault;

/// First and longest wait before a relay that ended by itself is started again. The cap keeps the
/// log readable and the relay within half a minute of a schema that a person has put right.
const RESTART_MIN: Duration = Duration::from_millis(500);
const RESTART_MAX: Duration = Duration::from_secs(30);
/// A relay that has worked for so long is not in a crash loop.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);

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

    /// Why it is not ready, if it is not.
    pub(crate) fn fault(&self) -> Option<Fault> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (code, what) = if let Some(error) = ended {
            (error.code().to_owned(), error.to_string())
        } else if let Some(FailingLane { lane, since, code }) = self.relay.failing_lanes().into_iter().next() {
            let what = format!("lane {lane} cannot be read or settled since {since:.0}; last reason: {code}");
            (code, what)
        } else {
            // The destination, the way there or our own limits may be at fault: the code says
            // which.
            let Outage { since, code } = self.metrics().outage()?;
            let what = format!("the breaker is open since {since:.0}, nothing is sent; last reason: {code}");
            (code, what)
        };
        Some(Fault { subscription: Some(self.name.clone()), code, what })
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
        let mut wait = RESTART_MIN;
        while !stop.is_cancelled() {
            let began = clock.monotonic();
            // A task of its own, so that a panic ends only this relay.
            let running = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&self).run(stop.clone())));
            let error = match running.await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error,
                Err(_) => {
                    let text = "the relay panicked; this is a defect";
                    Error::new(ErrorKind::Internal, "relay", "relay_panicked", text)
                }
            };
            if clock.monotonic().saturating_sub(began) > HEALTHY_AFTER {
                wait = RESTART_MIN;
            }
            error!(subscription = %self.name, %error, restart_in = ?wait, "relay failed; restarting");
            self.set_ended(Some(Arc::new(error)));
            tokio::select! {
                () = stop.cancelled() => return,
                () = clock.sleep(wait) => {}
            }
            self.set_ended(None);
            wait = (wait * 2).min(RESTART_MAX);
        }
    }
}
