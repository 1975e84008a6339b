//! From an outbox through a topic of Kafka into an inbox.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use krafka::Kafka;
use krafka::admin::{CreateTopicsOptions, NewTopic};
use krafka::producer::Record;
use postbox_testkit::servers::PrivateKafka;

use crate::env::{Kind, TestEnv, get, on_both, until};

const EVENTS: usize = 1_000;
const DUPLICATES: usize = 300;

async fn with_topic(server: &PrivateKafka) -> Result<Kafka> {
    let kafka = Kafka::builder(server.brokers()).connect().await?;
    let made = kafka.admin().create_topics([NewTopic::new("orders", 4, 1)?], CreateTopicsOptions::default()).await?;
    made.into_values().collect::<krafka::Result<Vec<_>>>()?;
    Ok(kafka)
}

/// Two services with a store each. Of what is published, three of ten come again; the relay and the
/// receiver are killed meanwhile. Each event has one effect, those of a key in their order.
async fn each_event_has_one_effect_at_the_other_end(kind: Kind) -> Result<()> {
    let server = PrivateKafka::launch().await;
    let (kafka, brokers) = (with_topic(&server).await?, server.brokers());
    let sender = TestEnv::with(kind, &format!(
        "[subscriptions.out]\nbatch = 100\nsink = {{ type = \"kafka\", brokers = {brokers:?}, topic = \"orders\" }}\n"
    ))
    .await?;
    let receiver = TestEnv::with(
        kind,
        &format!(
            "[sources.orders]\ntype = \"kafka\"\nbrokers = {brokers:?}\ntopic = \"orders\"\nsession_timeout = \"6s\"\n\
             [subscriptions.apply]\nlog = \"inbox\"\nsink = {{ type = \"file\", path = \"effects.jsonl\" }}\n"
        ),
    )
    .await?;
    let event = |n: usize| ("order.paid", (n % 40).to_string(), n as i64);
    sender.insert((0..EVENTS).map(event)).await?;
    let (relay, receiving) = (sender.serve().await?, receiver.serve().await?);
    let stored = |at_least: usize| {
        let receiver = &receiver;
        async move || {
            let stats = receiver.ok(&["stats", "--log", "inbox"])?;
            let total = stats.trim().rsplit_once("total=").and_then(|(_, total)| total.parse::<usize>().ok());
            Ok(total.filter(|total| *total >= at_least).map(drop))
        }
    };
    until("some of them", stored(EVENTS / 10)).await?;
    relay.kill().await?;
    receiving.kill().await?;
    let (relay, receiving) = (sender.serve().await?, receiver.serve().await?);
    until("each of them", stored(EVENTS)).await?;
    relay.terminate().await?;
    // Three of ten again, as a producer that lost its answers would send them.
    let (consumer, producer) = (kafka.consumer_without_group().build().await?, kafka.producer().build().await?);
    consumer.assign("orders", (0..4).collect()).await?;
    for partition in 0..4 {
        consumer.seek_to_beginning("orders", partition).await?;
    }
    let mut again = Vec::new();
    while again.len() < DUPLICATES {
        again.extend(consumer.poll(Duration::from_secs(1)).await?);
    }
    for record in again.into_iter().take(DUPLICATES) {
        let mut copy = Record::new("orders", record.value.context("a value")?);
        (copy.key, copy.headers) = (record.key, record.headers);
        ensure!(producer.send(copy).await?.is_persisted());
    }
    consumer.close().await?;
    producer.close().await?;
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
    let mut server = PrivateKafka::launch().await;
    let brokers = server.brokers();
    server.kill();
    let env = TestEnv::with(
        kind,
        &format!(
            "[subscriptions.out]\nbreaker = {{ base = \"50ms\", max = \"200ms\" }}\n\
         sink = {{ type = \"kafka\", brokers = {brokers:?}, topic = \"orders\" }}\n\
         [sources.orders]\ntype = \"kafka\"\nbrokers = {brokers:?}\ntopic = \"orders\"\nsession_timeout = \"6s\"\n"
        ),
    )
    .await?;
    ensure!(env.ok(&["check-config"])?.contains("  kafka orders -> inbox\n"));
    env.insert_three().await?;
    let served = env.serve().await?;
    served.logged("breaker opened", 1).await?;
    served.logged("source failed", 1).await?;
    server.start().await;
    with_topic(&server).await?;
    let there = async || Ok((env.ok(&["stats", "--log", "inbox"])?.contains("total=3")).then_some(()));
    until("all three", there).await?;
    let said = env.ok(&["check-config", "--connect"])?;
    ensure!(said.contains("subscriptions.out.sink: answers; the topic orders is there"), "{said}");
    let log = served.terminate().await?;
    ensure!(log.iter().all(|line| !line.contains("krafka")), "its client says nothing of its own: {log:#?}");
    ensure!(env.ok(&["stats", "--log", "outbox"])? == "pending=0 dispatched=3 dead=0 total=3\n");
    Ok(())
}

on_both!(each_event_has_one_effect_at_the_other_end, a_server_may_come_later);
