//! One batch from plan to settlement.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Batch, Delivery, Disposition, Key, Result, Unreadable};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::Lane;
use super::call::Call;
use super::dispatch::Pace;
use super::late::weigh;
use super::verdicts::{Verdicts, span};
use crate::shared::Destination;

/// What became of a stream batch.
pub(super) enum Progress {
    /// All of it is written down; these are the keys that later events must wait for.
    Settled(HashSet<Key>),
    /// It was cut short: the caller settles it once no read is in flight, then lets the late calls go on.
    Short { verdicts: Verdicts, late: Vec<Call> },
}

impl Lane {
    /// Plans, sends and settles a stream batch.
    pub(super) async fn process(
        &self,
        batch: &Arc<Batch>,
        carried: &HashSet<Key>,
        pace: Pace,
        round: &CancellationToken,
    ) -> Result<Progress> {
        let mut verdicts = self.plan(batch, carried);
        match &self.shared.destination {
            Destination::Sink(sink) => {
                let late = self.dispatch(sink, batch, &mut verdicts, pace, round).await;
                // Of a lost lane the store would refuse whatever we know.
                if self.held.is_lost() || !verdicts.is_complete() {
                    return Ok(Progress::Short { verdicts, late });
                }
                self.settle(verdicts.settle_stream(batch, self.shared.holds_keys(), false)).await?;
                self.adopt(batch, &verdicts, late);
            }
            Destination::Apply(apply) => {
                if !self.apply_stream(&**apply, batch, &mut verdicts, round).await? {
                    let verdicts = Verdicts::new(batch.deliveries.len());
                    return Ok(Progress::Short { verdicts, late: Vec::new() });
                }
            }
        }
        let (first, last) = span(batch);
        debug!(
            subscription = self.shared.name(), lane = self.held.lease.lane, events = batch.deliveries.len(),
            exceptions = verdicts.exceptions().len(), %first, %last, "batch settled"
        );
        Ok(Progress::Settled(verdicts.holding_keys(&batch.deliveries)))
    }

    /// Sends and settles due rows.
    pub(super) async fn process_due(&self, batch: &Arc<Batch>, pace: Pace, round: &CancellationToken) -> Result<()> {
        let mut verdicts = self.plan_due(batch);
        match &self.shared.destination {
            Destination::Sink(sink) => {
                let late = self.dispatch(sink, batch, &mut verdicts, pace, round).await;
                if self.held.is_lost() {
                    return Ok(());
                }
                self.settle(verdicts.settle_due(batch, self.shared.holds_keys())).await?;
                if !verdicts.is_complete() {
                    self.alarm.ring_in(self.shared.clock.monotonic(), Duration::ZERO);
                }
                self.adopt(batch, &verdicts, late);
            }
            Destination::Apply(apply) => self.apply_due(&**apply, batch, &mut verdicts, round).await?,
        }
        debug!(
            subscription = self.shared.name(),
            lane = self.held.lease.lane,
            events = batch.deliveries.len(),
            "due rows settled"
        );
        Ok(())
    }

    /// Lets calls go on without their batch, whose rows are written.
    pub(super) fn adopt(&self, batch: &Batch, verdicts: &Verdicts, late: Vec<Call>) {
        if late.is_empty() {
            return;
        }
        let in_flight = |disposition: &Disposition| match disposition {
            Disposition::Retry { code, .. } => code == Disposition::IN_FLIGHT,
            _ => false,
        };
        let places = verdicts.exceptions().iter().filter(|(_, disposition)| in_flight(disposition));
        self.late.adopt(late, places.map(|(place, _)| batch.deliveries[*place].seq), weigh(batch));
    }

    /// An event that cannot be read can never be sent. Its key goes on: nothing of it is known that others must wait for.
    fn close_unreadable(&self, verdicts: &mut Verdicts, index: usize, delivery: &Delivery, why: &Unreadable) {
        let disposition = why.disposition();
        self.shared.record(delivery, &disposition);
        verdicts.put_aside(index, disposition);
    }

    /// A person may have made a row due whose call is still in flight: it is not sent beside itself.
    fn plan_due(&self, batch: &Batch) -> Verdicts {
        let mut verdicts = Verdicts::new(batch.deliveries.len());
        let mut waiting: HashSet<&Key> = HashSet::new();
        for (index, delivery) in batch.deliveries.iter().enumerate() {
            let key = delivery.event.key.as_ref().filter(|_| self.shared.holds_keys());
            if self.late.holds(delivery.seq) {
                waiting.extend(key);
                verdicts.put_aside(index, self.in_flight());
            } else if let Some(why) = batch.unreadable.get(&delivery.seq) {
                self.close_unreadable(&mut verdicts, index, delivery, why);
            } else if !waiting.is_empty() && key.is_some_and(|key| waiting.contains(key)) {
                verdicts.put_aside(index, Disposition::Block);
            }
        }
        verdicts
    }

    /// Puts aside what does not go out with its batch: discarded and unreadable events, later times, held keys.
    ///
    /// No clock is asked: an event with a later time than its append goes to the store, whose clock decides, so that a
    /// wrong clock here can neither hurry nor delay it.
    fn plan(&self, batch: &Batch, carried: &HashSet<Key>) -> Verdicts {
        let mut verdicts = Verdicts::new(batch.deliveries.len());
        let anything_held = self.shared.holds_keys() && !(batch.held.is_empty() && carried.is_empty());
        let anything_discarded = !batch.discarded.is_empty();
        for (index, delivery) in batch.deliveries.iter().enumerate() {
            let event = &delivery.event;
            if anything_discarded && batch.discarded.contains(&delivery.seq) {
                verdicts.put_aside(index, Disposition::Discarded);
            } else if let Some(why) = batch.unreadable.get(&delivery.seq) {
                self.close_unreadable(&mut verdicts, index, delivery, why);
            } else if let Some(at) = event.deliver_at.filter(|at| *at > event.created_at) {
                verdicts.put_aside(index, Disposition::Schedule { at });
            } else if anything_held
                && event.key.as_ref().is_some_and(|key| batch.held.contains(key) || carried.contains(key))
            {
                verdicts.put_aside(index, Disposition::Block);
            }
        }
        verdicts
    }
}
