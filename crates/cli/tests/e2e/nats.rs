//! From an outbox through a stream of NATS into an inbox.

use std::time::Duration;

use anyhow::{Context as _, Result};
use async_nats::{Client, Message, Subscriber};
use futures::{FutureExt as _, StreamExt as _};
use postbox_testkit::servers::{NatsVersion, PrivateNats};
use serde_json::Value;

use crate::broker::{self, Broker};
use crate::env::{Kind, on_both};

struct Nats {
    server: PrivateNats,
    client: Client,
    subscriber: Subscriber,
}

/// The stream forgets ids at once: nothing but the inbox knows a repetition.
fn tables(url: &str) -> (String, String) {
    let sink = format!("type = \"nats\", url = {url:?}, subject = \"orders.{{topic}}\", stream = \"ORDERS\"");
    let source = format!("type = \"nats\"\nurl = {url:?}\nstream = \"ORDERS\"\nack_wait = \"1s\"\nin_flight = 1");
    (format!("{sink}, create = {{ duplicate_window = \"100ms\" }}"), source)
}

impl Broker for Nats {
    type Message = Message;

    /// The stream is made by the relay, so the first calls of the source may find none.
    fn tables(&self) -> (String, String) {
        tables(&self.server.url())
    }

    async fn published(&mut self) -> Result<Vec<Message>> {
        Ok(std::iter::from_fn(|| self.subscriber.next().now_or_never().flatten()).collect())
    }

    fn read(message: &Message) -> Result<(String, String, Value)> {
        let headers = message.headers.as_ref().context("headers")?;
        let header = |name: &str| headers.get(name).map(ToString::to_string).context("a header");
        Ok((header("Nats-Msg-Id")?, header("ce-subject")?, serde_json::from_slice(&message.payload)?))
    }

    async fn publish(&mut self, messages: Vec<&Message>) -> Result<()> {
        tokio::time::sleep(Duration::from_millis(200)).await;
        for message in messages {
            let headers = message.headers.clone().context("headers")?;
            self.client.publish_with_headers(message.subject.clone(), headers, message.payload.clone()).await?;
        }
        Ok(self.client.flush().await?)
    }
}

async fn each_event_has_one_effect_at_the_other_end(kind: Kind) -> Result<()> {
    let server = PrivateNats::launch(NatsVersion::V2_15).await;
    let client = async_nats::connect(server.url()).await?;
    let subscriber = client.subscribe("orders.>").await?;
    client.flush().await?;
    broker::each_event_has_one_effect(kind, Nats { server, client, subscriber }).await
}

async fn a_server_may_come_later(kind: Kind) -> Result<()> {
    let mut server = PrivateNats::launch(NatsVersion::V2_15).await;
    server.kill();
    let tables = tables(&server.url());
    let start = async || {
        server.start().await;
        Ok(())
    };
    broker::a_server_may_come_later(kind, tables, "async_nats", start).await?;
    Ok(())
}

on_both!(each_event_has_one_effect_at_the_other_end, a_server_may_come_later);
