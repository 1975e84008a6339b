//! From an outbox through a Kafka topic into an inbox.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use krafka::admin::{CreateTopicsOptions, NewTopic};
use krafka::consumer::Consumer;
use krafka::producer::Record;
use krafka::{ConsumerRecord, Kafka as Client};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::PrivateKafka;
use serde_json::Value;

use crate::broker::{self, Broker};
use crate::env::{Kind, on_both};

pub(crate) struct Kafka {
    _server: PrivateKafka,
    client: Client,
    consumer: Consumer,
}

async fn with_topic(server: &PrivateKafka) -> Result<Client> {
    let kafka = Client::builder(server.brokers()).connect().await?;
    let made = kafka.admin().create_topics([NewTopic::new("orders", 4, 1)?], CreateTopicsOptions::default()).await?;
    made.into_values().collect::<krafka::Result<Vec<_>>>()?;
    Ok(kafka)
}

impl Broker for Kafka {
    type Message = ConsumerRecord;

    /// Kafka clients connect to the advertised address, so ours goes through the proxy as well.
    async fn launch() -> Result<(Self, FaultProxy)> {
        let mut proxy = None;
        let advertise = async |address: SocketAddr| proxy.insert(broker::proxied(address.port()).await).address();
        let server = PrivateKafka::launch_behind(advertise).await;
        let client = with_topic(&server).await?;
        let consumer = client.consumer_without_group().build().await?;
        consumer.assign("orders", (0..4).collect()).await?;
        for partition in 0..4 {
            consumer.seek_to_beginning("orders", partition).await?;
        }
        Ok((Self { _server: server, client, consumer }, proxy.context("a proxy")?))
    }

    fn tables(port: u16) -> (String, String) {
        let topic =
            |between| format!("type = \"kafka\"{between}brokers = \"127.0.0.1:{port}\"{between}topic = \"orders\"");
        (topic(", "), topic("\n") + "\nsession_timeout = \"6s\"")
    }

    async fn published(&mut self) -> Result<Vec<ConsumerRecord>> {
        Ok(self.consumer.poll(Duration::from_millis(100)).await?)
    }

    /// A poll returns one partition after the other. The records of a partition stay as they are.
    fn order(records: &mut [ConsumerRecord]) {
        let mut latest = HashMap::new();
        records.sort_by_cached_key(|record| {
            let latest = latest.entry(record.partition).or_insert(record.timestamp);
            *latest = record.timestamp.max(*latest);
            *latest
        });
    }

    fn read(record: &ConsumerRecord) -> Result<(String, String, Value)> {
        let id = record.header_str("postbox-id").context("an id")?.to_owned();
        let key = String::from_utf8(record.key.clone().context("a key")?.to_vec())?;
        Ok((id, key, serde_json::from_slice(&record.value.clone().context("a value")?)?))
    }

    /// As a producer that lost its answers would.
    async fn publish(&mut self, records: Vec<&ConsumerRecord>) -> Result<()> {
        let producer = self.client.producer().build().await?;
        for record in records {
            let mut copy = Record::new("orders", record.value.clone().context("a value")?);
            (copy.key, copy.headers) = (record.key.clone(), record.headers.clone());
            ensure!(producer.send(copy).await?.is_persisted());
        }
        Ok(producer.close().await?)
    }
}

async fn a_server_may_come_later(kind: Kind) -> Result<()> {
    let mut server = PrivateKafka::launch().await;
    let prepare = async |server: &PrivateKafka| with_topic(server).await.map(drop);
    let env = broker::a_server_may_come_later::<Kafka, _>(kind, &mut server, "krafka", prepare).await?;
    let said = env.ok(&["check-config", "--connect"])?;
    ensure!(said.contains("subscriptions.out.sink: answers; the topic orders is there"), "{said}");
    Ok(())
}

on_both!(a_server_may_come_later);
