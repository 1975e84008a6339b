//! Handlers that run in the transaction that settles their events, so that each effect happens
//! exactly once.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt as _;
use postbox_core::kit::{BlockedKeys, entries_of, panic_text};
use postbox_core::trace::Traced;
use postbox_core::{
    Apply, Database, Decide, Delivery, Error, ErrorKind, HandledFuture, Handlers, Lease, Outcome, Result, Settlement,
    Transact,
};
use postbox_postgres_sql::UNREACHABLE;
use tokio_postgres::Transaction;
use tracing::Instrument as _;

use crate::PostgresStore;
use crate::classify::classify;
use crate::execute::{Execute as _, Row};
use crate::session::{PINNED, Session};
use crate::settle::settle_in;

/// A handler that works inside the store's transaction.
///
/// Behaviour:
/// - `tx` is a savepoint. An outcome other than delivered, an SQL error or a panic rolls back what
///   this call did, and nothing else.
/// - Several events share the transaction. The role, the search_path and the statement and lock
///   timeouts that a handler sets end with its call; any other setting (`SET LOCAL`) stays for the
///   handlers after it.
/// - A `SET` without `LOCAL` outlives the transaction. If it changed one of these, the connection
///   is closed afterwards; any other would reach later calls, as would a lock of the session.
/// - The handler must not commit or roll back by SQL. It should wait for nothing but the database,
///   because the transaction stays open meanwhile.
#[async_trait]
pub trait TxHandler: Send + Sync + 'static {
    /// Does the event's work.
    async fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery) -> Outcome;
}

impl PostgresStore {
    /// Binds a handler to this store.
    pub fn apply<H: TxHandler>(&self, handler: H) -> Arc<dyn Apply> {
        Arc::new(TxApply { store: self.clone(), handler })
    }
}

impl Database for PostgresStore {
    type Lent<'t> = &'t Transaction<'t>;
    type Handled<'t> = HandledFuture<'t>;

    fn handled<'t>(outcome: Outcome) -> HandledFuture<'t> {
        Box::pin(std::future::ready(outcome))
    }
}

impl Transact for PostgresStore {
    fn apply_handlers(&self, handlers: Arc<dyn Handlers<Self>>) -> Arc<dyn Apply> {
        self.apply(InTurn(handlers))
    }
}

/// Calls the handlers of an event one after the other, and stops at the first that fails: after a
/// failed statement Postgres would refuse the statements of later handlers too.
struct InTurn(Arc<dyn Handlers<PostgresStore>>);

#[async_trait]
impl TxHandler for InTurn {
    async fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery) -> Outcome {
        let mut nth = 0;
        while let Some(handled) = self.0.call(nth, delivery, tx) {
            let outcome = handled.await;
            if !outcome.is_delivered() {
                return outcome;
            }
            nth += 1;
        }
        Outcome::DELIVERED
    }
}

struct TxApply<H> {
    store: PostgresStore,
    handler: H,
}

/// The first statement of the handlers' transaction; returns its id. It sets no planner options and
/// no statement timeout, because both would apply to the handlers' statements. The position is
/// written at the end of the transaction. Written first, it would lock the lane while handlers run,
/// and the lease could not be renewed.
pub(crate) static APPLY_BEGIN: LazyLock<String> = LazyLock::new(|| {
    let kept = SETTINGS.map(|name| copied(name, &kept(name))).join(", ");
    format!(
        "SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text,
CASE WHEN pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off' THEN pg_catalog.set_config('synchronous_commit', 'on', true) END,
{kept}"
    )
});

/// What a handler may set for its own call. `SET LOCAL` outlives its savepoint.
const SETTINGS: [&str; 4] = ["role", "search_path", "statement_timeout", "lock_timeout"];

/// Where the value is kept that a setting began the transaction with.
fn kept(setting: &str) -> String {
    format!("postbox.begin_{setting}")
}

/// The expression that copies a setting until the end of the transaction.
fn copied(from: &str, to: &str) -> String {
    format!("pg_catalog.set_config('{to}', pg_catalog.current_setting('{from}'), true)")
}

/// Restores the [`SETTINGS`] that the transaction began with.
pub(crate) static SETTINGS_BACK: LazyLock<String> =
    LazyLock::new(|| format!("SELECT {}", SETTINGS.map(|name| copied(&kept(name), name)).join(", ")));

/// The [`SETTINGS`] of the session and its user. Reads nothing.
static SESSION_SETTINGS: LazyLock<String> = LazyLock::new(|| {
    let settings = SETTINGS.map(|name| format!("pg_catalog.current_setting('{name}')")).join(", ");
    format!("SELECT pg_catalog.concat_ws(' ', session_user, {settings})")
});

/// How long they are asked for after the commit. The work is done, so it must not wait for a
/// connection that broke meanwhile.
const SETTINGS_TIME_MAX: Duration = Duration::from_secs(1);

/// What became of the transaction with this id; reads the commit log.
const XACT_STATUS: &str = "SELECT pg_catalog.pg_xact_status('{xid}')";

/// How often it is asked what became of a transaction whose connection ended, and the pause between
/// two questions. The server rolls back within milliseconds, unless it has not seen the end yet.
const STATUS_ASKED_MAX: usize = 100;
const STATUS_PAUSE: Duration = Duration::from_millis(20);

/// Saves the role, search_path and planner options that the last handler worked with, and sets our
/// own.
pub(crate) static SETTINGS_OURS: LazyLock<String> = LazyLock::new(|| {
    let saved = theirs().map(|name| copied(name, &format!("postbox.{name}"))).collect::<Vec<_>>().join(", ");
    let pins = PINNED.map(|name| format!("pg_catalog.set_config('{name}', 'off', true)")).join(", ");
    let back = &*SETTINGS_BACK;
    format!("SELECT {saved}; {back}; SELECT pg_catalog.set_config('search_path', 'pg_catalog', true), {pins}")
});
/// Restores what [`SETTINGS_OURS`] saved.
pub(crate) static SETTINGS_THEIRS: LazyLock<String> = LazyLock::new(|| {
    let saved: Vec<String> = theirs().map(|name| copied(&format!("postbox.{name}"), name)).collect();
    format!("SELECT {}", saved.join(", "))
});

fn theirs() -> impl Iterator<Item = &'static str> {
    ["role", "search_path"].into_iter().chain(PINNED)
}

/// Checks that a handler's effect can be committed. A failed statement that the handler ignored
/// leaves its savepoint aborted. A violated deferred constraint would fail the whole transaction at
/// its commit, every time, for every event in it. The check is rolled back, so that constraints
/// stay deferred for the handlers that follow.
pub(crate) const EFFECT_CHECK: &str = "SAVEPOINT postbox_check; SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO SAVEPOINT postbox_check; RELEASE SAVEPOINT postbox_check";

#[async_trait]
impl<H: TxHandler> Apply for TxApply<H> {
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        mut settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        let failed = |error: tokio_postgres::Error| classify("apply", &error);
        let mut session = self.store.session_for_handlers().await?;
        let (settings, subscription) =
            futures::join!(settings_of(&session), self.store.leased_for_handlers(&session, lease, &settlement));
        let (settings, subscription) = (settings?, subscription?);
        let mut tx = session
            .client_mut()
            .build_transaction()
            .isolation_level(tokio_postgres::IsolationLevel::ReadCommitted)
            .read_only(false)
            .start()
            .await
            .map_err(failed)?;
        let mut lent = Lent { tx: &mut tx, handler: &self.handler };
        let outcomes = call_each(&self.store, &mut lent, lease, deliveries, &mut settlement, decide).await?;
        // From here on the lane is locked, so the rest is bounded in time: a host that vanishes now
        // must not delay a take-over. The handlers may have set a role and a search_path of their
        // own, while our statements need ours. Theirs are restored afterwards, because deferred
        // triggers run at the commit.
        let (bounded, pinned, settled) = futures::join!(
            tx.batch_execute(&self.store.inner.modes.soon_over),
            tx.batch_execute(&SETTINGS_OURS),
            settle_in(&self.store, tx.client(), lease, &subscription, deliveries, &settlement),
        );
        bounded.and(pinned).map_err(failed)?;
        settled?;
        tx.batch_execute(&SETTINGS_THEIRS).await.map_err(failed)?;
        tx.commit().await.map_err(failed)?;
        committed(&self.store, lease, &settlement);
        // The settlement's own settings hid what a handler set for the whole session until now.
        let left = tokio::time::timeout(SETTINGS_TIME_MAX, settings_of(&session)).await;
        if left.is_ok_and(|left| left.is_ok_and(|left| left == settings)) {
            session.ended();
        }
        Ok(outcomes)
    }
}

async fn settings_of(session: &Session) -> Result<String> {
    session.row(&SESSION_SETTINGS, &[]).await.map(|row| row.get(0))
}

/// The store's transaction, lent to a handler as a savepoint.
struct Lent<'a, 'c, H> {
    tx: &'a mut Transaction<'c>,
    handler: &'a H,
}

impl<H: TxHandler> Calls for Lent<'_, '_, H> {
    async fn rows(&mut self, sql: String) -> Result<Vec<Row>> {
        self.tx.client().rows(&sql, &[]).await
    }

    async fn call(&mut self, delivery: &Delivery, after: &str) -> Result<Outcome> {
        let failed = |error: tokio_postgres::Error| classify("apply", &error);
        let savepoint = self.tx.savepoint("postbox_handler").await.map_err(failed)?;
        let failed = |error: tokio_postgres::Error| after_handler(classify("apply", &error));
        let mut outcome = handled(delivery, self.handler.handle(&savepoint, delivery)).await;
        if outcome.is_delivered() {
            match savepoint.batch_execute(&format!("{EFFECT_CHECK}; {after}")).await {
                Ok(()) => {}
                Err(error) => match error.as_db_error() {
                    Some(refusal) => outcome = effect_refused(refusal.message()),
                    None => return Err(failed(error)),
                },
            }
        }
        let ended = if outcome.is_delivered() { savepoint.commit().await } else { savepoint.rollback().await };
        ended.map(|()| outcome).map_err(failed)
    }
}

/// A transaction in which a handler is called for one event after another.
pub(crate) trait Calls {
    /// Executes a statement on the connection. Its columns are `text`.
    fn rows(&mut self, sql: String) -> impl Future<Output = Result<Vec<Row>>> + Send;

    /// Calls the handler in a savepoint, and executes statements after its effect. An error means
    /// that the transaction itself is lost.
    fn call(&mut self, delivery: &Delivery, after: &str) -> impl Future<Output = Result<Outcome>> + Send;
}

/// Calls the handler for every delivery that is not blocked by an earlier failure of its key, and
/// adds the dispositions to the settlement. The transaction must have just begun.
pub(crate) async fn call_each<'d>(
    store: &PostgresStore,
    transaction: &mut impl Calls,
    lease: &Lease,
    deliveries: &[&'d Delivery],
    settlement: &mut Settlement<'d>,
    decide: &Decide<'_>,
) -> Result<Vec<Option<Outcome>>> {
    let xid = first_text(transaction.rows(APPLY_BEGIN.clone()).await?);
    let mut outcomes = Vec::with_capacity(deliveries.len());
    let mut blocked = BlockedKeys::new(settlement.hold_keys);
    for delivery in deliveries {
        if blocked.blocks(delivery) {
            outcomes.push(None);
            continue;
        }
        let traced = Traced::process(delivery, lease.subscription.as_str());
        // The last one's settings hold until the commit, for deferred triggers.
        let after = if outcomes.len() + 1 < deliveries.len() { &SETTINGS_BACK } else { "" };
        let called = transaction.call(traced.delivery(), after).instrument(traced.span().clone()).await;
        if let Err(error) = &called
            && (error.is_transaction_ended() || error.is_transaction_lost())
            && is_committed(store, &xid, error).await?
        {
            let error = Error::transaction_ended("apply");
            outcomes.push(Some(Outcome::dead(error.code().to_owned(), error.message())));
            for (delivery, outcome) in deliveries.iter().zip(&outcomes) {
                outcome.as_ref().map(|outcome| decide(delivery, outcome));
            }
            return Err(error);
        }
        let outcome = called?;
        traced.end(&outcome);
        blocked.note(delivery, &outcome);
        outcomes.push(Some(outcome));
    }
    settlement.entries.extend(entries_of(deliveries, &outcomes, settlement.position.is_some(), decide));
    Ok(outcomes)
}

/// Whether the transaction was committed that a handler ended, or lost with its connection. The
/// store asks on a connection of its own: that of the handler may have another transaction open,
/// and a failed one. An error has the code of `ended`, and says that nobody knows.
async fn is_committed(store: &PostgresStore, xid: &str, ended: &Error) -> Result<bool> {
    let sql = XACT_STATUS.replace("{xid}", xid);
    let asked = async {
        let session = store.session_for_handlers().await?;
        for _ in 0..STATUS_ASKED_MAX {
            let status: Option<String> = session.row(&sql, &[]).await?.get(0);
            match status.as_deref() {
                Some("committed") => return Ok(true),
                // The server has not noticed the end of the connection yet.
                Some("in progress") if ended.is_transaction_lost() => tokio::time::sleep(STATUS_PAUSE).await,
                Some(_) => return Ok(false),
                None => break,
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "apply", "status_unknown", "the server has no answer yet"))
    };
    store.bounded("apply", asked).await.map_err(|unknown| {
        let message = format!(
            "the transaction ended while the handler had it, and it is not known whether it was committed ({}); \
             check its effects, because what was committed may be done again",
            unknown.message()
        );
        Error::new(ended.kind(), "apply", ended.code().to_owned(), message)
    })
}

fn first_text(rows: Vec<Row>) -> String {
    rows.into_iter().flatten().flatten().next().unwrap_or_default()
}

/// Runs a handler's call in the context of its event. A panic becomes a retry.
pub(crate) async fn handled(delivery: &Delivery, call: impl Future<Output = Outcome>) -> Outcome {
    let call = delivery.context().scope(call);
    let caught = AssertUnwindSafe(call).catch_unwind().await;
    caught.unwrap_or_else(|panic| Outcome::retry("panic", panic_text(&*panic).to_owned()))
}

/// The error of a statement that follows a handler's call. If the connection ended, the handler may
/// be the cause, or a timeout of the server that it ran into.
pub(crate) fn after_handler(error: Error) -> Error {
    let ended = [UNREACHABLE, "store_unavailable"].contains(&error.code());
    if ended { Error::transaction_lost("apply", error.message()) } else { error }
}

/// The outcome of an event whose handler reported success, but whose [`EFFECT_CHECK`] failed.
pub(crate) fn effect_refused(said: &str) -> Outcome {
    let error = format!("the handler reported success, but its effect cannot be kept: {said}");
    Outcome::retry("handler_sql", error)
}

/// Updates what this process knows of the lane, after the commit.
pub(crate) fn committed(store: &PostgresStore, lease: &Lease, settlement: &Settlement<'_>) {
    store.lane(lease).settled(lease.epoch, settlement.position.map(|seq| seq.0), settlement.rewind);
    store.wake();
}
