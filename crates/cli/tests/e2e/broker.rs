//! From an outbox through a broker into an inbox: what holds with every one of them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::env::{Kind, Served, TestEnv, get, until};

const EVENTS: usize = 1_000;
const KEYS: usize = 40;
const DUPLICATES: usize = 300;

/// What is special about a broker that runs, with a client beside us.
pub(crate) trait Broker {
    /// A message that was published.
    type Message;

    /// The keys of the sink and of the source.
    fn tables(&self) -> (String, String);

    /// What was published and not asked for yet, in its order.
    async fn published(&mut self) -> Result<Vec<Self::Message>>;

    /// The id, the key and the payload.
    fn read(message: &Self::Message) -> Result<(String, String, Value)>;

    /// Publishes these once more, as they were.
    async fn publish(&mut self, messages: Vec<&Self::Message>) -> Result<()>;

    /// Whether everything was acknowledged.
    async fn is_settled(&mut self) -> Result<bool> {
        Ok(true)
    }

    /// Whether messages that were out when a receiver was killed come again in their order.
    const REPEATS_IN_ORDER: bool = true;
}

fn sends(sink: &str) -> String {
    format!(
        "[subscriptions.out]\nbatch = 50\nlease = \"2s\"\nbreaker = {{ base = \"50ms\", max = \"200ms\" }}\nsink = {{ {sink} }}\n"
    )
}

/// Two services with a store each. The relay is killed three times, the receiver once. Of what is
/// published, three of ten come again. Each event has one effect, those of a key in their order.
pub(crate) async fn each_event_has_one_effect<B: Broker>(kind: Kind, mut broker: B) -> Result<()> {
    let (sink, source) = broker.tables();
    let sender = TestEnv::with(kind, &sends(&sink)).await?;
    let effects = "[subscriptions.apply]\nlog = \"inbox\"\nlease = \"2s\"\nsink = { type = \"file\", path = \"effects.jsonl\" }\n";
    let receiver = TestEnv::with(kind, &format!("[sources.orders]\n{source}\n{effects}")).await?;
    sender.insert((0..EVENTS).map(|n| ("order.paid", (n % KEYS).to_string(), n as i64))).await?;

    let receiving = receiver.serve().await?;
    let mut sent = Vec::new();
    for share in [1, 300, 600] {
        let relay = sender.serve().await?;
        until("its share", async || {
            sent.extend(broker.published().await?);
            Ok((sent.len() >= share).then_some(()))
        })
        .await?;
        relay.kill().await?;
    }
    until("some are applied", async || Ok((receiver.lines("effects.jsonl")?.len() > 20).then_some(()))).await?;
    receiving.kill().await?;
    let (relay, receiving) = (sender.serve().await?, receiver.serve().await?);
    let all = format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n");
    until("all are sent", async || Ok((sender.ok(&["stats"])? == all).then_some(()))).await?;
    relay.terminate().await?;

    // Every event was published at least once; after a kill some may be so twice.
    let (mut ids, mut by_key, mut seen) = (BTreeSet::new(), BTreeMap::<String, Vec<i64>>::new(), 0);
    until("all are published", async || {
        sent.extend(broker.published().await?);
        for message in &sent[seen..] {
            let (id, key, payload) = B::read(message)?;
            if ids.insert(id) {
                by_key.entry(key).or_default().push(payload["n"].as_i64().context("a number")?);
            }
        }
        seen = sent.len();
        Ok((ids.len() == EVENTS).then_some(()))
    })
    .await?;
    in_order(&by_key)?;

    broker.publish(sent.iter().step_by(sent.len() / DUPLICATES).collect()).await?;
    until("all of them, and three of ten again", async || {
        let applied = receiver.ok(&["stats", "--log", "inbox"])? == all;
        Ok((applied && duplicates(&receiving).await? >= DUPLICATES && broker.is_settled().await?).then_some(()))
    })
    .await?;
    receiving.terminate().await?;
    ensure!(receiver.ok(&["stats", "--log", "inbox"])? == all, "each is stored once");
    let (mut applied, mut by_key) = (BTreeSet::new(), BTreeMap::<String, Vec<i64>>::new());
    for line in receiver.lines("effects.jsonl")? {
        let n = line["payload"]["n"].as_i64().context("a number")?;
        // What was killed behind the inbox begins again, and a file knows no ids.
        if applied.insert(n) {
            by_key.entry(line["key"].to_string()).or_default().push(n);
        }
    }
    ensure!(applied.len() == EVENTS, "{} of {EVENTS} are applied", applied.len());
    if B::REPEATS_IN_ORDER { in_order(&by_key) } else { Ok(()) }
}

fn in_order(by_key: &BTreeMap<String, Vec<i64>>) -> Result<()> {
    ensure!(by_key.len() == KEYS && by_key.values().all(|numbers| numbers.is_sorted()), "out of order: {by_key:?}");
    Ok(())
}

/// How many messages of the source `orders` were known.
pub(crate) async fn duplicates(receiving: &Served) -> Result<usize> {
    let page = get(&receiving.address, "/metrics", "").await?;
    let name = "postbox_received_total{source=\"orders\",result=\"duplicate\"} ";
    Ok(page.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0").parse()?)
}

/// A server that is not there when the service starts is no reason not to start. `start` starts it;
/// its `client` says nothing of its own in our log.
pub(crate) async fn a_server_may_come_later(
    kind: Kind,
    (sink, source): (String, String),
    client: &str,
    start: impl AsyncFnOnce() -> Result<()>,
) -> Result<TestEnv> {
    let env = TestEnv::with(kind, &format!("{}[sources.orders]\n{source}\n", sends(&sink))).await?;
    let name = sink.split('"').nth(1).context("its type")?;
    ensure!(env.ok(&["check-config"])?.contains(&format!("  {name} orders -> inbox\n")));
    env.insert_three().await?;
    let served = env.serve().await?;
    served.logged("breaker opened", 1).await?;
    served.logged("source failed", 1).await?;
    start().await?;
    until("all three", async || Ok(env.ok(&["stats", "--log", "inbox"])?.contains("total=3").then_some(()))).await?;
    let log = served.terminate().await?;
    ensure!(log.iter().all(|line| !line.contains(client)), "its client says nothing of its own: {log:#?}");
    ensure!(env.ok(&["stats", "--log", "outbox"])? == "pending=0 dispatched=3 dead=0 total=3\n");
    Ok(env)
}
