//! Finds events that no subscription wants, while relays run.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Clock, LogName, Maintain, Result};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::retention::pause_after;
use crate::supervise::keep_up;

/// How often to look at the logs. A look that finds nothing new costs one or two index probes.
const EVERY: Duration = Duration::from_secs(1);
/// Number of looks between two log lines about one log.
const LOOKS_PER_LINE: u32 = 60;

/// Finds events that no subscription of their log wants, and hands them to a subscription that
/// later wants them ([`Maintain::note_unrouted`]). Several replicas may do so at once.
pub struct UnroutedFinder {
    store: Arc<dyn Maintain>,
    logs: Vec<LogName>,
    clock: Arc<dyn Clock>,
}

impl UnroutedFinder {
    /// Creates a finder for these logs.
    pub fn new(store: Arc<dyn Maintain>, logs: Vec<LogName>, clock: Arc<dyn Clock>) -> Self {
        Self { store, logs, clock }
    }

    /// Looks every second until `stop`, and logs at most once a minute what it found.
    ///
    /// Cancel-safe: each step is a transaction of the store.
    pub async fn run(&self, stop: CancellationToken) {
        let mut found = vec![0; self.logs.len()];
        for look in 0_u32.. {
            if stop.run_until_cancelled(self.clock.sleep(EVERY)).await.is_none() {
                return;
            }
            for (log, found) in self.logs.iter().zip(&mut found) {
                match self.find_in(log, &stop).await {
                    Ok(count) => *found += count,
                    // The relays report what is wrong with the store.
                    Err(_) => continue,
                }
                if *found > 0 && look % LOOKS_PER_LINE == 0 {
                    warn!(%log, events = *found, "events that no subscription wants");
                    *found = 0;
                }
            }
        }
    }

    /// As [`Self::run`], and starts again after a panic.
    pub async fn supervise(self: Arc<Self>, stop: CancellationToken) {
        let run = || {
            let (finder, stop) = (Arc::clone(&self), stop.clone());
            async move { finder.run(stop).await }
        };
        keep_up("finder", run, &*self.clock, &stop).await;
    }

    /// Looks once at all events, in bounded steps. Returns how many were found.
    pub async fn find(&self, stop: &CancellationToken) -> Result<u64> {
        let mut found = 0;
        for log in &self.logs {
            found += self.find_in(log, stop).await?;
        }
        Ok(found)
    }

    async fn find_in(&self, log: &LogName, stop: &CancellationToken) -> Result<u64> {
        let mut found = 0;
        while !stop.is_cancelled() {
            let began = self.clock.monotonic();
            let routed = self.store.note_unrouted(log).await?;
            found += routed.unrouted;
            if !routed.more {
                break;
            }
            pause_after(&*self.clock, began, stop).await;
        }
        Ok(found)
    }
}
