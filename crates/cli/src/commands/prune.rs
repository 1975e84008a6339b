//! `postbox prune --older-than AGE`.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use postbox_core::LogName;
use postbox_engine::step_pause;
use postbox_server::text::grouped;

use crate::context::{Context, never_run};
use crate::failure::Failure;
use crate::output;

/// How often a run that takes long says how far it is, where somebody looks.
const NOTE_EVERY: Duration = Duration::from_secs(1);

pub(super) async fn run(context: &Context, older_than: Duration, unrouted: bool) -> Result<(), Failure> {
    let store = context.store().await?;
    let infos = context.registered(store.as_ref()).await?;
    // What others have read, it has not.
    if let Some(name) = context.never_run_at_all(&store.subscriptions().await?).next() {
        return Err(Failure::failed(never_run(name)));
    }
    let logs: BTreeSet<LogName> = match &context.log {
        Some(log) => [log.clone()].into(),
        None => infos.iter().map(|info| info.log.clone()).collect(),
    };
    let (mut pruned, mut noted) = (0, Instant::now());
    for log in &logs {
        while unrouted && store.give_up_unrouted(log, older_than).await? > 0 {}
        let mut after = None;
        loop {
            let began = Instant::now();
            let step = store.prune(log, older_than, after).await?;
            pruned += step.count;
            after = step.next;
            if after.is_none() {
                break;
            }
            tokio::time::sleep(step_pause(began.elapsed())).await;
            if noted.elapsed() >= NOTE_EVERY && std::io::stderr().is_terminal() {
                output::note(&format!("{log}: {} deleted", grouped(pruned)));
                noted = Instant::now();
            }
        }
    }
    output::line(&format!("pruned={pruned}"))
}
