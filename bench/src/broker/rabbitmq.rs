//! RabbitMQ: persistent, mandatory messages to a quorum queue, with confirms.

use std::sync::Arc;

use anyhow::Context as _;
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use postbox_core::envelope::Binding;
use postbox_core::{Delivery, Sink};
use postbox_rabbitmq::RabbitmqSinkTable;
use postbox_testkit::sending::{context, sink};
use postbox_testkit::servers::PrivateRabbitmq;

use super::{TIMEOUT, cloud_event, timed, topic};
use crate::figure::Figure;

const EXCHANGE: &str = "amq.topic";
/// Messages in flight at once.
const WINDOW: usize = 4_096;
/// The `delivery-mode` of messages that must be on disk before they are confirmed.
const PERSISTENT: u8 = 2;

pub(super) struct Broker {
    server: PrivateRabbitmq,
    channel: Channel,
    _connection: Connection,
}

impl Broker {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let server = PrivateRabbitmq::launch().await;
        let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { server, channel, _connection: connection })
    }
}

#[async_trait]
impl super::Broker for Broker {
    fn pid(&self) -> u32 {
        self.server.pid()
    }

    async fn make(&self, place: &str) -> anyhow::Result<()> {
        let mut quorum = FieldTable::default();
        quorum.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        self.channel.queue_declare(place.into(), options, quorum).await?;
        let (options, key) = (QueueBindOptions::default(), format!("{place}.#"));
        let bound = self.channel.queue_bind(place.into(), EXCHANGE.into(), key.into(), options, FieldTable::default());
        Ok(bound.await?)
    }

    async fn remove(&self, place: &str) -> anyhow::Result<()> {
        self.channel.queue_delete(place.into(), QueueDeleteOptions::default()).await?;
        Ok(())
    }

    async fn count(&self, place: &str) -> anyhow::Result<usize> {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.channel.queue_declare(place.into(), options, FieldTable::default()).await?;
        Ok(usize::try_from(queue.message_count())?)
    }

    async fn sink(&self, place: &str) -> Arc<dyn Sink> {
        let url = self.server.url();
        let keys = format!("url = {url:?}\nexchange = {EXCHANGE:?}\nrouting_key = \"{place}.{{topic}}\"");
        sink::<RabbitmqSinkTable>(&keys, &context(TIMEOUT)).await
    }

    async fn publish(&self, place: &str, deliveries: &[Delivery]) -> anyhow::Result<Figure> {
        let message = |delivery: &Delivery| -> anyhow::Result<(ShortString, BasicProperties, Bytes)> {
            let wrapped = cloud_event(delivery)?;
            let mut headers = FieldTable::default();
            for (name, value) in Binding::AMQP.spell(&wrapped) {
                headers.insert(name.into(), AMQPValue::LongString(value.as_ref().into()));
            }
            let properties = BasicProperties::default()
                .with_content_type(wrapped.content_type.as_ref().into())
                .with_delivery_mode(PERSISTENT)
                .with_headers(headers)
                .with_message_id(delivery.dedupe_id().into());
            Ok((format!("{place}.{}", topic(delivery)).into(), properties, wrapped.body))
        };
        let messages = deliveries.iter().map(message).collect::<anyhow::Result<Vec<_>>>()?;
        let publish = |(key, properties, body): (ShortString, BasicProperties, Bytes)| async move {
            let options = BasicPublishOptions { mandatory: true, immediate: false };
            let sent = self.channel.basic_publish(EXCHANGE.into(), key, options, &body, properties).await;
            let confirmed = sent?.await.context("confirmed")?;
            anyhow::ensure!(confirmed.is_ack() && confirmed.take_message().is_none(), "it is in no queue");
            Ok(())
        };
        let published = futures::stream::iter(messages).map(publish).buffer_unordered(WINDOW).try_collect::<()>();
        timed(deliveries.len(), published).await
    }
}
