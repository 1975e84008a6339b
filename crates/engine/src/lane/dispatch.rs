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

/// A batch that is being sent.
struct Sending<'a> {
    lane: &'a Lane,
    sink: &'a Arc<dyn Sink>,
    batch: &'a Arc<Batch>,
    limits: DispatchLimits,
    round: &'a CancellationToken,
    queue: DispatchQueue,
    calls: FuturesUnordered<Call>,
    /// Deliveries in flight; not for a sink that takes many per call.
    out: HashSet<usize>,
}

/// What the next call waits for; by default nothing, because all calls that may go out are out.
#[derive(Default)]
struct Filled {
    /// It waits for a permit.
    starved: bool,
    /// How long it waits for the rate.
    rate_wait: Option<Duration>,
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
        let (context, clock) = (&self.context, &self.context.clock);
        let mut settle_time = clock.sleep(SETTLE_EVERY);
        let (deliveries, by_key, prefix) = (&batch.deliveries, context.holds_keys(), context.capabilities.prefix);
        let queue = match limits.probe {
            true => DispatchQueue::probe(deliveries, verdicts, by_key, &*context.random),
            false => DispatchQueue::new(deliveries, verdicts, by_key, prefix),
        };
        let (calls, out) = (FuturesUnordered::new(), HashSet::new());
        let mut sending = Sending { lane: self, sink, batch, limits, round, queue, calls, out };
        let mut spare = if limits.alone { self.careful.take_permit() } else { None };
        let bytes = if prefix { 0 } else { payload_bytes(batch) };
        loop {
            let Filled { starved, rate_wait } = sending.fill(spare.take(), verdicts);
            let is_filled = !starved && rate_wait.is_none();
            if is_filled && sending.calls.is_empty() {
                // Nothing is in flight and nothing may go out: the batch is done, or the round has
                // ended.
                return Ok(Vec::new());
            }
            let may_detach = is_filled && self.may_detach(sending.calls.len(), bytes);
            let detach_after = limits.detach_after.filter(|_| may_detach);
            let stream_waits = rate_wait.is_some() && batch.end.is_some();
            let _stream_waits = stream_waits.then(|| context.limiter.stream_waits());
            tokio::select! {
                biased;
                () = self.lease.abandon.cancelled() => return Ok(Vec::new()),
                Some(returned) = sending.calls.next(), if !sending.calls.is_empty() => {
                    sending.queue.returned();
                    returned.places.iter().for_each(|place| _ = sending.out.remove(place));
                    self.take_outcomes(returned, &mut sending.queue, verdicts, round);
                }
                () = round.cancelled(), if sending.calls.is_empty() => return Ok(Vec::new()),
                Some(permit) = context.limiter.permit(), if starved => spare = Some(permit),
                // The loop checks again what may be sent. The lease may have ended meanwhile.
                () = clock.sleep(rate_wait.unwrap_or_default()), if rate_wait.is_some() => {}
                () = clock.sleep(detach_after.unwrap_or_default()), if detach_after.is_some() => {
                    return Ok(sending.detach(verdicts));
                }
                Some(settled) = OptionFuture::from(settling.as_mut()) => {
                    *settling = None;
                    verdicts.settled(settled?);
                }
                () = &mut settle_time, if settling.is_none() => {
                    settle_time = clock.sleep(SETTLE_EVERY);
                    *settling = verdicts.settle_decided(batch, by_key).map(|(end, settlement)| {
                        let settled = async move { self.settle(settlement).await.map(|()| end) };
                        Box::pin(settled) as Settling<'_>
                    });
                }
            }
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
            context.record(delivery, &verdict, returned.sent, now);
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

impl Sending<'_> {
    /// Starts all calls that may go out now. `spare` is a permit for the first.
    fn fill(&mut self, mut spare: Option<OwnedSemaphorePermit>, verdicts: &mut Verdicts) -> Filled {
        let (lane, batch, limits) = (self.lane, self.batch, self.limits);
        let (context, are_rows, count) = (&lane.context, batch.end.is_none(), batch.deliveries.len());
        while self.calls.len() < limits.calls_max && self.queue.has_more(count) && lane.may_send(limits, self.round) {
            let now = context.clock.monotonic();
            // Alone it is paid for already.
            if !limits.alone
                && let Some(wait) = context.limiter.wait(now, are_rows)
            {
                let left = limits.send_until.map_or(Duration::MAX, |until| until.saturating_sub(now));
                return Filled { starved: false, rate_wait: Some(wait.min(left)) };
            }
            let Some(permit) = spare.take().or_else(|| context.limiter.try_permit()) else {
                return Filled { starved: true, rate_wait: None };
            };
            let places = lane.take_places(&mut self.queue, batch, verdicts);
            if places.is_empty() {
                break;
            }
            if !limits.alone {
                context.limiter.spend(places.len(), now, are_rows);
            }
            if !context.capabilities.prefix {
                self.out.extend(&places);
            }
            self.calls.push(call(context.clone(), self.sink.clone(), batch.clone(), places, permit));
        }
        Filled::default()
    }

    /// Returns the calls in flight, which go on without their batch.
    fn detach(mut self, verdicts: &mut Verdicts) -> Vec<Call> {
        for place in self.out {
            verdicts.failed(place, self.lane.in_flight());
            self.queue.hold(place, &self.batch.deliveries, verdicts);
        }
        self.calls.into_iter().collect()
    }
}
