//! Orders and their events commit together, or not at all, with `sea-orm`. Every third order is
//! rolled back on purpose.

use anyhow::{Context as _, ensure};
use postbox::postgres::{Postgres, PostgresConfig, PostgresStore};
use postbox::router::{Event, Router, State};
use postbox::{LogName, Migrate as _, Postbox, Relay, Subscription};
use sea_orm::prelude::*;
use sea_orm::{Database, DatabaseTransaction, Set, TransactionTrait as _};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

const ORDERS: i64 = 30;

mod orders {
    use sea_orm::entity::prelude::*;

    #[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
    #[sea_orm(table_name = "orders")]
    pub struct Model {
        #[sea_orm(primary_key, auto_increment = false)]
        pub id: i64,
        pub state: String,
    }

    #[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
    pub enum Relation {}

    impl ActiveModelBehavior for ActiveModel {}
}

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "order.paid", key = "order")]
struct OrderPaid {
    order: i64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("DATABASE_URL").context("set DATABASE_URL to an empty Postgres database")?;
    let database = Database::connect(&url).await?;
    database.execute_unprepared("CREATE TABLE orders (id bigint PRIMARY KEY, state text NOT NULL)").await?;
    // Once, or from your deployment: `postbox migrate up --store URL`.
    let store = PostgresStore::connect(PostgresConfig::new(&url)).await?;
    store.up().await?;

    let postbox = Postbox::new(Postgres::default());
    for order in 1..=ORDERS {
        let mut tx = database.begin().await?;
        pay(&mut tx, &postbox, order).await?;
        if order % 3 == 0 {
            tx.rollback().await?;
        } else {
            tx.commit().await?;
        }
    }
    let mut committed: Vec<i64> = orders::Entity::find().all(&database).await?.iter().map(|order| order.id).collect();
    committed.sort_unstable();

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

async fn pay(tx: &mut DatabaseTransaction, postbox: &Postbox<Postgres>, order: i64) -> anyhow::Result<()> {
    let paid = orders::ActiveModel { id: Set(order), state: Set("paid".to_owned()) };
    paid.insert(tx).await?;
    postbox.append(tx, OrderPaid { order }).await?;
    Ok(())
}

async fn ship(Event(paid): Event<OrderPaid>, State(heard): State<UnboundedSender<i64>>) -> anyhow::Result<()> {
    Ok(heard.send(paid.order)?)
}
