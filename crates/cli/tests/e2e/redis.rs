//! From an outbox into a Redis stream, and from there into an inbox.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::servers::{PrivateRedis, RedisKind};
use redis::aio::MultiplexedConnection;

use crate::env::{Kind, TestEnv, on_both, until};

const EVENTS: usize = 1_000;
const KEYS: usize = 40;

type Entry = (String, Vec<(String, Vec<u8>)>);

fn field(entry: &Entry, name: &str) -> Result<String> {
    let found = entry.1.iter().find(|(its, _)| its == name).with_context(|| format!("no field {name}"))?;
    Ok(String::from_utf8(found.1.clone())?)
}

async fn entries(redis: &mut MultiplexedConnection) -> Result<Vec<Entry>> {
    Ok(redis::cmd("XRANGE").arg("events").arg("-").arg("+").query_async(redis).await?)
}

/// The relay is killed on the way, 30 % of the entries are there twice, the receiver is killed on
/// its way: each event has its effect once.
async fn every_event_gets_into_the_other_s_inbox_once(kind: Kind) -> Result<()> {
    let server = PrivateRedis::launch(RedisKind::Redis7).await;
    let url = server.url();
    let mut redis = redis::Client::open(url.as_str())?.get_multiplexed_async_connection().await?;

    let sink =
        format!("[subscriptions.out]\nbatch = 50\nsink = {{ type = \"redis\", url = {url:?}, stream = \"events\" }}\n");
    let outbox = TestEnv::with(kind, &sink).await?;
    outbox.insert((0..EVENTS).map(|n| ("order.placed", (n % KEYS).to_string(), n as i64))).await?;
    for share in [1, 300, 600] {
        let served = outbox.serve().await?;
        until("its share", async || {
            let length: usize = redis::cmd("XLEN").arg("events").query_async(&mut redis).await?;
            Ok((length >= share).then_some(()))
        })
        .await?;
        served.kill().await?;
    }
    let served = outbox.serve().await?;
    let all = format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n");
    until("all are sent", async || Ok((outbox.ok(&["stats"])? == all).then_some(()))).await?;
    served.terminate().await?;

    let sent = entries(&mut redis).await?;
    let (mut ids, mut by_key) = (HashSet::new(), BTreeMap::<String, Vec<u64>>::new());
    for entry in &sent {
        if ids.insert(field(entry, "id")?) {
            let payload: serde_json::Value = serde_json::from_str(&field(entry, "payload")?)?;
            by_key.entry(field(entry, "key")?).or_default().push(payload["n"].as_u64().context("a number")?);
        }
    }
    ensure!(ids.len() == EVENTS, "{} of {EVENTS} arrived", ids.len());
    ensure!(by_key.len() == KEYS && by_key.values().all(|numbers| numbers.is_sorted()), "out of order: {by_key:?}");

    for entry in sent.iter().enumerate().filter(|(n, _)| n % 10 < 3).map(|(_, entry)| entry) {
        let mut again = redis::cmd("XADD");
        again.arg("events").arg("*");
        entry.1.iter().for_each(|(name, value)| _ = again.arg(name).arg(value));
        let _: String = again.query_async(&mut redis).await?;
    }
    let source = format!(
        "[sources.orders]\ntype = \"redis\"\nurl = {url:?}\nstream = \"events\"\nin_flight = 100\n\
         [subscriptions.apply]\nlog = \"inbox\"\nsink = {{ type = \"file\", path = \"applied.jsonl\" }}\n"
    );
    let inbox = TestEnv::with(kind, &source).await?;
    let served = inbox.serve().await?;
    until("some are stored", async || Ok((!inbox.lines("applied.jsonl").unwrap_or_default().is_empty()).then_some(())))
        .await?;
    served.kill().await?;
    let served = inbox.serve().await?;
    until("all are applied", async || Ok((inbox.ok(&["stats", "--log", "inbox"])? == all).then_some(()))).await?;
    // Until the last duplicate was looked at.
    until("nothing is pending", async || {
        let (pending, ..): (usize, redis::Value, redis::Value, redis::Value) =
            redis::cmd("XPENDING").arg("events").arg("postbox").query_async(&mut redis).await?;
        let groups: Vec<BTreeMap<String, redis::Value>> =
            redis::cmd("XINFO").arg("GROUPS").arg("events").query_async(&mut redis).await?;
        Ok((pending == 0 && groups[0]["lag"] == redis::Value::Int(0)).then_some(()))
    })
    .await?;
    served.terminate().await?;
    ensure!(inbox.ok(&["stats", "--log", "inbox"])? == all, "each is stored once");
    let applied: HashSet<u64> =
        inbox.lines("applied.jsonl")?.iter().filter_map(|line| line["payload"]["n"].as_u64()).collect();
    ensure!(applied.len() == EVENTS, "{} of {EVENTS} were applied", applied.len());
    Ok(())
}

on_both!(every_event_gets_into_the_other_s_inbox_once);
