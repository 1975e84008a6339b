//! Handlers whose effect commits with the position. Here the effect is what the handler appends.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use postbox_core::kit::{BlockedKeys, entries_of, panic_text, settled_already};
use postbox_core::trace::Traced;
use postbox_core::{Apply, Decide, Delivery, Error, Lease, Outcome, Result, Settlement, lock};

use crate::settle::Write;
use crate::state::State;
use crate::{MemoryStore, MemoryTransaction, Server};

impl MemoryStore {
    /// Binds a handler to this store. Events appended through the transaction become visible with
    /// the settlement, or never.
    pub fn apply<H>(&self, handler: H) -> Arc<dyn Apply>
    where
        H: Fn(&mut MemoryTransaction, &Delivery) -> Outcome + Send + Sync + 'static,
    {
        Arc::new(Applier { store: self.clone(), handler })
    }
}

struct Applier<H> {
    store: MemoryStore,
    handler: H,
}

#[async_trait]
impl<H> Apply for Applier<H>
where
    H: Fn(&mut MemoryTransaction, &Delivery) -> Outcome + Send + Sync + 'static,
{
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        let mut transaction = self.store.begin();
        let mut settlement = settlement;
        let mut blocked = BlockedKeys::new(settlement.hold_keys);
        let mut outcomes = Vec::with_capacity(deliveries.len());
        for delivery in deliveries.iter().copied() {
            if blocked.blocks(delivery) {
                outcomes.push(None);
                continue;
            }
            let traced = Traced::process(delivery, lease.subscription.as_str());
            let outcome = traced.span().in_scope(|| self.run(&mut transaction, traced.delivery()));
            traced.end(&outcome);
            blocked.note(delivery, &outcome);
            outcomes.push(Some(outcome));
        }
        settlement.entries.extend(entries_of(deliveries, &outcomes, settlement.position.is_some(), decide));
        let client = &self.store.client;
        let write = Write::of(&settlement, client.position(lease).as_ref());
        let (called, position) = (lease.clone(), write.place.as_ref().map(|place| place.position));
        let handled: HashSet<i64> = deliveries.iter().map(|delivery| delivery.seq.0).collect();
        let transaction = Mutex::new(Some(transaction));
        // A transaction ends once, even if the call arrives several times.
        let commit = move |server: &Server| {
            let transaction = lock(&transaction).take();
            server.settle_with(&called, &write, &handled, transaction.ok_or_else(|| Error::stale("apply"))?)
        };
        let settled = self.store.call("apply", Some(lease), commit).await;
        client.note_settled(lease, position, settlement.rewind, &settled);
        settled.map(|()| outcomes)
    }
}

impl Server {
    /// Takes one lock for the check, the settlement and the commit, so that nobody sees one without
    /// the others.
    fn settle_with(
        &self,
        lease: &Lease,
        write: &Write,
        handled: &HashSet<i64>,
        mut transaction: MemoryTransaction,
    ) -> Result<()> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("apply")?;
        let (reader, log) = state.data.leased("apply", lease, monotonic)?;
        if reader.was_settled(lease.lane, write, handled) {
            return Err(settled_already());
        }
        reader.settle(log, lease.lane, write, now)?;
        transaction.commit_in(&mut state);
        State::flush_and_wake(state);
        Ok(())
    }
}

impl<H> Applier<H>
where
    H: Fn(&mut MemoryTransaction, &Delivery) -> Outcome,
{
    /// Runs the handler once. Anything but success rolls back what it appended.
    fn run(&self, transaction: &mut MemoryTransaction, delivery: &Delivery) -> Outcome {
        let savepoint = transaction.savepoint();
        let context = delivery.context();
        let ran = catch_unwind(AssertUnwindSafe(|| context.scope_sync(|| (self.handler)(transaction, delivery))));
        let outcome = ran.unwrap_or_else(|panic| Outcome::retry("panic", panic_text(&*panic).to_owned()));
        if !outcome.is_delivered() {
            transaction.rollback_to(savepoint);
        }
        outcome
    }
}
