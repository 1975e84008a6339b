//! Handlers whose effect commits with the position: here an effect is whatever the handler appends.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use async_trait::async_trait;

use super::settle::Write;
use super::{MemoryStore, MemoryTransaction, Server};
use crate::apply::{Apply, Decide};
use crate::batch::{Delivery, Disposition, Entry, Settlement};
use crate::error::{Error, ErrorKind, Result};
use crate::log::Lease;
use crate::names::Key;
use crate::outcome::Outcome;

impl MemoryStore {
    /// Binds a handler to this store. What it appends through the transaction becomes visible with the settlement, or never.
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
        mut settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        let mut transaction = self.store.begin();
        let mut failed: HashSet<&Key> = HashSet::new();
        let mut outcomes = Vec::with_capacity(deliveries.len());
        // The entries borrow for as long as the settlement does not, so ours get a list of their own.
        let mut entries: Vec<Entry<'_>> = std::mem::take(&mut settlement.entries);
        for delivery in deliveries.iter().copied() {
            let key = delivery.event.key.as_ref().filter(|_| settlement.hold_keys);
            if key.is_some_and(|key| failed.contains(key)) {
                entries.push(Entry { delivery, disposition: Disposition::Block });
                outcomes.push(None);
                continue;
            }
            let outcome = self.run(&mut transaction, delivery);
            if !outcome.is_delivered() {
                failed.extend(key);
            }
            entries.push(Entry { delivery, disposition: decide(delivery, &outcome) });
            outcomes.push(Some(outcome));
        }
        let settlement = Settlement { entries, ..settlement };
        let client = &self.store.client;
        let write = Write::of(&settlement, client.position(lease).as_ref());
        let (called, position) = (lease.clone(), write.place.as_ref().map(|place| place.position));
        let transaction = Mutex::new(Some(transaction));
        // A transaction has one end, however often the call arrives.
        let commit = move |server: &Server| {
            let transaction = transaction.lock().unwrap_or_else(PoisonError::into_inner).take();
            server.settle_with(&called, &write, transaction.ok_or_else(|| Error::stale("apply"))?)
        };
        let settled = self.store.call("apply", Some(lease), commit).await;
        match &settled {
            Ok(()) => client.settled(lease, position, settlement.rewind),
            Err(error) if error.is_stale() => client.forget(lease),
            Err(_) => {}
        }
        settled.map(|()| outcomes)
    }
}

impl Server {
    /// One lock for the check, the settlement and the commit: nobody sees one without the other.
    fn settle_with(&self, lease: &Lease, write: &Write, mut transaction: MemoryTransaction) -> Result<()> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("apply")?;
        let (reader, _) = state.data.leased("apply", lease, monotonic)?;
        if reader.was_settled(lease.lane, write) {
            let message = "the events were settled or changed meanwhile; what this call did is rolled back";
            return Err(Error::new(ErrorKind::Stale, "apply", "settled_already", message));
        }
        reader.settle(lease.lane, write, now)?;
        let wakers = transaction.commit_in(&mut state);
        state.flush();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        Ok(())
    }
}

impl<H> Applier<H>
where
    H: Fn(&mut MemoryTransaction, &Delivery) -> Outcome,
{
    /// Runs the handler once; anything but success takes back what it appended.
    fn run(&self, transaction: &mut MemoryTransaction, delivery: &Delivery) -> Outcome {
        let savepoint = transaction.savepoint();
        let ran = catch_unwind(AssertUnwindSafe(|| (self.handler)(transaction, delivery)));
        let outcome = ran.unwrap_or_else(|_| Outcome::retry("panic", "the handler panicked"));
        if !outcome.is_delivered() {
            transaction.rollback_to(savepoint);
        }
        outcome
    }
}
