//! Handlers in transactions of `diesel-async`, with the suites of the other driver.

#[path = "../../../../stores/postgres/tests/support/mod.rs"]
mod support;

#[path = "../../../sqlx/tests/handlers/particular.rs"]
mod particular;
#[path = "../../../sqlx/tests/handlers/suites.rs"]
mod suites;

pub(crate) use diesel::result::Error as Failure;
use diesel::sql_types::Text;
pub(crate) use diesel_async::AsyncPgConnection as Connection;
use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_async::pooled_connection::deadpool::Object;
use diesel_async::{AsyncConnection as _, RunQueryDsl as _, SimpleAsyncConnection as _};
pub(crate) use postbox_diesel_async::DieselAsync as Driver;
use postbox_testkit::conformance::ApplyFixture as _;

pub(crate) type Pool = diesel_async::pooled_connection::deadpool::Pool<Connection>;

fn pool(url: &str) -> Pool {
    pool_of(url, 4)
}

fn pool_of(url: &str, connections: usize) -> Pool {
    Pool::builder(AsyncDieselConnectionManager::new(url)).max_size(connections).build().expect("a pool")
}

/// Returns the number of connections of the pool.
fn size(pool: &Pool) -> usize {
    pool.status().size
}

/// Returns a pool whose only connection is taken. Waiting for it times out soon.
async fn taken_up(url: &str) -> (Pool, Taken) {
    let pool = pool_of(url, 1);
    let connection = pool.get().await.expect("a connection");
    tokio::time::pause();
    (pool, Taken { _connection: connection })
}

struct Taken {
    _connection: Object<Connection>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        tokio::time::resume();
    }
}

async fn write(tx: &mut Connection, effect: &str) {
    let query = diesel::sql_query("INSERT INTO effect (payload) VALUES ($1)");
    query.bind::<Text, _>(effect).execute(tx).await.expect("the effect is written");
}

async fn execute(tx: &mut Connection, sql: &str) -> Result<(), Failure> {
    tx.batch_execute(sql).await
}

/// The driver does not end a nested transaction whose future is dropped. To release the handler's
/// savepoint would keep half of it.
#[tokio::test]
async fn a_nested_transaction_that_is_given_up_keeps_nothing() {
    let fixture = suites::direct().await;
    let lost = particular::drained(&fixture, &["nested and dropped", "1"]).await;
    assert_eq!(lost, particular::codes(&[("nested and dropped", "handler_lost_transaction")]));
    assert_eq!(fixture.effects().await, ["1"]);
}

/// Writes the effect in a nested transaction, which ends as the effect says.
async fn nested(tx: &mut Connection, effect: &str) -> Result<(), Failure> {
    if effect == "nested and dropped" {
        let unfinished = tx.transaction(async |nested| {
            write(nested, effect).await;
            std::future::pending::<Result<(), Failure>>().await
        });
        drop(tokio::time::timeout(std::time::Duration::from_millis(200), unfinished).await);
        return Ok(());
    }
    let ended = tx.transaction(async |nested| {
        write(nested, effect).await;
        match effect {
            "nested and kept" => Ok(()),
            "nested and left" => Err(Failure::RollbackTransaction),
            _ => panic!("as asked"),
        }
    });
    match ended.await {
        Err(Failure::RollbackTransaction) => Ok(()),
        ended => ended,
    }
}
