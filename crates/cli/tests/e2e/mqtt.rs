//! From an outbox through MQTT topics into an inbox.

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::PrivateMqtt;
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Packet, Publish};
use rumqttc::v5::{AsyncClient, Event, MqttOptions};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::broker::{self, Broker};
use crate::env::{Kind, on_both};

pub(crate) struct Mqtt {
    _server: PrivateMqtt,
    client: AsyncClient,
    heard: mpsc::UnboundedReceiver<Publish>,
    _driver: JoinHandle<()>,
}

/// A client that subscribes to everything; it returns once it has subscribed.
async fn subscriber(url: &str, id: &str) -> Result<(AsyncClient, mpsc::UnboundedReceiver<Publish>, JoinHandle<()>)> {
    let port = url.rsplit_once(':').context("a port")?.1.parse()?;
    let mut options = MqttOptions::new(id, "127.0.0.1", port);
    options.set_clean_start(false).set_session_expiry_interval(Some(600));
    let (client, mut events) = AsyncClient::new(options, 1_000);
    client.subscribe("orders/#", QoS::AtLeastOnce).await?;
    while !matches!(events.poll().await?, Event::Incoming(Packet::SubAck(_))) {}
    let (hear, heard) = mpsc::unbounded_channel();
    let driver = tokio::spawn(async move {
        while let Ok(event) = events.poll().await {
            if let Event::Incoming(Packet::Publish(message)) = event
                && hear.send(message).is_err()
            {
                return;
            }
        }
    });
    Ok((client, heard, driver))
}

impl Broker for Mqtt {
    type Message = Publish;

    async fn launch() -> Result<(Self, FaultProxy)> {
        // The broker is not killed, and saving the whole queue after each message would become ever
        // slower.
        let unsaved = "autosave_on_changes false\nautosave_interval 1800\n";
        let server = PrivateMqtt::launch_with(&format!("allow_anonymous true\nmax_queued_messages 0\n{unsaved}")).await;
        let proxy = broker::proxied(server.port()).await;
        // Messages published before the first subscription are lost, so the receiver's subscription
        // is made first.
        subscriber(&server.url(), "orders-1").await?.2.abort();
        let (client, heard, driver) = subscriber(&server.url(), "test").await?;
        Ok((Self { _server: server, client, heard, _driver: driver }, proxy))
    }

    fn tables(port: u16) -> (String, String) {
        let url = format!("url = \"mqtt://127.0.0.1:{port}\"");
        // Until the receiver has subscribed, only the test has.
        let sink = format!("type = \"mqtt\", {url}, topic = \"orders/{{topic}}\"");
        (sink, format!("type = \"mqtt\"\n{url}\nclient_id = \"orders-1\"\ntopic = \"orders/#\"\n"))
    }

    async fn published(&mut self) -> Result<Vec<Publish>> {
        Ok(std::iter::from_fn(|| self.heard.try_recv().ok()).collect())
    }

    fn read(message: &Publish) -> Result<(String, String, Value)> {
        let properties = &message.properties.as_ref().context("properties")?.user_properties;
        let property = |name: &str| {
            let found =
                properties.iter().find(|(its, _)| its == name).with_context(|| format!("no property {name}"))?;
            anyhow::Ok(found.1.clone())
        };
        Ok((property("postbox-id")?, property("subject")?, serde_json::from_slice(&message.payload)?))
    }

    async fn publish(&mut self, messages: Vec<&Publish>) -> Result<()> {
        for message in messages {
            let topic = String::from_utf8(message.topic.to_vec())?;
            let (payload, properties) = (message.payload.clone(), message.properties.clone().context("properties")?);
            self.client.publish_with_properties(topic, QoS::AtLeastOnce, false, payload, properties).await?;
        }
        Ok(())
    }
}

async fn a_server_may_come_later(kind: Kind) -> Result<()> {
    let mut server = PrivateMqtt::launch().await;
    let env = broker::a_server_may_come_later::<Mqtt, _>(kind, &mut server, "rumqttc", async |_| Ok(())).await?;
    let said = env.ok(&["check-config", "--connect"])?;
    ensure!(said.contains("subscriptions.out.sink: answers"), "{said}");
    Ok(())
}

on_both!(a_server_may_come_later);
