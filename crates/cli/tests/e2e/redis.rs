//! From an outbox into a Redis stream, and from there into an inbox.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::{PrivateRedis, RedisKind};
use redis::aio::MultiplexedConnection;
use serde_json::{Value, json};

use crate::broker::{self, Broker};
use crate::env::{Kind, TestEnv, get, on_both, until};

type Entry = (String, Vec<(String, Vec<u8>)>);

pub(crate) struct Redis {
    _server: PrivateRedis,
    connection: MultiplexedConnection,
    last: String,
}

impl Broker for Redis {
    type Message = Entry;

    const REPEATS_IN_ORDER: bool = false;

    async fn launch() -> Result<(Self, FaultProxy)> {
        let server = PrivateRedis::launch(RedisKind::Redis7).await;
        let proxy = broker::proxied(server.port()).await;
        let connection = redis::Client::open(server.url())?.get_multiplexed_async_connection().await?;
        Ok((Self { _server: server, connection, last: "0".to_owned() }, proxy))
    }

    fn tables(port: u16) -> (String, String) {
        let url = format!("url = \"redis://127.0.0.1:{port}\"");
        (
            format!("type = \"redis\", {url}, stream = \"events\""),
            format!("type = \"redis\"\n{url}\nstream = \"events\"\nin_flight = 100"),
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
}

/// The end of a stream is asked of the server, so a service that starts anew and sends nothing
/// knows it as well.
async fn a_stream_s_end_is_seen_from_outside(kind: Kind) -> Result<()> {
    let server = PrivateRedis::launch(RedisKind::Redis7).await;
    let sink = format!("type = \"redis\", url = {:?}, stream = \"events:{{topic}}\"", server.url());
    let config = format!("[subscriptions.out]\nsink = {{ {sink} }}\n");
    let env = TestEnv::with(kind, &config).await?;
    let stats = |address: &str| {
        env.config(&format!("{config}[server]\nlisten = {address:?}\n"))?;
        anyhow::Ok(env.json(&["stats", "--json"])?[0]["high_water_marks"].clone())
    };
    env.insert_three().await?;
    let served = env.serve().await?;
    until("all three", async || Ok(env.ok(&["stats"])?.contains("dispatched=3").then_some(()))).await?;
    let mut connection = redis::Client::open(server.url())?.get_multiplexed_async_connection().await?;
    let names: Vec<String> = redis::cmd("KEYS").arg("events:*").query_async(&mut connection).await?;
    let mut marks = BTreeMap::new();
    for name in names {
        let mut last = redis::cmd("XREVRANGE");
        last.arg(&name).arg("+").arg("-").arg("COUNT").arg(1);
        let entries: Vec<Entry> = last.query_async(&mut connection).await?;
        marks.insert(name, entries[0].0.clone());
    }
    let expected: Vec<Value> =
        marks.iter().map(|(stream, position)| json!({ "stream": stream, "position": position })).collect();
    ensure!(!expected.is_empty());
    let seen = async |address: &str| -> Result<()> {
        ensure!(stats(address)? == json!(expected));
        let (stream, position) = marks.first_key_value().context("a stream")?;
        let answer = get(address, &format!("/high-water-marks?stream={stream}"), "").await?;
        let (_, body) = answer.split_once("\r\n\r\n").context("a body")?;
        let one = json!([{ "subscription": "out", "high_water_marks": [expected[0]], "fault": null }]);
        ensure!(serde_json::from_str::<Value>(body)? == one, "{answer}");
        let nothing = get(address, "/high-water-marks?stream=none", "").await?;
        ensure!(nothing.contains("\"high_water_marks\":[]"), "{nothing}");
        let page = get(address, "/metrics", "").await?;
        let number = position.split('-').next().context("milliseconds")?;
        let series = format!("postbox_high_water_mark{{subscription=\"out\",stream=\"{stream}\"}} {number}\n");
        ensure!(page.contains(&series), "{series} in {page}");
        Ok(())
    };
    seen(&served.address).await?;
    served.terminate().await?;
    ensure!(stats("127.0.0.1:1")? == json!([]), "without a service nobody is asked");
    env.config(&config)?;
    let again = env.serve().await?;
    seen(&again.address).await?;
    again.terminate().await?;
    Ok(())
}

on_both!(a_stream_s_end_is_seen_from_outside);
