//! From an outbox through a stream of NATS into an inbox.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use futures::StreamExt as _;
use postbox_testkit::servers::{NatsVersion, PrivateNats};

use crate::env::{Kind, TestEnv, get, on_both, until};

const EVENTS: usize = 1_000;
const DUPLICATES: usize = 300;

/// Two services with a store each. Of what is published, three of ten come again; the relay and the
/// receiver are killed meanwhile. Each event has one effect, those of a key in their order.
async fn each_event_has_one_effect_at_the_other_end(kind: Kind) -> Result<()> {
    let server = PrivateNats::launch(NatsVersion::V2_15).await;
    let url = server.url();
    let client = async_nats::connect(&url).await?;
    let mut published = client.subscribe("orders.>").await?;
    client.flush().await?;
    // The stream forgets ids at once: nothing but the inbox knows a repetition.
    let sender = TestEnv::with(kind, &format!(
        "[subscriptions.out]\nbatch = 100\nsink = {{ type = \"nats\", url = {url:?}, subject = \"orders.{{topic}}\", \
         stream = \"ORDERS\", create = {{ duplicate_window = \"100ms\" }} }}\n"
    ))
    .await?;
    let receiver = TestEnv::with(
        kind,
        &format!(
            "[sources.orders]\ntype = \"nats\"\nurl = {url:?}\nstream = \"ORDERS\"\nack_wait = \"1s\"\nin_flight = 1\n\
         [subscriptions.apply]\nlog = \"inbox\"\nsink = {{ type = \"file\", path = \"effects.jsonl\" }}\n"
        ),
    )
    .await?;
    let event = |n: usize| ("order.paid", (n % 40).to_string(), n as i64);
    sender.insert((0..EVENTS).map(event)).await?;
    let relay = sender.serve().await?;
    // The stream is made by the relay, so the first calls of the source may find none.
    let receiving = receiver.serve().await?;
    let mut seen = Vec::new();
    while seen.len() < EVENTS / 2 {
        seen.push(published.next().await.context("the subscription ended")?);
    }
    relay.kill().await?;
    receiving.kill().await?;
    let (relay, receiving) = (sender.serve().await?, receiver.serve().await?);
    // Every event was published at least once; after the kill some may be so twice.
    let id = |message: &async_nats::Message| {
        message.headers.as_ref().and_then(|all| Some(all.get("Nats-Msg-Id")?.as_str().to_owned()))
    };
    let mut ids: std::collections::BTreeSet<_> = seen.iter().filter_map(id).collect();
    while ids.len() < EVENTS {
        let message = published.next().await.context("the subscription ended")?;
        ids.extend(id(&message));
        seen.push(message);
    }
    relay.terminate().await?;
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    for message in seen.iter().step_by(seen.len() / DUPLICATES) {
        let headers = message.headers.clone().context("headers")?;
        client.publish_with_headers(message.subject.clone(), headers, message.payload.clone()).await?;
    }
    client.flush().await?;
    let drained = async || {
        let page = get(&receiving.address, "/metrics", "").await?;
        let duplicates = page
            .lines()
            .find_map(|line| line.strip_prefix("postbox_received_total{source=\"orders\",result=\"duplicate\"} "));
        let duplicates: usize = duplicates.unwrap_or("0").parse()?;
        let stats = receiver.ok(&["stats", "--log", "inbox"])?;
        let applied = stats == format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n");
        Ok((duplicates >= DUPLICATES && applied).then_some(()))
    };
    until("all of them, and three of ten again", drained).await?;
    receiving.terminate().await?;
    let mut effects: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for line in receiver.lines("effects.jsonl")? {
        let n = line["payload"]["n"].as_i64().context("a number")?;
        let numbers = effects.entry(line["key"].to_string()).or_default();
        // What was killed behind the inbox begins again, and a file knows no ids.
        if !numbers.contains(&n) {
            numbers.push(n);
        }
    }
    ensure!(effects.len() == 40, "{} keys", effects.len());
    for (key, numbers) in &effects {
        ensure!(numbers.is_sorted(), "key {key} in order: {numbers:?}");
    }
    let count: usize = effects.values().map(Vec::len).sum();
    ensure!(count == EVENTS, "{count} of {EVENTS}");
    Ok(())
}

/// A server that is not there when the service starts is no reason not to start.
async fn a_server_may_come_later(kind: Kind) -> Result<()> {
    let mut server = PrivateNats::launch(NatsVersion::V2_15).await;
    let url = server.url();
    server.kill();
    let env = TestEnv::with(kind, &format!(
        "[subscriptions.out]\nbreaker = {{ base = \"50ms\", max = \"200ms\" }}\nsink = {{ type = \"nats\", url = {url:?}, \
         subject = \"orders.{{topic}}\", stream = \"ORDERS\", create = {{}} }}\n\
         [sources.orders]\ntype = \"nats\"\nurl = {url:?}\nstream = \"ORDERS\"\n"
    ))
    .await?;
    ensure!(env.ok(&["check-config"])?.contains("  nats orders -> inbox\n"));
    env.insert_three().await?;
    let served = env.serve().await?;
    served.logged("breaker opened", 1).await?;
    served.logged("source failed", 1).await?;
    server.start().await;
    let there = async || Ok((env.ok(&["stats", "--log", "inbox"])?.contains("total=3")).then_some(()));
    until("all three", there).await?;
    let log = served.terminate().await?;
    ensure!(log.iter().all(|line| !line.contains("async_nats")), "its client says nothing of its own: {log:#?}");
    ensure!(env.ok(&["stats", "--log", "outbox"])? == "pending=0 dispatched=3 dead=0 total=3\n");
    Ok(())
}

on_both!(each_event_has_one_effect_at_the_other_end, a_server_may_come_later);
