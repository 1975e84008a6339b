//! Hands dead events to the dead-letter sink, beside the lane's work. Only the store knows which
//! ones have not been handed over, so nothing is lost with this process.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use postbox_core::{DeadLetter, Delivery, Handover, Outcome, Result};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Lane;
use super::call::guarded;
use crate::context::DeadLetterSink;

/// Time between two looks for dead letters. Nobody waits for one, so this need not be short.
const LOOK: Duration = Duration::from_millis(500);
/// First and longest wait while the sink is down.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// How long a letter waits after the sink refused it for a reason of its own. Only a person can fix
/// it, and until then it must not be in the way of others.
const PUT_OFF: Duration = Duration::from_secs(300);
/// After this time without a failure, no letter waits any more that the sink refused: each would
/// have been tried again. It was discarded, say, or another relay has handed it over.
const OUTAGE_KEPT: Duration = PUT_OFF.saturating_mul(2);
/// After how many groups in a row that failed as in an outage the sink counts as down. More than
/// one, because letters that are refused in this way may have died together.
const DOWN_GROUPS: usize = 2;
/// How long a bounded run goes on while the sink takes nothing. It must not wait for this sink, and
/// the next run continues.
const RUN_IN_VAIN_MAX: Duration = Duration::from_secs(10);

/// The result of one look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    /// There was nothing to hand over, or the sink refused all of it.
    Nothing,
    /// Something was handed over, so the next look finds less.
    HandedOver,
    Failed,
}

impl Lane {
    /// Hands letters over until `ended`. A call in flight at that moment may finish.
    pub(super) async fn hand_over_until(&self, ended: &CancellationToken) {
        let Some(sink) = &self.context.dead_letters else { return };
        let mut failures = 0;
        while !ended.is_cancelled() {
            let wait = match self.look_for_letters(sink, failures, ended).await {
                Look::HandedOver => {
                    failures = 0;
                    continue;
                }
                Look::Nothing => LOOK,
                Look::Failed => {
                    let wait = BACKOFF_MIN.saturating_mul(1 << failures.min(10)).min(BACKOFF_MAX);
                    failures += 1;
                    wait
                }
            };
            self.pause(wait, ended).await;
        }
        // Whoever has the lane next knows about its letters. This relay's other lanes say it again.
        self.context.metrics.dead_letters_fail.works();
    }

    /// Hands letters over for as long as the sink takes some.
    pub(super) async fn hand_over_all(&self) {
        let (Some(sink), halt) = (&self.context.dead_letters, &self.lease.halt) else { return };
        while !halt.is_cancelled() && self.look_for_letters(sink, 0, halt).await == Look::HandedOver {}
    }

    async fn look_for_letters(&self, sink: &DeadLetterSink, failures: usize, ended: &CancellationToken) -> Look {
        match self.lease.abandon.run_until_cancelled(self.hand_over(sink, failures, ended)).await {
            Some(Ok(look)) => {
                if look == Look::Nothing {
                    self.context.metrics.dead_letters_fail.end_after(OUTAGE_KEPT, self.context.clock.now());
                }
                look
            }
            Some(Err(error)) => {
                // If the lease is lost, the rest of the lane learns it by itself.
                if !error.is_stale() {
                    self.context.store_failed(&error);
                }
                Look::Failed
            }
            None => Look::Failed,
        }
    }

    /// Takes one look and hands over what it finds, until `ended`. The oldest letters come first.
    /// For each failed look before, one group of letters moves to the end, because it may be the
    /// reason that the sink looks down.
    async fn hand_over(&self, sink: &DeadLetterSink, failures: usize, ended: &CancellationToken) -> Result<Look> {
        let (context, lease) = (&*self.context, &self.lease.lease);
        let letters = sink.store.dead_letters(lease, context.settings.batch).await?;
        let (unreadable, letters): (Vec<_>, Vec<_>) = letters.into_iter().partition(|it| it.unreadable.is_some());
        if !unreadable.is_empty() {
            warn!(subscription = context.name(), events = unreadable.len(), "dead events unreadable, no dead letter");
            let done = |it: &DeadLetter| handover(&it.delivery, None);
            sink.store.hand_over(lease, &unreadable.iter().map(done).collect::<Vec<_>>()).await?;
        }
        let capabilities = sink.sink.capabilities();
        // Without `prefix`, one call may not hold several events of a key.
        let batch_max = if capabilities.prefix { capabilities.batch_max.max(1) } else { 1 };
        let mut look = if unreadable.is_empty() { Look::Nothing } else { Look::HandedOver };
        // The death that each letter belongs to, in the same order as the deliveries to send.
        let (mut deaths, mut sent): (Vec<_>, Vec<_>) =
            letters.into_iter().map(|it| (handover(&it.delivery, None), it.into_delivery(lease))).unzip();
        let group = batch_max.saturating_mul(capabilities.concurrency.max(1));
        let failed_at = group.saturating_mul(failures) % sent.len().max(1);
        deaths.rotate_left(failed_at);
        sent.rotate_left(failed_at);
        let (mut down_groups, mut taken_at) = (0, context.clock.monotonic());
        for (deaths, sent) in deaths.chunks(group).zip(sent.chunks(group)) {
            let now = context.clock.monotonic();
            if ended.is_cancelled() || !self.lease.is_safe(now) {
                break;
            }
            if self.is_bounded && now.saturating_sub(taken_at) >= RUN_IN_VAIN_MAX {
                return Ok(Look::Failed);
            }
            let outcomes = self.send_letters(sink, batch_max, deaths, sent).await?;
            if outcomes.iter().any(Outcome::is_delivered) {
                // While the sink takes other letters, a failure is the letter's own.
                context.metrics.dead_letters_fail.works();
                (look, down_groups, taken_at) = (Look::HandedOver, 0, context.clock.monotonic());
            } else if outcomes.iter().any(|it| matches!(it, Outcome::Unavailable { .. } | Outcome::Ambiguous { .. })) {
                down_groups += 1;
                if look == Look::Nothing {
                    look = Look::Failed;
                }
            } else {
                down_groups = 0;
            }
            if outcomes.iter().any(|it| matches!(it, Outcome::Throttled { .. })) {
                return Ok(Look::Failed);
            }
            if down_groups >= DOWN_GROUPS {
                break;
            }
        }
        Ok(look)
    }

    /// Sends one group of letters, and writes what came of each.
    async fn send_letters(
        &self,
        sink: &DeadLetterSink,
        batch_max: usize,
        deaths: &[Handover],
        sent: &[Delivery],
    ) -> Result<Vec<Outcome>> {
        let context = &*self.context;
        let calls = sent.chunks(batch_max).map(|call| {
            let call: Vec<&Delivery> = call.iter().collect();
            async move { guarded(context, &*sink.sink, &call).await }
        });
        let outcomes: Vec<Outcome> = join_all(calls).await.into_iter().flatten().collect();
        let delivered = outcomes.iter().filter(|outcome| outcome.is_delivered()).count();
        let handovers: Vec<_> = deaths
            .iter()
            .zip(&outcomes)
            .filter_map(|(death, outcome)| self.judge_letter(*death, outcome, delivered > 0))
            .collect();
        if !handovers.is_empty() {
            sink.store.hand_over(&self.lease.lease, &handovers).await?;
        }
        context.metrics.dead_letters.fetch_add(delivered as u64, Ordering::Relaxed);
        context.metrics.dead_letters_failed.fetch_add((outcomes.len() - delivered) as u64, Ordering::Relaxed);
        Ok(outcomes)
    }

    /// Returns what to write about a letter; `None` writes nothing, because the whole sink is down.
    /// A letter never dies: it stays until it is handed over.
    fn judge_letter(&self, death: Handover, outcome: &Outcome, takes_others: bool) -> Option<Handover> {
        let (code, error, again) = match outcome {
            Outcome::Delivered { .. } => return Some(death),
            Outcome::Unavailable { code, error } => (code, error, takes_others.then_some(PUT_OFF)),
            Outcome::Throttled { code, error, .. } => (code, error, None),
            Outcome::Retry { code, error, .. }
            | Outcome::ServerError { code, error, .. }
            | Outcome::Ambiguous { code, error, .. }
            | Outcome::Dead { code, error }
            | Outcome::Gone { code, error } => (code, error, Some(PUT_OFF)),
        };
        self.context.metrics.dead_letters_fail.failed(self.context.clock.now(), code);
        if let Some(left_out) = self.context.log_line("dead letter not handed over", code) {
            let (subscription, seq) = (self.context.name(), death.seq.0);
            warn!(subscription, seq, code = &**code, why = error, left_out, "dead letter not handed over");
        }
        again.map(|again| Handover { again: Some(again), ..death })
    }
}

fn handover(delivery: &Delivery, again: Option<Duration>) -> Handover {
    Handover { seq: delivery.seq, replay: delivery.replay, again }
}
