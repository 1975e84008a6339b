//! Sends suspicious events alone, to find one that ends its relay: for example a handler that
//! aborts, or a sink that makes the program run out of memory.
//!
//! Such an event ends the process before anything is written about it, and the next holder of the
//! lane sends it again. After several holders in a row vanished
//! ([`Lease::crashes`](postbox_core::Lease::crashes)), the next one is *careful*. It sends whatever
//! may have been in flight one event at a time: the first batch of the stream, and the rows that
//! are due. If the event is in a later batch, the next crash brings it into reach. Before each
//! call, a row records that the event is sent alone ([`Disposition::Alone`]). If the call ends the
//! relay, that row remains, and the next holder counts one more crash for it ([`Batch::crashes`]).
//! From then on the event always goes alone. It is dead after the third crash. A crash ends every
//! lane of the process, so only one of them sends an event alone at a time ([`Turns`]).
//!
//! The rest of the stream goes on meanwhile. On the happy path nothing extra is written.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use postbox_core::{Batch, Delivery, Destination, Disposition, Entry, Key, Result, Settlement, lock};
use tokio::sync::{Mutex, OwnedMutexGuard, OwnedSemaphorePermit};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Lane;
use super::detached::DUE_MARGIN;
use super::dispatch::DispatchLimits;

/// Number of holders in a row that must vanish before the next is careful. A lower number would
/// slow down lanes whose relays were killed by a person or lost with their machine.
const HOLDERS_CRASHED: u32 = 3;
/// Number of crashes with an event sent alone after which it is dead. A kill at the wrong moment
/// may cost an innocent event one of them, hardly two.
const EVENT_CRASHES_MAX: u32 = 3;

/// Lets one event at a time be sent alone, so that a crash is counted for one event only. All
/// relays of a process must share it.
#[derive(Debug, Clone, Default)]
pub struct Turns(Arc<Mutex<()>>);

impl Turns {
    /// Returns that of this process.
    pub(crate) fn of_process() -> Self {
        static TURNS: LazyLock<Turns> = LazyLock::new(Turns::default);
        TURNS.clone()
    }
}

/// What a lane still has to send of that which vanished holders may have had in flight. A careful
/// lane sends it alone.
pub(super) struct Careful {
    is_careful: bool,
    /// Whether the next batch of the stream may have been in flight at a former holder. A careful
    /// lane sets it aside, and this stays true until its rows are written.
    stream: AtomicBool,
    /// Upper bound of the due rows left to send.
    rows: AtomicUsize,
    /// The permit for the call that is about to be made.
    permit: std::sync::Mutex<Option<OwnedSemaphorePermit>>,
}

impl Careful {
    /// Plans for a lease with `crashes` vanished holders, each with batches of at most `events` in
    /// flight. That is one batch of the stream, which becomes due rows, and one batch of due rows.
    pub(super) fn new(crashes: u32, events: usize) -> Self {
        let rows = if crashes > 0 { events.saturating_mul(2) } else { 0 };
        Self {
            is_careful: crashes >= HOLDERS_CRASHED,
            stream: AtomicBool::new(crashes > 0),
            rows: AtomicUsize::new(rows),
            permit: std::sync::Mutex::default(),
        }
    }

    /// Returns whether the next batch of the stream must be set aside.
    pub(super) fn has_stream(&self) -> bool {
        self.is_careful && self.stream.load(Ordering::Acquire)
    }

    /// Notes that this batch of the stream went out.
    pub(super) fn sent_stream(&self, batch: &Batch) {
        if !batch.deliveries.is_empty() {
            self.stream_done();
        }
    }

    /// Notes that the rows of that batch are written, or that there is none.
    pub(super) fn stream_done(&self) {
        self.stream.store(false, Ordering::Release);
    }

    /// Returns whether every due row goes alone.
    pub(super) fn has_rows(&self) -> bool {
        self.is_careful && self.rows.load(Ordering::Acquire) > 0
    }

    fn sent_row(&self) {
        _ = self.rows.fetch_update(Ordering::AcqRel, Ordering::Acquire, |rows| rows.checked_sub(1));
    }

    /// Notes that no row is due any more, by a look that began after [`Self::stream_done`]: an
    /// earlier one may have missed the rows that are written there.
    pub(super) fn no_rows(&self) {
        self.rows.store(0, Ordering::Release);
    }

    /// Returns the permit that the event to be sent alone has waited for.
    pub(super) fn take_permit(&self) -> Option<OwnedSemaphorePermit> {
        lock(&self.permit).take()
    }

    /// Returns whether everything was sent that may have been in flight at a former holder.
    pub(super) fn is_over(&self) -> bool {
        !self.stream.load(Ordering::Acquire) && self.rows.load(Ordering::Acquire) == 0
    }
}

impl Lane {
    pub(super) fn log_careful(&self) {
        let lease = &self.lease.lease;
        if self.careful.is_careful {
            warn!(
                subscription = self.context.name(),
                lane = lease.lane,
                crashes = lease.crashes,
                "relays crashed, events go alone"
            );
        }
    }

    /// Takes out of a batch of due rows one event that must go alone. Other such events stay in the
    /// store as they are, and so do the events behind any of them in its key.
    pub(super) fn set_apart(&self, batch: Batch) -> (Batch, Option<Arc<Batch>>) {
        let careful = self.careful.has_rows();
        if !careful && batch.crashes.is_empty() {
            return (batch, None);
        }
        let mut alone = None;
        let mut together = Vec::with_capacity(batch.deliveries.len());
        let (mut keys_together, mut keys_apart) = (HashSet::<Key>::new(), HashSet::<Key>::new());
        for delivery in batch.deliveries {
            let key = delivery.event.key.as_ref().filter(|_| self.context.holds_keys());
            let crashes = batch.crashes.get(&delivery.seq).copied().unwrap_or_default();
            let may_crash = (careful || crashes > 0)
                && crashes < EVENT_CRASHES_MAX
                && !batch.unreadable.contains_key(&delivery.seq)
                && !self.detached.contains(delivery.seq);
            if key.is_some_and(|key| keys_apart.contains(key)) {
                continue;
            }
            if !may_crash {
                keys_together.extend(key.cloned());
                together.push(delivery);
                continue;
            }
            keys_apart.extend(key.cloned());
            if alone.is_none() && key.is_none_or(|key| !keys_together.contains(key)) {
                let expires = batch.expires.clone();
                alone = Some(Arc::new(Batch { deliveries: vec![delivery], expires, ..Batch::default() }));
            }
        }
        (Batch { deliveries: together, ..batch }, alone)
    }

    /// Sends one due row alone, after writing that it is sent alone. Nothing is waited for between
    /// the two: a kill meanwhile would count a crash against an event that was never sent.
    pub(super) async fn deliver_alone(&self, batch: Arc<Batch>, probe: bool, round: &CancellationToken) -> Result<()> {
        let context = &self.context;
        let Some((_turn, permit)) = self.take_turn(round).await else { return Ok(()) };
        let limits = DispatchLimits { calls_max: 1, detach_after: None, alone: true, ..self.limits(probe) };
        let may_send = match &context.destination {
            Destination::Sink(_) => self.may_send(limits, round),
            Destination::Apply(_) => self.may_apply(round),
        };
        if !may_send {
            return Ok(());
        }
        // If a crash leaves rows in several lanes, they must not all come due at the same moment:
        // otherwise an innocent event would be in flight each time the faulty one is sent.
        let spread = context.settings.deliver_timeout.mul_f64(context.random.unit());
        let after = context.settings.deliver_timeout.saturating_add(DUE_MARGIN).saturating_add(spread);
        let written = |disposition| {
            let entries = vec![Entry { delivery: &batch.deliveries[0], disposition }];
            Settlement { position: None, entries, rewind: false, hold_keys: context.holds_keys() }
        };
        self.settle(written(Disposition::Alone { after })).await?;
        self.careful.sent_row();
        *lock(&self.careful.permit) = Some(permit);
        let ended = self.deliver_due(&batch, limits, round).await;
        // A handler in a transaction needs none.
        drop(self.careful.take_permit());
        match ended {
            // The call came back or was never made. Either way the event did not end this relay.
            Err(error) if !error.is_lease_lost() => {
                _ = self.settle(written(Disposition::NotSent)).await;
                Err(error)
            }
            ended => ended.map(drop),
        }
    }

    /// Waits for the rate, the turn and a permit, and spends the rate; `None` if the round ended
    /// first.
    ///
    /// The rate comes first, because it may take minutes, and the searches of all other
    /// subscriptions wait for the turn. A permit comes back with the next call that ends.
    async fn take_turn(&self, round: &CancellationToken) -> Option<(OwnedMutexGuard<()>, OwnedSemaphorePermit)> {
        let (limiter, clock) = (&self.context.limiter, &self.context.clock);
        loop {
            while let Some(wait) = limiter.wait(clock.monotonic(), true) {
                round.run_until_cancelled(clock.sleep(wait)).await?;
            }
            let turn = round.run_until_cancelled(self.context.turns.0.clone().lock_owned()).await?;
            let permit = round.run_until_cancelled(limiter.permit()).await??;
            let now = clock.monotonic();
            if limiter.wait(now, true).is_none() {
                limiter.spend(1, now, true);
                return Some((turn, permit));
            }
        }
    }

    /// Returns the dead disposition for a due row whose relays crashed too often.
    pub(super) fn dead_of_crashes(&self, batch: &Batch, delivery: &Delivery) -> Option<Disposition> {
        let crashes = batch.crashes.get(&delivery.seq).filter(|crashes| **crashes >= EVENT_CRASHES_MAX)?;
        let error = format!(
            "{crashes} relays ended while they sent this event alone; find out why (the log of the program, its memory), \
             then: postbox retry {}",
            delivery.event.id
        );
        Some(self.context.dead(delivery, Disposition::RELAY_CRASHED.into(), &error, None))
    }
}
