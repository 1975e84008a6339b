//! The lanes one relay holds: taking its share, giving up any surplus, stopping.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{OwnerId, Result};
use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, error, info};

use crate::context::RelayContext;
use crate::lane::{Lane, LeaseGuard, SETTLE_GRACE};

/// Longest wait between two requests for a free lane. A crashed relay's lane is taken over within
/// its lease plus this.
const ASK_MAX: Duration = Duration::from_millis(500);
/// Wait before asking again after a lane ended by itself.
const ASK_SOON: Duration = Duration::from_millis(50);

/// The lanes of one relay, each in a separate task.
pub(crate) struct Lanes {
    context: Arc<RelayContext>,
    owner: OwnerId,
    tasks: JoinSet<Result<()>>,
    lanes: BTreeMap<u16, (Id, CancellationToken)>,
    /// Number of lanes the subscription has.
    of: u16,
    failures: u32,
    paused: bool,
}

impl Lanes {
    pub(crate) fn new(context: Arc<RelayContext>, owner: OwnerId) -> Self {
        Self { context, owner, tasks: JoinSet::new(), lanes: BTreeMap::new(), of: 1, failures: 0, paused: false }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Waits for the next lane that ends by itself; forever if there is none. Cancel-safe. An error
    /// is permanent.
    pub(crate) async fn next_ended(&mut self) -> Result<()> {
        let Some(joined) = self.tasks.join_next_with_id().await else { return std::future::pending().await };
        let (id, ended) = match joined {
            Ok((id, ended)) => (id, ended),
            Err(panic) => {
                // The lane is free again after its lease.
                error!(subscription = self.context.name(), error = %panic, "lane panicked");
                (panic.id(), Ok(()))
            }
        };
        self.lanes.retain(|_, (task, _)| *task != id);
        self.note_held();
        ended
    }

    /// Updates the share of the rate and the poll interval after the number of held lanes changed.
    /// Without a lane, the destination's state is that of the relay that has them.
    fn note_held(&self) {
        if self.lanes.is_empty() {
            self.context.metrics.destination_unknown();
        }
        // A subscription that is paused takes no part of a rate from those it shares it with.
        let of = if self.paused && self.lanes.is_empty() { 0 } else { usize::from(self.of) };
        self.context.limiter.share(self.lanes.len(), Some(of));
        self.context.siblings.set_lanes(self.lanes.len());
    }

    /// Asks the store for a lane, and gives up lanes beyond our share. Returns the wait until the
    /// next request.
    pub(crate) async fn ask(&mut self) -> Result<Duration> {
        let context = self.context.clone();
        let ttl = context.settings.lease_ttl;
        let ask_max = (ttl / 10).min(ASK_MAX);
        if context.health.is_gone() {
            return Ok(ask_max);
        }
        let asked_at = context.clock.monotonic();
        let held: Vec<u16> = self.lanes.keys().copied().collect();
        let acquired = match context.acquire(&self.owner, &held).await {
            Ok(acquired) => acquired,
            Err(error) if context.store_failed(&error) => {
                // Its part of a shared rate stays as it was: another replica may reach the store.
                self.failures += 1;
                return Ok(context.store_backoff(self.failures));
            }
            Err(error) => return Err(error),
        };
        self.failures = 0;
        context.metrics.lanes_kept(&held);
        self.note_pause(acquired.paused.as_ref());
        self.of = acquired.lanes;
        self.note_held();
        let share = usize::from(acquired.lanes.div_ceil(acquired.replicas.max(1)));
        let active = self.lanes.values().filter(|(_, halt)| !halt.is_cancelled()).count();
        if active > share {
            // The last ones. Every relay that gives up lanes keeps its first ones, so lanes move as
            // little as possible.
            let surplus = self.lanes.values().rev().filter(|(_, halt)| !halt.is_cancelled()).take(active - share);
            surplus.for_each(|(_, halt)| halt.cancel());
        }
        let Some(lease) = acquired.lease else {
            return Ok(self.next_ask(active, usize::from(acquired.lanes), ask_max));
        };
        if active >= share || self.lanes.contains_key(&lease.lane) {
            // We have our share already, or the task that held this lane before has not ended yet.
            // Leave it to another relay or a later request.
            context.release(&lease).await;
            return Ok(ask_max);
        }
        context.metrics.lane_taken(&lease);
        let halt = CancellationToken::new();
        let lane = lease.lane;
        let guard = LeaseGuard::new(lease, asked_at, ttl, halt.clone());
        let task = self.tasks.spawn(Lane::new(context, guard).run().in_current_span());
        self.lanes.insert(lane, (task.id(), halt));
        self.note_held();
        Ok(match active + 1 < share {
            true => Duration::ZERO,
            false => self.next_ask(active + 1, usize::from(acquired.lanes), ask_max),
        })
    }

    /// Returns when to ask again. Soon while a lane could become ours. As often as leases are
    /// renewed to notice new replicas. Hardly ever if we hold the only lane.
    fn next_ask(&self, active: usize, lanes: usize, ask_max: Duration) -> Duration {
        let ttl = self.context.settings.lease_ttl;
        if active < lanes {
            // Jitter, so that standbys do not ask all at once.
            return ask_max.mul_f64(0.75 + self.context.random.unit() / 4.0);
        }
        if lanes == 1 { ttl * 1_000 } else { ttl / 3 }
    }

    /// Returns the wait after a lane ended by itself.
    pub(crate) fn ask_again_soon(&self) -> Duration {
        ASK_SOON.mul_f64(0.5 + self.context.random.unit() / 2.0)
    }

    fn note_pause(&mut self, pause: Option<&postbox_core::Pause>) {
        match pause {
            Some(pause) if !self.paused => {
                info!(subscription = self.context.name(), by = pause.by, why = pause.why, "subscription paused");
            }
            None if self.paused => {
                info!(subscription = self.context.name(), "subscription resumed");
                // A person who resumes wants to know now whether the destination is back.
                self.context.health.breaker.probe_from(self.context.clock.monotonic());
            }
            _ => {}
        }
        self.paused = pause.is_some();
    }

    /// Stops every lane. Nothing new is sent, calls in flight have the drain time, then the results
    /// are settled. Afterwards other relays may take this relay's share.
    pub(crate) async fn stop(&mut self) {
        for (_, halt) in self.lanes.values() {
            halt.cancel();
        }
        let clock = self.context.clock.clone();
        let limit = self.context.settings.drain_timeout.saturating_add(SETTLE_GRACE);
        if !self.ended_within(clock.sleep(limit)).await {
            self.tasks.shutdown().await;
        }
        self.lanes.clear();
        self.context.leave(&self.owner).await;
    }

    async fn ended_within(&mut self, limit: impl Future<Output = ()>) -> bool {
        let ended = async {
            while let Some(joined) = self.tasks.join_next().await {
                if let Ok(Err(error)) = joined {
                    error!(code = error.code(), error = %error, "lane failed while stopping");
                }
            }
        };
        tokio::select! {
            biased;
            () = ended => true,
            () = limit => false,
        }
    }
}
