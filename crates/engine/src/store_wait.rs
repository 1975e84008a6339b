//! Starting a service whose store is not available yet.

use std::time::Duration;

use postbox_core::{Clock, Error, Result};
use tracing::warn;

/// First and longest wait between two tries. The cap keeps a start within two seconds of the store.
const WAIT_MIN: Duration = Duration::from_millis(500);
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Number of equal failures between two log lines: with the longest wait, two minutes.
const TRIES_PER_LINE: u32 = 60;

/// Repeats a store call while its error is one that `is_waited_for`. Logs the wait now and then.
/// Returns the first other answer. Cancel-safe if the call is.
pub async fn wait_for_store<T, F: Future<Output = Result<T>>>(
    clock: &dyn Clock,
    is_waited_for: impl Fn(&Error) -> bool,
    call: impl Fn() -> F,
) -> Result<T> {
    let (mut wait, mut tries, mut last) = (WAIT_MIN, 0, String::new());
    loop {
        let error = match call().await {
            Err(error) if is_waited_for(&error) => error,
            answer => return answer,
        };
        if error.code() != last || tries % TRIES_PER_LINE == 0 {
            warn!(code = error.code(), why = error.message(), "store away");
            (tries, last) = (0, error.code().to_owned());
        }
        tries += 1;
        clock.sleep(wait).await;
        wait = (wait * 2).min(WAIT_MAX);
    }
}
