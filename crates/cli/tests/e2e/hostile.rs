//! The hostile values from one service to another: append, relay, signed webhook, inbox, handler.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result, ensure};
use async_trait::async_trait;
use postbox_core::{Apply, Delivery, Event, EventId, Headers, LogName, NewEvent, Outcome, Store};
use postbox_core::{Subscription, SubscriptionName};
use postbox_engine::Relay;
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_sqlite::{SqliteConfig, SqliteStore};
use postbox_testkit::hostile::{Case, Fate, RESERVED_HEADERS, cases};

use crate::env::{Kind, TestEnv, on_both, until};
use crate::sender::SECRET;

/// The header in which the inbox keeps the sender's message id.
const MESSAGE_ID: &str = "postbox-message-id";
/// Headers that the inbox adds to an event's own.
const ADDED: [&str; 5] = [MESSAGE_ID, "ce-id", "ce-source", "ce-tenant", "webhook-id"];

async fn open(env: &TestEnv) -> Result<Arc<dyn Store>> {
    Ok(match env.kind {
        Kind::Sqlite => Arc::new(SqliteStore::open(SqliteConfig::new(env.url.trim_start_matches("sqlite:"))).await?),
        Kind::Postgres => Arc::new(PostgresStore::connect(PostgresConfig::new(&env.url)).await?),
    })
}

/// The event id of case `number`.
fn id_of(number: usize) -> EventId {
    EventId::from_uuid(uuid::Uuid::from_u128(1 + number as u128))
}

fn neighbour(number: usize) -> NewEvent {
    NewEvent::json("neighbour", format!("{{\"n\":{number}}}")).key("neighbour").header("n", number.to_string())
}

/// The events that the handler received, in order.
type Seen = Arc<Mutex<Vec<Event>>>;

fn see(seen: &Seen, delivery: &Delivery) {
    seen.lock().expect("no panic while it is held").push(delivery.event.clone());
}

struct OnPostgres(Seen);

#[async_trait]
impl postbox_postgres::TxHandler for OnPostgres {
    async fn handle(&self, tx: &tokio_postgres::Transaction<'_>, delivery: &Delivery) -> Outcome {
        let id = delivery.event.id.as_uuid().to_string();
        match tx.execute("INSERT INTO applied (id) VALUES ($1)", &[&id]).await {
            Ok(_) => see(&self.0, delivery),
            Err(error) => return Outcome::dead("applied_twice", error.to_string()),
        }
        Outcome::DELIVERED
    }
}

/// Applies the whole inbox, each event in the transaction that settles it.
async fn apply(env: &TestEnv) -> Result<Vec<Event>> {
    env.sql("CREATE TABLE applied (id text PRIMARY KEY)").await?;
    let seen = Seen::default();
    let noted = Arc::clone(&seen);
    let (store, handler): (Arc<dyn Store>, Arc<dyn Apply>) = match env.kind {
        Kind::Sqlite => {
            let store = SqliteStore::open(SqliteConfig::new(env.url.trim_start_matches("sqlite:"))).await?;
            let handler = store.apply(move |tx: &rusqlite::Transaction<'_>, delivery: &Delivery| {
                match tx.execute("INSERT INTO applied (id) VALUES (?1)", [delivery.event.id.to_string()]) {
                    Ok(_) => see(&noted, delivery),
                    Err(error) => return Outcome::dead("applied_twice", error.to_string()),
                }
                Outcome::DELIVERED
            });
            (Arc::new(store), handler)
        }
        Kind::Postgres => {
            let store = PostgresStore::connect(PostgresConfig::new(&env.url)).await?;
            let handler = store.apply(OnPostgres(noted));
            (Arc::new(store), handler)
        }
    };
    let subscription = Subscription::new(SubscriptionName::new("apply")?, LogName::inbox());
    let relay = Relay::builder(store as _, subscription).apply(handler).build()?;
    let drained = relay.drain(None).await?;
    ensure!(drained.failed == 0 && drained.dead == 0, "{drained:?}");
    Ok(std::mem::take(&mut *seen.lock().expect("no panic while it is held")))
}

/// An event's headers after HTTP: lower case, none that are reserved, values trimmed.
fn over_http(headers: &Headers) -> Headers {
    let own =
        headers.iter().map(|(name, value)| (name.to_ascii_lowercase(), value.trim_matches([' ', '\t']).to_owned()));
    own.filter(|(name, _)| !RESERVED_HEADERS.contains(&name.as_str())).collect()
}

fn ensure_identical(case: &Case, arrived: &Event) -> Result<()> {
    let (name, event) = (&case.name, &case.event);
    ensure!(arrived.payload == event.payload, "{name}: another payload, {} bytes", arrived.payload.len());
    ensure!(arrived.content_type == event.content_type, "{name}: content type {:?}", arrived.content_type);
    ensure!(arrived.topic.as_str() == event.topic, "{name}: topic {:?}", arrived.topic);
    ensure!(arrived.key.as_ref().map(|key| key.as_str()) == event.key.as_deref(), "{name}: key {:?}", arrived.key);
    ensure!(arrived.aggregate == event.aggregate, "{name}: aggregate {:?}", arrived.aggregate);
    ensure!(arrived.kind == event.kind, "{name}: kind {:?}", arrived.kind);
    let mut headers = arrived.headers.clone();
    headers.retain(|name, _| !ADDED.contains(&name.as_str()));
    ensure!(headers == over_http(&event.headers), "{name}: headers {headers:?}");
    Ok(())
}

async fn the_hostile_list_arrives_identical_or_is_refused_by_name(kind: Kind) -> Result<()> {
    let (sender, receiver) = (TestEnv::migrated(kind).await?, TestEnv::migrated(kind).await?);
    // A debug build on a busy machine needs time for 16 MiB.
    receiver.config(&format!(
        "[sources.peer]\ntype = \"webhook\"\nscheme = \"standard-webhooks\"\nsecrets = [\"{SECRET}\"]\nbody_max = \"16MiB\"\nbody_timeout = \"10m\"\n"
    ))?;
    let inbox = receiver.serve().await?;
    sender.config(&format!(
        "[subscriptions.out]\ntimeout = \"10m\"\nsink = {{ type = \"http\", url = \"http://{}/in/peer\", allow = [\"127.0.0.1\"], secret = \"{SECRET}\" }}\n",
        inbox.address
    ))?;

    let store = open(&sender).await?;
    let cases = cases();
    for (number, case) in cases.iter().enumerate() {
        let appended = store.append(&LogName::outbox(), &[case.event.clone().id(id_of(number))]).await;
        let code = appended.as_ref().err().map(|error| error.code().to_owned());
        let expected = if let Fate::Refused(code) = case.fate { Some(code) } else { None };
        ensure!(code.as_deref() == expected, "{}: {appended:?}", case.name);
        store.append(&LogName::outbox(), &[neighbour(number)]).await?;
    }

    let relay = sender.serve().await?;
    let out = SubscriptionName::new("out")?;
    // The relay creates the subscription a moment after the start.
    let drained = async || anyhow::Ok((store.stats(&out).await.is_ok_and(|stats| stats.pending == 0)).then_some(()));
    until("the end of the delivery", drained).await?;
    let logs = [relay.terminate().await?, inbox.terminate().await?].concat();
    let panicked = logs.iter().find(|line| line.contains("panicked"));
    ensure!(panicked.is_none(), "{panicked:?}");

    let dead = sender.json(&["list", "--state", "dead", "--limit", "1000", "--json"])?;
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let dead: HashMap<String, String> = dead
        .as_array()
        .context("a list")?
        .iter()
        .map(|record| (text(&record["event"]["id"]), text(&record["code"])))
        .collect();
    let applied = apply(&receiver).await?;
    let arrived: HashMap<&str, &Event> =
        applied.iter().filter_map(|event| Some((event.header(MESSAGE_ID)?, event))).collect();
    let mut faults = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let id = id_of(number).to_string();
        let met = match (case.fate, arrived.get(id.as_str()), dead.get(&id)) {
            (Fate::Delivered, Some(event), None) => ensure_identical(case, event).map_err(|error| error.to_string()),
            (Fate::DeadOverHttp(code), None, Some(found)) if code == found => Ok(()),
            (Fate::Refused(_), None, None) => Ok(()),
            (fate, arrived, dead) => {
                Err(format!("{}: {fate:?}, arrived: {}, dead: {dead:?}", case.name, arrived.is_some()))
            }
        };
        faults.extend(met.err());
    }
    ensure!(faults.is_empty(), "{} of {} cases:\n{}", faults.len(), cases.len(), faults.join("\n"));
    let neighbours: Vec<&str> = applied
        .iter()
        .filter(|event| event.topic.as_str() == "neighbour")
        .filter_map(|event| event.header("n"))
        .collect();
    let wanted: Vec<String> = (0..cases.len()).map(|number| number.to_string()).collect();
    ensure!(neighbours == wanted, "the neighbours: {neighbours:?}");
    let delivered = cases.iter().filter(|case| case.fate == Fate::Delivered).count();
    ensure!(applied.len() == delivered + cases.len() && arrived.len() == applied.len(), "something came twice");
    Ok(())
}

on_both!(the_hostile_list_arrives_identical_or_is_refused_by_name);
