//! A shop and a warehouse, each with its own Postgres, and three JetStream servers between them.
//! While orders arrive, relays, receivers, handlers, databases and brokers are killed. Each order
//! that the shop committed is shipped once, in order per customer; no order that was rolled back is
//! shipped.

mod service;
mod warehouse;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use postbox_testkit::servers::{NatsVersion, PrivateNats, PrivatePostgres, Settings, Version};
use tokio_postgres::{Client, NoTls};

use crate::service::{Service, ask, postbox};

const CUSTOMERS: i64 = 20;
/// Number of orders shipped after a fault before the next fault.
const BETWEEN: i64 = 25;
/// Only turns a hang into a failure: nothing here takes long.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is killed. The process of the first three is restarted at once, the others a while later.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Relay,
    Receiver,
    Handler,
    Broker(usize),
    ShopDatabase,
    WarehouseDatabase,
}

const STORM: [Fault; 8] = [
    Fault::Relay,
    Fault::Receiver,
    Fault::Broker(0),
    Fault::Handler,
    Fault::ShopDatabase,
    Fault::Broker(1),
    Fault::WarehouseDatabase,
    Fault::Relay,
];

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    if std::env::args().nth(1).as_deref() == Some("warehouse") {
        return warehouse::run(&std::env::var("POSTBOX_STORE")?).await;
    }
    let mut place = Place::build().await?;
    let stop = Arc::new(AtomicBool::new(false));
    let orders = tokio::spawn(take_orders(place.shop.url(), Arc::clone(&stop)));
    let mut longest = Duration::ZERO;
    for fault in STORM {
        let shipped = place.shipped().await?;
        let began = Instant::now();
        place.make(fault).await?;
        place.until(|now| now >= shipped + BETWEEN).await.with_context(|| format!("after {fault:?}"))?;
        longest = longest.max(began.elapsed());
    }
    stop.store(true, Ordering::SeqCst);
    let taken_back = orders.await?;
    let counts = place.prove().await?;
    println!(
        "{} orders of {CUSTOMERS} customers committed, {taken_back} taken back: each committed one is shipped once, \
         those of a customer in their order. {} faults; after one, {BETWEEN} more were shipped within {longest:.1?}",
        counts,
        STORM.len()
    );
    Ok(())
}

/// Everything that runs. Fields are dropped in this order.
struct Place {
    relay: Service,
    receiver: Service,
    handler: Service,
    brokers: [PrivateNats; 3],
    shop: PrivatePostgres,
    warehouse: PrivatePostgres,
    _folder: tempfile::TempDir,
}

impl Place {
    async fn build() -> anyhow::Result<Self> {
        let (brokers, shop, warehouse) = tokio::join!(
            PrivateNats::launch_cluster(NatsVersion::V2_15),
            PrivatePostgres::launch(Version::V15, Settings::durable()),
            PrivatePostgres::launch(Version::V15, Settings::durable()),
        );
        connect(&shop.url()).await?.batch_execute("CREATE TABLE orders (id bigint, customer text)").await?;
        connect(&warehouse.url()).await?.batch_execute(warehouse::TABLES).await?;
        let (postbox, folder) = (postbox()?, tempfile::tempdir()?);
        let servers = brokers.each_ref().map(PrivateNats::url).join(",");
        let config = |name: &str, text: &str| {
            let path = folder.path().join(name);
            let servers = text.replace("nats://127.0.0.1:4222,nats://127.0.0.1:4223,nats://127.0.0.1:4224", &servers);
            std::fs::write(&path, servers)?;
            anyhow::Ok(path.display().to_string())
        };
        let start = |name: &str, text: &str, store: &str| {
            ask(&postbox, store, &["migrate", "up"])?;
            Service::start(&postbox, &["run", "--config", &config(name, text)?], store)
        };
        let relay = start("shop.toml", include_str!("../shop.toml"), &shop.url())?;
        let receiver = start("warehouse.toml", include_str!("../warehouse.toml"), &warehouse.url())?;
        let handler = Service::start(&std::env::current_exe()?, &["warehouse"], &warehouse.url())?;
        Ok(Self { relay, receiver, handler, brokers, shop, warehouse, _folder: folder })
    }

    async fn make(&mut self, fault: Fault) -> anyhow::Result<()> {
        match fault {
            Fault::Relay => self.relay.kill(),
            Fault::Receiver => self.receiver.kill(),
            Fault::Handler => self.handler.kill(),
            Fault::Broker(number) => {
                let shipped = self.shipped().await?;
                self.brokers[number].kill();
                // The other two continue.
                self.until(|now| now >= shipped + BETWEEN).await?;
                self.brokers[number].start().await;
                Ok(())
            }
            Fault::ShopDatabase => {
                self.shop.kill();
                self.shop.start().await;
                Ok(())
            }
            Fault::WarehouseDatabase => {
                self.warehouse.kill();
                self.warehouse.start().await;
                Ok(())
            }
        }
    }

    async fn shipped(&self) -> anyhow::Result<i64> {
        let counted = connect(&self.warehouse.url()).await?.query_one("SELECT count(*) FROM shipped", &[]).await?;
        Ok(counted.get(0))
    }

    /// Waits until enough orders are shipped.
    async fn until(&mut self, enough: impl Fn(i64) -> bool) -> anyhow::Result<()> {
        let began = Instant::now();
        while !enough(self.shipped().await?) {
            ensure!(began.elapsed() < PATIENCE, "{} are shipped, and no more", self.shipped().await?);
            for service in [&mut self.relay, &mut self.receiver, &mut self.handler] {
                service.revive()?;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Compares the two databases; returns the number of orders.
    async fn prove(&mut self) -> anyhow::Result<usize> {
        const ORDERS: &str = "SELECT id, customer FROM orders ORDER BY id";
        const SHIPPED: &str = "SELECT order_id, customer FROM shipped ORDER BY place";
        let orders = by_customer(&connect(&self.shop.url()).await?, ORDERS).await?;
        let count = orders.values().map(Vec::len).sum();
        self.until(|now| now >= count as i64).await?;
        for (store, log) in [(self.shop.url(), "outbox"), (self.warehouse.url(), "inbox")] {
            let stats = ask(&postbox()?, &store, &["stats", "--log", log])?;
            ensure!(stats == format!("pending=0 dispatched={count} dead=0 total={count}\n"), "{log}: {stats}");
        }
        let warehouse = connect(&self.warehouse.url()).await?;
        let shipped = by_customer(&warehouse, SHIPPED).await?;
        ensure!(shipped == orders, "ordered: {orders:?}\nshipped: {shipped:?}");
        let units: i64 = warehouse.query_one("SELECT units FROM stock", &[]).await?.get(0);
        ensure!(units == 1_000_000 - count as i64, "{units} units are left");
        Ok(count)
    }
}

/// Orders by customer.
async fn by_customer(client: &Client, query: &str) -> anyhow::Result<BTreeMap<String, Vec<i64>>> {
    let mut found = BTreeMap::<String, Vec<i64>>::new();
    for row in client.query(query, &[]).await? {
        found.entry(row.get(1)).or_default().push(row.get(0));
    }
    Ok(found)
}

async fn connect(url: &str) -> anyhow::Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Places a hundred orders a second and rolls back every fifth; returns how many were rolled back.
/// While the database is down there are no orders, and only the database knows the result of the
/// last one.
async fn take_orders(url: String, stop: Arc<AtomicBool>) -> usize {
    let mut pace = tokio::time::interval(Duration::from_millis(10));
    let (mut id, mut taken_back) = (0, 0);
    while !stop.load(Ordering::SeqCst) {
        pace.tick().await;
        let Ok(mut client) = connect(&url).await else { continue };
        while !stop.load(Ordering::SeqCst) {
            pace.tick().await;
            id += 1;
            match order(&mut client, id).await {
                Ok(committed) => taken_back += usize::from(!committed),
                Err(_) => break,
            }
        }
    }
    taken_back
}

/// Writes the order and its event in one transaction; returns whether it was committed.
async fn order(client: &mut Client, id: i64) -> Result<bool, tokio_postgres::Error> {
    const EVENT: &str = "SELECT postbox.enqueue(topic => 'order.placed', payload => $1::text, key => $2)";
    let customer = format!("customer-{}", id % CUSTOMERS);
    let transaction = client.transaction().await?;
    transaction.execute("INSERT INTO orders VALUES ($1, $2)", &[&id, &customer]).await?;
    transaction.query(EVENT, &[&format!("{{\"order\":{id}}}"), &customer]).await?;
    if id % 5 == 0 {
        transaction.rollback().await?;
        return Ok(false);
    }
    transaction.commit().await?;
    Ok(true)
}
