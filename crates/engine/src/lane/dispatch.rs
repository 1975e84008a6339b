//! Sends one batch: which calls go out when, and what their outcomes mean.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::OptionFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use postbox_core::{Batch, Disposition, Key, Result, Sink};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::Lane;
use super::call::{Call, Returned, call};
use super::detached::{DETACH_AFTER, payload_bytes};
use super::judge::Verdict;
use super::queue::DispatchQueue;
use super::settle::Settling;
use super::verdicts::{Verdicts, holds};

/// How often the decided part at the start of a batch is settled while the rest is still out. A
/// crash repeats at most what was delivered in this time, however low the rate.
const SETTLE_EVERY: Duration = Duration::from_secs(1);

/// How one batch is sent.
#[derive(Clone, Copy)]
pub(super) struct DispatchLimits {
    /// Maximum calls in flight for this batch.
    pub(super) calls_max: usize,
    /// When to stop sending; `None`: never.
    pub(super) send_until: Option<Duration>,
    /// How long to wait for the last calls before they go on without the batch; `None`: until they
    /// end.
    pub(super) detach_after: Option<Duration>,
    /// The breaker is half open, and this is its probe.
    pub(super) probe: bool,
    /// A row says that this event is sent alone, so its result must be written too. Its permit is
    /// in [`Careful`](super::alone::Careful), and its rate is spent.
    pub(super) alone: bool,
}

/// Why a wait ended.
enum Wake {
    Returned(Returned),
    Permit(OwnedSemaphorePermit),
    RateAllows,
    SettleTime,
    Settled(Result<usize>),
    Slow,
    Ended,
}

impl Lane {
    pub(super) fn limits(&self, probe: bool) -> DispatchLimits {
        DispatchLimits {
            calls_max: self.context.capabilities.concurrency,
            send_until: None,
            detach_after: (!probe).then_some(DETACH_AFTER),
            probe,
            alone: false,
        }
    }

    /// Sends what waits in `batch` until all of it is decided, or until `round` ends and the calls
    /// in flight are back. Ends `round` itself when the destination is down or gone.
    ///
    /// What is decided meanwhile is settled from time to time, once `settling` (the settlement of
    /// the previous batch) is over. Returns the calls that go on without the batch. Their events
    /// are `InFlight` in `verdicts`, and the caller must detach the calls once those are settled.
    /// An error comes from a settlement.
    pub(super) async fn dispatch<'a>(
        &'a self,
        sink: &Arc<dyn Sink>,
        batch: &'a Arc<Batch>,
        verdicts: &mut Verdicts,
        limits: DispatchLimits,
        mut settling: Option<Settling<'a>>,
        round: &CancellationToken,
    ) -> Result<Vec<Call>> {
        let calls = self.send_all(sink, batch, verdicts, limits, round, &mut settling).await?;
        // Without its answer it is unknown what is still to be written.
        if let Some(settled) = settling {
            verdicts.settled(settled.await?);
        }
        Ok(calls)
    }

    async fn send_all<'a>(
        &'a self,
        sink: &Arc<dyn Sink>,
        batch: &'a Arc<Batch>,
        verdicts: &mut Verdicts,
        limits: DispatchLimits,
        round: &CancellationToken,
        settling: &mut Option<Settling<'a>>,
    ) -> Result<Vec<Call>> {
        let context = &self.context;
        let mut settle_time = context.clock.sleep(SETTLE_EVERY);
        let deliveries = &batch.deliveries;
        let prefix = context.capabilities.prefix;
        let by_key = context.holds_keys();
        let mut queue = match limits.probe {
            true => DispatchQueue::probe(deliveries, verdicts, by_key, &*context.random),
            false => DispatchQueue::new(deliveries, verdicts, by_key, prefix),
        };
        let mut calls = FuturesUnordered::new();
        let mut out: HashSet<usize> = HashSet::new();
        let are_rows = batch.end.is_none();
        let mut spare = if limits.alone { self.careful.take_permit() } else { None };
        let bytes = if prefix { 0 } else { payload_bytes(batch) };
        loop {
            let mut starved = false;
            let mut rate_wait = None;
            while calls.len() < limits.calls_max && queue.has_more(deliveries.len()) && self.may_send(limits, round) {
                let now = context.clock.monotonic();
                let left = limits.send_until.map_or(Duration::MAX, |until| until.saturating_sub(now));
                // Alone it is paid for already.
                if !limits.alone {
                    rate_wait = context.limiter.wait(now, are_rows).map(|wait| wait.min(left));
                }
                if rate_wait.is_some() {
                    break;
                }
                let Some(permit) = spare.take().or_else(|| context.limiter.try_permit()) else {
                    starved = true;
                    break;
                };
                let places = self.take_places(&mut queue, batch, verdicts);
                if places.is_empty() {
                    break;
                }
                if !limits.alone {
                    context.limiter.spend(places.len(), now, are_rows);
                }
                if !prefix {
                    out.extend(&places);
                }
                calls.push(call(context.clone(), sink.clone(), batch.clone(), places, permit));
            }
            spare = None;
            if calls.is_empty() && !starved && rate_wait.is_none() {
                // Nothing is in flight and nothing may go out: the batch is done, or the round has
                // ended.
                return Ok(Vec::new());
            }
            let may_detach = !starved && rate_wait.is_none() && self.may_detach(calls.len(), bytes);
            let detach_after = limits.detach_after.filter(|_| may_detach);
            let _stream_waits = (rate_wait.is_some() && !are_rows).then(|| context.limiter.stream_waits());
            let event = tokio::select! {
                biased;
                event = self.next_event(&mut calls, starved, rate_wait, detach_after, round) => event,
                Some(settled) = OptionFuture::from(settling.as_mut()) => Wake::Settled(settled),
                () = &mut settle_time, if settling.is_none() => Wake::SettleTime,
            };
            match event {
                Wake::Returned(returned) => {
                    queue.returned();
                    returned.places.iter().for_each(|place| _ = out.remove(place));
                    self.take_outcomes(returned, &mut queue, verdicts, round);
                }
                Wake::Permit(permit) => spare = Some(permit),
                // The loop checks again what may be sent. The lease may have ended meanwhile.
                Wake::RateAllows => {}
                Wake::SettleTime => {
                    settle_time = context.clock.sleep(SETTLE_EVERY);
                    *settling = verdicts.settle_decided(batch, context.holds_keys()).map(|(end, settlement)| {
                        let settled = async move { self.settle(settlement).await.map(|()| end) };
                        Box::pin(settled) as Settling<'_>
                    });
                }
                Wake::Settled(settled) => {
                    *settling = None;
                    verdicts.settled(settled?);
                }
                Wake::Slow => {
                    for place in out {
                        verdicts.failed(place, self.in_flight());
                        queue.hold(place, deliveries, verdicts);
                    }
                    return Ok(calls.into_iter().collect());
                }
                Wake::Ended => return Ok(Vec::new()),
            }
        }
    }

    async fn next_event(
        &self,
        calls: &mut FuturesUnordered<Call>,
        starved: bool,
        rate_wait: Option<Duration>,
        detach_after: Option<Duration>,
        round: &CancellationToken,
    ) -> Wake {
        let clock = &self.context.clock;
        tokio::select! {
            biased;
            () = self.lease.abandon.cancelled() => Wake::Ended,
            Some(returned) = calls.next(), if !calls.is_empty() => Wake::Returned(returned),
            () = round.cancelled(), if calls.is_empty() => Wake::Ended,
            Some(permit) = self.context.limiter.permit(), if starved => Wake::Permit(permit),
            () = clock.sleep(rate_wait.unwrap_or_default()), if rate_wait.is_some() => Wake::RateAllows,
            () = clock.sleep(detach_after.unwrap_or_default()), if detach_after.is_some() => Wake::Slow,
            else => Wake::Ended,
        }
    }

    /// Returns whether the calls in flight may go on without their batch. At most half of all calls
    /// may, so that slow events leave room for others, and with at most one batch's payload in
    /// memory. Not for a sink that takes many events per call, because there the whole sink is
    /// slow. Not when the lane ends.
    fn may_detach(&self, in_flight: usize, bytes: usize) -> bool {
        let context = &self.context;
        !context.capabilities.prefix
            && self.detached.len() + in_flight <= context.capabilities.concurrency / 2
            && self.detached.bytes() + bytes <= context.settings.batch.payload_bytes
            && !self.lease.halt.is_cancelled()
    }

    /// The check before each send: the lane is still ours, the destination is up, the round goes
    /// on.
    pub(super) fn may_send(&self, limits: DispatchLimits, round: &CancellationToken) -> bool {
        if round.is_cancelled() {
            return false;
        }
        let context = &self.context;
        let now = context.clock.monotonic();
        if limits.send_until.is_some_and(|until| until <= now) {
            return false;
        }
        if !self.lease.is_safe(now) {
            self.lease.run_out(context);
            return false;
        }
        if context.health.is_gone() || !(limits.probe || context.health.breaker.is_closed()) {
            round.cancel();
            return false;
        }
        true
    }

    /// Turns the outcomes of one call into verdicts.
    fn take_outcomes(
        &self,
        returned: Returned,
        queue: &mut DispatchQueue,
        verdicts: &mut Verdicts,
        round: &CancellationToken,
    ) {
        let context = &*self.context;
        let (deliveries, now) = (&returned.batch.deliveries, context.clock.now());
        // Keys that the sink stopped at within this call, and whether an outage was the reason.
        let mut stopped: HashMap<&Key, bool> = HashMap::new();
        for (place, outcome) in returned.places.into_iter().zip(returned.outcomes) {
            let delivery = &deliveries[place];
            let key = delivery.event.key.as_ref().filter(|_| context.holds_keys());
            if !outcome.is_delivered()
                && let Some(is_outage) = key.and_then(|key| stopped.get(key))
            {
                // The sink did not try it.
                if !is_outage {
                    verdicts.defer(place, Disposition::Block);
                    queue.hold(place, deliveries, verdicts);
                }
                continue;
            }
            let verdict = context.judge(delivery, outcome, returned.sent, returned.took);
            // Writing this failure would put aside all events before it, and it proves nothing. The
            // event is tried again in its turn.
            if matches!(&verdict, Verdict::Failed(_)) && matches!(queue, DispatchQueue::Probe { .. }) && place > 0 {
                continue;
            }
            context.record(delivery, &verdict, now);
            let (disposition, holding) = match verdict {
                Verdict::Delivered { .. } => {
                    verdicts.delivered(place);
                    queue.done(place);
                    continue;
                }
                Verdict::Outage { disposition, .. } => {
                    verdicts.record_outage(place, disposition);
                    stopped.extend(key.map(|key| (key, true)));
                    round.cancel();
                    continue;
                }
                Verdict::Gone { disposition, .. } => {
                    round.cancel();
                    (disposition, false)
                }
                Verdict::Refused(disposition) => (disposition, false),
                Verdict::Failed(disposition) => (disposition, true),
            };
            stopped.extend(key.map(|key| (key, false)));
            let holding = holding || holds(&disposition);
            verdicts.failed(place, disposition);
            if holding {
                queue.hold(place, deliveries, verdicts);
            } else {
                queue.done(place);
            }
        }
    }
}
