//! Holding a lane: renewal in the background, and the check before each send.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postbox_core::{Error, ErrorKind, Lease, lock};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::context::RelayContext;

/// A lease, and how long we may still rely on it.
///
/// The time is counted on our monotonic clock from *before* the call that granted the lease. So we
/// consider it ended no later than the store does, whatever the two wall clocks say. Only the time
/// of a machine that is suspended does not count: after it wakes, events may go out for up to a
/// third of a lease beside the next holder's, until a renewal is refused.
pub(crate) struct LeaseGuard {
    pub(crate) lease: Lease,
    ttl: Duration,
    /// Nanoseconds on the monotonic clock.
    until: AtomicU64,
    lost: AtomicBool,
    /// Why it was lost, until [`Self::take_loss`] takes it.
    loss: Mutex<Option<Error>>,
    /// Stop sending, then settle what is known.
    pub(crate) halt: CancellationToken,
    /// Drop what is in flight. Never before `halt`.
    pub(crate) abandon: CancellationToken,
}

impl LeaseGuard {
    pub(crate) fn new(lease: Lease, asked_at: Duration, ttl: Duration, halt: CancellationToken) -> Self {
        let (until, abandon) = (AtomicU64::new(nanos(asked_at + ttl)), CancellationToken::new());
        Self { lease, ttl, until, lost: AtomicBool::new(false), loss: Mutex::default(), halt, abandon }
    }

    /// Returns when we stop relying on the lease: a tenth before its end, so that an event still
    /// has time to reach its destination.
    fn safe_until(&self) -> Duration {
        Duration::from_nanos(self.until.load(Ordering::Acquire)).saturating_sub(self.ttl / 10)
    }

    /// Returns whether we may still send at `now`.
    pub(crate) fn is_safe(&self, now: Duration) -> bool {
        !self.is_lost() && now < self.safe_until()
    }

    /// Returns whether the lane is no longer ours.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Returns why the lane was lost: `Stale` if another relay may have it, otherwise the store's
    /// error.
    pub(crate) fn take_loss(&self) -> Option<Error> {
        lock(&self.loss).take()
    }

    /// Marks the lane as lost. Nothing more is sent, and calls in flight are dropped.
    pub(crate) fn lose(&self, context: &RelayContext, error: Error) {
        if self.lost.swap(true, Ordering::AcqRel) {
            return;
        }
        // A refused renewal was counted already.
        context.metrics.add(&context.metrics.leases_lost, usize::from(lock(&self.loss).is_none()));
        let (lane, epoch) = (self.lease.lane, self.lease.epoch);
        warn!(subscription = context.name(), lane, epoch, code = error.code(), why = error.message(), "lease lost");
        *lock(&self.loss) = Some(error);
        self.halt.cancel();
        self.abandon.cancel();
    }

    /// Sends nothing more, because the store refused to renew the lease: the subscription is
    /// paused, or another relay has the lane. Calls in flight may still return and be settled until
    /// the lease or the drain time ends, so that a pause repeats nothing. If the lane has another
    /// owner, settling changes nothing.
    fn not_renewed(&self, context: &RelayContext, error: Error) {
        context.metrics.add(&context.metrics.leases_lost, 1);
        let (lane, epoch) = (self.lease.lane, self.lease.epoch);
        info!(subscription = context.name(), lane, epoch, code = error.code(), "lease not renewed");
        *lock(&self.loss) = Some(error);
        self.halt.cancel();
    }

    /// Marks the lane as lost, because the store did not confirm the lease in time.
    pub(crate) fn run_out(&self, context: &RelayContext) {
        let message = "the lease was not renewed in time: the store did not answer, or this process stood still";
        self.lose(context, Error::new(ErrorKind::Unavailable, "renew", "lease_not_renewed", message));
    }
}

/// Renews every third of the time to live until the lane ends or is lost. Runs in a separate task,
/// so that a sink that blocks its thread does not cost the lease.
pub(super) async fn keep(context: Arc<RelayContext>, guard: Arc<LeaseGuard>) {
    let clock = &context.clock;
    let mut wait = guard.ttl / 3;
    loop {
        clock.sleep(wait).await;
        let asked_at = clock.monotonic();
        let left = guard.safe_until().saturating_sub(asked_at);
        if left.is_zero() {
            return guard.run_out(&context);
        }
        let answer = tokio::select! {
            biased;
            answer = context.log.renew(&guard.lease, guard.ttl) => answer,
            () = clock.sleep(left) => return guard.run_out(&context),
        };
        context.metrics.lease_answered(answer.as_ref().err(), clock.now());
        match answer {
            Ok(()) => {
                guard.until.store(nanos(asked_at + guard.ttl), Ordering::Release);
                context.metrics.add(&context.metrics.renewals_ok, 1);
                // The lease counts from the question, so its answer may have used up some of the
                // wait.
                wait = (asked_at + guard.ttl / 3).saturating_sub(clock.monotonic());
            }
            Err(error) if error.is_stale() => {
                guard.not_renewed(&context, error);
                clock.sleep(guard.safe_until().saturating_sub(clock.monotonic())).await;
                guard.lost.store(true, Ordering::Release);
                return guard.abandon.cancel();
            }
            Err(error) => {
                context.metrics.add(&context.metrics.renewals_failed, 1);
                if !context.store_failed(&error) {
                    return guard.lose(&context, error);
                }
                wait = (guard.ttl / 12).min(Duration::from_millis(250));
            }
        }
    }
}

/// Drops what is in flight once the lane has been halted for the drain time. Otherwise a lane that
/// another relay is to have would stand still for as long as its slowest call.
pub(super) async fn end_drain(context: Arc<RelayContext>, guard: Arc<LeaseGuard>) {
    guard.halt.cancelled().await;
    let drained = context.clock.sleep(context.settings.drain_timeout);
    if guard.abandon.run_until_cancelled(drained).await.is_some() {
        info!(subscription = context.name(), lane = guard.lease.lane, "drain timeout, calls dropped");
        guard.abandon.cancel();
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
