//! Changes in steps that commit one by one, with a count that is right however they end.

use std::time::Instant;

use postbox_core::{Changed, Error, Selection};
use postbox_engine::step_pause;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::failure::{Failure, is_refused};
use crate::output;
use crate::signals::stopped;

/// What a failure adds if nobody knows whether the step was done.
pub(super) const MAY_BE_DONE: &str = "; the step that failed may have been done nevertheless";

/// What a limit to continue with adds then: with all of it, more could change than was wanted.
pub(super) const LESS_IF_DONE: &str = ", less what that step did: look first";

/// Takes steps until nothing is left, an error occurs, or a signal arrives.
pub(super) struct Steps {
    /// The word printed with the count, e.g. `retried`.
    word: &'static str,
    /// Whether it only counts.
    dry_run: bool,
    /// Whether it prints JSON.
    json: bool,
    /// Most events that the whole command may change.
    limit: Option<usize>,
    count: u64,
    /// Whether the last step failed, and may have been done nevertheless.
    may_be_done: bool,
    stop: CancellationToken,
    _listening: AbortOnDropHandle<()>,
}

impl Steps {
    /// Starts listening for the signals that stop the program.
    pub(super) fn begin(word: &'static str, dry_run: bool, json: bool, limit: Option<usize>) -> Self {
        let stop = CancellationToken::new();
        let (stopping, signal) = (stop.clone(), stopped());
        let listening = AbortOnDropHandle::new(tokio::spawn(async move {
            signal.await;
            stopping.cancel();
        }));
        Self { word, dry_run, json, limit, count: 0, may_be_done: false, stop, _listening: listening }
    }

    /// Number of events changed so far.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Fails if a signal has arrived.
    pub(super) fn go_on(&self) -> Result<(), Failure> {
        match self.stop.is_cancelled() {
            true => {
                Err(Failure::failed(format!("interrupted; the same command continues with the rest{}", self.limited())))
            }
            false => Ok(()),
        }
    }

    /// What the next command needs besides. A dry run begins anew, with its own limit.
    fn limited(&self) -> String {
        let done = if self.dry_run { 0 } else { usize::try_from(self.count).unwrap_or(usize::MAX) };
        with_limit(self.limit.map(|limit| limit.saturating_sub(done)))
    }

    /// Counts a step, also against a limit.
    pub(super) fn add(&mut self, count: u64, limit: &mut Option<usize>) {
        self.count += count;
        *limit = limit.map(|limit| limit.saturating_sub(usize::try_from(count).unwrap_or(usize::MAX)));
    }

    /// The failure of a step.
    pub(super) fn failed(&mut self, error: Error) -> Failure {
        self.may_be_done = !is_refused(&error);
        error.into()
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
            let changed = step(&selection).await.map_err(|error| self.failed(error))?;
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
        let midway = self.midway();
        let Self { word, dry_run, json, count, .. } = self;
        // A change that failed at its first step prints no count.
        if ended.is_ok() || count > 0 {
            counted(word, count, dry_run, json);
        }
        if let (Err(_), Some(midway)) = (&ended, midway) {
            output::note(&midway);
        }
        ended
    }

    /// What to say after a failure. An interruption has said it.
    fn midway(&self) -> Option<String> {
        let is_midway = self.may_be_done || (self.count > 0 && !self.stop.is_cancelled());
        let may = if self.may_be_done { MAY_BE_DONE } else { "" };
        let less = if self.may_be_done && self.limit.is_some() { LESS_IF_DONE } else { "" };
        (is_midway && !self.dry_run)
            .then(|| format!("stopped midway{may}. The same command continues with the rest{}{less}", self.limited()))
    }
}

/// The limit of a command that continues another: the same one again would change more than was
/// wanted.
pub(super) fn with_limit(left: Option<usize>) -> String {
    left.map(|left| format!(", with --limit {left}")).unwrap_or_default()
}

/// Prints the count of a bulk change, in one format for all commands.
pub(super) fn counted(word: &str, count: u64, dry_run: bool, json: bool) {
    let line = format!("{word}={count}{}", if dry_run { " dry_run=true" } else { "" });
    output::done(json, &serde_json::json!({ word: count, "dry_run": dry_run }), &line);
}

#[cfg(test)]
mod tests {
    use postbox_core::ErrorKind;

    use super::*;

    #[tokio::test]
    async fn a_step_may_have_been_done_if_its_answer_is_lost_also_the_first() {
        let said = |count, kind, code: &'static str| {
            let mut steps = Steps::begin("retried", false, false, Some(10));
            steps.add(count, &mut None);
            let _ = steps.failed(Error::new(kind, "change", code, "it failed"));
            steps.midway()
        };
        let lost = |left| {
            let rest = "The same command continues with the rest, with --limit";
            format!("stopped midway{MAY_BE_DONE}. {rest} {left}{LESS_IF_DONE}")
        };
        assert_eq!(said(0, ErrorKind::Unavailable, "store_unavailable"), Some(lost(10)));
        assert_eq!(said(3, ErrorKind::Unavailable, "store_unavailable"), Some(lost(7)));
        let refused = "stopped midway. The same command continues with the rest, with --limit 7";
        assert_eq!(said(3, ErrorKind::Unavailable, "store_read_only").as_deref(), Some(refused));
        assert_eq!(said(0, ErrorKind::NotFound, "subscription_unknown"), None);
    }
}
