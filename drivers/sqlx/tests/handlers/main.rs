//! Handlers in transactions of `sqlx` keep every promise of those in the store's own, directly and
//! through a transaction-mode pooler; and what is particular to them.

#[path = "../../../../stores/postgres/tests/support/mod.rs"]
mod support;

mod particular;

use std::sync::Arc;

use async_trait::async_trait;
use postbox_core::{Apply, Delivery, HandledFuture, Handlers, NewEvent, Outcome, Result, Store, Transact as _, Tx};
use postbox_engine::RelayBuilder;
use postbox_engine::router::{Event, Router, State};
use postbox_postgres::PostgresStore;
use postbox_sqlx::Sqlx;
use postbox_testkit::conformance::faults::CallFaults;
use postbox_testkit::conformance::transact::{Entry, Fault, Healed, NotBroken, RouterFixture, WRITTEN, sql_of};
use postbox_testkit::conformance::{ApplyFixture, OpenTransaction, StoreCapabilities, StoreFixture};
use postbox_testkit::servers::Version;
use sqlx::Executor as _;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};

/// A store and a pool of `sqlx` on its database.
struct Fixture {
    store: support::Fixture,
    sqlx: Sqlx,
    pool: PgPool,
}

impl Fixture {
    fn of(store: support::Fixture) -> Self {
        let pool = pool(&store.front);
        Self { sqlx: Sqlx::new(&store.store, pool.clone()), store, pool }
    }
}

/// Behind a pooler `sqlx` must neither keep statements nor ask for settings at the start.
fn pool(url: &str) -> PgPool {
    let options: PgConnectOptions = url.parse().expect("a url");
    let options = options.statement_cache_capacity(0).extra_float_digits(None);
    PgPoolOptions::new().max_connections(4).connect_lazy_with(options)
}

async fn direct() -> Fixture {
    Fixture::of(support::on(Version::V15).await)
}

async fn pooled() -> Fixture {
    Fixture::of(support::pooled().await)
}

mod postgres_15 {
    use super::direct as fixture;

    postbox_testkit::apply_suite!(fixture);
    postbox_testkit::transact_suite!(fixture);
}

mod pgbouncer {
    use super::pooled as fixture;

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
        self.sqlx.apply_handlers(Arc::new(Effects))
    }

    async fn harmed(&self) -> [Arc<dyn Apply>; 2] {
        let harm = self.store.harm().await;
        let apply = |store: &PostgresStore| Sqlx::new(store, pool(&harm.url)).apply_handlers(Arc::new(Effects));
        [apply(harm.postgres()), apply(harm.postgres())]
    }

    async fn effects(&self) -> Vec<String> {
        self.store.effects().await
    }
}

impl RouterFixture for Fixture {
    fn route(&self, relay: RelayBuilder, healed: Healed) -> Result<RelayBuilder> {
        let never = |fault: &Fault| matches!(fault, Fault::Never);
        let router = Router::in_transaction(&self.sqlx).on(first).on(second).dead_on(never);
        relay.router(router.schemas(Arc::new(NotBroken)).with_state(healed))
    }
}

async fn first(
    Event(Entry { entry }): Event<Entry>,
    State(healed): State<Healed>,
    Tx(tx): Tx<'_, Sqlx>,
) -> std::result::Result<(), Fault> {
    write(tx, &entry).await;
    let postbox = postbox_core::Postbox::new(postbox_postgres::Postgres::default());
    postbox.append(tx, NewEvent::json(WRITTEN, entry.clone())).await.expect("appended");
    healed.end("first", &entry)
}

async fn second(
    State(healed): State<Healed>,
    Event(Entry { entry }): Event<Entry>,
    Tx(tx): Tx<'_, Sqlx>,
) -> std::result::Result<(), Fault> {
    write(tx, &format!("{entry}+")).await;
    if let Some(sql) = sql_of(&entry) {
        tx.execute(sqlx::AssertSqlSafe(sql)).await.expect("ended");
    }
    healed.end("second", &entry)
}

async fn write(tx: &mut PgConnection, effect: &str) {
    let query = sqlx::query("INSERT INTO effect (payload) VALUES ($1)").persistent(false);
    query.bind(effect).execute(tx).await.expect("the effect is written");
}

/// Writes the payload down, then does as the payload says.
struct Effects;

impl Handlers<Sqlx> for Effects {
    fn call<'t>(&'t self, nth: usize, delivery: &'t Delivery, tx: &'t mut PgConnection) -> Option<HandledFuture<'t>> {
        (nth == 0).then(|| Box::pin(effect(delivery, tx)) as HandledFuture<'t>)
    }
}

async fn effect(delivery: &Delivery, tx: &mut PgConnection) -> Outcome {
    let payload = String::from_utf8_lossy(&delivery.event.payload).into_owned();
    write(tx, &payload).await;
    match payload.as_str() {
        "retry" => Outcome::retry("later", "not now"),
        "dead" => Outcome::dead("never", "not ever"),
        "panic" => panic!("as asked"),
        _ => Outcome::DELIVERED,
    }
}
