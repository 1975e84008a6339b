//! `postbox prune --older-than AGE`.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use postbox_core::{LogName, Prune, Store};
use postbox_engine::step_pause;
use postbox_server::text::grouped;

use super::steps::Steps;
use crate::context::Context;
use crate::failure::Failure;
use crate::output;

/// Interval between progress notes of a long run, at a terminal.
const NOTE_EVERY: Duration = Duration::from_secs(1);

pub(super) async fn run(context: &Context, prune: Prune, json: bool) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    let infos = context.registered(store.as_ref()).await?;
    // A subscription that never ran has not read what others have, so pruning would lose its
    // events.
    let all = store.subscriptions().await?;
    if let Some(name) = context.never_run_at_all(&all).next() {
        return Err(Failure::failed(context.why_unread(name, &all)));
    }
    let logs: BTreeSet<LogName> = match &context.log {
        Some(log) => [log.clone()].into(),
        None => infos.iter().map(|info| info.log.clone()).collect(),
    };
    let mut steps = Steps::begin("pruned", prune.dry_run, json, prune.limit);
    let ended = take(store.as_ref(), &logs, prune, &mut steps).await;
    steps.end(ended)
}

async fn take(store: &dyn Store, logs: &BTreeSet<LogName>, mut prune: Prune, steps: &mut Steps) -> Result<(), Failure> {
    let mut noted = Instant::now();
    for log in logs {
        prune.after = None;
        while prune.limit != Some(0) {
            steps.go_on()?;
            let began = Instant::now();
            let step = store.prune(log, &prune).await.map_err(|error| steps.failed(error))?;
            steps.add(step.count, &mut prune.limit);
            prune.after = step.next;
            if step.next.is_none() {
                break;
            }
            tokio::time::sleep(step_pause(began.elapsed())).await;
            if noted.elapsed() >= NOTE_EVERY && std::io::stderr().is_terminal() {
                let what = if prune.dry_run { "counted" } else { "deleted" };
                output::note(&format!("{log}: {} {what}", grouped(steps.count())));
                noted = Instant::now();
            }
        }
    }
    Ok(())
}
