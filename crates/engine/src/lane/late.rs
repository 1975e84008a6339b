//! Calls that outlive their batch: a slow event must not hold up the keys behind it.
//!
//! When nothing else of a batch can be done, its slow events leave the stream as uncounted retries with code `in_flight`, due
//! only after the call's time limit, and the batch settles. The call goes on; its outcome is written to the row like that of a
//! due one. A crash in between costs a repetition, as with any event in flight: whoever takes the lane next finds such rows due at once.

use std::borrow::Cow;
use std::collections::HashSet;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use postbox_core::{Batch, Delivery, Disposition, Entry, Outcome, Result, Seq, Settlement};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::Lane;
use super::call::{Call, Returned};

/// How long a batch waits for its last calls before they go on without it. Above what a healthy destination takes, far
/// below what a person notices; a sink that is always slower pays one row an event at a rate where that is nothing.
pub(super) const LATE_AFTER: Duration = Duration::from_millis(250);
/// Between a call's own time limit and the moment its row is due, should its outcome never be written.
const LATE_MARGIN: Duration = Duration::from_secs(1);

/// The calls of a lane that outlived their batch. Dropping it drops them.
#[derive(Default)]
pub(super) struct Late {
    calls: Mutex<JoinSet<Returned>>,
    seqs: Mutex<HashSet<Seq>>,
    /// Payload bytes of the batches that these calls keep in memory.
    bytes: Arc<AtomicUsize>,
    added: Notify,
}

/// The part of a batch in `bytes`, until the last of its calls is back.
struct Weight(Arc<AtomicUsize>, usize);

impl Drop for Weight {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::AcqRel);
    }
}

impl Late {
    pub(super) fn len(&self) -> usize {
        lock(&self.calls).len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Acquire)
    }

    pub(super) fn holds(&self, seq: Seq) -> bool {
        let seqs = lock(&self.seqs);
        !seqs.is_empty() && seqs.contains(&seq)
    }

    /// Takes over calls whose events have their rows by now, and which keep `bytes` of payload in memory.
    pub(super) fn adopt(&self, calls: Vec<Call>, seqs: impl Iterator<Item = Seq>, bytes: usize) {
        if calls.is_empty() {
            return;
        }
        lock(&self.seqs).extend(seqs);
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

    /// The next call that came back; waits for one to be adopted if there is none. Cancel-safe.
    pub(super) async fn next(&self) -> Returned {
        loop {
            match self.next_of_these().await {
                Some(returned) => return returned,
                None => self.added.notified().await,
            }
        }
    }

    /// The next call that came back; `None` if there is none in flight. Cancel-safe.
    pub(super) async fn next_of_these(&self) -> Option<Returned> {
        poll_fn(|context| {
            loop {
                match lock(&self.calls).poll_join_next(context) {
                    Poll::Ready(Some(Ok(returned))) => return Poll::Ready(Some(returned)),
                    // Panics of the sink are caught inside the call; this was aborted, and its row becomes due by itself.
                    Poll::Ready(Some(Err(_))) => {}
                    Poll::Ready(None) => return Poll::Ready(None),
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await
    }

    fn forget(&self, returned: &Returned) {
        let mut seqs = lock(&self.seqs);
        for place in &returned.places {
            seqs.remove(&returned.batch.deliveries[*place].seq);
        }
    }
}

impl Lane {
    /// The disposition of an event whose call goes on without its batch.
    pub(super) fn in_flight(&self) -> Disposition {
        Disposition::Retry {
            after: self.shared.settings.deliver_timeout.saturating_add(LATE_MARGIN),
            counted: false,
            code: Cow::Borrowed(Disposition::IN_FLIGHT),
            error: "the destination has not answered yet".to_owned(),
        }
    }

    /// Writes down the outcomes of a call that outlived its batch.
    pub(super) async fn settle_late(&self, returned: Returned) -> Result<()> {
        let shared = &*self.shared;
        self.late.forget(&returned);
        let Returned { batch, places, outcomes } = &returned;
        let mut delivered = 0;
        let mut entries: Vec<Entry<'_>> = Vec::with_capacity(places.len());
        for (place, outcome) in places.iter().zip(outcomes) {
            let delivery = &batch.deliveries[*place];
            if let Outcome::Delivered { duplicate: true } = outcome {
                shared.metrics.duplicate(&delivery.event);
            }
            let disposition = self.late_disposition(delivery, outcome);
            match disposition {
                Disposition::Delivered => delivered += 1,
                _ => shared.record(delivery, &disposition),
            }
            entries.push(Entry { delivery, disposition });
        }
        shared.metrics.add(&shared.metrics.delivered, delivered);
        let hold_keys = shared.holds_keys();
        self.settle(Settlement { position: None, entries, rewind: false, hold_keys }).await?;
        // The next of the key may have been released.
        self.alarm.ring_in(shared.clock.monotonic(), Duration::ZERO);
        Ok(())
    }

    fn late_disposition(&self, delivery: &Delivery, outcome: &Outcome) -> Disposition {
        let shared = &*self.shared;
        match outcome {
            Outcome::Unavailable { code, error, after } => {
                if let Some(disposition) = shared.found_down(delivery, code, error, *after) {
                    return disposition;
                }
            }
            Outcome::Gone { code, error } => shared.set_gone(format!("{code}: {error}")),
            outcome => shared.answered(outcome),
        }
        shared.decide(delivery, outcome)
    }

    /// Waits for the calls that outlived their batches, for a graceful end of the lane.
    pub(super) async fn finish_late(&self) -> Result<()> {
        loop {
            let returned = tokio::select! {
                biased;
                () = self.held.abandon.cancelled() => return Ok(()),
                returned = self.late.next_of_these() => returned,
            };
            match returned {
                Some(returned) => self.settle_late(returned).await?,
                None => return Ok(()),
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The payload bytes of a batch.
pub(super) fn weigh(batch: &Batch) -> usize {
    batch.deliveries.iter().map(|delivery| delivery.event.payload.len()).sum()
}
