//! `postbox prune --older-than AGE`.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use postbox_core::{LogName, Prune};
use postbox_engine::step_pause;
use postbox_server::text::grouped;

use super::steps::counted;
use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::signals::stopped;

/// Interval between progress notes of a long run, at a terminal.
const NOTE_EVERY: Duration = Duration::from_secs(1);

pub(super) async fn run(context: &Context, mut prune: Prune, json: bool) -> Result<(), Failure> {
    let store = context.store().await?;
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
    let (mut pruned, mut noted) = (0, Instant::now());
    let mut stop = std::pin::pin!(stopped());
    let mut ended = Ok(());
    'logs: for log in &logs {
        prune.after = None;
        while prune.limit != Some(0) {
            let began = Instant::now();
            let step = match store.prune(log, &prune).await {
                Ok(step) => step,
                Err(error) => {
                    ended = Err(Failure::from(error));
                    break 'logs;
                }
            };
            pruned += step.count;
            if let Some(limit) = &mut prune.limit {
                *limit = limit.saturating_sub(usize::try_from(step.count).unwrap_or(usize::MAX));
            }
            prune.after = step.next;
            if step.next.is_none() {
                break;
            }
            tokio::select! {
                biased;
                () = &mut stop => {
                    ended = Err(Failure::failed("interrupted; the same command continues with the rest"));
                    break 'logs;
                }
                () = tokio::time::sleep(step_pause(began.elapsed())) => {}
            }
            if noted.elapsed() >= NOTE_EVERY && std::io::stderr().is_terminal() {
                let what = if prune.dry_run { "counted" } else { "deleted" };
                output::note(&format!("{log}: {} {what}", grouped(pruned)));
                noted = Instant::now();
            }
        }
    }
    if ended.is_ok() || pruned > 0 {
        counted("pruned", pruned, prune.dry_run, json)?;
    }
    ended
}
