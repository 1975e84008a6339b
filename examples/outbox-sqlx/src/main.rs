//! Orders and their events commit together, or not at all, with `sqlx`. Every third order is rolled
//! back on purpose.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, ensure};
use postbox::postgres::{PostgresConfig, PostgresStore};
use postbox::{Delivery, LogName, Migrate as _, NewEvent, Relay, Subscription, handler_sink};
use sqlx::PgPool;

const ORDERS: i64 = 30;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("DATABASE_URL").context("set DATABASE_URL to an empty Postgres database")?;
    let pool = PgPool::connect(&url).await?;
    sqlx::query("CREATE TABLE orders (id bigint PRIMARY KEY, state text NOT NULL)").execute(&pool).await?;

    // Once, or from your deployment: `postbox migrate up --store URL`.
    let store = Arc::new(PostgresStore::connect(PostgresConfig::new(&url)).await?);
    store.up().await?;

    for id in 1..=ORDERS {
        let mut transaction = pool.begin().await?;
        sqlx::query("INSERT INTO orders VALUES ($1, 'paid')").bind(id).execute(&mut *transaction).await?;
        let paid = NewEvent::json("order.paid", format!(r#"{{"order":{id}}}"#)).key(id.to_string());
        store.postbox().append(&mut transaction, paid).await?;
        if id % 3 == 0 {
            transaction.rollback().await?;
        } else {
            transaction.commit().await?;
        }
    }

    // In a service: `relay.run(stop)` in a task, or the `postbox` program beside it.
    let reported = Arc::new(Mutex::new(BTreeSet::new()));
    let shipping = handler_sink({
        let reported = Arc::clone(&reported);
        move |delivery: Delivery| {
            let key = delivery.event.key.map(|key| key.to_string());
            reported.lock().expect("no handler panics").extend(key);
            async {}
        }
    });
    let subscription = Subscription::new("shipping".parse()?, LogName::outbox());
    let drained = Relay::builder(store, subscription).sink(Arc::new(shipping)).build()?.drain(None).await?;

    let committed: Vec<String> = sqlx::query_scalar("SELECT id::text FROM orders").fetch_all(&pool).await?;
    let committed = BTreeSet::from_iter(committed);
    let reported = reported.lock().expect("no handler panics");
    ensure!(*reported == committed, "orders {committed:?}, but shipping heard of {reported:?}");
    println!(
        "{} orders committed, {} rolled back; shipping heard of exactly the committed ones",
        drained.delivered,
        ORDERS / 3
    );
    Ok(())
}
