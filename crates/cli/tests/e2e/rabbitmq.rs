//! From an outbox to an exchange of RabbitMQ, and from its queue into an inbox.

use anyhow::{Context as _, Result};
use lapin::message::Delivery;
use lapin::options::{BasicGetOptions, BasicPublishOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties};
use postbox_testkit::servers::PrivateRabbitmq;
use serde_json::Value;

use crate::broker::{self, Broker};
use crate::env::{Kind, on_both};

struct Rabbitmq {
    server: PrivateRabbitmq,
    channel: Channel,
    _connection: Connection,
}

impl Broker for Rabbitmq {
    type Message = Delivery;

    fn tables(&self) -> (String, String) {
        let url = self.server.url();
        (
            format!("type = \"rabbitmq\", url = {url:?}, exchange = \"amq.topic\""),
            format!("type = \"rabbitmq\"\nurl = {url:?}\nqueue = \"orders\"\nin_flight = 100"),
        )
    }

    async fn published(&mut self) -> Result<Vec<Delivery>> {
        let mut messages = Vec::new();
        while let Some(got) = self.channel.basic_get("sent".into(), BasicGetOptions { no_ack: true }).await? {
            messages.push(got.delivery);
        }
        Ok(messages)
    }

    fn read(message: &Delivery) -> Result<(String, String, Value)> {
        let id = message.properties.message_id().as_ref().context("an id")?.to_string();
        let headers = message.properties.headers().as_ref().context("headers")?;
        let AMQPValue::LongString(key) = &headers.inner()["cloudEvents_subject"] else { anyhow::bail!("no key") };
        Ok((id, key.to_string(), serde_json::from_slice(&message.data)?))
    }

    async fn publish(&mut self, messages: Vec<&Delivery>) -> Result<()> {
        for message in messages {
            let (options, properties) = (BasicPublishOptions::default(), message.properties.clone());
            self.channel.basic_publish("".into(), "orders".into(), options, &message.data, properties).await?;
        }
        Ok(())
    }

    /// What the consumer has and what the queue has.
    async fn is_settled(&mut self) -> Result<bool> {
        let counts = self.server.ctl(&["list_queues", "name", "messages"]);
        Ok(counts.lines().any(|line| line.split_whitespace().eq(["orders", "0"])))
    }

    const REPEATS_IN_ORDER: bool = false;
}

async fn every_event_gets_into_the_other_s_inbox_once(kind: Kind) -> Result<()> {
    let server = PrivateRabbitmq::launch().await;
    let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let mut quorum = FieldTable::default();
    quorum.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    for queue in ["sent", "orders"] {
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(queue.into(), durable, quorum.clone()).await?;
        let (bound, key) = (QueueBindOptions::default(), "order.#".into());
        channel.queue_bind(queue.into(), "amq.topic".into(), key, bound, FieldTable::default()).await?;
    }
    broker::each_event_has_one_effect(kind, Rabbitmq { server, channel, _connection: connection }).await
}

on_both!(every_event_gets_into_the_other_s_inbox_once);
