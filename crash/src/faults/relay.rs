//! Faults of relay and writer processes.

use postbox_crash_checker::faults::Fault;
use rand::Rng as _;
use rand::rngs::SmallRng;
use tokio::time::sleep;

use super::{choose, millis};
use crate::relay::LEASE;
use crate::stage::{RELAYS, Stage};
use crate::store::window_of_all;

/// Kills a relay, and starts it again at once or after others took over.
pub(super) async fn kill(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let number = random.random_range(0..RELAYS);
    fault.detail = format!("relay {number}");
    fault.window = stage.bed.window_of_one().await;
    let mut relay = stage.relays[number].lock().await;
    relay.kill();
    sleep(millis(random, 0..600)).await;
    relay.start()
}

/// Freezes a relay until others have taken over, then thaws it: a former owner that believes in its
/// lease.
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

/// Stops a relay in an orderly way: afterwards nothing is in flight.
pub(super) async fn stop(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let number = random.random_range(0..RELAYS);
    fault.detail = format!("relay {number}");
    let mut relay = stage.relays[number].lock().await;
    relay.stop().await?;
    relay.start()
}

/// Moves a relay's clock; it moves again when it is chosen next. Neither leases nor order depend on
/// it.
pub(super) async fn step_clock(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    anyhow::ensure!(crate::process::faketime_library().is_some(), "libfaketime is not installed");
    let day = 24 * 60 * 60;
    let seconds = *choose(&[-day, -3_600, -5, 0, 5, 3_600, day], random);
    // SQLite leases use the machine's clock, which is the same for all processes of the file.
    let (relays, window) = match stage.sqlite() {
        Ok(_) => (0..RELAYS, window_of_all()),
        Err(_) => {
            let number = random.random_range(0..RELAYS);
            (number..number + 1, stage.bed.window_of_one().await)
        }
    };
    fault.detail = format!("relays {relays:?}: {seconds:+} s");
    fault.window = window;
    fault.missed = true;
    for number in relays {
        fault.missed &= !stage.relays[number].lock().await.step_clock(seconds)?;
    }
    Ok(())
}

/// Kills a writer during whatever it does; its mark in the database shows the result.
pub(super) async fn kill_writer(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let number = stage.replace_writer(random).await?;
    fault.detail = format!("writer {number}");
    Ok(())
}
