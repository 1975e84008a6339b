//! Faults of a SQLite file.

use postbox_crash_checker::faults::Fault;
use rand::rngs::SmallRng;
use rusqlite::params;
use tokio::time::sleep;

use super::millis;
use crate::stage::{RELAYS, Stage};
use crate::store::postgres::Copy;
use crate::store::{Ballast, window_of_all};
use crate::writer::now_micros;

/// Fills the disk, and frees it.
pub(super) async fn fill_disk(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let Some((_, folder)) = &stage.sqlite()?.small else { anyhow::bail!("needs root, for a file system of its own") };
    fault.window = window_of_all();
    let ballast = Ballast::fill(folder)?;
    sleep(millis(random, 300..2_500)).await;
    drop(ballast);
    Ok(())
}

/// Another program holds the write lock for a while.
pub(super) async fn hold_lock(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let connection = stage.sqlite()?.connection()?;
    connection.execute_batch("BEGIN IMMEDIATE")?;
    fault.window = window_of_all();
    sleep(millis(random, 200..2_500)).await;
    Ok(connection.execute_batch("ROLLBACK")?)
}

/// Rewrites the file.
pub(super) async fn vacuum(stage: &Stage, _random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    fault.window = window_of_all();
    Ok(stage.sqlite()?.connection()?.execute_batch("VACUUM")?)
}

/// Writes the write-ahead log into the file and truncates it.
pub(super) async fn checkpoint(stage: &Stage, _random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    fault.window = window_of_all();
    let connection = stage.sqlite()?.connection()?;
    Ok(connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))?)
}

/// Makes a copy while everything runs.
pub(super) async fn copy(stage: &Stage, _random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let bed = stage.sqlite()?;
    let data = bed.path().with_extension("copy");
    let _ = std::fs::remove_file(&data);
    let (at, places, topics) = (now_micros(), stage.places(), stage.topics.lock().await.clone());
    let committed = stage.committed();
    bed.connection()?.execute("VACUUM INTO ?1", params![data.display().to_string()])?;
    "VACUUM INTO".clone_into(&mut fault.detail);
    *bed.copy.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
        Some(Copy { data, at, places, topics, committed });
    Ok(())
}

/// The procedure of the guide: stop every program that uses the file, remove its write-ahead log,
/// and replace it by the copy.
pub(super) async fn restore(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let bed = stage.sqlite()?;
    let copy = bed.copy.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    let Some(copy) = copy else {
        // There is nothing to restore yet.
        "backup copied".clone_into(&mut fault.kind);
        return self::copy(stage, random, fault).await;
    };
    fault.window = window_of_all();
    (fault.copied_at, fault.copied_places) = (Some(copy.at), copy.places);
    stage.take_back_to(copy.committed);
    let topics = stage.topics.lock().await.clone();
    if topics != copy.topics {
        fault.topics = Some((copy.topics, topics));
    }
    let mut relays = Vec::new();
    for number in 0..RELAYS {
        relays.push(stage.relays[number].lock().await);
    }
    stage
        .without_writers(async {
            relays.iter_mut().for_each(|relay| relay.kill());
            for ending in ["-wal", "-shm"] {
                let mut journal = bed.path().into_os_string();
                journal.push(ending);
                let _ = std::fs::remove_file(journal);
            }
            std::fs::rename(&copy.data, bed.path())?;
            bed.connection()?.execute("UPDATE crash_aggregate SET version = version + 1000000", [])?;
            Ok(())
        })
        .await?;
    for relay in &mut relays {
        relay.start()?;
    }
    Ok(())
}
