//! Work that is started again when it fails.

use std::time::Duration;

use postbox_core::{Clock, Error, ErrorKind, Result};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

/// First and longest wait before work that ended by itself is started again. The cap keeps the log
/// readable and the work within half a minute of a fault that a person has put right.
const RESTART_MIN: Duration = Duration::from_millis(500);
const RESTART_MAX: Duration = Duration::from_secs(30);
/// What has worked for so long is not in a crash loop.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);

/// Runs until `stop`; starts again after an error or a panic. `ended` hears the error and the wait
/// before the next start, then nothing when it comes. Without a wait it has ended for good, by an
/// error with a code in `last`. Dropping this ends the work at once.
///
/// `what` is its noun, for the error of a panic.
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
        // A task of its own, so that a panic ends only this work.
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
