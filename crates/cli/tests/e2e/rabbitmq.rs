//! From an outbox to an exchange of RabbitMQ, and from its queue into an inbox.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Context as _, Result, ensure};
use lapin::message::Delivery;
use lapin::options::{BasicGetOptions, BasicPublishOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties};
use postbox_testkit::servers::PrivateRabbitmq;

use crate::env::{Kind, TestEnv, on_both, until};

const EVENTS: usize = 1_000;
const KEYS: usize = 40;

async fn queue(channel: &Channel, name: &str) -> Result<()> {
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    channel.queue_declare(name.into(), options, arguments).await?;
    Ok(())
}

async fn take(channel: &Channel, queue: &str, messages: &mut Vec<Delivery>) -> Result<()> {
    while let Some(got) = channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await? {
        messages.push(got.delivery);
    }
    Ok(())
}

/// The relay is killed on the way, 30 % of the messages are there twice, the receiver is killed on
/// its way: each event has its effect once.
async fn every_event_gets_into_the_other_s_inbox_once(kind: Kind) -> Result<()> {
    let server = PrivateRabbitmq::launch().await;
    let url = server.url();
    let connection = Connection::connect(&url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    queue(&channel, "sent").await?;
    let (bound, key) = (QueueBindOptions::default(), "order.#".into());
    channel.queue_bind("sent".into(), "amq.topic".into(), key, bound, FieldTable::default()).await?;

    let sink = format!(
        "[subscriptions.out]\nbatch = 50\nsink = {{ type = \"rabbitmq\", url = {url:?}, exchange = \"amq.topic\" }}\n"
    );
    let outbox = TestEnv::with(kind, &sink).await?;
    outbox.insert((0..EVENTS).map(|n| ("order.placed", (n % KEYS).to_string(), n as i64))).await?;
    let mut sent = Vec::new();
    for share in [1, 300, 600] {
        let served = outbox.serve().await?;
        until("its share", async || {
            take(&channel, "sent", &mut sent).await?;
            Ok((sent.len() >= share).then_some(()))
        })
        .await?;
        served.kill().await?;
    }
    let served = outbox.serve().await?;
    let all = format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n");
    until("all are sent", async || Ok((outbox.ok(&["stats"])? == all).then_some(()))).await?;
    served.terminate().await?;
    take(&channel, "sent", &mut sent).await?;

    let (mut ids, mut by_key) = (HashSet::new(), BTreeMap::<String, Vec<u64>>::new());
    for message in &sent {
        let id = message.properties.message_id().as_ref().context("an id")?.to_string();
        if ids.insert(id) {
            let payload: serde_json::Value = serde_json::from_slice(&message.data)?;
            let headers = message.properties.headers().as_ref().context("headers")?;
            let AMQPValue::LongString(key) = &headers.inner()["cloudEvents_subject"] else { anyhow::bail!("no key") };
            by_key.entry(key.to_string()).or_default().push(payload["n"].as_u64().context("a number")?);
        }
    }
    ensure!(ids.len() == EVENTS, "{} of {EVENTS} arrived", ids.len());
    ensure!(by_key.len() == KEYS && by_key.values().all(|numbers| numbers.is_sorted()), "out of order: {by_key:?}");

    queue(&channel, "orders").await?;
    let again = sent.iter().enumerate().filter(|(n, _)| n % 10 < 3).map(|(_, message)| message);
    for message in sent.iter().chain(again) {
        let (options, properties) = (BasicPublishOptions::default(), message.properties.clone());
        channel.basic_publish("".into(), "orders".into(), options, &message.data, properties).await?;
    }
    let source = format!(
        "[sources.orders]\ntype = \"rabbitmq\"\nurl = {url:?}\nqueue = \"orders\"\nin_flight = 100\n\
         [subscriptions.apply]\nlog = \"inbox\"\nsink = {{ type = \"file\", path = \"applied.jsonl\" }}\n"
    );
    let inbox = TestEnv::with(kind, &source).await?;
    let served = inbox.serve().await?;
    until("some are stored", async || Ok((!inbox.lines("applied.jsonl").unwrap_or_default().is_empty()).then_some(())))
        .await?;
    served.kill().await?;
    let served = inbox.serve().await?;
    until("all are applied", async || Ok((inbox.ok(&["stats", "--log", "inbox"])? == all).then_some(()))).await?;
    // Until the last duplicate was looked at: what the consumer has and what the queue has.
    until("nothing is pending", async || {
        let counts = server.ctl(&["list_queues", "name", "messages"]);
        Ok(counts.lines().any(|line| line.split_whitespace().eq(["orders", "0"])).then_some(()))
    })
    .await?;
    served.terminate().await?;
    ensure!(inbox.ok(&["stats", "--log", "inbox"])? == all, "each is stored once");
    let applied: HashSet<u64> =
        inbox.lines("applied.jsonl")?.iter().filter_map(|line| line["payload"]["n"].as_u64()).collect();
    ensure!(applied.len() == EVENTS, "{} of {EVENTS} were applied", applied.len());
    Ok(())
}

on_both!(every_event_gets_into_the_other_s_inbox_once);
