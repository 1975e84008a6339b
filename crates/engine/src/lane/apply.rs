//! Batches of an apply subscription: the handler runs inside the transaction that settles.
//!
//! A transaction whose answer we did not get may have committed. It is never repeated blindly, which could run a handler
//! twice: the lane is given back and read again, and what committed is not read again.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use postbox_core::{
    Apply, Batch, Delivery, Disposition, Entry, Error, ErrorKind, Key, Outcome, Result, Seq, Settlement,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Lane;
use super::call::panic_text;
use super::verdicts::{Verdicts, holds};

impl Lane {
    /// Applies and settles a stream batch in chunks; false if the round ended before the end, and the rest is to be read again.
    pub(super) async fn apply_stream(
        &self,
        apply: &dyn Apply,
        batch: &Batch,
        verdicts: &mut Verdicts,
        round: &CancellationToken,
    ) -> Result<bool> {
        let count = batch.deliveries.len();
        let mut from = 0;
        let mut held: HashSet<Key> = HashSet::new();
        loop {
            if from < count && !self.may_apply(round) {
                return Ok(false);
            }
            let to = (from + self.shared.apply_chunk()).min(count);
            let position = if to == count { batch.end } else { batch.deliveries.get(to - 1).map(|last| last.seq) };
            self.apply_chunk(apply, batch, from..to, position, verdicts, &mut held, round).await?;
            from = to;
            if from == count {
                return Ok(true);
            }
        }
    }

    /// Applies and settles due rows in chunks. Rows after the end of the round stay as they are: due.
    pub(super) async fn apply_due(
        &self,
        apply: &dyn Apply,
        batch: &Batch,
        verdicts: &mut Verdicts,
        round: &CancellationToken,
    ) -> Result<()> {
        let count = batch.deliveries.len();
        let mut from = 0;
        let mut held: HashSet<Key> = HashSet::new();
        while from < count {
            if !self.may_apply(round) {
                let rest = verdicts.settle_due(batch, self.shared.holds_keys());
                let entries = rest.entries.into_iter().skip_while(|it| it.delivery.seq < batch.deliveries[from].seq);
                return self.settle(Settlement { entries: entries.collect(), ..rest }).await;
            }
            let to = (from + self.shared.apply_chunk()).min(count);
            self.apply_chunk(apply, batch, from..to, None, verdicts, &mut held, round).await?;
            from = to;
        }
        Ok(())
    }

    /// The check before each transaction. A lease that ran out ends the round: read and rewound again and again until somebody else
    /// notices, the lane would only burn the store.
    fn may_apply(&self, round: &CancellationToken) -> bool {
        if round.is_cancelled() || self.shared.is_gone() {
            return false;
        }
        let is_safe = self.held.is_safe(self.shared.clock.monotonic());
        if !is_safe {
            self.held.run_out(&self.shared);
        }
        is_safe
    }

    /// One transaction: the deliveries of `range` that are ready, and entries for those that are not.
    #[expect(clippy::too_many_arguments, reason = "the loop's state, passed to its one leaf")]
    async fn apply_chunk(
        &self,
        apply: &dyn Apply,
        batch: &Batch,
        range: std::ops::Range<usize>,
        position: Option<Seq>,
        verdicts: &mut Verdicts,
        held: &mut HashSet<Key>,
        round: &CancellationToken,
    ) -> Result<()> {
        let shared = &*self.shared;
        for place in range.clone().filter(|place| held_key(&batch.deliveries[*place], held).is_some()) {
            if verdicts.is_waiting(place) {
                verdicts.put_aside(place, Disposition::Block);
            }
        }
        for place in range.clone() {
            let delivery = &batch.deliveries[place];
            if verdicts.is_waiting(place) && shared.take_overran(delivery) {
                let limit = shared.settings.deliver_timeout;
                let outcome = Outcome::retry("timeout", format!("the transaction overran {limit:?} or panicked"));
                self.applied(place, delivery, Some(outcome), verdicts, held, round);
            }
        }
        let ready: Vec<usize> = range
            .clone()
            .filter(|place| verdicts.is_waiting(*place) && held_key(&batch.deliveries[*place], held).is_none())
            .collect();
        for place in range.clone() {
            if verdicts.is_waiting(place) && !ready.contains(&place) {
                verdicts.put_aside(place, Disposition::Block);
            }
        }
        let refs: Vec<&Delivery> = ready.iter().map(|place| &batch.deliveries[*place]).collect();
        let mut entries: Vec<Entry<'_>> = verdicts
            .exceptions()
            .iter()
            .filter(|(place, _)| range.contains(place))
            .map(|(place, disposition)| Entry { delivery: &batch.deliveries[*place], disposition: disposition.clone() })
            .collect();
        entries.sort_by_key(|entry| entry.delivery.seq);
        let settlement = Settlement { position, entries, rewind: false, hold_keys: shared.holds_keys() };
        if refs.is_empty() {
            return self.settle(settlement).await;
        }
        let outcomes = self.apply_in_time(apply, &refs, settlement.clone()).await?;
        self.settled(&settlement);
        let delivered = outcomes.iter().filter(|it| it.as_ref().is_some_and(Outcome::is_delivered)).count();
        shared.metrics.add(&shared.metrics.delivered, delivered);
        if delivered > 0 {
            shared.answered(&Outcome::DELIVERED);
        }
        for (place, outcome) in ready.into_iter().zip(outcomes) {
            self.applied(place, &batch.deliveries[place], outcome, verdicts, held, round);
        }
        Ok(())
    }

    /// Runs the transaction under its time limit. Any failure gives the lane back.
    async fn apply_in_time(
        &self,
        apply: &dyn Apply,
        refs: &[&Delivery],
        settlement: Settlement<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        let shared = &*self.shared;
        let decide = |delivery: &Delivery, outcome: &Outcome| shared.decide(delivery, outcome);
        let call = AssertUnwindSafe(async { apply.apply(&self.held.lease, refs, settlement, &decide).await });
        let answer = tokio::select! {
            biased;
            () = self.held.abandon.cancelled() => return Err(Error::stale("apply")),
            answer = call.catch_unwind() => answer,
            () = shared.clock.sleep(shared.settings.deliver_timeout) => {
                shared.metrics.add(&shared.metrics.timeouts, 1);
                shared.apply_overran(refs);
                return Err(dropped("the transaction overran its time"));
            }
        };
        match answer {
            Ok(Ok(outcomes)) => {
                self.works("apply");
                shared.apply_in_time();
                Ok(outcomes)
            }
            Ok(Err(error)) if error.is_stale() => {
                shared.metrics.add(&shared.metrics.stale_writes, 1);
                Err(error)
            }
            Ok(Err(error)) if self.failed("apply", &error) => {
                shared.clock.sleep(shared.store_backoff(1)).await;
                Err(dropped("the transaction's end is unknown"))
            }
            Ok(Err(error)) => Err(error),
            Err(panic) => {
                warn!(subscription = shared.name(), panic = panic_text(&*panic), "apply panicked");
                shared.metrics.add(&shared.metrics.panics, 1);
                shared.apply_overran(refs);
                Err(dropped("the transaction panicked"))
            }
        }
    }

    /// Takes note of what a committed transaction decided, for the deliveries after it.
    fn applied(
        &self,
        place: usize,
        delivery: &Delivery,
        outcome: Option<Outcome>,
        verdicts: &mut Verdicts,
        held: &mut HashSet<Key>,
        round: &CancellationToken,
    ) {
        let shared = &*self.shared;
        let disposition = match &outcome {
            None => Disposition::Block,
            Some(Outcome::Delivered { duplicate }) => {
                if *duplicate {
                    shared.metrics.duplicate(&delivery.event);
                }
                return verdicts.delivered(place);
            }
            Some(outcome) => shared.decide(delivery, outcome),
        };
        match &outcome {
            Some(Outcome::Unavailable { code, error, after }) => {
                shared.unavailable(code, error, *after);
                round.cancel();
            }
            Some(Outcome::Gone { code, error }) => {
                shared.set_gone(format!("{code}: {error}"));
                round.cancel();
            }
            Some(outcome) => shared.answered(outcome),
            None => {}
        }
        shared.record(delivery, &disposition);
        if let Disposition::Retry { after, .. } = &disposition {
            self.alarm.ring_in(shared.clock.monotonic(), *after);
        }
        if shared.holds_keys()
            && let Some(key) = &delivery.event.key
            && holds(&disposition)
        {
            held.insert(key.clone());
        }
        match outcome {
            Some(_) => verdicts.failed(place, disposition),
            None => verdicts.put_aside(place, disposition),
        }
    }
}

fn held_key<'k>(delivery: &Delivery, held: &'k HashSet<Key>) -> Option<&'k Key> {
    if held.is_empty() {
        return None;
    }
    delivery.event.key.as_ref().and_then(|key| held.get(key))
}

/// The lane must be given back and read again; nothing is wrong with it.
fn dropped(why: &'static str) -> Error {
    Error::new(ErrorKind::Stale, "apply", "apply_dropped", why)
}
