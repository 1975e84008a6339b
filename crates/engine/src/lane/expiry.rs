//! Events whose time runs out: from their `expires_at` on they are not sent.
//!
//! The store says how much time each has left, by its own clock; from there on the monotonic clock
//! runs, so that a wrong clock of this machine neither kills an event early nor sends it late. It
//! is looked at when a batch is planned and again before each call, because a batch may wait for a
//! rate or behind slow calls. A call that is under way is not cut.

use std::sync::Arc;

use postbox_core::{Batch, Delivery, Disposition};

use super::Lane;
use super::queue::DispatchQueue;
use super::verdicts::Verdicts;

impl Lane {
    /// Turns what the store said of a batch that was just read into times of our own clock.
    pub(super) fn note_expiry(&self, batch: &mut Batch) {
        if !batch.expires.is_empty() {
            let now = self.context.clock.monotonic();
            batch.expires.values_mut().for_each(|left| *left = left.saturating_add(now));
        }
    }

    /// Whether an event of a batch must not be sent any more.
    pub(super) fn is_expired(&self, batch: &Batch, delivery: &Delivery) -> bool {
        // Nearly always there is nothing to look up.
        !batch.expires.is_empty()
            && batch.expires.get(&delivery.seq).is_some_and(|at| *at <= self.context.clock.monotonic())
    }

    pub(super) fn give_up_expired(&self, verdicts: &mut Verdicts, index: usize, delivery: &Delivery) {
        // What has no end is not in `Batch::expires`.
        let expired = Disposition::Expired { at: delivery.event.expires_at.unwrap_or_default() };
        self.context.record_failure(delivery, &expired);
        verdicts.defer(index, expired);
    }

    /// The places of the next call without what has expired meanwhile; empty if nothing may go out
    /// now.
    pub(super) fn take_places(
        &self,
        queue: &mut DispatchQueue,
        batch: &Arc<Batch>,
        verdicts: &mut Verdicts,
    ) -> Vec<usize> {
        let deliveries = &batch.deliveries;
        loop {
            let mut places = queue.take(self.context.capabilities.batch_max, deliveries, verdicts);
            if batch.expires.is_empty() || places.is_empty() {
                return places;
            }
            places.retain(|place| {
                let is_expired = self.is_expired(batch, &deliveries[*place]);
                if is_expired {
                    self.give_up_expired(verdicts, *place, &deliveries[*place]);
                    queue.done(*place);
                }
                !is_expired
            });
            if !places.is_empty() {
                return places;
            }
            // There is no call that would say so.
            queue.returned();
        }
    }
}
