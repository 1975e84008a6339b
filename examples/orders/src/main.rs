//! A service with typed events. An order and its event commit together. One handler sends mail;
//! another writes the ledger in the transaction that settles the event. Every third order is rolled
//! back.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use postbox::router::{Event, Router, State, Tx};
use postbox::sqlite::{SqliteConfig, SqliteStore};
use postbox::{Migrate as _, Service};
use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

const ORDERS: i64 = 30;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "order.paid", key = "order", aggregate = "order")]
struct OrderPaid {
    order: i64,
    cents: i64,
}

/// Sends mails; here they are only counted.
#[derive(Clone, Default)]
struct Mailer {
    sent: Arc<AtomicI64>,
}

/// At least once: it may be called again after a crash.
async fn mail(Event(paid): Event<OrderPaid>, State(mailer): State<Mailer>) -> anyhow::Result<()> {
    ensure!(paid.cents > 0, "nothing was paid for order {}", paid.order);
    mailer.sent.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

/// Exactly once: the entry and the position of the subscription commit together.
fn ledger(Event(paid): Event<OrderPaid>, Tx(tx): Tx<'_, SqliteStore>) -> rusqlite::Result<()> {
    tx.execute("INSERT INTO ledger VALUES (?1, ?2)", (paid.order, paid.cents))?;
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("orders.db");
    let store = SqliteStore::open(SqliteConfig::new(&file)).await?;
    store.up().await?;
    let connection = Connection::open(&file)?;
    connection.execute_batch("CREATE TABLE orders (id, cents); CREATE TABLE ledger (id, cents)")?;

    let mailer = Mailer::default();
    let service = Service::builder(store.clone())
        .outbox("mails", Router::new().on(mail).with_state(mailer.clone()))
        .outbox("ledger", Router::in_transaction(&store).on(ledger))
        .build()?;
    let (stop, stopped) = oneshot::channel::<()>(); // a real service: `tokio::signal::ctrl_c()`
    let selling = async {
        sell(&store, &file)?;
        let paid = ORDERS - ORDERS / 3;
        let all_handled = async {
            while mailer.sent.load(Ordering::SeqCst) < paid || count(&connection, "ledger")? < paid {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(PATIENCE, all_handled).await??;
        drop(stop); // What is in flight is finished and settled first.
        anyhow::Ok(())
    };
    let (served, sold) = tokio::join!(service.run_until(stopped), selling);
    served?;
    sold?;

    let (orders, entries) = (count(&connection, "orders")?, count(&connection, "ledger")?);
    let same = "SELECT id, cents FROM orders INTERSECT SELECT id, cents FROM ledger";
    let (same, mails) = (count(&connection, &format!("({same})"))?, mailer.sent.load(Ordering::SeqCst));
    ensure!([orders, entries, same, mails] == [ORDERS - ORDERS / 3; 4], "{orders} {entries} {same} {mails}");
    println!("{orders} orders committed: {entries} entries in the ledger, {mails} mails");
    Ok(())
}

/// Places orders, on its own connection.
fn sell(store: &SqliteStore, file: &Path) -> anyhow::Result<()> {
    let postbox = store.postbox();
    let mut connection = Connection::open(file)?;
    connection.busy_timeout(PATIENCE)?;
    for order in 1..=ORDERS {
        let paid = OrderPaid { order, cents: 100 * order };
        let mut tx = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        tx.execute("INSERT INTO orders VALUES (?1, ?2)", (paid.order, paid.cents))?;
        postbox.append(&mut tx, paid)?;
        if order % 3 != 0 {
            tx.commit()?;
            store.wake();
        } // Dropped otherwise, which rolls back.
    }
    Ok(())
}

fn count(connection: &Connection, table: &str) -> rusqlite::Result<i64> {
    connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0))
}
