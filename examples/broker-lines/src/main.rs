//! Sends a log through the sink and proves the result: every event arrived exactly once, in order
//! per key.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::ensure;
use broker_lines::server::{Server, listen};
use broker_lines::{LinesConfig, LinesSink};
use postbox::{Append as _, LogName, MemoryStore, NewEvent, Relay, Subscription, TokioClock};

const EVENTS: usize = 1_000;
const KEYS: usize = 20;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (listener, address) = listen().await?;
    let server = Server::start(listener, Arc::new(|_| Some("ok")));
    let config = LinesConfig { address: address.to_string(), ..LinesConfig::default() };

    let store = Arc::new(MemoryStore::new(Arc::new(TokioClock::default())));
    let events: Vec<NewEvent> =
        (0..EVENTS).map(|n| NewEvent::json("order.placed", n.to_string()).key((n % KEYS).to_string())).collect();
    store.append(&LogName::outbox(), &events).await?;

    let subscription = Subscription::new("lines".parse()?, LogName::outbox());
    let relay = Relay::builder(store, subscription).sink(Arc::new(LinesSink::new(&config))).build()?;
    relay.drain(None).await?;

    let mut by_key: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for received in server.received() {
        let key = received.head["key"].as_str().unwrap_or_default().to_owned();
        by_key.entry(key).or_default().push(String::from_utf8(received.payload)?.parse()?);
    }
    let arrived: usize = by_key.values().map(Vec::len).sum();
    ensure!(arrived == EVENTS, "{arrived} of {EVENTS} arrived");
    ensure!(by_key.len() == KEYS && by_key.values().all(|numbers| numbers.is_sorted()), "out of order: {by_key:?}");
    println!("{EVENTS} events of {KEYS} keys arrived over TCP, each once, in the order of their keys");
    Ok(())
}
