//! Orders and their events commit together, or not at all, with `diesel`. Every third order is
//! rolled back on purpose.

use anyhow::{Context as _, ensure};
use diesel::prelude::*;
use postbox::postgres::{Postgres, PostgresConfig, PostgresStore};
use postbox::router::{Event, Router, State};
use postbox::{LogName, Migrate as _, Postbox, Relay, Subscription};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

const ORDERS: i64 = 30;

diesel::table! {
    orders (id) {
        id -> BigInt,
        state -> Text,
    }
}

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "order.paid", key = "order")]
struct OrderPaid {
    order: i64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("DATABASE_URL").context("set DATABASE_URL to an empty Postgres database")?;
    // Once, or from your deployment: `postbox migrate up --store URL`.
    let store = PostgresStore::connect(PostgresConfig::new(&url)).await?;
    store.up().await?;
    let committed = tokio::task::spawn_blocking(move || pay_all(&url)).await??;

    // In a service: `Service::builder(store).outbox("shipping", router)`, or the `postbox` program
    // beside it.
    let (heard, mut shipped) = unbounded_channel();
    let router = Router::new().on(ship).with_state(heard);
    let subscription = Subscription::new("shipping".parse()?, LogName::outbox());
    let relay = Relay::builder(std::sync::Arc::new(store), subscription).router(router)?.build()?;
    relay.drain(None).await?;

    let mut reported = Vec::new();
    while let Ok(order) = shipped.try_recv() {
        reported.push(order);
    }
    reported.sort_unstable();
    ensure!(reported == committed, "orders {committed:?}, but shipping heard of {reported:?}");
    println!("{} orders committed; shipping heard of exactly these", committed.len());
    Ok(())
}

/// Pays every order, each in its own transaction; returns those that were committed.
fn pay_all(url: &str) -> anyhow::Result<Vec<i64>> {
    let mut connection = PgConnection::establish(url)?;
    diesel::sql_query("CREATE TABLE orders (id bigint PRIMARY KEY, state text NOT NULL)").execute(&mut connection)?;
    let postbox = Postbox::new(Postgres::default());
    for order in 1..=ORDERS {
        let paid = connection.transaction(|tx| pay(tx, &postbox, order));
        ensure!(paid.is_ok() == (order % 3 != 0), "order {order}: {paid:?}");
    }
    Ok(orders::table.order(orders::id).select(orders::id).load(&mut connection)?)
}

fn pay(tx: &mut PgConnection, postbox: &Postbox<Postgres>, order: i64) -> anyhow::Result<()> {
    diesel::insert_into(orders::table).values((orders::id.eq(order), orders::state.eq("paid"))).execute(tx)?;
    postbox.append(tx, OrderPaid { order })?;
    ensure!(order % 3 != 0, "the card of order {order} was refused");
    Ok(())
}

async fn ship(Event(paid): Event<OrderPaid>, State(heard): State<UnboundedSender<i64>>) -> anyhow::Result<()> {
    Ok(heard.send(paid.order)?)
}
