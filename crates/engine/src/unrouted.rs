//! Finds events that no subscription wants, while relays run.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Clock, LogName, Maintain, Result};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::last_outcome::{FailingPart, LastOutcome};
use crate::retention::pause_after;
use crate::supervise::keep_up;

/// How often to look at the logs. A look that finds nothing new costs one or two index probes.
const EVERY: Duration = Duration::from_secs(1);
/// Number of looks between two log lines about one log.
const LOOKS_PER_LINE: u32 = 60;
/// Least time between two log lines about failed looks. A look fails every second.
const FAILURES_LOGGED_EVERY: Duration = Duration::from_secs(60);
/// Number of failed looks in a row before the search counts as failing: a lock is over sooner.
const FAILED_LOOKS_MIN: u64 = 10;

/// Finds events that no subscription of their log wants, and hands them to a subscription that
/// later wants them ([`Maintain::note_unrouted`]). Several replicas may do so at once.
pub struct UnroutedFinder {
    store: Arc<dyn Maintain>,
    logs: Vec<LogName>,
    clock: Arc<dyn Clock>,
    last: LastOutcome,
}

impl UnroutedFinder {
    /// Creates a finder for these logs.
    pub fn new(store: Arc<dyn Maintain>, logs: Vec<LogName>, clock: Arc<dyn Clock>) -> Self {
        Self { store, logs, clock, last: LastOutcome::default() }
    }

    /// Looks every second until `stop`, and logs at most once a minute what it found.
    ///
    /// Cancel-safe: each step is a transaction of the store.
    pub async fn run(&self, stop: CancellationToken) {
        let (mut found, mut logged_at) = (vec![0; self.logs.len()], None::<Duration>);
        for look in 0_u32.. {
            if stop.run_until_cancelled(self.clock.sleep(EVERY)).await.is_none() {
                return;
            }
            let mut looked = Ok(());
            for (log, found) in self.logs.iter().zip(&mut found) {
                match self.find_in(log, &stop).await {
                    Ok(count) => *found += count,
                    Err(error) => {
                        let now = self.clock.monotonic();
                        if logged_at.is_none_or(|at| now.saturating_sub(at) >= FAILURES_LOGGED_EVERY) {
                            warn!(%log, code = error.code(), %error, "search for unrouted events failed");
                            logged_at = Some(now);
                        }
                        looked = Err(error);
                        continue;
                    }
                }
                if *found > 0 && look % LOOKS_PER_LINE == 0 {
                    warn!(%log, events = *found, "events that no subscription wants");
                    *found = 0;
                }
            }
            self.last.note(&looked, self.clock.now());
        }
    }

    /// As [`Self::run`], and starts again after a panic.
    pub async fn supervise(self: Arc<Self>, stop: CancellationToken) {
        let run = || {
            let (finder, stop) = (Arc::clone(&self), stop.clone());
            async move { finder.run(stop).await }
        };
        keep_up("finder", run, &self.last, &*self.clock, &stop).await;
    }

    /// Returns since when the search of [`Self::run`] fails, if it does for several looks in a row.
    pub fn failing(&self) -> Option<FailingPart> {
        self.last.failing().filter(|it| it.tries >= FAILED_LOOKS_MIN)
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use postbox_core::{Error, ErrorKind};
    use postbox_memory::MemoryStore;
    use postbox_testkit::memory::FailsAt;

    use super::*;
    use crate::clock::TokioClock;

    #[tokio::test(start_paused = true)]
    async fn a_search_that_fails_is_known_after_ten_looks_until_one_succeeds() {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::simulated(jiff::Timestamp::UNIX_EPOCH));
        let server = MemoryStore::new(Arc::clone(&clock));
        let calls = AtomicU32::new(0);
        let twelve = move || {
            let fails = calls.fetch_add(1, Ordering::SeqCst) < 12;
            fails.then(|| Error::new(ErrorKind::Unauthorized, "simulate", "permission_denied", "no right"))
        };
        let store = Arc::new(server.client(Some(Arc::new(FailsAt("note_unrouted", twelve)))));
        let finder = Arc::new(UnroutedFinder::new(store, vec![LogName::outbox()], clock));
        let stop = CancellationToken::new();
        let running = tokio::spawn(Arc::clone(&finder).supervise(stop.clone()));
        tokio::time::sleep(Duration::from_millis(9_500)).await;
        assert_eq!(finder.failing(), None);
        tokio::time::sleep(Duration::from_secs(2)).await;
        let failing = finder.failing().expect("eleven looks failed");
        assert_eq!((failing.code.as_str(), failing.tries, failing.since.as_second()), ("permission_denied", 11, 1));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(finder.failing(), None);
        stop.cancel();
        running.await.expect("no panic");
    }
}
