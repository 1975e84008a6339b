//! Restarts work that fails.

use std::time::Duration;

use postbox_core::{Clock, Error, ErrorKind, Result};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument as _, error};

use crate::last_outcome::LastOutcome;

/// First and longest wait before failed work is restarted. With this cap the work goes on five
/// seconds after a person has fixed the fault, and logs twelve lines a minute until then.
const RESTART_MIN: Duration = Duration::from_millis(500);
const RESTART_MAX: Duration = Duration::from_secs(5);
/// Work that lasted this long is not in a crash loop, so the wait starts over.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);

/// Runs work until `stop`, and restarts it after an error or a panic. Dropping this ends the work
/// at once.
///
/// `ended` is called with the error and the wait before the restart, and with `None` when the
/// restart comes. Without a wait the work has ended for good, because the error's code is in
/// `last`. `what` names the work in the error of a panic.
pub async fn supervise<F>(
    what: &'static str,
    run: impl Fn() -> F,
    ended: impl Fn(Option<(Error, Option<Duration>)>),
    last: &[&str],
    clock: &dyn Clock,
    stop: &CancellationToken,
) where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let mut wait = RESTART_MIN;
    while !stop.is_cancelled() {
        let began = clock.monotonic();
        // A separate task, so that a panic ends only this work.
        let error = match AbortOnDropHandle::new(tokio::spawn(run().in_current_span())).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => {
                let text = format!("the {what} panicked; this is a defect");
                Error::new(ErrorKind::Internal, what, format!("{what}_panicked"), text)
            }
        };
        if clock.monotonic().saturating_sub(began) > HEALTHY_AFTER {
            wait = RESTART_MIN;
        }
        if last.contains(&error.code()) {
            ended(Some((error, None)));
            return stop.cancelled().await;
        }
        ended(Some((error, Some(wait))));
        tokio::select! {
            () = stop.cancelled() => return,
            () = clock.sleep(wait) => {}
        }
        ended(None);
        wait = (wait * 2).min(RESTART_MAX);
    }
}

/// Does work until `stop`. Starts it again after a panic, which would otherwise end the whole
/// service, with all its relays, and notes it in `last`. Dropping this ends the work at once.
pub(crate) async fn keep_up<F: Future<Output = ()> + Send + 'static>(
    what: &'static str,
    work: impl Fn() -> F,
    last: &LastOutcome,
    clock: &dyn Clock,
    stop: &CancellationToken,
) {
    let run = || {
        let (working, stop) = (work(), stop.clone());
        async move {
            working.await;
            // A schedule without a next time ends early. The first part to end stops the others.
            stop.cancelled().await;
            Ok(())
        }
    };
    let ended = |ended| {
        if let Some((error, Some(wait))) = ended {
            error!(part = what, %error, restart_in = ?wait, "part of the service failed");
            last.note(&Err::<(), _>(error), clock.now());
        }
    };
    supervise(what, run, ended, &[], clock, stop).await;
}
