//! What happens to relays and writers as processes.

use postbox_crash_checker::faults::Fault;
use rand::Rng as _;
use rand::rngs::SmallRng;
use tokio::time::sleep;

use super::{choose, millis};
use crate::relay::LEASE;
use crate::stage::{RELAYS, Stage};

/// Dies; is started again at once, or after the others took over.
pub(super) async fn kill(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let number = random.random_range(0..RELAYS);
    fault.detail = format!("relay {number}");
    fault.window = stage.bed.window_of_one().await;
    let mut relay = stage.relays[number].lock().await;
    relay.kill();
    sleep(millis(random, 0..600)).await;
    relay.start()
}

/// Frozen until others have taken over, then thawed: a former owner that believes in its lease.
pub(super) async fn freeze(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let number = random.random_range(0..RELAYS);
    fault.detail = format!("relay {number}");
    fault.window = stage.bed.window_of_one().await;
    let relay = stage.relays[number].lock().await;
    relay.signal("STOP");
    sleep(LEASE + millis(random, 100..900)).await;
    relay.signal("CONT");
    Ok(())
}

/// An orderly stop: nothing is in flight after it.
pub(super) async fn stop(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let number = random.random_range(0..RELAYS);
    fault.detail = format!("relay {number}");
    let mut relay = stage.relays[number].lock().await;
    relay.stop().await?;
    relay.start()
}

/// Its clock jumps, and jumps again when it is next chosen. No lease and no order hangs on it.
pub(super) async fn step_clock(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    anyhow::ensure!(crate::process::faketime_library().is_some(), "libfaketime is not installed");
    let number = random.random_range(0..RELAYS);
    let day = 24 * 60 * 60;
    // On SQLite the machine's clock is the only one that processes share: a small step may cost a lease, and a large one stays until it is over.
    let steps: &[i64] = if stage.sqlite().is_ok() { &[-1, 0, 1] } else { &[-day, -3_600, -5, 0, 5, 3_600, day] };
    let seconds = *choose(steps, random);
    fault.detail = format!("relay {number}: {seconds:+} s");
    fault.window = stage.bed.window_of_one().await;
    stage.relays[number].lock().await.step_clock(seconds)
}

/// A writer dies in the middle of whatever it does; the database's mark tells what became of that.
pub(super) async fn kill_writer(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let number = stage.replace_writer(random).await?;
    fault.detail = format!("writer {number}");
    Ok(())
}
