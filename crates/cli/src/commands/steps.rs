//! Changes in steps, each committed by itself, with an account that is right however they end.

use postbox_core::limits::CHANGE_EVENTS_MAX;
use postbox_core::{Changed, Selection};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::failure::Failure;
use crate::output;
use crate::signals::stopped;

/// Steps until there is nothing left, an error, or a person who wants it to stop.
pub(super) struct Steps {
    /// What is counted, as it is printed: `retried`.
    word: &'static str,
    /// Whether it is only counted.
    dry_run: bool,
    /// Whether it is said as JSON.
    json: bool,
    count: u64,
    stop: CancellationToken,
    _listening: AbortOnDropHandle<()>,
}

impl Steps {
    /// Begins to listen for SIGTERM and SIGINT.
    pub(super) fn begin(word: &'static str, dry_run: bool, json: bool) -> Self {
        let stop = CancellationToken::new();
        let (stopping, signal) = (stop.clone(), stopped());
        let listening = AbortOnDropHandle::new(tokio::spawn(async move {
            signal.await;
            stopping.cancel();
        }));
        Self { word, dry_run, json, count: 0, stop, _listening: listening }
    }

    /// How many events were changed so far.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Takes steps until nothing of the selection is left. A step under way is always waited for:
    /// dropped at its commit, nobody could say whether it was done.
    pub(super) async fn take(
        &mut self,
        mut selection: Selection,
        step: impl AsyncFn(&Selection) -> postbox_core::Result<Changed>,
    ) -> Result<(), Failure> {
        while selection.limit != Some(0) {
            if self.stop.is_cancelled() {
                return Err(Failure::failed("interrupted; the same command goes on with the rest"));
            }
            let changed = step(&selection).await?;
            self.count += changed.count;
            if let Some(limit) = &mut selection.limit {
                *limit = limit.saturating_sub(usize::try_from(changed.count).unwrap_or(usize::MAX));
            }
            if changed.next.is_none() {
                break;
            }
            selection.after = changed.next;
        }
        Ok(())
    }

    /// Says how many there were, also after a failure midway.
    pub(super) fn end(self, ended: Result<(), Failure>) -> Result<(), Failure> {
        let Self { word, dry_run, json, count, stop, .. } = self;
        // What could not even begin has changed nothing to speak of: its error is all it says.
        if ended.is_ok() || count > 0 {
            counted(word, count, dry_run, json)?;
        }
        if ended.is_err() && count > 0 && !dry_run && !stop.is_cancelled() {
            output::note(&format!(
                "stopped midway; the step that failed, at most {CHANGE_EVENTS_MAX} events, may be done all the same. The same command goes on with the rest"
            ));
        }
        ended
    }
}

/// The count of a bulk change, in one shape for every such command.
pub(super) fn counted(word: &str, count: u64, dry_run: bool, json: bool) -> Result<(), Failure> {
    let line = format!("{word}={count}{}", if dry_run { " dry_run=true" } else { "" });
    output::done(json, &serde_json::json!({ word: count, "dry_run": dry_run }), &line)
}
