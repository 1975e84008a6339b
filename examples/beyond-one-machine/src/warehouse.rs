//! The warehouse's own program: it ships each order in the transaction that settles the event.

use std::sync::Arc;
use std::time::Duration;

use postbox::postgres::{PostgresConfig, PostgresStore, TxHandler};
use postbox::{CancellationToken, Delivery, LogName, Outcome, Relay, RelaySettings, Subscription, async_trait};
use tokio_postgres::Transaction;

/// Shipped orders. No constraint prevents duplicates, so that they would be found.
pub const TABLES: &str = "CREATE TABLE shipped (place bigserial, order_id bigint NOT NULL, customer text NOT NULL); \
    CREATE TABLE stock (units bigint NOT NULL); INSERT INTO stock VALUES (1000000)";

/// Ships orders until it is killed.
pub async fn run(url: &str) -> anyhow::Result<()> {
    let store = Arc::new(PostgresStore::connect(PostgresConfig::new(url)).await?);
    let settings = RelaySettings { lease_ttl: Duration::from_secs(2), ..RelaySettings::default() };
    let ship = Subscription::new("ship".parse()?, LogName::inbox());
    let relay = Relay::builder(store.clone(), ship).settings(settings).apply(store.apply(Ship)).build()?;
    relay.run(CancellationToken::new()).await?;
    Ok(())
}

struct Ship;

#[async_trait]
impl TxHandler for Ship {
    async fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery) -> Outcome {
        let event = &delivery.event;
        let payload: serde_json::Value = serde_json::from_slice(&event.payload).unwrap_or_default();
        let (Some(order), Some(customer)) = (payload["order"].as_i64(), event.key.as_ref()) else {
            return Outcome::dead("not_an_order", "it names no order, or no customer");
        };
        let shipped = async {
            let customer = customer.as_str();
            tx.execute("INSERT INTO shipped (order_id, customer) VALUES ($1, $2)", &[&order, &customer]).await?;
            tx.execute("UPDATE stock SET units = units - 1", &[]).await
        };
        match shipped.await {
            Ok(_) => Outcome::DELIVERED,
            Err(error) => Outcome::retry("not_shipped", error.to_string()),
        }
    }
}
