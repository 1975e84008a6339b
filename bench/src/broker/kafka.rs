//! Kafka's protocol: an idempotent producer with acks from all replicas.
//!
//! The server is the test broker of the client, in a process of its own: no Kafka can be had from
//! the registries, and Tansu counts fewer messages than it has confirmed.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use krafka::Kafka;
use krafka::admin::{CreateTopicsOptions, DeleteTopicsOptions, NewTopic};
use krafka::producer::{Acks, Record};
use krafka::testing::FakeBroker;
use postbox_core::envelope::Binding;
use postbox_core::{Delivery, Sink};
use postbox_kafka::KafkaSinkTable;
use postbox_testkit::sending::{context, sink};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::{TIMEOUT, cloud_event, key, timed};
use crate::figure::Figure;

const PARTITIONS: i32 = 4;
/// Records in flight at once.
const WINDOW: usize = 8_192;
/// The same settings as the sink.
const BATCH_BYTES: usize = 512 * 1024;
const MEMORY_BYTES: usize = 64 * 1024 * 1024;
const LINGER: Duration = Duration::from_millis(1);

pub(super) struct Broker {
    /// Ends with this value.
    server: Child,
    address: String,
    kafka: Kafka,
}

impl Broker {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("kafka").stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut server = command.spawn()?;
        let address = BufReader::new(server.stdout.take().context("its output")?).lines().next_line().await?;
        let address = address.context("the test broker did not start")?;
        let kafka = Kafka::builder(address.as_str()).connect().await?;
        Ok(Self { server, address, kafka })
    }
}

/// Serves Kafka's protocol in this process until the input ends, as it does with the parent.
pub(crate) async fn serve() -> anyhow::Result<()> {
    let broker = FakeBroker::start().await?;
    println!("{}", broker.bootstrap_servers());
    tokio::io::stdin().read_to_end(&mut Vec::new()).await?;
    Ok(())
}

#[async_trait]
impl super::Broker for Broker {
    fn pid(&self) -> u32 {
        self.server.id().unwrap_or_default()
    }

    async fn make(&self, place: &str) -> anyhow::Result<()> {
        let wanted = NewTopic::new(place, PARTITIONS, 1)?;
        let made = self.kafka.admin().create_topics([wanted], CreateTopicsOptions::default()).await?;
        Ok(made.into_values().collect::<Result<Vec<_>, _>>().map(drop)?)
    }

    async fn remove(&self, place: &str) -> anyhow::Result<()> {
        let removed = self.kafka.admin().delete_topics([place], DeleteTopicsOptions::default()).await?;
        Ok(removed.into_values().collect::<Result<Vec<_>, _>>().map(drop)?)
    }

    async fn count(&self, place: &str) -> anyhow::Result<usize> {
        let looker = self.kafka.consumer_without_group().metrics_push(false).build().await?;
        let mut count = 0;
        for partition in 0..PARTITIONS {
            let (low, high) = looker.fetch_watermarks(place, partition).await?;
            count += usize::try_from(high - low)?;
        }
        looker.close().await?;
        Ok(count)
    }

    async fn sink(&self, place: &str) -> Arc<dyn Sink> {
        let keys = format!("brokers = {:?}\ntopic = {place:?}", self.address);
        sink::<KafkaSinkTable>(&keys, &context(TIMEOUT)).await
    }

    async fn publish(&self, place: &str, deliveries: &[Delivery]) -> anyhow::Result<Figure> {
        let record = |delivery: &Delivery| -> anyhow::Result<Record> {
            let wrapped = cloud_event(delivery)?;
            let attributes = Binding::KAFKA.spell(&wrapped).map(|(name, value)| (name, value.into_owned()));
            let own = [("content-type", wrapped.content_type.to_string()), ("postbox-id", delivery.dedupe_id())];
            let own = own.map(|(name, value)| (name.to_owned(), value));
            let mut record = Record::new(place, wrapped.body.clone());
            record.key = Some(Bytes::copy_from_slice(key(delivery).as_bytes()));
            record.headers = attributes.chain(own).map(|(name, value)| (name, Some(Bytes::from(value)))).collect();
            Ok(record)
        };
        let records = deliveries.iter().map(record).collect::<anyhow::Result<Vec<_>>>()?;
        let producer = self.kafka.producer().acks(Acks::All).idempotent(true).batch_size(BATCH_BYTES);
        let producer = producer.buffer_memory(MEMORY_BYTES).linger(LINGER).metrics_push(false).build().await?;
        let producer = &producer;
        let send = |record: Record| async move {
            let confirmed = producer.enqueue(record).await?.await?;
            anyhow::ensure!(confirmed.is_persisted(), "it is not stored");
            Ok(())
        };
        let sent = futures::stream::iter(records).map(send).buffer_unordered(WINDOW).try_collect::<()>();
        let figure = timed(deliveries.len(), sent).await?;
        producer.close().await?;
        Ok(figure)
    }
}
