//! SQS, as emulated by moto: requests of ten messages.

use std::sync::Arc;

use async_trait::async_trait;
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_sqs::types::{MessageAttributeValue, QueueAttributeName, SendMessageBatchRequestEntry};
use aws_sdk_sqs::{Client, Config};
use aws_smithy_http_client::Builder;
use futures::{StreamExt as _, TryStreamExt as _};
use postbox_core::{Delivery, Sink};
use postbox_sqs::SqsSinkTable;
use postbox_testkit::sending::{context, sink};
use postbox_testkit::servers::PrivateSqs;

use super::{TIMEOUT, key, timed, topic};
use crate::figure::Figure;

/// Messages per request: the maximum.
const BATCH: usize = 10;
/// Concurrent requests, as many as the sink's calls.
const REQUESTS: usize = 16;
const REGION: &str = "us-east-1";
const ACCOUNT: &str = "123456789012";
const ACCESS_KEY: &str = "AKIATEST";

pub(super) struct Broker {
    server: PrivateSqs,
    client: Client,
}

impl Broker {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let server = PrivateSqs::launch().await;
        let config = Config::builder()
            .behavior_version(BehaviorVersion::v2026_01_12())
            .http_client(Builder::new().build_http())
            .region(Region::new(REGION))
            .endpoint_url(server.url())
            .credentials_provider(Credentials::new(ACCESS_KEY, "secret", None, None, "bench"))
            .build();
        Ok(Self { server, client: Client::from_conf(config) })
    }

    fn queue(&self, place: &str) -> String {
        format!("{}/{ACCOUNT}/{place}", self.server.url())
    }
}

#[async_trait]
impl super::Broker for Broker {
    fn pid(&self) -> u32 {
        self.server.pid()
    }

    async fn make(&self, place: &str) -> anyhow::Result<()> {
        self.client.create_queue().queue_name(place).send().await?;
        Ok(())
    }

    async fn remove(&self, place: &str) -> anyhow::Result<()> {
        self.client.delete_queue().queue_url(self.queue(place)).send().await?;
        Ok(())
    }

    async fn count(&self, place: &str) -> anyhow::Result<usize> {
        let wanted = QueueAttributeName::ApproximateNumberOfMessages;
        let request = self.client.get_queue_attributes().queue_url(self.queue(place)).attribute_names(wanted);
        let counts = request.send().await?.attributes.unwrap_or_default();
        Ok(counts.values().map(|count| count.parse::<usize>()).sum::<Result<usize, _>>()?)
    }

    async fn sink(&self, place: &str) -> Arc<dyn Sink> {
        let who = format!("access_key_id = {ACCESS_KEY:?}, secret_access_key = \"secret\"");
        let aws = format!("{{ region = {REGION:?}, endpoint = {:?}, {who} }}", self.server.url());
        let keys = format!("queue_url = {:?}\naws = {aws}", self.queue(place));
        sink::<SqsSinkTable>(&keys, &context(TIMEOUT)).await
    }

    async fn publish(&self, place: &str, deliveries: &[Delivery]) -> anyhow::Result<Figure> {
        let entry = |(n, delivery): (usize, &Delivery)| -> anyhow::Result<SendMessageBatchRequestEntry> {
            let event = &delivery.event;
            let body = str::from_utf8(&event.payload)?;
            let mut entry = SendMessageBatchRequestEntry::builder().id(n.to_string()).message_body(body);
            for (name, value) in [
                ("postbox-id", delivery.dedupe_id().as_str()),
                ("postbox-topic", topic(delivery)),
                ("postbox-key", key(delivery)),
                ("content-type", event.content_type()),
            ] {
                let value = MessageAttributeValue::builder().data_type("String").string_value(value).build()?;
                entry = entry.message_attributes(name, value);
            }
            Ok(entry.build()?)
        };
        let batch = |batch: &[Delivery]| batch.iter().enumerate().map(entry).collect::<anyhow::Result<Vec<_>>>();
        let batches = deliveries.chunks(BATCH).map(batch).collect::<anyhow::Result<Vec<_>>>()?;
        let queue = &self.queue(place);
        let send = |entries: Vec<SendMessageBatchRequestEntry>| async move {
            let request = self.client.send_message_batch().queue_url(queue).set_entries(Some(entries));
            let answer = request.send().await?;
            anyhow::ensure!(answer.failed().is_empty(), "{:?}", answer.failed());
            Ok(())
        };
        let sent = futures::stream::iter(batches).map(send).buffer_unordered(REQUESTS).try_collect::<()>();
        timed(deliveries.len(), sent).await
    }
}
