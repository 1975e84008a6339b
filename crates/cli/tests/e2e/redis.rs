//! From an outbox into a Redis stream, and from there into an inbox.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use postbox_testkit::servers::{PrivateRedis, RedisKind};
use redis::aio::MultiplexedConnection;
use serde_json::Value;

use crate::broker::{self, Broker};
use crate::env::{Kind, on_both};

type Entry = (String, Vec<(String, Vec<u8>)>);

struct Redis {
    server: PrivateRedis,
    connection: MultiplexedConnection,
    last: String,
}

impl Broker for Redis {
    type Message = Entry;

    fn tables(&self) -> (String, String) {
        let url = self.server.url();
        (
            format!("type = \"redis\", url = {url:?}, stream = \"events\""),
            format!("type = \"redis\"\nurl = {url:?}\nstream = \"events\"\nin_flight = 100"),
        )
    }

    async fn published(&mut self) -> Result<Vec<Entry>> {
        let mut range = redis::cmd("XRANGE");
        range.arg("events").arg(format!("({}", self.last)).arg("+");
        let entries: Vec<Entry> = range.query_async(&mut self.connection).await?;
        self.last = entries.last().map_or(std::mem::take(&mut self.last), |entry| entry.0.clone());
        Ok(entries)
    }

    fn read((_, fields): &Entry) -> Result<(String, String, Value)> {
        let field = |name: &str| {
            let found = fields.iter().find(|(its, _)| its == name).with_context(|| format!("no field {name}"))?;
            anyhow::Ok(String::from_utf8(found.1.clone())?)
        };
        Ok((field("id")?, field("key")?, serde_json::from_str(&field("payload")?)?))
    }

    async fn publish(&mut self, entries: Vec<&Entry>) -> Result<()> {
        for (_, fields) in entries {
            let mut again = redis::cmd("XADD");
            again.arg("events").arg("*");
            fields.iter().for_each(|(name, value)| _ = again.arg(name).arg(value));
            let _: String = again.query_async(&mut self.connection).await?;
        }
        Ok(())
    }

    async fn is_settled(&mut self) -> Result<bool> {
        let (pending, ..): (usize, redis::Value, redis::Value, redis::Value) =
            redis::cmd("XPENDING").arg("events").arg("postbox").query_async(&mut self.connection).await?;
        let groups: Vec<BTreeMap<String, redis::Value>> =
            redis::cmd("XINFO").arg("GROUPS").arg("events").query_async(&mut self.connection).await?;
        Ok(pending == 0 && groups[0]["lag"] == redis::Value::Int(0))
    }

    const REPEATS_IN_ORDER: bool = false;
}

async fn every_event_gets_into_the_other_s_inbox_once(kind: Kind) -> Result<()> {
    let server = PrivateRedis::launch(RedisKind::Redis7).await;
    let connection = redis::Client::open(server.url())?.get_multiplexed_async_connection().await?;
    broker::each_event_has_one_effect(kind, Redis { server, connection, last: "0".to_owned() }).await
}

on_both!(every_event_gets_into_the_other_s_inbox_once);
