//! Exactly-once effects: handlers run in the transaction that settles their events.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};

use async_trait::async_trait;
use postbox_core::kit::{BlockedKeys, entries_of, handlers_of_another_store, panic_text};
use postbox_core::trace::Traced;
use postbox_core::{
    Apply, Database, Decide, Delivery, Error, ErrorKind, Handlers, Lease, Outcome, Result, Settlement, Transact,
};
use rusqlite::Transaction;
use tokio::sync::oneshot;

use crate::classify::Work;
use crate::lease::held;
use crate::settle::{Owned, OwnedEntry, refuse_settled, write};
use crate::store::SqliteStore;
use crate::thread::Session;

/// A handler whose effect is in the same database. It runs on the store's writing thread, inside
/// the transaction that settles the event: both commit, or neither.
///
/// Keep it short, and inside the database: while it runs, nobody else writes to the file. An effect
/// outside of the database (a call, a mail) is not rolled back. For those, write a
/// [`postbox_core::Sink`].
///
/// ```
/// use postbox_core::{Delivery, Outcome};
/// use postbox_sqlite::TxHandler;
///
/// struct Ledger;
///
/// impl TxHandler for Ledger {
///     fn handle(&self, tx: &rusqlite::Transaction<'_>, delivery: &Delivery) -> Outcome {
///         match tx.execute("INSERT INTO ledger (event) VALUES (?1)", [delivery.event.id.to_string()]) {
///             Ok(_) => Outcome::DELIVERED,
///             Err(error) => Outcome::retry("ledger", error.to_string()),
///         }
///     }
/// }
/// ```
///
/// Do not commit or roll back `tx` in a handler. The call would fail with code
/// `handler_ended_transaction`, and what was committed would stay without being settled. To append
/// events, use [`postbox_core::Postbox::append`] with `&mut &*tx`.
pub trait TxHandler: Send + Sync + 'static {
    /// Handles one event. An outcome other than delivered, or a panic, rolls back what this call
    /// did.
    fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery) -> Outcome;
}

impl<F> TxHandler for F
where
    F: Fn(&Transaction<'_>, &Delivery) -> Outcome + Send + Sync + 'static,
{
    fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery) -> Outcome {
        self(tx, delivery)
    }
}

impl SqliteStore {
    /// Binds a handler to this store.
    pub fn apply(&self, handler: impl TxHandler) -> Arc<dyn Apply> {
        Arc::new(Applier { store: self.clone(), handler: Arc::new(handler) })
    }
}

impl Database for SqliteStore {
    type Lent<'t> = &'t Transaction<'t>;
    type Handled<'t> = Outcome;

    fn handled<'t>(outcome: Outcome) -> Self::Handled<'t> {
        outcome
    }
}

impl Transact for SqliteStore {
    fn apply_handlers(&self, handlers: Arc<dyn Handlers<Self>>) -> Arc<dyn Apply> {
        self.apply(move |tx: &Transaction<'_>, delivery: &Delivery| {
            let mut outcomes = (0..).map_while(|nth| handlers.call(nth, delivery, tx));
            outcomes.find(|outcome| !outcome.is_delivered()).unwrap_or(Outcome::DELIVERED)
        })
    }
}

struct Applier {
    store: SqliteStore,
    handler: Arc<dyn TxHandler>,
}

type Outcomes = Vec<Option<Outcome>>;

#[async_trait]
impl Apply for Applier {
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Outcomes> {
        let (rewind, is_stream) = (settlement.rewind, settlement.position.is_some());
        if is_stream && !self.store.knows_lane(lease) {
            return Err(handlers_of_another_store(&lease.subscription));
        }
        let owned = Owned::new("apply", settlement, self.store.cursor(lease))?;
        let job = Application {
            lease: lease.clone(),
            deliveries: deliveries.iter().map(|delivery| (*delivery).clone()).collect(),
            settlement: owned,
            handler: self.handler.clone(),
        };
        // The decision belongs to the caller and cannot leave this task, so the transaction's
        // thread asks for it once.
        let (asking, asked) = oneshot::channel::<Outcomes>();
        let (deciding, decided) = mpsc::sync_channel::<Vec<OwnedEntry>>(1);
        let applying = self.store.writer().call("apply", move |session| job.run(session, asking, &decided));
        let deciding = async move {
            // An error means that the transaction is gone; `applying` says why.
            let outcomes = asked.await.ok()?;
            let entries = entries_of(deliveries, &outcomes, is_stream, decide);
            _ = deciding.send(entries.into_iter().map(OwnedEntry::from).collect());
            Some(outcomes)
        };
        let (applied, outcomes) = futures::future::join(applying, deciding).await;
        applied?;
        if rewind {
            self.store.set_cursor(lease, None);
        }
        // A handler may have appended.
        self.store.wake();
        outcomes.ok_or_else(|| Error::new(ErrorKind::Internal, "apply", "store_panic", "the outcomes were lost"))
    }
}

struct Application {
    lease: Lease,
    deliveries: Vec<Delivery>,
    settlement: Owned,
    handler: Arc<dyn TxHandler>,
}

impl Application {
    fn run(
        mut self,
        session: &mut Session,
        asking: oneshot::Sender<Outcomes>,
        decided: &mpsc::Receiver<Vec<OwnedEntry>>,
    ) -> Work<()> {
        let now = session.settings.now();
        // The caller answers as soon as it is polled. If it never is, it must not keep the write
        // lock.
        let patience = session.settings.busy_timeout;
        let settings = session.settings.clone();
        session.transact(|tx| {
            let lane = held("apply", tx, &self.lease, now)?;
            refuse_settled(tx, &self.lease, lane, &self.settlement, &self.deliveries)?;
            // A handler's COMMIT becomes a ROLLBACK: the work of earlier handlers is then repeated,
            // but not applied twice.
            let committed = Arc::new(AtomicBool::new(false));
            let noted = Arc::clone(&committed);
            let refuse = move || {
                noted.store(true, Relaxed);
                true
            };
            tx.commit_hook(Some(refuse))?;
            let outcomes = self.handle_all(tx, &committed);
            tx.commit_hook(None::<fn() -> bool>)?;
            let outcomes = outcomes?;
            // If the caller has gone, nothing may be committed.
            let entries =
                asking.send(outcomes).ok().and_then(|()| decided.recv_timeout(patience).ok()).ok_or_else(abandoned)?;
            self.settlement.entries.extend(entries);
            // The handlers may have taken long, so the lease is checked again at the end.
            let lane = held("apply", tx, &self.lease, settings.now())?;
            write(tx, &self.lease, lane, &self.settlement, now)
        })
    }

    fn handle_all(&self, tx: &Transaction<'_>, committed: &AtomicBool) -> Work<Outcomes> {
        let mut blocked = BlockedKeys::new(self.settlement.hold_keys);
        let mut outcomes = Vec::with_capacity(self.deliveries.len());
        for delivery in &self.deliveries {
            if blocked.blocks(delivery) {
                outcomes.push(None);
                continue;
            }
            let traced = Traced::process(delivery, self.lease.subscription.as_str());
            let outcome = traced.span().in_scope(|| self.handle(tx, traced.delivery(), committed))?;
            traced.end(&outcome);
            blocked.note(delivery, &outcome);
            outcomes.push(Some(outcome));
        }
        Ok(outcomes)
    }

    /// Runs the handler inside a savepoint. `committed` is set once a handler tried to commit.
    ///
    /// A deferred foreign key is checked by the commit alone: the only check before it walks every
    /// table of the file. The relay then applies one event at a time, so only the one at fault
    /// fails.
    fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery, committed: &AtomicBool) -> Work<Outcome> {
        tx.execute_batch("SAVEPOINT postbox_handler")?;
        let context = delivery.context();
        let handle = || context.scope_sync(|| self.handler.handle(tx, delivery));
        let outcome = catch_unwind(AssertUnwindSafe(handle))
            .unwrap_or_else(|panic| Outcome::retry("panic", panic_text(&*panic).to_owned()));
        if tx.is_autocommit() {
            // After an error, SQLite may have rolled back by itself: the disk is full, or a page
            // cannot be read. Nothing was committed in either case, because a COMMIT is refused.
            let ended = match outcome.is_delivered() || committed.load(Relaxed) {
                true => Error::transaction_ended("apply"),
                false => Error::transaction_lost("apply", "it ended in a handler that failed"),
            };
            return Err(ended.into());
        }
        tx.execute_batch(if outcome.is_delivered() {
            "RELEASE postbox_handler"
        } else {
            "ROLLBACK TO postbox_handler; RELEASE postbox_handler"
        })?;
        Ok(outcome)
    }
}

fn abandoned() -> Error {
    Error::new(ErrorKind::Unavailable, "apply", "apply_abandoned", "the caller went away; nothing was committed")
}
