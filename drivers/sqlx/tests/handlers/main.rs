//! Handlers in transactions of `sqlx`, directly and through a transaction-mode pooler.

#[path = "../../../../stores/postgres/tests/support/mod.rs"]
mod support;

mod particular;
mod suites;

use std::time::Duration;

pub(crate) use postbox_sqlx::Sqlx as Driver;
use postbox_testkit::conformance::ApplyFixture as _;
pub(crate) use sqlx::Error as Failure;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
pub(crate) use sqlx::postgres::{PgConnection as Connection, PgPool as Pool};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};

/// Behind a pooler, `sqlx` must neither keep prepared statements nor send settings at the start.
fn pool(url: &str) -> Pool {
    let options: PgConnectOptions = url.parse().expect("a url");
    let options = options.statement_cache_capacity(0).extra_float_digits(None);
    PgPoolOptions::new().max_connections(4).connect_lazy_with(options)
}

mod pgbouncer {
    use super::pooled as fixture;

    postbox_testkit::apply_suite!(fixture);
    postbox_testkit::transact_suite!(fixture);
}

async fn pooled() -> suites::Fixture {
    let store = support::pooled().await;
    let pool = pool(&store.front);
    suites::Fixture::of(store, pool)
}

/// Returns the number of connections of the pool.
fn size(pool: &Pool) -> usize {
    pool.size() as usize
}

/// Returns a pool whose only connection is taken. Waiting for it times out soon.
async fn taken_up(url: &str) -> (Pool, Taken) {
    let pool = PgPoolOptions::new().max_connections(1).connect(url).await.expect("a pool");
    let connection = pool.acquire().await.expect("a connection");
    tokio::time::pause();
    (pool, Taken { _connection: connection })
}

struct Taken {
    _connection: PoolConnection<sqlx::Postgres>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        tokio::time::resume();
    }
}

async fn write(tx: &mut Connection, effect: &str) {
    let query = sqlx::query("INSERT INTO effect (payload) VALUES ($1)").persistent(false);
    query.bind(effect).execute(tx).await.expect("the effect is written");
}

async fn execute(tx: &mut Connection, sql: &str) -> Result<(), Failure> {
    tx.execute(AssertSqlSafe(sql.to_owned())).await.map(drop)
}

/// Writes the effect in a nested transaction, which ends as the effect says.
async fn nested(tx: &mut Connection, effect: &str) -> Result<(), Failure> {
    if effect == "nested and refused" {
        execute(tx, "SELECT 1 / 0").await.expect_err("a division by zero");
    }
    let mut nested = tx.begin().await?;
    write(&mut nested, effect).await;
    match effect {
        "nested and kept" => nested.commit().await?,
        "nested and left" => drop(nested),
        "nested and forgotten" => std::mem::forget(nested),
        "nested and unsure" => {
            drop(tokio::time::timeout(Duration::ZERO, nested.commit()).await);
            return Err(Failure::RowNotFound);
        }
        _ => panic!("as asked"),
    }
    Ok(())
}

/// The driver rolls the whole transaction back if a nested begin fails. After a commit whose future
/// is dropped, it rolls back to a savepoint that is gone. The handler did neither by SQL.
#[tokio::test]
async fn a_nested_transaction_that_does_not_begin_or_end_is_retried() {
    let fixture = suites::direct().await;
    let retried = particular::drained(&fixture, &["1", "nested and refused", "nested and unsure", "2"]).await;
    let expected = [("nested and refused", "handler_lost_transaction"), ("nested and unsure", "handler_error")];
    assert_eq!(retried, particular::codes(&expected));
    let mut effects = fixture.effects().await;
    effects.sort();
    assert_eq!(effects, ["1", "2"]);
}

/// The driver would end the nested transaction instead of the one around it.
#[tokio::test]
async fn a_nested_transaction_that_is_forgotten_is_not_taken_for_delivered() {
    let fixture = suites::direct().await;
    let forgotten = particular::drained(&fixture, &["1", "nested and forgotten", "2"]).await;
    assert_eq!(forgotten, particular::codes(&[("nested and forgotten", "handler_lost_transaction")]));
    let mut effects = fixture.effects().await;
    effects.sort();
    assert_eq!(effects, ["1", "2"]);
}
