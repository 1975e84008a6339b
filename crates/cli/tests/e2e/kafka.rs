//! From an outbox through a topic of Kafka into an inbox.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use krafka::admin::{CreateTopicsOptions, NewTopic};
use krafka::consumer::Consumer;
use krafka::producer::Record;
use krafka::{ConsumerRecord, Kafka};
use postbox_testkit::servers::PrivateKafka;
use serde_json::Value;

use crate::broker::{self, Broker};
use crate::env::{Kind, on_both};

struct Topic {
    server: PrivateKafka,
    kafka: Kafka,
    consumer: Consumer,
}

async fn with_topic(server: &PrivateKafka) -> Result<Kafka> {
    let kafka = Kafka::builder(server.brokers()).connect().await?;
    let made = kafka.admin().create_topics([NewTopic::new("orders", 4, 1)?], CreateTopicsOptions::default()).await?;
    made.into_values().collect::<krafka::Result<Vec<_>>>()?;
    Ok(kafka)
}

fn tables(brokers: &str) -> (String, String) {
    (
        format!("type = \"kafka\", brokers = {brokers:?}, topic = \"orders\""),
        format!("type = \"kafka\"\nbrokers = {brokers:?}\ntopic = \"orders\"\nsession_timeout = \"6s\""),
    )
}

impl Broker for Topic {
    type Message = ConsumerRecord;

    fn tables(&self) -> (String, String) {
        tables(&self.server.brokers())
    }

    async fn published(&mut self) -> Result<Vec<ConsumerRecord>> {
        Ok(self.consumer.poll(Duration::from_millis(100)).await?)
    }

    fn read(record: &ConsumerRecord) -> Result<(String, String, Value)> {
        let id = record.header_str("postbox-id").context("an id")?.to_owned();
        let key = String::from_utf8(record.key.clone().context("a key")?.to_vec())?;
        Ok((id, key, serde_json::from_slice(&record.value.clone().context("a value")?)?))
    }

    /// As a producer that lost its answers.
    async fn publish(&mut self, records: Vec<&ConsumerRecord>) -> Result<()> {
        let producer = self.kafka.producer().build().await?;
        for record in records {
            let mut copy = Record::new("orders", record.value.clone().context("a value")?);
            (copy.key, copy.headers) = (record.key.clone(), record.headers.clone());
            ensure!(producer.send(copy).await?.is_persisted());
        }
        Ok(producer.close().await?)
    }
}

async fn each_event_has_one_effect_at_the_other_end(kind: Kind) -> Result<()> {
    let server = PrivateKafka::launch().await;
    let kafka = with_topic(&server).await?;
    let consumer = kafka.consumer_without_group().build().await?;
    consumer.assign("orders", (0..4).collect()).await?;
    for partition in 0..4 {
        consumer.seek_to_beginning("orders", partition).await?;
    }
    broker::each_event_has_one_effect(kind, Topic { server, kafka, consumer }).await
}

async fn a_server_may_come_later(kind: Kind) -> Result<()> {
    let mut server = PrivateKafka::launch().await;
    server.kill();
    let tables = tables(&server.brokers());
    let start = async || {
        server.start().await;
        with_topic(&server).await.map(drop)
    };
    let env = broker::a_server_may_come_later(kind, tables, "krafka", start).await?;
    let said = env.ok(&["check-config", "--connect"])?;
    ensure!(said.contains("subscriptions.out.sink: answers; the topic orders is there"), "{said}");
    Ok(())
}

on_both!(each_event_has_one_effect_at_the_other_end, a_server_may_come_later);
