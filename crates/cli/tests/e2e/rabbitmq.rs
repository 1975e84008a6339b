//! From an outbox to a RabbitMQ exchange, and from its queue into an inbox.

use anyhow::{Context as _, Result};
use futures::{FutureExt as _, StreamExt as _};
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, BasicPublishOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties, Consumer};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::PrivateRabbitmq;
use serde_json::Value;

use crate::broker::{self, Broker};

pub(crate) struct Rabbitmq {
    server: PrivateRabbitmq,
    channel: Channel,
    sent: Consumer,
    _connection: Connection,
}

impl Broker for Rabbitmq {
    type Message = Delivery;

    const REPEATS_IN_ORDER: bool = false;

    async fn launch() -> Result<(Self, FaultProxy)> {
        let server = PrivateRabbitmq::launch().await;
        let proxy = broker::proxied(server.port()).await;
        let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let mut quorum = FieldTable::default();
        quorum.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        // Only this connection reads it, so it stays in the server's memory.
        let own = QueueDeclareOptions { exclusive: true, ..Default::default() };
        for (queue, options, arguments) in [("sent", own, FieldTable::default()), ("orders", durable, quorum)] {
            channel.queue_declare(queue.into(), options, arguments).await?;
            let (bound, key) = (QueueBindOptions::default(), "order.#".into());
            channel.queue_bind(queue.into(), "amq.topic".into(), key, bound, FieldTable::default()).await?;
        }
        let unsettled = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let sent = channel.basic_consume("sent".into(), "".into(), unsettled, FieldTable::default()).await?;
        Ok((Self { server, channel, sent, _connection: connection }, proxy))
    }

    fn tables(port: u16) -> (String, String) {
        let url = format!("url = \"amqp://127.0.0.1:{port}\"");
        (
            format!("type = \"rabbitmq\", {url}, exchange = \"amq.topic\""),
            format!("type = \"rabbitmq\"\n{url}\nqueue = \"orders\"\nin_flight = 100"),
        )
    }

    async fn published(&mut self) -> Result<Vec<Delivery>> {
        Ok(std::iter::from_fn(|| self.sent.next().now_or_never().flatten()).collect::<Result<_, _>>()?)
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

    /// Counts what the consumer holds and what is queued.
    async fn is_settled(&mut self) -> Result<bool> {
        let counts = self.server.ctl(&["list_queues", "name", "messages"]);
        Ok(counts.lines().any(|line| line.split_whitespace().eq(["orders", "0"])))
    }
}
