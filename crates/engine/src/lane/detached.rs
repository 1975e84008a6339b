//! Calls that outlive their batch, so that a slow event does not hold up the keys behind it.
//!
//! When nothing else of a batch can be done, its slow events leave the stream as
//! [`Disposition::InFlight`], due only after the call's time limit, and the batch settles. The call
//! goes on, and its outcome is written to the row as for any due row. A crash in between causes a
//! repetition, as for any event in flight: the next holder of the lane finds such rows due at once.

use std::collections::HashSet;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use postbox_core::{Batch, Disposition, Entry, Result, Seq, Settlement, lock};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::Lane;
use super::call::{Call, Returned};
use super::verdicts::Verdicts;

/// How long a batch waits for its last calls before they are detached. Longer than a healthy
/// destination takes, and far shorter than a person notices.
pub(super) const DETACH_AFTER: Duration = Duration::from_millis(250);
/// How long after a call's time limit its row comes due, in case nobody writes the outcome.
pub(super) const DUE_MARGIN: Duration = Duration::from_secs(1);

/// The detached calls of a lane. Dropping this drops the calls.
#[derive(Default)]
pub(super) struct DetachedCalls {
    calls: Mutex<JoinSet<Returned>>,
    seqs: Mutex<HashSet<Seq>>,
    /// Payload bytes of the batches that these calls keep in memory.
    bytes: Arc<AtomicUsize>,
    added: Notify,
}

/// The share of one batch in `bytes`, held until the last of its calls is back.
struct Weight(Arc<AtomicUsize>, usize);

impl Drop for Weight {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::AcqRel);
    }
}

/// Events whose calls end with it, unless they were detached.
struct Noted<'a>(&'a DetachedCalls, Vec<Seq>);

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        let mut seqs = lock(&self.0.seqs);
        self.1.iter().for_each(|seq| _ = seqs.remove(seq));
    }
}

impl DetachedCalls {
    pub(super) fn len(&self) -> usize {
        lock(&self.calls).len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    pub(super) fn contains(&self, seq: Seq) -> bool {
        lock(&self.seqs).contains(&seq)
    }

    /// Notes the events in flight of a batch, without those whose earlier call still goes on.
    fn note(&self, batch: &Batch, verdicts: &Verdicts) -> Noted<'_> {
        let mut seqs = lock(&self.seqs);
        let in_flight = verdicts.exceptions().filter(|(_, it)| matches!(it, Disposition::InFlight { .. }));
        let noted = in_flight.map(|(place, _)| batch.deliveries[place].seq).filter(|seq| seqs.insert(*seq));
        Noted(self, noted.collect())
    }

    fn add(&self, calls: Vec<Call>, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
        let weight = Arc::new(Weight(self.bytes.clone(), bytes));
        let mut tasks = lock(&self.calls);
        for call in calls {
            let weight = weight.clone();
            tasks.spawn(async move {
                let _weight = weight;
                call.await
            });
        }
        self.added.notify_one();
    }

    /// Returns the next call that came back. Waits for one to be added if there is none.
    /// Cancel-safe.
    pub(super) async fn next(&self) -> Returned {
        loop {
            match self.next_in_flight().await {
                Some(returned) => return returned,
                None => self.added.notified().await,
            }
        }
    }

    /// Returns the next call that came back; `None` if none is in flight. Cancel-safe.
    pub(super) async fn next_in_flight(&self) -> Option<Returned> {
        poll_fn(|context| {
            loop {
                match lock(&self.calls).poll_join_next(context) {
                    Poll::Ready(Some(Ok(returned))) => return Poll::Ready(Some(returned)),
                    // Aborted: panics of the sink are caught inside the call. Its row comes due
                    // later.
                    Poll::Ready(Some(Err(_))) => {}
                    Poll::Ready(None) => return Poll::Ready(None),
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await
    }

    /// Returns all calls that are back by now.
    pub(super) fn returned(&self) -> impl Iterator<Item = Returned> {
        std::iter::from_fn(|| lock(&self.calls).try_join_next()).filter_map(Result::ok)
    }

    fn forget(&self, returned: &Returned) {
        let mut seqs = lock(&self.seqs);
        for place in &returned.places {
            seqs.remove(&returned.batch.deliveries[*place].seq);
        }
    }
}

impl Lane {
    /// Returns what is written for an event whose call goes on without its batch.
    pub(super) fn in_flight(&self) -> Disposition {
        Disposition::InFlight { after: self.context.settings.deliver_timeout.saturating_add(DUE_MARGIN) }
    }

    /// Settles a batch and lets its calls go on without it.
    ///
    /// They are noted before their rows are in the store: a person may make such a row due before
    /// the answer is here, and it must not be sent beside its call.
    pub(super) async fn settle_and_detach(
        &self,
        settlement: Settlement<'_>,
        batch: &Batch,
        verdicts: &Verdicts,
        calls: Vec<Call>,
    ) -> Result<()> {
        if calls.is_empty() {
            return self.settle(settlement).await;
        }
        let mut noted = self.detached.note(batch, verdicts);
        self.settle(settlement).await?;
        noted.1.clear();
        self.detached.add(calls, payload_bytes(batch));
        Ok(())
    }

    /// Writes the outcomes of a detached call, and of any others that are back by now.
    pub(super) async fn settle_detached(&self, first: Returned) -> Result<()> {
        let context = &*self.context;
        let mut returned = vec![first];
        returned.extend(self.detached.returned());
        returned.iter().for_each(|returned| self.detached.forget(returned));
        let (mut entries, now): (Vec<Entry<'_>>, _) = (Vec::new(), context.clock.now());
        for Returned { batch, places, outcomes, sent, took } in &mut returned {
            for (place, outcome) in places.iter().zip(outcomes.drain(..)) {
                let delivery = &batch.deliveries[*place];
                let verdict = context.judge(delivery, outcome, *sent, *took);
                context.record(delivery, &verdict, *sent, now);
                entries.push(Entry { delivery, disposition: verdict.into_disposition() });
            }
        }
        let hold_keys = context.holds_keys();
        self.settle(Settlement { position: None, entries, rewind: false, hold_keys }).await?;
        // The next event of the key may have been released.
        self.due_timer.schedule(context.clock.monotonic(), Duration::ZERO);
        Ok(())
    }

    /// Waits for the detached calls, for a graceful end of the lane.
    pub(super) async fn finish_detached(&self) -> Result<()> {
        let abandon = &self.lease.abandon;
        while let Some(Some(returned)) = abandon.run_until_cancelled(self.detached.next_in_flight()).await {
            self.settle_detached(returned).await?;
        }
        Ok(())
    }
}

pub(super) fn payload_bytes(batch: &Batch) -> usize {
    batch.deliveries.iter().map(|delivery| delivery.event.payload.len()).sum()
}
