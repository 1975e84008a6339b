//! Faults of the database server, its processes, its disk, its clock, and the pooler in front of
//! it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use postbox_crash_checker::faults::Fault;
use postbox_testkit::proxy::Direction;
use rand::Rng as _;
use rand::rngs::SmallRng;
use tokio::task::block_in_place as blocking;
use tokio::time::sleep;

use super::operator::roll;
use super::{choose, millis};
use crate::process::{faketime_library, signal};
use crate::stage::{RELAYS, Stage};
use crate::store::postgres::Copy;
use crate::store::{Ballast, window_of_all};
use crate::writer::now_micros;

/// Attempts to start a killed server while its remaining processes end.
const TRIES_AFTER_KILL: usize = 100;

// A server waits for its sessions to end, and one of them may be frozen by another fault, which
// must go on meanwhile. Hence `blocking`.

/// An immediate shutdown, which Postgres treats as a crash.
pub(super) async fn stop_immediate(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    fault.window = window_of_all();
    let mut server = stage.postgres()?.server.lock().await;
    blocking(|| server.stop_immediate());
    sleep(millis(random, 0..500)).await;
    server.try_start().await
}

/// Kills the postmaster with SIGKILL.
pub(super) async fn kill(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    fault.window = window_of_all();
    let mut server = stage.postgres()?.server.lock().await;
    blocking(|| server.kill());
    sleep(millis(random, 0..300)).await;
    // The other processes notice and end in their own time; until then it does not start.
    for _ in 0..TRIES_AFTER_KILL {
        if server.try_start().await.is_ok() {
            return Ok(());
        }
        sleep(Duration::from_millis(100)).await;
    }
    server.try_start().await
}

/// Moves the database's clock for a while, and back.
pub(super) async fn step_clock(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let Some(library) = faketime_library() else { anyhow::bail!("libfaketime is not installed") };
    let step = *choose(&["-86400", "-3600", "-5", "+5", "+3600", "+86400"], random);
    fault.detail = format!("{step} s");
    fault.window = window_of_all();
    let mut server = stage.postgres()?.server.lock().await;
    let library = library.display().to_string();
    let moved = [
        ("LD_PRELOAD", library.as_str()),
        ("FAKETIME", step),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ("NO_FAKE_STAT", "1"),
    ];
    for env in [&moved[..], &[]] {
        blocking(|| server.stop_fast());
        server.set_env(env);
        server.try_start().await?;
        sleep(millis(random, 500..2_500)).await;
    }
    Ok(())
}

/// Fills the disk, and frees it. A server that stopped because of it is started again.
pub(super) async fn fill_disk(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let bed = stage.postgres()?;
    let Some((_, folder)) = &bed.small else { anyhow::bail!("needs root, for a file system of its own") };
    fault.window = window_of_all();
    let mut server = bed.server.lock().await;
    let ballast = Ballast::fill(folder)?;
    sleep(millis(random, 300..2_500)).await;
    drop(ballast);
    sleep(millis(random, 100..400)).await;
    fault.detail = if server.runs() { "the server went on" } else { "the server stopped" }.to_owned();
    server.try_start().await
}

/// Terminates a session, as an administrator would.
pub(super) async fn terminate_backend(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let bed = stage.postgres()?;
    let pids = bed.backends(random.random_bool(0.7)).await?;
    if pids.is_empty() {
        "nobody there".clone_into(&mut fault.detail);
        fault.missed = true;
        return Ok(());
    }
    fault.window = window_of_all();
    bed.execute(&format!("SELECT pg_terminate_backend({})", choose(&pids, random))).await
}

/// Freezes a session in the middle of a call until its client sees the connection break, then thaws
/// it.
pub(super) async fn freeze_backend(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let bed = stage.postgres()?;
    let pids = bed.backends(true).await?;
    let Some(pid) = pids.first().and_then(|_| u32::try_from(*choose(&pids, random)).ok()) else {
        "nobody there".clone_into(&mut fault.detail);
        fault.missed = true;
        return Ok(());
    };
    fault.window = window_of_all();
    signal(pid, "STOP");
    (0..RELAYS).for_each(|relay| bed.proxy(relay).reset());
    sleep(millis(random, 50..1_500)).await;
    signal(pid, "CONT");
    Ok(())
}

/// Kills the pooler; what it had passed on is executed all the same.
pub(super) async fn kill_pooler(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let Some(pooler) = &stage.postgres()?.pooler else { anyhow::bail!("there is no pooler") };
    fault.window = window_of_all();
    let mut pooler = pooler.lock().await;
    blocking(|| pooler.kill());
    sleep(millis(random, 0..500)).await;
    pooler.start_again()
}

/// Makes a cold copy of the data, for a later restore.
pub(super) async fn copy(stage: &Stage, _random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let bed = stage.postgres()?;
    fault.window = window_of_all();
    let mut server = bed.server.lock().await;
    let mut kept = bed.copy.lock().await;
    if let Some(old) = kept.take() {
        std::fs::remove_dir_all(old.data)?;
    }
    // Before the stop: what commits until then may be in the copy or not, and counts as taken back
    // by a restore.
    let (at, places, topics) = (now_micros(), stage.places(), stage.topics.lock().await.clone());
    let committed = stage.committed();
    blocking(|| server.stop_fast());
    let data = server.data().with_extension("copy");
    let copied = copy_folder(&server.data(), &data);
    server.try_start().await?;
    copied?;
    *kept = Some(Copy { data, at, places, topics, committed });
    Ok(())
}

/// Replaces the data by the copy, under running relays: whatever came after the copy is gone.
pub(super) async fn restore(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let bed = stage.postgres()?;
    let mut server = bed.server.lock().await;
    let Some(copy) = bed.copy.lock().await.take() else {
        drop(server);
        // There is nothing to restore yet.
        "backup copied".clone_into(&mut fault.kind);
        return copy(stage, random, fault).await;
    };
    fault.window = window_of_all();
    (fault.copied_at, fault.copied_places) = (Some(copy.at), copy.places);
    stage.take_back_to(copy.committed);
    // Writers wait, because they would use numbers that were used before.
    bed.writers.swallow(&Direction::BOTH);
    blocking(|| server.stop_immediate());
    let data = server.data();
    std::fs::remove_dir_all(&data)?;
    std::fs::rename(&copy.data, &data)?;
    server.try_start().await?;
    bed.execute("UPDATE crash.aggregate AS a SET version = version + 1000000 FROM (SELECT key FROM crash.aggregate FOR UPDATE SKIP LOCKED) AS free WHERE free.key = a.key").await?;
    bed.writers.heal();
    bed.writers.reset();
    let topics = stage.topics.lock().await.clone();
    if topics != copy.topics {
        // The database has the former filter again, the relays' configuration the current one.
        fault.topics = Some((copy.topics, topics));
        drop(server);
        roll(stage, fault).await?;
    }
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> anyhow::Result<()> {
    let status = Command::new("cp").args(["-a", "--sparse=always"]).arg(from).arg(to).status()?;
    anyhow::ensure!(status.success(), "the data cannot be copied");
    Ok(())
}
