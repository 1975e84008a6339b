//! Two services react to the same events, each with a subscription of its own: what one has read,
//! the other still gets, in its own time. A handler that fails once is tried again, and only its
//! own service sees the event twice.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::ensure;
use postbox::sqlite::{SqliteConfig, SqliteStore};
use postbox::{
    Append as _, Delivery, InProcessBus, LogName, Migrate as _, NewEvent, Relay, RelaySettings, RetryPolicy,
    Subscription,
};
use tokio_util::sync::CancellationToken;

const ORDERS: usize = 20;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let store = Arc::new(SqliteStore::open(SqliteConfig::new(folder.path().join("bus.db"))).await?);
    store.up().await?;

    // Billing wants paid orders; its first call fails.
    let (billed, calls) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
    let billing = InProcessBus::new().on("order.paid", {
        let (billed, calls) = (Arc::clone(&billed), Arc::clone(&calls));
        move |delivery: Arc<Delivery>| {
            let first = calls.fetch_add(1, Ordering::SeqCst) == 0;
            if !first {
                billed.lock().expect("no handler panics").push(delivery.event.id);
            }
            async move { if first { Err("the bank sleeps") } else { Ok(()) } }
        }
    })?;
    // Mail wants everything about orders.
    let mailed = Arc::new(AtomicUsize::new(0));
    let mail = InProcessBus::new().on("order.*", {
        let mailed = Arc::clone(&mailed);
        move |_: Arc<Delivery>| {
            mailed.fetch_add(1, Ordering::SeqCst);
            async {}
        }
    })?;

    // Billing listens while orders come in.
    let stop = CancellationToken::new();
    let listening = tokio::spawn({
        let (relay, stop) = (service(&store, "billing", billing)?, stop.clone());
        async move { relay.run(stop).await }
    });
    for id in 0..ORDERS {
        let placed = NewEvent::json("order.placed", format!(r#"{{"order":{id}}}"#)).key(id.to_string());
        let paid = NewEvent::json("order.paid", format!(r#"{{"order":{id}}}"#)).key(id.to_string());
        store.append(&LogName::outbox(), &[placed, paid]).await?;
    }
    let all_billed = async {
        while billed.lock().expect("no handler panics").len() < ORDERS {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), all_billed).await?;
    stop.cancel();
    listening.await??;

    // Mail comes much later and still gets everything, from the beginning.
    service(&store, "mail", mail)?.drain(None).await?;

    let (calls, mailed) = (calls.load(Ordering::SeqCst), mailed.load(Ordering::SeqCst));
    ensure!(calls == ORDERS + 1, "billing was called {calls} times");
    ensure!(mailed == 2 * ORDERS, "mail was called {mailed} times");
    println!("billing handled {ORDERS} payments in {calls} calls; mail, later, all {mailed} events");
    Ok(())
}

/// A relay that hands a subscription of its own to the service's handlers.
fn service(store: &Arc<SqliteStore>, name: &str, handlers: InProcessBus) -> postbox::Result<Relay> {
    let retry = RetryPolicy { delays: vec![Duration::from_millis(10)], ..RetryPolicy::default() };
    let settings = RelaySettings { retry, ..RelaySettings::default() };
    let subscription = Subscription::new(name.parse()?, LogName::outbox());
    Relay::builder(store.clone(), subscription).sink(Arc::new(handlers)).settings(settings).build()
}
