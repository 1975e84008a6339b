//! NATS JetStream: publishes with `Nats-Msg-Id` and awaits acks in bulk; pull requests and acks.

use std::sync::Arc;

use anyhow::Context as _;
use async_nats::header::{HeaderName, HeaderValue};
use async_nats::{Client, HeaderMap, Request};
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use postbox_config::SourceConfig;
use postbox_core::envelope::Binding;
use postbox_core::{Delivery, Sink};
use postbox_nats::{NatsSinkTable, NatsSourceTable};
use postbox_testkit::sending::{context, sink, table};
use postbox_testkit::servers::{NatsVersion, PrivateNats};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{TIMEOUT, cloud_event, timed, topic};
use crate::figure::Figure;

/// Publishes in flight at once; more is not faster.
const WINDOW: usize = 4_096;
/// Messages per pull request; two requests are open.
const PULL: usize = 500;
const CONSUMER: &str = "raw";

pub(super) struct Broker {
    server: PrivateNats,
    client: Client,
}

/// The server's acknowledgement that a stream has a message.
#[derive(Deserialize)]
struct Ack {
    seq: u64,
}

impl Broker {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let server = PrivateNats::launch(NatsVersion::V2_15).await;
        let client = async_nats::connect(server.url()).await?;
        Ok(Self { server, client })
    }

    async fn call(&self, name: String, body: Value) -> anyhow::Result<Value> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = self.client.send_request(format!("$JS.API.{name}"), Request::new().payload(body.into())).await?;
        let answer: Value = serde_json::from_slice(&answer.payload)?;
        anyhow::ensure!(answer["error"].is_null(), "{name}: {answer}");
        Ok(answer)
    }

    async fn pull(&self, place: &str, inbox: &str) -> anyhow::Result<()> {
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{place}.{CONSUMER}");
        let request = json!({ "batch": PULL }).to_string();
        Ok(self.client.publish_with_reply(subject, inbox.to_owned(), request.into()).await?)
    }
}

#[async_trait]
impl super::Broker for Broker {
    fn pid(&self) -> u32 {
        self.server.pid()
    }

    async fn make(&self, place: &str) -> anyhow::Result<()> {
        let config = json!({ "name": place, "subjects": [format!("{place}.>")], "storage": "file", "num_replicas": 1 });
        self.call(format!("STREAM.CREATE.{place}"), config).await.map(drop)
    }

    async fn remove(&self, place: &str) -> anyhow::Result<()> {
        self.call(format!("STREAM.DELETE.{place}"), Value::Null).await.map(drop)
    }

    async fn count(&self, place: &str) -> anyhow::Result<usize> {
        let info = self.call(format!("STREAM.INFO.{place}"), Value::Null).await?;
        Ok(usize::try_from(info["state"]["messages"].as_u64().context("a number")?)?)
    }

    async fn sink(&self, place: &str) -> Arc<dyn Sink> {
        let keys = format!("url = {:?}\nsubject = \"{place}.{{topic}}\"\nstream = {place:?}", self.server.url());
        sink::<NatsSinkTable>(&keys, &context(TIMEOUT)).await
    }

    async fn publish(&self, place: &str, deliveries: &[Delivery]) -> anyhow::Result<Figure> {
        let message = |delivery: &Delivery| -> anyhow::Result<(String, HeaderMap, Bytes)> {
            let wrapped = cloud_event(delivery)?;
            let mut headers = HeaderMap::new();
            for (name, value) in Binding::NATS.spell(&wrapped) {
                headers.insert(name.parse::<HeaderName>()?, value.parse::<HeaderValue>()?);
            }
            headers.insert("Nats-Msg-Id", delivery.dedupe_id().as_str());
            headers.insert("Nats-Expected-Stream", place);
            Ok((format!("{place}.{}", topic(delivery)), headers, wrapped.body))
        };
        let messages = deliveries.iter().map(message).collect::<anyhow::Result<Vec<_>>>()?;
        let publish = |(subject, headers, body): (String, HeaderMap, Bytes)| async move {
            let request = Request::new().headers(headers).payload(body).timeout(None);
            let answer = self.client.send_request(subject, request).await?;
            let ack: Ack = serde_json::from_slice(&answer.payload)?;
            anyhow::ensure!(ack.seq > 0, "no place in the stream");
            Ok(())
        };
        let published = futures::stream::iter(messages).map(publish).buffer_unordered(WINDOW).try_collect::<()>();
        timed(deliveries.len(), published).await
    }

    fn source(&self, place: &str, in_flight: usize) -> Option<Arc<dyn SourceConfig>> {
        let keys = format!("url = {:?}\nstream = {place:?}\nin_flight = {in_flight}", self.server.url());
        Some(Arc::new(table::<NatsSourceTable>(&keys)))
    }

    async fn consume(&self, place: &str, count: usize) -> anyhow::Result<Figure> {
        let config = json!({ "durable_name": CONSUMER, "ack_policy": "explicit", "max_ack_pending": 4 * PULL });
        let body = json!({ "stream_name": place, "config": config });
        self.call(format!("CONSUMER.DURABLE.CREATE.{place}.{CONSUMER}"), body).await?;
        let inbox = self.client.new_inbox();
        let mut messages = self.client.subscribe(inbox.clone()).await?;
        let consume = async {
            self.pull(place, &inbox).await?;
            self.pull(place, &inbox).await?;
            for taken in 1..=count {
                let message = messages.next().await.context("the connection ended")?;
                let reply = message.reply.with_context(|| format!("no message: {:?}", message.status))?;
                if taken % PULL == 0 {
                    self.pull(place, &inbox).await?;
                }
                match taken == count {
                    false => self.client.publish(reply, "+ACK".into()).await?,
                    // The server processes acks in order, so its answer to the last one confirms
                    // all.
                    true => drop(self.client.send_request(reply, Request::new().payload("+ACK".into())).await?),
                }
            }
            Ok(())
        };
        timed(count, consume).await
    }
}
