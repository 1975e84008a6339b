//! Changes in steps that commit one by one, with a count that is right however they end.

use std::time::Instant;

use postbox_core::{Changed, Selection};
use postbox_engine::step_pause;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::failure::Failure;
use crate::output;
use crate::signals::stopped;

/// Takes steps until nothing is left, an error occurs, or a signal arrives.
pub(super) struct Steps {
    /// The word printed with the count, e.g. `retried`.
    word: &'static str,
    /// Whether it only counts.
    dry_run: bool,
    /// Whether it prints JSON.
    json: bool,
    count: u64,
    stop: CancellationToken,
    _listening: AbortOnDropHandle<()>,
}

impl Steps {
    /// Starts listening for the signals that stop the program.
    pub(super) fn begin(word: &'static str, dry_run: bool, json: bool) -> Self {
        let stop = CancellationToken::new();
        let (stopping, signal) = (stop.clone(), stopped());
        let listening = AbortOnDropHandle::new(tokio::spawn(async move {
            signal.await;
            stopping.cancel();
        }));
        Self { word, dry_run, json, count: 0, stop, _listening: listening }
    }

    /// Number of events changed so far.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Fails if a signal has arrived.
    pub(super) fn go_on(&self) -> Result<(), Failure> {
        match self.stop.is_cancelled() {
            true => Err(Failure::failed("interrupted; the same command continues with the rest")),
            false => Ok(()),
        }
    }

    /// Counts a step, also against a limit.
    pub(super) fn add(&mut self, count: u64, limit: &mut Option<usize>) {
        self.count += count;
        *limit = limit.map(|limit| limit.saturating_sub(usize::try_from(count).unwrap_or(usize::MAX)));
    }

    /// Takes steps until nothing of the selection is left. A step that has begun is always awaited:
    /// if it were dropped during its commit, nobody could know whether it was done.
    pub(super) async fn take(
        &mut self,
        mut selection: Selection,
        step: impl AsyncFn(&Selection) -> postbox_core::Result<Changed>,
    ) -> Result<(), Failure> {
        while selection.limit != Some(0) {
            self.go_on()?;
            let began = Instant::now();
            let changed = step(&selection).await?;
            self.add(changed.count, &mut selection.limit);
            if changed.next.is_none() {
                break;
            }
            selection.after = changed.next;
            tokio::time::sleep(step_pause(began.elapsed())).await;
        }
        Ok(())
    }

    /// Prints the count, even after a failure midway.
    pub(super) fn end(self, ended: Result<(), Failure>) -> Result<(), Failure> {
        let Self { word, dry_run, json, count, stop, .. } = self;
        // A change that failed at its first step prints only its error.
        if ended.is_ok() || count > 0 {
            counted(word, count, dry_run, json)?;
        }
        if ended.is_err() && count > 0 && !dry_run && !stop.is_cancelled() {
            output::note(
                "stopped midway; the step that failed may have been done nevertheless. The same command continues with the rest",
            );
        }
        ended
    }
}

/// Prints the count of a bulk change, in one format for all commands.
pub(super) fn counted(word: &str, count: u64, dry_run: bool, json: bool) -> Result<(), Failure> {
    let line = format!("{word}={count}{}", if dry_run { " dry_run=true" } else { "" });
    output::done(json, &serde_json::json!({ word: count, "dry_run": dry_run }), &line)
}
