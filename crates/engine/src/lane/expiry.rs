//! Events that expire: from their `expires_at` on they are not sent.
//!
//! The store says how much time each event has left by the store's clock. From then on the
//! monotonic clock counts, so a wrong wall clock on this machine neither expires an event early nor
//! sends it late. Expiry is checked when a batch is planned and again before each call, because a
//! batch may wait for a rate or behind slow calls. A call under way is not cut short.

use std::sync::Arc;

use postbox_core::{Batch, Delivery, Disposition};

use super::Lane;
use super::queue::DispatchQueue;
use super::verdicts::Verdicts;

impl Lane {
    /// Converts the remaining times in a batch that was just read to times of our monotonic clock.
    pub(super) fn note_expiry(&self, batch: &mut Batch) {
        if !batch.expires.is_empty() {
            let now = self.context.clock.monotonic();
            batch.expires.values_mut().for_each(|left| *left = left.saturating_add(now));
        }
    }

    /// Returns whether an event of a batch has expired and must not be sent.
    pub(super) fn is_expired(&self, batch: &Batch, delivery: &Delivery) -> bool {
        // Almost always empty, so there is nothing to look up.
        !batch.expires.is_empty()
            && batch.expires.get(&delivery.seq).is_some_and(|at| *at <= self.context.clock.monotonic())
    }

    pub(super) fn give_up_expired(&self, verdicts: &mut Verdicts, index: usize, delivery: &Delivery) {
        // Events without an expiry are not in `Batch::expires`.
        verdicts.defer(index, Disposition::Expired { at: delivery.event.expires_at.unwrap_or_default() });
    }

    /// Returns the places of the next call, without events that have expired meanwhile; empty if
    /// nothing may go out now.
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
            // No call was made that would report this later.
            queue.returned();
        }
    }
}
