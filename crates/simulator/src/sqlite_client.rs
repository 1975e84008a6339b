//! A SQLite store as a relay or a person calls it. Each call meets the faults of the plan, and
//! other calls may run between two of its jobs.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Acquired, Admin, Apply, Batch, BatchLimit, Change, Changed, Decide, Delivery, Disposition, Entry, Lease, Log,
    LogName, Maintain, Outcome, OwnerId, Pause, Prune, Replay, Replayed, ResetPlan, ResetTo, Result, Routed, Selection,
    Seq, Settlement, Subscription, SubscriptionName, lock,
};
use postbox_sqlite::SqliteStore;
use rusqlite::Transaction;

use crate::gate::Gate;
use crate::ledger::Who;
use crate::sqlite::{Opened, SqliteFile};
use crate::world::{SimWire, Trip, World, down};

pub(crate) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A call that can be repeated. It is late if its caller already has the answer, or an error.
pub(crate) struct SqliteCall {
    pub(crate) operation: &'static str,
    /// The argument says whether it is late. The result is `false` if the store went back
    /// meanwhile.
    pub(crate) execute: Box<dyn Fn(bool) -> Boxed<'static, bool> + Send + Sync>,
}

pub(crate) struct SqliteClient {
    wire: Arc<SimWire>,
    opened: Opened,
    handler: Arc<dyn Apply>,
}

impl SqliteClient {
    pub(crate) fn new(wire: Arc<SimWire>, file: &SqliteFile) -> Self {
        let opened = file.open();
        let (world, who) = (wire.world.clone(), wire.who);
        let handler = move |tx: &Transaction<'_>, delivery: &Delivery| {
            let insert = "INSERT INTO postbox_inbox (topic, version, payload) VALUES ('effect', ?1, '{}')";
            world.apply(who, delivery, |effect| tx.execute(insert, [effect.version]).is_ok())
        };
        Self { handler: opened.store.apply(handler), wire, opened }
    }

    /// Carries a call that the store may execute late, or twice. The argument of `make` says
    /// whether it is late; then the part on the caller's side must not be done.
    async fn carry<T: Send + 'static>(
        &self,
        operation: &'static str,
        lease: Option<&Lease>,
        make: impl Fn(SqliteStore, bool) -> Boxed<'static, Result<T>> + Send + Sync + 'static,
    ) -> Result<T> {
        let answer: Arc<Mutex<Option<Result<T>>>> = Arc::default();
        let (slot, opened) = (answer.clone(), self.opened.clone());
        let (world, who, called) = (self.wire.world.clone(), self.wire.who, lease.cloned());
        let execute = move |is_late| -> Boxed<'static, bool> {
            let call = make(opened.store.clone(), is_late);
            let (gate, slot) = (opened.gate.clone(), slot.clone());
            let (world, called) = (world.clone(), called.clone());
            Box::pin(async move {
                let done = step_through(&world, who, operation, called.as_ref(), &gate, call).await;
                let executed = done.is_some();
                *lock(&slot) = done;
                executed
            })
        };
        let call = SqliteCall { operation, execute: Box::new(execute) };
        self.wire.travel(Trip::Sqlite(Arc::new(call))).await?;
        let answer = lock(&answer).take();
        answer.unwrap_or_else(|| Err(down()))
    }

    /// Makes a call that needs its caller: instead of late it is lost, and it is never executed
    /// twice.
    async fn once<T>(&self, operation: &'static str, lease: &Lease, call: Boxed<'_, Result<T>>) -> Result<T> {
        let wire = &self.wire;
        let set_out = wire.set_out(operation).await?;
        let answer = step_through(&wire.world, wire.who, operation, Some(lease), &self.opened.gate, call).await;
        wire.come_back(&set_out, answer.is_some()).await?;
        answer.unwrap_or_else(|| Err(down()))
    }

    /// Reads the store, without faults.
    fn look<T>(&self, call: impl Future<Output = T>) -> T {
        self.opened.gate.run(call)
    }
}

/// Carries a call. Borrowed arguments are cloned once for the caller, and again for each time the
/// store executes it.
macro_rules! carry {
    ($client:ident, $operation:expr, $lease:expr, [$($own:ident),*], |$store:ident, $is_late:tt| $call:expr) => {{
        let (operation, of) = ($operation, $lease);
        $(let $own = $own.to_owned();)*
        let carried = $client.carry(operation, of, move |$store, $is_late| {
            $(let $own = $own.to_owned();)*
            Box::pin(async move { $call.await })
        });
        carried.await
    }};
}

/// Runs a call job by job. `None`: the store went back meanwhile.
async fn step_through<T>(
    world: &World,
    who: Who,
    operation: &'static str,
    lease: Option<&Lease>,
    gate: &Arc<Gate>,
    mut call: Boxed<'_, T>,
) -> Option<T> {
    let generation = world.generation();
    let mut observed = false;
    while generation == world.generation() {
        let stepped = gate.step(call.as_mut());
        let has_changed = world.server.has_changed();
        if has_changed {
            gate.committed.notify_waiters();
        }
        if has_changed || stepped.is_ready() && !observed {
            world.observe(operation, lease, who);
            observed = true;
        }
        match stepped {
            Poll::Ready(answer) => return Some(answer),
            // Its transaction is open while it calls back its caller.
            Poll::Pending if operation == "apply" => {}
            Poll::Pending => world.jitter(who).await,
        }
    }
    None
}

/// A settlement that can be repeated.
struct OwnedSettlement {
    position: Option<Seq>,
    entries: Vec<(Delivery, Disposition)>,
    rewind: bool,
    hold_keys: bool,
}

impl OwnedSettlement {
    fn new(settlement: Settlement<'_>) -> Self {
        let Settlement { position, entries, rewind, hold_keys } = settlement;
        let entries = entries.into_iter().map(|entry| (entry.delivery.clone(), entry.disposition)).collect();
        Self { position, entries, rewind, hold_keys }
    }

    fn lend(&self, rewind: bool) -> Settlement<'_> {
        let entries = self.entries.iter().map(|(delivery, it)| Entry { delivery, disposition: it.clone() });
        Settlement { position: self.position, entries: entries.collect(), rewind, hold_keys: self.hold_keys }
    }
}

#[async_trait]
impl Log for SqliteClient {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        carry!(self, "subscribe", None, [subscription], |store, _| store.subscribe(&subscription))
    }

    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        carry!(self, "acquire", None, [subscription, owner, held], |store, _| {
            store.acquire(&subscription, &owner, &held, ttl)
        })
    }

    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        carry!(self, "renew", Some(lease), [lease], |store, _| store.renew(&lease, ttl))
    }

    async fn release(&self, lease: &Lease) -> Result<()> {
        carry!(self, "release", Some(lease), [lease], |store, _| store.release(&lease))
    }

    async fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()> {
        carry!(self, "leave", None, [subscription, owner], |store, _| store.leave(&subscription, &owner))
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        // The client itself records what was read, so the read cannot run without it.
        self.once("open", lease, self.opened.store.next_batch(lease, limit)).await
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        carry!(self, "due", Some(lease), [lease], |store, _| store.due(&lease, limit))
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        let owned = Arc::new(OwnedSettlement::new(settlement));
        carry!(self, "settle", Some(lease), [lease, owned], |store, is_late| {
            // The client itself records a rewind.
            store.settle(&lease, owned.lend(owned.rewind && !is_late))
        })
    }

    async fn hint(&self, _lease: &Lease) {
        self.opened.gate.committed.notified().await;
    }
}

#[async_trait]
impl Apply for SqliteClient {
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        self.once("apply", lease, self.handler.apply(lease, deliveries, settlement, decide)).await
    }
}

#[async_trait]
impl Admin for SqliteClient {
    async fn change(&self, subscription: &SubscriptionName, change: &Change, selection: &Selection) -> Result<Changed> {
        carry!(self, change.operation(), None, [subscription, change, selection], |store, _| {
            store.change(&subscription, &change, &selection)
        })
    }

    async fn replay(&self, subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed> {
        carry!(self, "replay", None, [subscription, replay], |store, _| store.replay(&subscription, &replay))
    }

    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
        let pause = pause.cloned();
        carry!(self, "pause", None, [subscription, pause], |store, _| store.pause(&subscription, pause.as_ref()))
    }

    async fn rename(&self, subscription: &SubscriptionName, generation: i64, to: &SubscriptionName) -> Result<()> {
        self.look(self.opened.store.rename(subscription, generation, to))
    }

    async fn remove(&self, subscription: &SubscriptionName, generation: i64) -> Result<()> {
        self.look(self.opened.store.remove(subscription, generation))
    }

    async fn reset(&self, subscription: &SubscriptionName, to: ResetTo, stamp: Option<&str>) -> Result<ResetPlan> {
        let Some(stamp) = stamp else { return self.look(self.opened.store.reset(subscription, to, None)) };
        carry!(self, "reset", None, [subscription, stamp], |store, _| store.reset(&subscription, to, Some(&stamp)))
    }

    async fn set_lanes(&self, subscription: &SubscriptionName, lanes: u16) -> Result<()> {
        carry!(self, "set_lanes", None, [subscription], |store, _| store.set_lanes(&subscription, lanes))
    }
}

#[async_trait]
impl Maintain for SqliteClient {
    async fn create_log(&self, log: &LogName) -> Result<()> {
        self.look(self.opened.store.create_log(log))
    }

    async fn note_unrouted(&self, log: &LogName) -> Result<Routed> {
        carry!(self, "note_unrouted", None, [log], |store, _| store.note_unrouted(&log))
    }

    async fn prune(&self, log: &LogName, prune: &Prune) -> Result<Changed> {
        carry!(self, "prune", None, [log, prune], |store, _| store.prune(&log, &prune))
    }

    async fn time(&self) -> Result<jiff::Timestamp> {
        self.look(self.opened.store.time())
    }

    async fn check_receiving(&self) -> Result<()> {
        self.look(self.opened.store.check_receiving())
    }

    async fn check_integrity(&self) -> Result<()> {
        self.look(self.opened.store.check_integrity())
    }

    async fn rebase(&self) -> Result<()> {
        self.look(self.opened.store.rebase())
    }
}
