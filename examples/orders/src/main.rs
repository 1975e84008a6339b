//! A service with typed events: an order and its event commit together, one handler mails, another
//! keeps the ledger in the very transaction that settles the event. Every third order is rolled
//! back.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use postbox::router::{Event, Router, State, Tx};
use postbox::sqlite::{SqliteConfig, SqliteStore};
use postbox::{LogName, Migrate as _, Relay, Subscription};
use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

const ORDERS: i64 = 30;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "order.paid", key = "order", aggregate = "order")]
struct OrderPaid {
    order: i64,
    cents: i64,
}

/// Where mails go: here, they are counted.
#[derive(Clone, Default)]
struct Mailer {
    sent: Arc<AtomicI64>,
}

/// May be called again after a crash: at least once.
async fn mail(Event(paid): Event<OrderPaid>, State(mailer): State<Mailer>) -> anyhow::Result<()> {
    ensure!(paid.cents > 0, "nothing was paid for order {}", paid.order);
    mailer.sent.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

/// Its entry and the position of the subscription commit together: exactly once.
fn ledger(Event(paid): Event<OrderPaid>, Tx(tx): Tx<'_, SqliteStore>) -> rusqlite::Result<()> {
    tx.execute("INSERT INTO ledger VALUES (?1, ?2)", (paid.order, paid.cents))?;
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("orders.db");
    let store = Arc::new(SqliteStore::open(SqliteConfig::new(&file)).await?);
    store.up().await?;
    let connection = Connection::open(&file)?;
    connection.execute_batch("CREATE TABLE orders (id, cents); CREATE TABLE ledger (id, cents)")?;

    let mailer = Mailer::default();
    let router = Router::new().on(mail).with_state(mailer.clone());
    let mails = Subscription::new("mails".parse()?, LogName::outbox());
    let mails = Relay::builder(store.clone(), mails).router(router)?.build()?;
    let entries = Subscription::new("ledger".parse()?, LogName::outbox());
    let router = Router::in_transaction(&*store).on(ledger);
    let entries = Relay::builder(store.clone(), entries).router(router)?.build()?;
    let stop = CancellationToken::new();
    let serving = async { tokio::try_join!(mails.run(stop.clone()), entries.run(stop.clone())) };

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
        stop.cancel(); // What is in flight is finished and settled first.
        anyhow::Ok(())
    };
    let (served, sold) = tokio::join!(serving, selling);
    served?;
    sold?;

    let (orders, entries) = (count(&connection, "orders")?, count(&connection, "ledger")?);
    let same = "SELECT id, cents FROM orders INTERSECT SELECT id, cents FROM ledger";
    let (same, mails) = (count(&connection, &format!("({same})"))?, mailer.sent.load(Ordering::SeqCst));
    ensure!([orders, entries, same, mails] == [ORDERS - ORDERS / 3; 4], "{orders} {entries} {same} {mails}");
    println!("{orders} orders committed: {entries} entries in the ledger, {mails} mails");
    Ok(())
}

/// Sells, with a connection of its own.
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
