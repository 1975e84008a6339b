//! What happens to relays and writers as processes.

use postbox_crash_checker::faults::Fault;
use rand::Rng as _;
use rand::rngs::SmallRng;
use tokio::time::sleep;

use super::{choose, millis};
use crate::relay::LEASE;
use crate::stage::{RELAYS, Stage};
use crate::store::window_of_all;

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
    let day = 24 * 60 * 60;
    let seconds = *choose(&[-day, -3_600, -5, 0, 5, 3_600, day], random);
    // Leases of SQLite run on the machine's clock, which is one for all processes of the file.
    let (relays, window) = match stage.sqlite() {
        Ok(_) => (0..RELAYS, window_of_all()),
        Err(_) => {
            let number = random.random_range(0..RELAYS);
            (number..number + 1, stage.bed.window_of_one().await)
        }
    };
    fault.detail = format!("relays {relays:?}: {seconds:+} s");
    fault.window = window;
    for number in relays {
        stage.relays[number].lock().await.step_clock(seconds)?;
    }
    Ok(())
}

/// A writer dies in the middle of whatever it does; the database's mark tells what became of that.
pub(super) async fn kill_writer(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let number = stage.replace_writer(random).await?;
    fault.detail = format!("writer {number}");
    Ok(())
}
