//! What maintenance does to the product's tables.

use postbox_crash_checker::faults::Fault;
use postbox_testkit::proxy::{Harm, Point};
use rand::Rng as _;
use rand::rngs::SmallRng;
use tokio::time::{sleep, timeout};
use tokio_postgres::error::SqlState;

use super::network::{Ambush, CALL_WITHIN, WINDOW, lay_at};
use super::{choose, millis};
use crate::stage::{RELAYS, Stage};
use crate::store::window_of_all;

/// Each moves every row, and locks the table meanwhile. The column with a volatile default also
/// changes the table's row type, so that prepared statements are planned again.
const REWRITES: [&str; 8] = [
    "VACUUM FULL postbox.lane",
    "VACUUM FULL postbox.delivery",
    "VACUUM FULL postbox.outbox",
    "VACUUM FULL postbox.subscription",
    "CLUSTER postbox.lane USING lane_pkey",
    "CLUSTER postbox.delivery USING delivery_pkey",
    "ALTER TABLE postbox.lane ADD COLUMN crash_draw float8 DEFAULT random(); ALTER TABLE postbox.lane DROP COLUMN crash_draw",
    "CLUSTER postbox.outbox USING outbox_pkey",
];

/// Rewrites a table.
pub(super) async fn rewrite(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let statement = *choose(&REWRITES, random);
    statement.clone_into(&mut fault.detail);
    let client = stage.postgres()?.client().await?;
    // A relay that waits for the lock may lose its lease; also if this call waits in vain.
    fault.window = window_of_all();
    let done = client.batch_execute(statement).await;
    let refusal = done.as_ref().err().and_then(|error| error.as_db_error());
    fault.missed = refusal.is_some_and(|error| *error.code() != SqlState::LOCK_NOT_AVAILABLE);
    Ok(done?)
}

/// Takes a lock that allows reads but no writes, like an index build.
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

/// A relay's connection breaks during its call for a window. It calls again, or settles first. Both
/// calls wait for the same lock, and are executed when it is released. The relay ends meanwhile,
/// usually before it gets an answer, so that nothing of either window is delivered.
pub(super) async fn end_behind_lock(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let Ambush { relay, trap } = lay_at(stage, random, fault, Harm::Delay, Point::Statement(WINDOW.to_owned())).await?;
    if !trap.is_sprung() {
        return Ok(());
    }
    let lock = lock(stage, fault, "lane").await?;
    sleep(millis(random, 100..500)).await;
    let ended = async {
        sleep(millis(random, 20..80)).await;
        if random.random_bool(0.3) {
            lock.batch_execute("COMMIT").await?;
            return end(stage, random, fault, relay).await;
        }
        fault.detail.push_str(" and killed behind it");
        let mut relay = stage.relays[relay].lock().await;
        relay.kill();
        lock.batch_execute("COMMIT").await?;
        relay.start()
    };
    // The held call is answered when the lock is released.
    let (_, ended) = futures::join!(timeout(CALL_WITHIN, trap.release()), ended);
    ended
}

async fn lock(stage: &Stage, fault: &mut Fault, table: &str) -> anyhow::Result<tokio_postgres::Client> {
    fault.detail.push_str(&format!(", lock of {table}"));
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

/// Holds a snapshot for a while, like a long report: no old row version can be removed, and the
/// horizon stands still.
pub(super) async fn hold_snapshot(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let client = stage.postgres()?.client().await?;
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id()").await?;
    sleep(millis(random, 500..3_000)).await;
    "with an id of its own".clone_into(&mut fault.detail);
    Ok(client.batch_execute("ROLLBACK").await?)
}
