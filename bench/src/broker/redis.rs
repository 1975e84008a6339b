//! Redis Streams: XADD in pipelines, XREADGROUP and XACK.

use std::sync::Arc;

use anyhow::Context as _;
use async_trait::async_trait;
use futures::{StreamExt as _, TryStreamExt as _};
use postbox_config::SourceConfig;
use postbox_core::{Delivery, Sink};
use postbox_redis::{RedisSinkConfig, RedisSourceConfig};
use postbox_testkit::sending::{context, sink, table};
use postbox_testkit::servers::{PrivateRedis, RedisKind};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{IntoConnectionInfo as _, Pipeline, Value};

use super::{TIMEOUT, key, timed, topic};
use crate::figure::Figure;

/// Entries per pipeline; the sink's maximum.
const PIPELINE: usize = 1_000;
/// Pipelines in flight, as many as the sink's calls.
const PIPELINES: usize = 4;
/// Entries per read.
const READ: usize = 1_000;
const GROUP: &str = "raw";

pub(super) struct Broker {
    server: PrivateRedis,
    connection: MultiplexedConnection,
}

impl Broker {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let server = PrivateRedis::launch(RedisKind::Redis7).await;
        let info = server.url().into_connection_info()?;
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let connection = redis::Client::open(info)?.get_multiplexed_async_connection().await?;
        Ok(Self { server, connection })
    }
}

#[async_trait]
impl super::Broker for Broker {
    fn pid(&self) -> u32 {
        self.server.pid()
    }

    async fn make(&self, _: &str) -> anyhow::Result<()> {
        Ok(())
    }

    async fn remove(&self, place: &str) -> anyhow::Result<()> {
        Ok(redis::cmd("DEL").arg(place).exec_async(&mut self.connection.clone()).await?)
    }

    async fn count(&self, place: &str) -> anyhow::Result<usize> {
        Ok(redis::cmd("XLEN").arg(place).query_async(&mut self.connection.clone()).await?)
    }

    async fn sink(&self, place: &str) -> Arc<dyn Sink> {
        let keys = format!("url = {:?}\nstream = {place:?}", self.server.url());
        sink::<RedisSinkConfig>(&keys, &context(TIMEOUT)).await
    }

    async fn publish(&self, place: &str, deliveries: &[Delivery]) -> anyhow::Result<Figure> {
        let pipeline = |chunk: &[Delivery]| {
            let mut pipeline = Pipeline::with_capacity(chunk.len());
            for delivery in chunk {
                let event = &delivery.event;
                pipeline.cmd("XADD").arg(place).arg("*").arg("id").arg(delivery.dedupe_id());
                pipeline.arg("topic").arg(topic(delivery)).arg("key").arg(key(delivery));
                pipeline.arg("content-type").arg(event.content_type()).arg("payload").arg(&event.payload[..]);
            }
            pipeline
        };
        let pipelines: Vec<Pipeline> = deliveries.chunks(PIPELINE).map(pipeline).collect();
        let send = |pipeline: Pipeline| {
            let mut connection = self.connection.clone();
            async move { Ok(pipeline.exec_async(&mut connection).await?) }
        };
        let sent = futures::stream::iter(pipelines).map(send).buffered(PIPELINES).try_collect::<()>();
        timed(deliveries.len(), sent).await
    }

    fn source(&self, place: &str, in_flight: usize) -> Option<Arc<dyn SourceConfig>> {
        let keys = format!("url = {:?}\nstream = {place:?}\nin_flight = {in_flight}", self.server.url());
        Some(Arc::new(table::<RedisSourceConfig>(&keys)))
    }

    /// Reads, and acknowledges the previous read, in one round trip.
    async fn consume(&self, place: &str, count: usize) -> anyhow::Result<Figure> {
        let mut connection = self.connection.clone();
        let mut group = redis::cmd("XGROUP");
        group.arg("CREATE").arg(place).arg(GROUP).arg("0").exec_async(&mut connection).await?;
        let consume = async {
            let (mut taken, mut ids) = (0, Vec::new());
            while taken < count || !ids.is_empty() {
                let mut round = Pipeline::new();
                if !ids.is_empty() {
                    round.cmd("XACK").arg(place).arg(GROUP).arg(&ids).ignore();
                }
                round.cmd("XREADGROUP").arg("GROUP").arg(GROUP).arg("raw").arg("COUNT").arg(READ);
                round.arg("STREAMS").arg(place).arg(">");
                let mut answers: Vec<Value> = round.query_async(&mut connection).await?;
                ids = entry_ids(answers.pop().context("an answer")?);
                taken += ids.len();
            }
            anyhow::ensure!(taken == count, "{taken} of {count} were read");
            Ok(())
        };
        timed(count, consume).await
    }
}

/// The ids in the answer to a read of one stream.
fn entry_ids(answer: Value) -> Vec<Vec<u8>> {
    let items = |value: Value| match value {
        Value::Array(items) => items,
        _ => Vec::new(),
    };
    let entries = items(answer).into_iter().filter_map(|stream| items(stream).pop()).flat_map(items);
    let id = |entry: Value| match items(entry).into_iter().next() {
        Some(Value::BulkString(id)) => Some(id),
        _ => None,
    };
    entries.filter_map(id).collect()
}
