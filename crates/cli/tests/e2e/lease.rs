//! Lanes that are taken in Redis too, by the running binary.

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::servers::{PrivateRedis, RedisKind};
use serde_json::Value;

use crate::env::{Kind, TestEnv, get, on_both, until};

const KEY: &str = "postbox:lease:{outbox:out:0}";

fn config(redis: &PrivateRedis) -> String {
    format!(
        "[subscriptions.out]\nlanes = 1\nlease = \"2s\"\nsink = {{ type = \"file\", path = \"out.jsonl\" }}\n\
         [lease]\ntype = \"redis\"\nurl = {:?}\n",
        redis.url()
    )
}

async fn holder(redis: &PrivateRedis) -> Result<Option<String>> {
    let mut connection = redis::Client::open(redis.url())?.get_multiplexed_async_connection().await?;
    Ok(redis::cmd("GET").arg(KEY).query_async(&mut connection).await?)
}

/// Waits until they are there and settled: a relay that is killed before sends them again.
async fn arrive(env: &TestEnv, count: usize) -> Result<()> {
    let settled = format!("pending=0 dispatched={count} ");
    until("all events", async || Ok(env.ok(&["stats"])?.contains(&settled).then_some(()))).await?;
    ensure!(env.lines("out.jsonl")?.len() == count, "{:?}", env.lines("out.jsonl")?);
    Ok(())
}

async fn one_of_two_is_active_and_without_redis_none(kind: Kind) -> Result<()> {
    let mut redis = PrivateRedis::launch(RedisKind::Redis7).await;
    let env = TestEnv::with(kind, &config(&redis)).await?;
    ensure!(!env.ok(&["check-config"])?.contains("lease"), "nothing is tried unless it is asked for");
    let said = env.ok(&["check-config", "--connect"])?;
    ensure!(said.contains("lease: answers\n") && holder(&redis).await?.is_none(), "{said}");

    let one = env.serve().await?;
    one.logged("lane taken in Redis", 1).await?;
    let first = holder(&redis).await?;
    let two = env.serve().await?;
    env.insert_three().await?;
    arrive(&env, 3).await?;
    one.kill().await?;
    two.logged("lane taken in Redis", 1).await?;
    let second = holder(&redis).await?;
    ensure!(first != second && second.is_some(), "{first:?} {second:?}");
    env.insert_three().await?;
    arrive(&env, 6).await?;

    redis.kill();
    two.logged("lease lost", 1).await?;
    env.insert_three().await?;
    let ready = async || get(&two.address, "/readyz", "").await;
    let why = until("not ready", async || Ok(Some(ready().await?).filter(|it| it.contains(" 503 ")))).await?;
    ensure!(why.contains("redis_connect_failed") && why.contains("no lane can be taken or kept"), "{why}");
    env.config(&format!("{}[server]\nlisten = {:?}\n", config(&redis), two.address))?;
    let doctor: Value = serde_json::from_str(&env.said(&["doctor", "--json"])?)?;
    let first = doctor.as_array().and_then(|all| all.iter().find(|it| it["severity"] == "problem")).context("one")?;
    ensure!(first["code"] == "lease_failing" && first["reason"] == "redis_connect_failed", "{doctor}");
    let away = env.output(&["check-config", "--connect"])?;
    let away = String::from_utf8(away.stderr)?;
    ensure!(away.contains("postbox: lease: the lease in Redis: ") && away.contains("(redis_connect_failed)"), "{away}");
    let metrics = get(&two.address, "/metrics", "").await?;
    let counted = |result: &str| {
        let series = format!("postbox_lease_renewals_total{{subscription=\"out\",result=\"{result}\"}} ");
        metrics.lines().find_map(|line| line.strip_prefix(&series)?.parse::<u64>().ok())
    };
    ensure!(counted("failed") > Some(0) && counted("lost") == Some(1), "{metrics}");
    ensure!(env.lines("out.jsonl")?.len() == 6, "something was sent without a lease in Redis");

    redis.start().await;
    arrive(&env, 9).await?;
    until("ready", async || Ok(ready().await?.contains(" 200 ").then_some(()))).await?;
    two.terminate().await?;
    ensure!(holder(&redis).await?.is_none(), "it is given back");
    // A single run takes lanes in the same way.
    env.insert_three().await?;
    ensure!(env.ok(&["dispatch"])?.contains("dispatched=3"));
    ensure!(holder(&redis).await?.is_none(), "it is given back");
    Ok(())
}

on_both!(one_of_two_is_active_and_without_redis_none);
