//! Batches of an apply subscription: the handler runs inside the transaction that settles.
//!
//! If the answer of a transaction is lost, it may have committed. Repeating it blindly could run a
//! handler twice. Instead the lane is given back and read again, which skips whatever committed.
//!
//! A handler that commits by itself leaves outcomes that only this relay knows. They are written
//! under the same lease, because another relay would run those handlers again.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Mutex;
use std::time::Duration;

use futures::FutureExt;
use postbox_core::kit::panic_text;
use postbox_core::{
    Apply, Batch, Delivery, Disposition, Entry, Error, ErrorKind, Key, Outcome, Result, Seq, Settlement, lock,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Lane;
use super::call::watched;
use super::judge::Verdict;
use super::verdicts::{Verdicts, holds};
use crate::failures::Sent;
use crate::log_lines::rounded;
use crate::metrics::Gauge;

/// A batch that is being applied, one transaction per chunk.
struct Applying<'a> {
    apply: &'a dyn Apply,
    batch: &'a Batch,
    verdicts: &'a mut Verdicts,
    /// Keys with an event in this batch that holds back later ones.
    held: HashSet<&'a Key>,
    round: &'a CancellationToken,
}

impl Lane {
    /// Applies and settles a batch in chunks. Returns false if the round ended first. Then the rest
    /// of a stream batch must be read again, and due rows stay due.
    pub(super) async fn apply_batch(
        &self,
        apply: &dyn Apply,
        batch: &Batch,
        verdicts: &mut Verdicts,
        round: &CancellationToken,
    ) -> Result<bool> {
        let count = batch.deliveries.len();
        let mut applying = Applying { apply, batch, verdicts, held: HashSet::new(), round };
        let mut from = 0;
        loop {
            // Outcomes that only this relay knows are written together, even after the round.
            let is_known = |place: &usize| self.context.apply.known(&batch.deliveries[*place]).is_some();
            let needs_no_call = |place: &usize| !applying.verdicts.is_waiting(*place) || is_known(place);
            let decided = (from..count).take_while(needs_no_call).count();
            let known = if (from..from + decided).any(|place| is_known(&place)) { decided } else { 0 };
            if from < count && known == 0 && !self.may_apply(round) {
                return Ok(false);
            }
            let size = if known > 0 { known } else { self.context.apply.chunk() };
            let to = (from + size).min(count);
            let seq = |end| if to == count { Some(end) } else { batch.deliveries.get(to - 1).map(|last| last.seq) };
            if !self.apply_chunk(&mut applying, from..to, batch.end.and_then(seq)).await? {
                continue;
            }
            from = to;
            if from == count {
                return Ok(true);
            }
        }
    }

    /// The check before each transaction. A lease that ran out ends the round. Otherwise the lane
    /// would read and rewind again and again until another relay takes it.
    pub(super) fn may_apply(&self, round: &CancellationToken) -> bool {
        if self.context.health.is_gone() {
            // Otherwise due rows would be read again and again, and the pause never be written.
            round.cancel();
        }
        if round.is_cancelled() {
            return false;
        }
        let is_safe = self.lease.is_safe(self.context.clock.monotonic());
        if !is_safe {
            self.lease.run_out(&self.context);
        }
        is_safe
    }

    /// Runs one transaction: the deliveries of `range` that are ready, and entries for the others.
    /// Returns false if a handler ended it: nothing is settled, and the caller begins there again.
    async fn apply_chunk(
        &self,
        applying: &mut Applying<'_>,
        range: Range<usize>,
        position: Option<Seq>,
    ) -> Result<bool> {
        let context = &*self.context;
        let batch = applying.batch;
        let sent = context.health.sent();
        let mut ready = Vec::with_capacity(range.len());
        for place in range.clone() {
            let delivery = &batch.deliveries[place];
            if !applying.verdicts.is_waiting(place) {
                continue;
            }
            if self.is_expired(batch, delivery) {
                self.give_up_expired(applying.verdicts, place, delivery);
            } else if delivery.event.key.as_ref().is_some_and(|key| applying.held.contains(key)) {
                applying.verdicts.defer(place, Disposition::Block);
            } else if let Some((outcome, took)) = context.apply.known(delivery) {
                self.applied(applying, place, context.judge(delivery, outcome, sent, took), sent);
            } else {
                ready.push(place);
            }
        }
        let refs: Vec<&Delivery> = ready.iter().map(|place| &batch.deliveries[*place]).collect();
        let entry = |place: usize| {
            let disposition = applying.verdicts.decided(place, batch.end.is_none())?;
            Some(Entry { delivery: &batch.deliveries[place], disposition })
        };
        let entries: Vec<Entry<'_>> = range.clone().filter_map(entry).collect();
        let settlement = Settlement { position, entries, rewind: false, hold_keys: context.holds_keys() };
        if refs.is_empty() {
            let settled = self.settle(settlement).await;
            match &settled {
                Ok(()) => context.apply.forget(&batch.deliveries[range]),
                // The store refuses what the relay writes, too: no event is at fault.
                Err(error) if error.is_permanent() => context.apply.forget_failed(error.code()),
                Err(_) => {}
            }
            return settled.map(|()| true);
        }
        let judged = self.apply_in_time(applying.apply, &refs, settlement.clone(), sent).await?;
        let Some(judged) = judged else { return Ok(false) };
        self.settled(&settlement);
        context.apply.forget(&batch.deliveries[range]);
        for (place, verdict) in ready.into_iter().zip(judged) {
            match verdict {
                Some(verdict) => self.applied(applying, place, verdict, sent),
                // The handler did not run, because an earlier event of its key failed in this
                // transaction.
                None => applying.defer_behind(place),
            }
        }
        Ok(true)
    }

    /// Runs the transaction under its time limit. Returns a verdict for each delivery, `None` if
    /// its handler did not run; instead of them `None` if a handler ended the transaction. Any
    /// other failure gives the lane back.
    async fn apply_in_time(
        &self,
        apply: &dyn Apply,
        refs: &[&Delivery],
        settlement: Settlement<'_>,
        sent: Sent,
    ) -> Result<Option<Vec<Option<Verdict>>>> {
        let context = &*self.context;
        let _in_flight = Gauge::up(&context.metrics.in_flight, refs.len());
        let begun = context.clock.monotonic();
        let transaction = Transaction { lane: self, refs, sent, begun, judged: Mutex::default() };
        let ended = transaction.run(apply, settlement).await;
        let is_refused = matches!(ended, Ended::Refused(_));
        let verdicts = transaction.conclude(ended);
        if is_refused {
            context.clock.sleep(context.store_backoff(1)).await;
        }
        verdicts
    }

    /// Acts on a verdict that has been written, so that deliveries after it are planned correctly.
    fn applied(&self, applying: &mut Applying<'_>, place: usize, verdict: Verdict, sent: Sent) {
        let context = &*self.context;
        let delivery = &applying.batch.deliveries[place];
        context.record(delivery, &verdict, sent, context.clock.now());
        match &verdict {
            Verdict::Delivered { .. } => return applying.verdicts.delivered(place),
            Verdict::Outage { .. } | Verdict::Gone { .. } => applying.round.cancel(),
            Verdict::Failed(_) | Verdict::Refused(_) => {}
        }
        let disposition = verdict.into_disposition();
        if let Some(row) = disposition.retrying() {
            self.due_timer.schedule(context.clock.monotonic(), row.after);
        }
        if holds(&disposition) && context.holds_keys() {
            applying.held.extend(&delivery.event.key);
        }
        applying.verdicts.failed(place, disposition);
    }
}

impl Applying<'_> {
    fn defer_behind(&mut self, place: usize) {
        self.held.extend(&self.batch.deliveries[place].event.key);
        self.verdicts.defer(place, Disposition::Block);
    }
}

/// How a transaction ended.
enum Ended {
    Committed(Vec<Option<Outcome>>),
    /// It was stale; and the longest time for which a handler blocked its thread.
    Stale(Error, Duration),
    /// A handler lost its connection.
    Lost(Error),
    /// A handler committed or rolled back.
    ByHandler(Error),
    /// The store failed or refused it, and is asked again after a pause.
    Refused(Error),
    /// The store refuses everything: a person must act.
    Failed(Error),
    Panicked(String),
    TimedOut,
    /// It was dropped, because the lane ends.
    Dropped,
}

/// One transaction of a lane.
struct Transaction<'a> {
    lane: &'a Lane,
    refs: &'a [&'a Delivery],
    sent: Sent,
    begun: Duration,
    /// The deliveries whose handlers have run.
    judged: Mutex<HashMap<Seq, (Outcome, Verdict)>>,
}

impl Transaction<'_> {
    /// Runs it until it ends, its time is over, or its lane is to be dropped.
    async fn run(&self, apply: &dyn Apply, settlement: Settlement<'_>) -> Ended {
        let (context, lease) = (&*self.lane.context, &*self.lane.lease);
        let decide = |delivery: &Delivery, outcome: &Outcome| {
            let verdict = self.judge(delivery, outcome.clone());
            lock(&self.judged).insert(delivery.seq, (outcome.clone(), verdict.clone()));
            verdict.into_disposition()
        };
        let call = AssertUnwindSafe(async { apply.apply(&lease.lease, self.refs, settlement, &decide).await });
        let (answer, blocked) = tokio::select! {
            biased;
            () = lease.abandon.cancelled() => return Ended::Dropped,
            answer = watched(context, call.catch_unwind()) => answer,
            () = context.clock.sleep(context.settings.deliver_timeout) => return Ended::TimedOut,
        };
        context.metrics.calls.observe(self.took());
        match answer {
            Ok(Ok(outcomes)) => Ended::Committed(outcomes),
            Ok(Err(error)) if error.is_stale() => Ended::Stale(error, blocked),
            Ok(Err(error)) if error.is_transaction_lost() => Ended::Lost(error),
            Ok(Err(error)) if error.is_transaction_ended() => Ended::ByHandler(error),
            // No bounded run gives up here: the lane is given back after each failure anyway.
            // If a handler has run, a permanent error concerns its effect. A store that refuses
            // everything also refuses to settle that failure.
            Ok(Err(error))
                if context.lane_failed(lease.lease.lane, "apply", &error) || !lock(&self.judged).is_empty() =>
            {
                Ended::Refused(error)
            }
            Ok(Err(error)) => Ended::Failed(error),
            Err(panic) => Ended::Panicked(panic_text(&*panic).to_owned()),
        }
    }

    /// Acts on how it ended. Returns what [`Lane::apply_in_time`] does.
    fn conclude(&self, ended: Ended) -> Result<Option<Vec<Option<Verdict>>>> {
        let context = &*self.lane.context;
        let retry = |error: &Error| Outcome::retry(error.code().to_owned(), error.message());
        match ended {
            Ended::Committed(outcomes) => Ok(Some(self.committed(outcomes))),
            Ended::Stale(error, blocked) => {
                context.metrics.add(&context.metrics.stale_writes, 1);
                self.outlasted(blocked);
                Err(error)
            }
            Ended::Lost(error) => {
                self.failed(retry(&error));
                Err(dropped("a handler lost the transaction"))
            }
            Ended::ByHandler(error) => {
                let mut judged = lock(&self.judged);
                // Dead at once, because another attempt would repeat what this one committed.
                if judged.is_empty() {
                    self.failed(Outcome::dead(error.code().to_owned(), error.message()));
                }
                for delivery in self.refs {
                    if let Some((outcome, _)) = judged.remove(&delivery.seq) {
                        context.apply.ended(delivery, (outcome, self.took()));
                    }
                }
                Ok(None)
            }
            Ended::Refused(error) => {
                // Otherwise an event whose effect the store cannot commit would stop its lane.
                if error.kind() == ErrorKind::Internal || error.is_permanent() {
                    self.failed(retry(&error));
                    if self.refs.len() == 1 {
                        // The event fails, not the lane.
                        self.lane.works("apply");
                    }
                }
                Err(dropped(match error.is_permanent() {
                    true => "the store refused the transaction and rolled it back",
                    false => "the transaction's end is unknown",
                }))
            }
            Ended::Failed(error) => Err(error),
            Ended::Panicked(panic) => {
                if let Some(left_out) = context.log_line("apply panicked", "panic") {
                    warn!(subscription = context.name(), panic, left_out, "apply panicked");
                }
                self.failed(Outcome::retry("panic", panic));
                Err(dropped("the transaction panicked"))
            }
            Ended::TimedOut => {
                context.metrics.add(&context.metrics.timeouts, 1);
                let limit = context.settings.deliver_timeout;
                self.failed(Outcome::retry("timeout", format!("the transaction overran {limit:?}")));
                Err(dropped("the transaction overran its time"))
            }
            Ended::Dropped if self.lane.lease.is_lost() => {
                self.outlasted(Duration::ZERO);
                Err(Error::stale("apply"))
            }
            Ended::Dropped => Err(dropped("the lane ends")),
        }
    }

    fn committed(&self, outcomes: Vec<Option<Outcome>>) -> Vec<Option<Verdict>> {
        self.lane.works("apply");
        let has_failed = outcomes.iter().flatten().any(|outcome| matches!(outcome, Outcome::Retry { .. }));
        self.lane.context.apply.committed(self.refs.len(), has_failed, self.took());
        let mut judged = lock(&self.judged);
        let verdict = |(delivery, outcome): (&&Delivery, Option<Outcome>)| {
            let outcome = outcome?;
            let verdict = judged.remove(&delivery.seq).map(|(_, verdict)| verdict);
            Some(verdict.unwrap_or_else(|| self.judge(delivery, outcome)))
        };
        self.refs.iter().zip(outcomes).map(verdict).collect()
    }

    /// Counts a failure if the transaction, or a handler that blocked its thread, took so long that
    /// the lease ended. Otherwise the handlers would be called and rolled back without end. While a
    /// handler blocks the thread, the lease may not be renewed.
    fn outlasted(&self, blocked: Duration) {
        let half = self.lane.context.settings.lease_ttl / 2;
        let (what, lasted) = match blocked >= half {
            true => ("the handler blocked its thread for", blocked),
            false => ("the transaction took", self.took()),
        };
        if lasted >= half {
            let text = format!("{what} {:?}, until the lease had ended", rounded(lasted));
            self.failed(Outcome::retry("handler_outlived_lease", text));
        }
    }

    /// Notes that it failed because of a handler.
    fn failed(&self, outcome: Outcome) {
        self.lane.context.apply.failed(self.refs, (outcome, self.took()));
    }

    fn judge(&self, delivery: &Delivery, outcome: Outcome) -> Verdict {
        self.lane.context.judge(delivery, outcome, self.sent, self.took())
    }

    fn took(&self) -> Duration {
        self.lane.context.clock.monotonic().saturating_sub(self.begun)
    }
}

/// The lane must be given back and read again, although nothing is wrong with it.
fn dropped(why: &'static str) -> Error {
    Error::new(ErrorKind::Stale, "apply", "apply_dropped", why)
}
