//! Three services share one bus, a log in a database that all of them reach. Each has its own
//! subscription, so every service gets every payment (fan-out). The two replicas of packing share a
//! subscription, so each parcel is packed by one of them (a work queue), and what packing appends
//! to the bus commits together with its position. Mail starts late, and still gets everything.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::ensure;
use postbox::contract::{Log as _, Maintain as _};
use postbox::router::{Event, Place, Router, State, Tx};
use postbox::sqlite::{Sqlite, SqliteConfig, SqliteStore};
use postbox::{Append as _, IntoEvents as _, Migrate as _, Postbox, Service, Subscription};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

const BUS: &str = "bus";
const ORDERS_MIN: usize = 20;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "order.paid", key = "order")]
struct OrderPaid {
    order: usize,
}

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "parcel.packed", key = "order")]
struct ParcelPacked {
    order: usize,
    packer: String,
}

/// Billing. Its first call fails, so it sees that order twice; the others do not.
#[derive(Clone, Default)]
struct Billing {
    calls: Arc<AtomicUsize>,
    orders: Arc<Mutex<Vec<usize>>>,
}

impl Billing {
    fn orders(&self) -> Vec<usize> {
        let mut orders = self.orders.lock().expect("no handler panics").clone();
        orders.sort_unstable();
        orders
    }
}

async fn bill(Event(paid): Event<OrderPaid>, State(billing): State<Billing>) -> anyhow::Result<()> {
    ensure!(billing.calls.fetch_add(1, Ordering::SeqCst) > 0, "the bank sleeps");
    billing.orders.lock().expect("no handler panics").push(paid.order);
    Ok(())
}

/// A replica of packing, by name.
#[derive(Clone)]
struct Packer(String);

fn pack(
    Event(paid): Event<OrderPaid>,
    State(Packer(packer)): State<Packer>,
    Tx(mut tx): Tx<'_, SqliteStore>,
) -> postbox::Result<()> {
    Postbox::new(Sqlite).log(BUS.parse()?).append(&mut tx, ParcelPacked { order: paid.order, packer })?;
    Ok(())
}

/// Mail: who packed which parcels, and the number of receipts sent.
#[derive(Clone, Default)]
struct Letters {
    receipts: Arc<AtomicUsize>,
    parcels: Arc<Mutex<BTreeMap<String, Vec<usize>>>>,
}

impl Letters {
    fn parcels(&self) -> BTreeMap<String, Vec<usize>> {
        self.parcels.lock().expect("no handler panics").clone()
    }
}

async fn send_receipt(_: Event<OrderPaid>, State(letters): State<Letters>) -> anyhow::Result<()> {
    letters.receipts.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

async fn announce(Event(packed): Event<ParcelPacked>, State(letters): State<Letters>) -> anyhow::Result<()> {
    letters.parcels.lock().expect("no handler panics").entry(packed.packer).or_default().push(packed.order);
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("bus.db");
    let shop = connect(&file).await?;
    shop.up().await?;
    shop.create_log(&BUS.parse()?).await?;

    // Two replicas of packing share its work. On SQLite that has to be asked for.
    let packing = Subscription { lanes: Some(2), ..Subscription::new("packing".parse()?, BUS.parse()?) };
    shop.subscribe(&packing).await?;

    let payments = Billing::default();
    let billing = start(connect(&file).await?, "billing", Router::new().on(bill).with_state(payments.clone()))?;
    let (one, two) = (packer(&file, "one").await?, packer(&file, "two").await?);

    // The shop sells until both replicas of packing had work.
    let mut orders = 0;
    let selling = async {
        while orders < ORDERS_MIN || one.handled() == 0 || two.handled() == 0 {
            shop.append(&BUS.parse()?, &OrderPaid { order: orders }.into_events()?).await?;
            orders += 1;
            tokio::time::sleep(Duration::from_millis(1)).await; // Customers take their time.
        }
        while payments.orders().len() < orders || one.handled() + two.handled() < orders {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(PATIENCE, selling).await??;
    let replicas = [one.handled(), two.handled()];
    for service in [billing, one, two] {
        service.stop().await?;
    }

    // Mail starts much later, and reads from the beginning.
    let letters = Letters::default();
    let router = Router::new().on(send_receipt).on(announce).with_state(letters.clone());
    let mail = start(connect(&file).await?, "mail", router)?;
    let all_mailed = async {
        while mail.handled() < 2 * orders {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, all_mailed).await?;
    mail.stop().await?;

    let everything: Vec<usize> = (0..orders).collect();
    let (billed, calls) = (payments.orders(), payments.calls.load(Ordering::SeqCst));
    ensure!(billed == everything && calls == orders + 1, "billing had {billed:?} in {calls} calls");
    let (receipts, parcels) = (letters.receipts.load(Ordering::SeqCst), letters.parcels());
    let mut packed: Vec<usize> = parcels.values().flatten().copied().collect();
    packed.sort_unstable();
    ensure!(packed == everything, "each parcel is packed once: {parcels:?}");
    ensure!(parcels.values().map(Vec::len).eq(replicas), "{parcels:?} by {replicas:?}");
    ensure!(receipts == orders, "{receipts} receipts for {orders} orders");
    println!("{orders} orders: billed in {calls} calls; packed once each, by replicas {replicas:?}; all mailed, later");
    Ok(())
}

/// A separate connection: the services share nothing but the bus.
async fn connect(file: &Path) -> postbox::Result<SqliteStore> {
    SqliteStore::open(SqliteConfig::new(file)).await
}

/// Starts a replica of packing.
async fn packer(file: &Path, name: &str) -> anyhow::Result<Running> {
    let store = connect(file).await?;
    let router = Router::in_transaction(&store).on(pack).with_state(Packer(name.to_owned()));
    start(store, "packing", router)
}

/// Starts a service, or another replica of it.
fn start<D: Place>(store: SqliteStore, name: &str, router: Router<(), D>) -> anyhow::Result<Running> {
    let service = Service::builder(store).subscription(BUS, name, router).build()?;
    let ran = tokio::spawn({
        let service = service.clone();
        async move { service.run_until(std::future::pending::<()>()).await } // a real service: `ctrl_c()`
    });
    Ok(Running { service, ran })
}

struct Running {
    service: Service,
    ran: JoinHandle<postbox::Result<()>>,
}

impl Running {
    /// Number of events that this replica has handled.
    fn handled(&self) -> usize {
        self.service.metrics().map(|(_, metrics)| metrics.delivered() as usize).sum()
    }

    async fn stop(self) -> anyhow::Result<()> {
        self.service.stop();
        Ok(self.ran.await??)
    }
}
