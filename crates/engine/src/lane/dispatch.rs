//! Sending one batch: which calls go out when, and what their outcomes mean.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use postbox_core::{Batch, Delivery, Disposition, Key, Outcome, Sink};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::Lane;
use super::call::{Call, Returned, call};
use super::feed::Feed;
use super::late::{LATE_AFTER, weigh};
use super::verdicts::{Verdicts, holds};

/// How a round of sending runs.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Calls this batch may have in flight.
    pub(super) calls_max: usize,
    /// The breaker is half open, and this is its probe.
    pub(super) probe: bool,
}

/// What ended a wait.
enum Event {
    Returned(Returned),
    Permit(OwnedSemaphorePermit),
    Paced,
    Late,
    Ended,
}

impl Lane {
    /// Sends what waits in `batch` until all is decided, or `round` ends and the calls in flight are back.
    ///
    /// Gives calls that are to go on without the batch: their events have verdicts as `in_flight`, and the calls must be
    /// adopted once those are settled. Ends `round` itself when the destination is down or gone.
    pub(super) async fn dispatch(
        &self,
        sink: &Arc<dyn Sink>,
        batch: &Arc<Batch>,
        verdicts: &mut Verdicts,
        pace: Pace,
        round: &CancellationToken,
    ) -> Vec<Call> {
        let shared = &self.shared;
        let deliveries = &batch.deliveries;
        let mut feed = Feed::new(deliveries, verdicts, shared.holds_keys(), shared.capabilities.prefix);
        let mut calls = FuturesUnordered::new();
        let mut out: HashSet<usize> = HashSet::new();
        let mut spare = None;
        let bytes = if shared.capabilities.prefix { 0 } else { weigh(batch) };
        loop {
            let mut starved = false;
            let mut paced = None;
            while calls.len() < pace.calls_max && feed.has_more(deliveries.len()) && self.may_send(pace, round) {
                paced = shared.rate_wait();
                if paced.is_some() {
                    break;
                }
                let Some(permit) = spare.take().or_else(|| shared.permits.clone().try_acquire_owned().ok()) else {
                    starved = true;
                    break;
                };
                let places = feed.take(shared.capabilities.batch_max, deliveries, verdicts);
                if places.is_empty() {
                    break;
                }
                shared.rate_spend(places.len());
                if !shared.capabilities.prefix {
                    out.extend(&places);
                }
                calls.push(call(shared.clone(), sink.clone(), batch.clone(), places, permit));
            }
            spare = None;
            if calls.is_empty() && !starved && paced.is_none() {
                // Nothing in flight and nothing may go out: done, or the round has ended.
                return Vec::new();
            }
            let may_be_late = !starved && paced.is_none() && self.may_be_late(pace, calls.len(), bytes);
            match self.next_event(&mut calls, starved, paced, may_be_late, round).await {
                Event::Returned(Returned { places, outcomes, .. }) => {
                    feed.returned();
                    places.iter().for_each(|place| _ = out.remove(place));
                    self.absorb(deliveries, &places, outcomes, &mut feed, verdicts, round);
                }
                Event::Permit(permit) => spare = Some(permit),
                // What may be sent is looked at again, the lease too: it may have ended during the wait.
                Event::Paced => {}
                Event::Late => {
                    for place in out {
                        verdicts.failed(place, self.in_flight());
                        feed.hold(place, deliveries, verdicts);
                    }
                    return calls.into_iter().collect();
                }
                Event::Ended => return Vec::new(),
            }
        }
    }

    async fn next_event(
        &self,
        calls: &mut FuturesUnordered<Call>,
        starved: bool,
        paced: Option<Duration>,
        may_be_late: bool,
        round: &CancellationToken,
    ) -> Event {
        tokio::select! {
            biased;
            () = self.held.abandon.cancelled() => Event::Ended,
            Some(returned) = calls.next(), if !calls.is_empty() => Event::Returned(returned),
            () = round.cancelled(), if calls.is_empty() => Event::Ended,
            Ok(permit) = self.shared.permits.clone().acquire_owned(), if starved => Event::Permit(permit),
            () = self.shared.clock.sleep(paced.unwrap_or_default()), if paced.is_some() => Event::Paced,
            () = self.shared.clock.sleep(LATE_AFTER), if may_be_late => Event::Late,
            else => Event::Ended,
        }
    }

    /// Whether the calls in flight may go on without their batch. Half of all calls at most, so that slow events leave
    /// room for the others, and keeping no more than a batch's worth of payload in memory; not those of a sink that takes
    /// whole chunks, which is slow as a whole; not on the way out.
    fn may_be_late(&self, pace: Pace, in_flight: usize, bytes: usize) -> bool {
        let shared = &self.shared;
        !pace.probe
            && !shared.capabilities.prefix
            && self.late.len() + in_flight <= shared.capabilities.concurrency / 2
            && self.late.bytes() + bytes <= shared.settings.batch.payload_bytes
            && !self.held.halt.is_cancelled()
    }

    /// The check before each send: still our lane, still a destination, still wanted.
    fn may_send(&self, pace: Pace, round: &CancellationToken) -> bool {
        if round.is_cancelled() {
            return false;
        }
        let shared = &self.shared;
        if !self.held.is_safe(shared.clock.monotonic()) {
            self.held.run_out(shared);
            return false;
        }
        if shared.is_gone() || !(pace.probe || shared.breaker.is_closed()) {
            round.cancel();
            return false;
        }
        true
    }

    /// Turns the outcomes of one call into verdicts.
    fn absorb(
        &self,
        deliveries: &[Delivery],
        places: &[usize],
        outcomes: Vec<Outcome>,
        feed: &mut Feed,
        verdicts: &mut Verdicts,
        round: &CancellationToken,
    ) {
        let shared = &*self.shared;
        let mut delivered = 0;
        // Keys of which an event of this call died or was not accepted: the sink may have stopped the rest of them.
        let mut stopped: HashSet<&Key> = HashSet::new();
        for (&place, outcome) in places.iter().zip(outcomes) {
            let delivery = &deliveries[place];
            let key = delivery.event.key.as_ref();
            if let Outcome::Delivered { duplicate } = outcome {
                delivered += 1;
                if duplicate {
                    shared.metrics.duplicate(&delivery.event);
                }
                verdicts.delivered(place);
                feed.done(place);
                continue;
            }
            // For good, as the destination says itself: it would say so again to whoever repeats this after a crash.
            let for_good = matches!(outcome, Outcome::Dead { .. } | Outcome::Gone { .. });
            let disposition = match outcome {
                Outcome::Unavailable { code, error, after } => {
                    let Some(disposition) = shared.found_down(delivery, &code, &error, after) else {
                        shared.metrics.failure(&delivery.event.topic, &code);
                        shared.metrics.add(&shared.metrics.unavailable, 1);
                        verdicts.note(place, code, error);
                        stopped.extend(key.filter(|_| shared.holds_keys()));
                        round.cancel();
                        continue;
                    };
                    disposition
                }
                _ if feed.is_held(place, deliveries) || key.is_some_and(|key| stopped.contains(key)) => {
                    // The sink stopped this key at an earlier failure of the same call; this one was not tried.
                    verdicts.put_aside(place, Disposition::Block);
                    feed.hold(place, deliveries, verdicts);
                    continue;
                }
                outcome => {
                    shared.answered(&outcome);
                    if let Outcome::Gone { code, error } = &outcome {
                        shared.set_gone(format!("{code}: {error}"));
                        round.cancel();
                    }
                    shared.decide(delivery, &outcome)
                }
            };
            shared.record(delivery, &disposition);
            // Out of attempts is known only once it is settled. Were the next of the key sent before that, a crash in
            // between would give this one another attempt, and it could arrive out of order.
            let holding = holds(&disposition) || !for_good;
            verdicts.failed(place, disposition);
            if holding {
                feed.hold(place, deliveries, verdicts);
            } else {
                if shared.holds_keys() && shared.capabilities.prefix {
                    stopped.extend(key);
                }
                feed.done(place);
            }
        }
        shared.metrics.add(&shared.metrics.delivered, delivered);
        if delivered > 0 {
            shared.answered(&Outcome::DELIVERED);
        }
    }
}
