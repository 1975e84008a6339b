//! `postbox prune --older-than AGE`.

use std::collections::BTreeSet;
use std::time::Duration;

use indicatif::ProgressBar;
use postbox_core::LogName;
use postbox_server::text::grouped;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(context: &Context, older_than: Duration) -> Result<(), Failure> {
    let store = context.store().await?;
    let logs: BTreeSet<LogName> = match &context.log {
        Some(log) => [log.clone()].into(),
        None => context.registered(store.as_ref()).await?.into_iter().map(|info| info.log).collect(),
    };
    // Draws on standard error, and only at a terminal.
    let progress = ProgressBar::new_spinner();
    let mut pruned = 0;
    for log in &logs {
        loop {
            let step = store.prune(log, older_than).await?;
            pruned += step;
            progress.set_message(format!("{log}: {} deleted", grouped(pruned)));
            progress.tick();
            if step == 0 {
                break;
            }
        }
    }
    progress.finish_and_clear();
    output::line(&format!("pruned={pruned}"))
}
