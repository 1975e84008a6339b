//! From an outbox through a NATS stream into an inbox.

use std::time::Duration;

use anyhow::{Context as _, Result};
use async_nats::{Client, ConnectOptions, Message, Subscriber};
use futures::{FutureExt as _, StreamExt as _};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::{NatsVersion, PrivateNats};
use serde_json::Value;

use crate::broker::{self, Broker};
use crate::env::{Kind, on_both};

pub(crate) struct Nats {
    _server: PrivateNats,
    client: Client,
    subscriber: Subscriber,
}

impl Broker for Nats {
    type Message = Message;

    async fn launch() -> Result<(Self, FaultProxy)> {
        let server = PrivateNats::launch(NatsVersion::V2_15).await;
        let proxy = broker::proxied(server.port()).await;
        // Holds all messages that arrive during an outage.
        let client = ConnectOptions::new().subscription_capacity(1 << 20).connect(server.url()).await?;
        let subscriber = client.subscribe("orders.>").await?;
        client.flush().await?;
        Ok((Self { _server: server, client, subscriber }, proxy))
    }

    /// The relay creates the stream, so the first calls of the source may find none. The stream
    /// forgets ids at once: only the inbox recognises repetitions.
    fn tables(port: u16) -> (String, String) {
        let url = format!("url = \"nats://127.0.0.1:{port}\"");
        let sink = format!("type = \"nats\", {url}, subject = \"orders.{{topic}}\", stream = \"ORDERS\"");
        let source = format!("type = \"nats\"\n{url}\nstream = \"ORDERS\"\nack_wait = \"1s\"\nin_flight = 1");
        (format!("{sink}, create = {{ duplicate_window = \"100ms\" }}"), source)
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

async fn a_server_may_come_later(kind: Kind) -> Result<()> {
    let mut server = PrivateNats::launch(NatsVersion::V2_15).await;
    broker::a_server_may_come_later::<Nats, _>(kind, &mut server, "async_nats", async |_| Ok(())).await.map(drop)
}

on_both!(a_server_may_come_later);
