//! Shared by these tests: sinks, sources, clients, and the contents of topics.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use krafka::admin::{CreateTopicsOptions, NewTopic};
use krafka::producer::Record;
use krafka::{ConsumerRecord, Kafka};
use postbox_config::SourceConfig as _;
use postbox_core::{Sink, Source, SourceMessage};
use postbox_kafka::{KafkaSinkTable, KafkaSourceTable};
use postbox_testkit::receiving::source_context;
use postbox_testkit::sending::{self, PATIENCE};
use tokio::time::timeout;

/// Interval of the checks whether a condition holds.
pub(crate) const LOOK: Duration = Duration::from_millis(5);
/// The subscription's timeout in tests with silent brokers. A call ends after 5.5 s, and a request
/// is repeated after 1.65 s.
pub(crate) const SHORT: Duration = Duration::from_secs(6);
/// The session timeout of sources. Tansu lets a member join after half of it.
pub(crate) const SESSION: &str = "session_timeout = \"6s\"";

/// Returns the keys that select the brokers, and the client under test.
pub(crate) fn basics(brokers: &str) -> String {
    format!("brokers = {brokers:?}\nclient = {:?}", crate::CLIENT)
}

/// Builds a sink from the brokers and these keys.
pub(crate) async fn sink(brokers: &str, keys: &str) -> Arc<dyn Sink> {
    sending::sink::<KafkaSinkTable>(&format!("{}\n{keys}", basics(brokers)), &sending::context(SHORT)).await
}

pub(crate) fn table(brokers: &str, keys: &str) -> KafkaSourceTable {
    sending::table(&format!("{}\n{SESSION}\n{keys}", basics(brokers)))
}

/// Builds a source from the brokers and these keys.
pub(crate) async fn source(brokers: &str, keys: &str) -> Arc<dyn Source> {
    table(brokers, keys).build(&source_context()).await.expect("a source")
}

/// Returns a separate client of the test.
pub(crate) async fn client(brokers: &str) -> Kafka {
    Kafka::builder(brokers).connect().await.expect("connected")
}

pub(crate) async fn make_topic(kafka: &Kafka, name: &str, partitions: i32) {
    let topic = NewTopic::new(name, partitions, 1).expect("a name");
    let made = kafka.admin().create_topics([topic], CreateTopicsOptions::default()).await;
    made.expect("an answer").into_values().for_each(|made| made.expect("made"));
}

/// Returns all records of a topic, ordered by partition and offset.
pub(crate) async fn records(kafka: &Kafka, topic: &str) -> Vec<ConsumerRecord> {
    let consumer = kafka.consumer_without_group().metrics_push(false).build().await.expect("a consumer");
    let found = consumer.fetch_metadata(Some(topic)).await.expect("metadata").topics;
    let mut partitions: Vec<i32> = found.iter().flat_map(|topic| topic.partitions.keys().copied()).collect();
    partitions.sort_unstable();
    let mut count = 0;
    for partition in &partitions {
        let (low, high) = consumer.fetch_watermarks(topic, *partition).await.expect("watermarks");
        count += usize::try_from(high - low).expect("no less than nothing");
    }
    consumer.assign(topic, partitions.clone()).await.expect("assigned");
    for partition in partitions {
        consumer.seek_to_beginning(topic, partition).await.expect("assigned");
    }
    let mut records = Vec::new();
    let read = async {
        while records.len() < count {
            records.extend(consumer.poll(Duration::from_secs(1)).await.expect("polled"));
        }
    };
    timeout(PATIENCE, read).await.expect("all of them in time");
    consumer.close().await.expect("closed");
    records.sort_by_key(|record| (record.partition, record.offset));
    records
}

pub(crate) fn header(record: &ConsumerRecord, name: &str) -> Option<String> {
    record.header_str(name).map(str::to_owned)
}

/// Returns the payloads of all records of a topic, sorted.
pub(crate) async fn payloads(kafka: &Kafka, topic: &str) -> Vec<String> {
    let records = records(kafka, topic).await;
    let mut payloads: Vec<String> = records
        .iter()
        .map(|it| String::from_utf8(it.value.clone().expect("a value").to_vec()).expect("text"))
        .collect();
    payloads.sort();
    payloads
}

/// Publishes numbers, each as the key and payload of a record.
pub(crate) async fn publish(kafka: &Kafka, topic: &str, numbers: std::ops::Range<usize>) {
    let producer = kafka.producer().metrics_push(false).build().await.expect("a producer");
    let send = |n: usize| producer.send(Record::new(topic, Bytes::from(n.to_string())).key(n.to_string()));
    for sent in futures::future::join_all(numbers.map(send)).await {
        assert!(sent.expect("sent").is_persisted());
    }
    producer.close().await.expect("closed");
}

pub(crate) fn bodies(taken: &[SourceMessage]) -> Vec<String> {
    taken.iter().map(|it| String::from_utf8(it.message.payload.to_vec()).expect("text")).collect()
}

/// Returns the sum of a group's committed offsets in all partitions of a topic.
pub(crate) async fn committed(kafka: &Kafka, group: &str, topic: &str, partitions: i32) -> i64 {
    let looker = kafka.consumer(group).metrics_push(false).build().await.expect("a consumer");
    let partitions: Vec<(&str, i32)> = (0..partitions).map(|partition| (topic, partition)).collect();
    let committed = looker.committed(&partitions).await.expect("an answer");
    looker.close().await.expect("closed");
    committed.values().map(|position| position.offset).sum()
}
