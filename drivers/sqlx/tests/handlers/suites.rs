//! Handlers in transactions of a driver keep every promise of those in the store's own
//! transactions. The tests of each driver include this file; driver-specific code is in their root.

use std::sync::Arc;

use async_trait::async_trait;
use postbox_core::{Apply, Delivery, HandledFuture, Handlers, NewEvent, Outcome, Result, Store, Transact as _, Tx};
use postbox_engine::RelayBuilder;
use postbox_router::{Event, Router, State};
use postbox_testkit::conformance::faults::CallFaults;
use postbox_testkit::conformance::transact::{Entry, Fault, Healed, NotBroken, RouterFixture, WRITTEN, sql_of};
use postbox_testkit::conformance::{ApplyFixture, OpenTransaction, StoreCapabilities, StoreFixture};
use postbox_testkit::servers::Version;

use crate::support;
use crate::{Connection, Driver, Pool, execute, pool, write};

/// A store, and a pool of the driver on its database.
pub(crate) struct Fixture {
    pub(crate) store: support::Fixture,
    pub(crate) pool: Pool,
    pub(crate) driver: Driver,
}

impl Fixture {
    pub(crate) fn of(store: support::Fixture, pool: Pool) -> Self {
        Self { driver: Driver::new(&store.store, pool.clone()), store, pool }
    }
}

pub(crate) async fn direct() -> Fixture {
    let store = support::on(Version::V15).await;
    let pool = pool(&store.front);
    Fixture::of(store, pool)
}

mod postgres_15 {
    use super::direct as fixture;

    postbox_testkit::apply_suite!(fixture);
    postbox_testkit::transact_suite!(fixture);
}

#[async_trait]
impl StoreFixture for Fixture {
    fn store(&self) -> Arc<dyn Store> {
        self.store.store()
    }

    fn capabilities(&self) -> StoreCapabilities {
        self.store.capabilities()
    }

    async fn begin(&self) -> Box<dyn OpenTransaction> {
        self.store.begin().await
    }

    async fn conflicts(&self) -> u64 {
        self.store.conflicts().await
    }

    async fn faults(&self) -> Arc<dyn CallFaults> {
        self.store.faults().await
    }
}

#[async_trait]
impl ApplyFixture for Fixture {
    fn apply(&self) -> Arc<dyn Apply> {
        self.driver.apply_handlers(Arc::new(Effects))
    }

    async fn harmed(&self) -> [Arc<dyn Apply>; 2] {
        let harm = self.store.harm().await;
        [(); 2].map(|()| Driver::new(harm.postgres(), pool(&harm.url)).apply_handlers(Arc::new(Effects)))
    }

    async fn effects(&self) -> Vec<String> {
        self.store.effects().await
    }
}

impl RouterFixture for Fixture {
    fn route(&self, relay: RelayBuilder, healed: Healed) -> Result<RelayBuilder> {
        let never = |fault: &Fault| matches!(fault, Fault::Never);
        let router = Router::in_transaction(&self.driver).on(first).on(second).dead_on(never);
        relay.router(router.schemas(Arc::new(NotBroken)).with_state(healed))
    }
}

async fn first(
    Event(Entry { entry }): Event<Entry>,
    State(healed): State<Healed>,
    Tx(tx): Tx<'_, Driver>,
) -> std::result::Result<(), Fault> {
    write(tx, &entry).await;
    let postbox = postbox_core::Postbox::new(postbox_postgres::Postgres::default());
    postbox.append(tx, NewEvent::json(WRITTEN, entry.clone())).await.expect("appended");
    healed.end("first", &entry)
}

async fn second(
    State(healed): State<Healed>,
    Event(Entry { entry }): Event<Entry>,
    Tx(tx): Tx<'_, Driver>,
) -> std::result::Result<(), Fault> {
    write(tx, &format!("{entry}+")).await;
    if let Some(sql) = sql_of(&entry) {
        execute(tx, sql).await.expect("ended");
    }
    healed.end("second", &entry)
}

/// Writes the payload as an effect, then ends as the payload says.
struct Effects;

impl Handlers<Driver> for Effects {
    fn call<'t>(&'t self, nth: usize, delivery: &'t Delivery, tx: &'t mut Connection) -> Option<HandledFuture<'t>> {
        (nth == 0).then(|| Box::pin(effect(delivery, tx)) as HandledFuture<'t>)
    }
}

async fn effect(delivery: &Delivery, tx: &mut Connection) -> Outcome {
    let payload = String::from_utf8_lossy(&delivery.event.payload).into_owned();
    write(tx, &payload).await;
    match payload.as_str() {
        "retry" => Outcome::retry("later", "not now"),
        "dead" => Outcome::dead("never", "not ever"),
        "panic" => panic!("as asked"),
        _ => Outcome::DELIVERED,
    }
}
