//! What maintenance does to the product's tables.

use postbox_crash_checker::faults::Fault;
use rand::Rng as _;
use rand::rngs::SmallRng;
use tokio::time::sleep;

use super::{choose, millis};
use crate::stage::{RELAYS, Stage};
use crate::store::window_of_all;

/// Each moves every row, and locks the table meanwhile.
const REWRITES: [&str; 8] = [
    "VACUUM FULL postbox.lane",
    "VACUUM FULL postbox.delivery",
    "VACUUM FULL postbox.outbox",
    "VACUUM FULL postbox.subscription",
    "CLUSTER postbox.lane USING lane_pkey",
    "CLUSTER postbox.delivery USING delivery_pkey",
    "ALTER TABLE postbox.lane ALTER COLUMN last_seq TYPE bigint USING last_seq + 0",
    "VACUUM (FREEZE) postbox.outbox",
];

/// A table is rewritten.
pub(super) async fn rewrite(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let statement = *choose(&REWRITES, random);
    statement.clone_into(&mut fault.detail);
    // Whoever waits for the lock may lose its lease.
    fault.window = window_of_all();
    stage.postgres()?.execute(statement).await
}

/// A lock that lets everybody read and nobody write, as an index build takes it.
pub(super) async fn index(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let table = *choose(&["lane", "lane", "delivery", "outbox"], random);
    let lock = lock(stage, fault, table).await?;
    sleep(millis(random, 100..600)).await;
    let victim = random.random_bool(0.6).then(|| random.random_range(0..RELAYS));
    if let Some(victim) = victim {
        reset(stage, fault, victim)?;
    }
    sleep(millis(random, 100..600)).await;
    lock.batch_execute("COMMIT").await?;
    match victim.filter(|_| random.random_bool(0.5)) {
        Some(victim) => end(stage, random, fault, victim).await,
        None => Ok(()),
    }
}

/// Two calls of one relay wait for the same lock, because its connection broke and it asked again; both are done when the lock goes,
/// and the relay ends before it has written down what it did.
pub(super) async fn end_behind_lock(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let lock = lock(stage, fault, "lane").await?;
    let victim = random.random_range(0..RELAYS);
    sleep(millis(random, 50..300)).await;
    reset(stage, fault, victim)?;
    sleep(millis(random, 50..300)).await;
    lock.batch_execute("COMMIT").await?;
    end(stage, random, fault, victim).await
}

async fn lock(stage: &Stage, fault: &mut Fault, table: &str) -> anyhow::Result<tokio_postgres::Client> {
    fault.detail = format!("lock of {table}");
    fault.window = window_of_all();
    let client = stage.postgres()?.client().await?;
    client.batch_execute(&format!("BEGIN; LOCK TABLE postbox.{table} IN SHARE MODE")).await?;
    Ok(client)
}

fn reset(stage: &Stage, fault: &mut Fault, relay: usize) -> anyhow::Result<()> {
    fault.detail.push_str(&format!(", connections of relay {relay} reset"));
    stage.postgres()?.proxy(relay).reset();
    Ok(())
}

async fn end(stage: &Stage, random: &mut SmallRng, fault: &mut Fault, relay: usize) -> anyhow::Result<()> {
    fault.detail.push_str(" and killed");
    sleep(millis(random, 0..30)).await;
    let mut relay = stage.relays[relay].lock().await;
    relay.kill();
    relay.start()
}

/// A report that reads for a while: no old version of a row can go, and the horizon stands still.
pub(super) async fn hold_snapshot(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let client = stage.postgres()?.client().await?;
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id()").await?;
    sleep(millis(random, 500..3_000)).await;
    "with an id of its own".clone_into(&mut fault.detail);
    Ok(client.batch_execute("ROLLBACK").await?)
}
