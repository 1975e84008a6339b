//! A shop's server accepts signed webhooks beside its own pages. Each verified one becomes an event
//! of the shop's own, is stored once however often it arrives, and is applied later. Unsigned ones
//! leave no trace.

use std::sync::{Arc, Mutex};

use anyhow::ensure;
use axum::Router;
use axum::routing::get;
use postbox::http::{HttpSink, HttpSinkConfig};
use postbox::ingress::{self, Ingress, WebhookSource};
use postbox::listen::{ServeLimits, serve};
use postbox::sqlite::{SqliteConfig, SqliteStore};
use postbox::webhook::{Scheme, Settings, standard, verifier};
use postbox::{
    Append as _, Clock, Delivery, LogName, MemoryStore, Migrate as _, NewEvent, Relay, Subscription, TokioClock,
    handler_sink,
};
use tokio::net::TcpListener;

/// The secret shared with the payment provider. A real service takes it from the environment.
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// A stranger's guess.
const GUESSED: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let store = Arc::new(SqliteStore::open(SqliteConfig::new(folder.path().join("shop.db"))).await?);
    store.up().await?;
    let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());

    // The ingress is a router like any other. `serve` adds protection against strangers: deadlines,
    // and a limit on connections.
    let ingress = Ingress::new(vec![payments()?], store.clone(), Arc::clone(&clock))?;
    let pages = Router::new().route("/", get(async || "the shop")).merge(ingress::router(Arc::clone(&ingress)));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/in/payments", listener.local_addr()?);
    let server =
        tokio::spawn(serve(listener, pages, ServeLimits::default(), Arc::clone(&clock), std::future::pending()));

    // The provider sends everything twice; the stranger sends the same with another key.
    let provider = Arc::new(MemoryStore::new(Arc::clone(&clock)));
    let notices = [("invoice.paid", 500), ("invoice.viewed", 0), ("invoice.paid", 70)];
    let notices = notices.map(|(kind, cents)| {
        NewEvent::json(kind, format!(r#"{{"type":"{kind}","customer":"ann","amount":{cents}}}"#)).key("ann")
    });
    provider.append(&LogName::outbox(), &notices).await?;
    for (name, secret, accepted) in [("stranger", GUESSED, 0), ("first", SECRET, 3), ("again", SECRET, 3)] {
        let keys = vec![standard::SignKey::parse(secret)?];
        // Only public addresses may be called unless others are allowed; this one is the local
        // machine.
        let allow = vec!["127.0.0.1/32".parse()?];
        let sink = HttpSink::new(HttpSinkConfig { keys, allow, ..HttpSinkConfig::new(&url) }, Arc::clone(&clock))?;
        let relay = Relay::builder(provider.clone(), Subscription::new(name.parse()?, LogName::outbox()));
        let sent = relay.sink(Arc::new(sink)).build()?.drain(None).await?;
        ensure!((sent.delivered, sent.dead) == (accepted, 3 - accepted), "{name}: {sent:?}");
    }

    // A subscription of the inbox applies the events, each once.
    let ledger = Arc::new(Mutex::new(Vec::new()));
    let book = Arc::clone(&ledger);
    let apply = handler_sink(move |delivery: Delivery| {
        let cents = String::from_utf8_lossy(&delivery.event.payload).into_owned();
        book.lock().unwrap_or_else(|broken| broken.into_inner()).push((delivery.event.topic.to_string(), cents));
        std::future::ready(())
    });
    let relay = Relay::builder(store, Subscription::new("apply".parse()?, LogName::inbox()));
    relay.sink(Arc::new(apply)).build()?.drain(None).await?;
    server.abort();

    let paid = |cents: &str| ("payment.received".to_owned(), cents.to_owned());
    let mut ledger = ledger.lock().unwrap_or_else(|broken| broken.into_inner());
    // They have no key, so no order among them.
    ledger.sort();
    ensure!(*ledger == [paid("500"), paid("70")], "{ledger:?}");
    let count = |code| ingress.counts().into_iter().find(|count| count.code == code).map_or(0, |count| count.count);
    ensure!((count("accepted"), count("duplicate"), count("ignored")) == (2, 2, 2));
    ensure!(count("signature_mismatch") == 3);
    println!("nine webhooks, three of them forged: two payments received, each once");
    Ok(())
}

/// The source of the provider's webhooks: `POST /in/payments`.
fn payments() -> anyhow::Result<WebhookSource> {
    let verifier = verifier(Scheme::StandardWebhooks, &[SECRET], &Settings::default())?;
    Ok(WebhookSource::new("payments".parse()?, LogName::inbox(), verifier).convert(|message| {
        let notice: serde_json::Value = serde_json::from_slice(message.body)?;
        if notice["type"] != "invoice.paid" {
            return Ok(None);
        }
        let customer = notice["customer"].as_str().ok_or("no customer")?;
        let cents = notice["amount"].as_u64().ok_or("no amount")?;
        Ok(Some(NewEvent::new("payment.received", cents.to_string(), "text/plain").key(customer)))
    }))
}
